"""Stores by the option `persist`."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, TypeAlias

from smokebox.agents.log.memory import MemoryStore
from smokebox.agents.log.sqlite import SqliteStore
from smokebox.errors import InvalidOption
from smokebox.foundation.endpoint import default_home

if TYPE_CHECKING:
    from smokebox.agents.log.store import SessionStore


Persist: TypeAlias = "bool | str | os.PathLike[str] | SessionStore"

# Stores of this process by path: all its agents write to a file through one store.
_open: weakref.WeakValueDictionary[str, SqliteStore] = weakref.WeakValueDictionary()


def open_store(persist: Persist = True) -> SessionStore:
    """Return the store for the option `persist`. Nothing is opened before its first use.

    Each call needs its own `aclose`, also for a store that is shared.

    Args:
        persist: True for a file in the state directory, False for memory, otherwise the path
            of a file, the URL of a Postgres database, or a store, which is returned as it is.

    Raises:
        InvalidOption: The value is none of these.
    """
    if persist is True:
        return _open_file(os.path.join(default_home(), "agents.db"))
    if persist is False:
        return MemoryStore()
    if isinstance(persist, str) and "://" in persist:
        return _open_url(persist)
    if isinstance(persist, str | os.PathLike):
        return _open_file(os.fspath(persist))
    if callable(getattr(persist, "follow", None)) and callable(getattr(persist, "open", None)):
        return persist
    raise _invalid(persist)


def _open_file(path: str) -> SqliteStore:
    if not path or "\0" in path:
        raise _invalid(path)
    path = os.path.abspath(os.path.expanduser(path))
    store = _open.get(path)
    if store is None or not store.share():
        _open[path] = store = SqliteStore(path)
    return store


def _open_url(url: str) -> SessionStore:
    if not url.startswith(("postgres://", "postgresql://")):
        raise _invalid(url.partition("://")[0] + "://...")
    from smokebox.agents.log.postgres import PostgresStore

    return PostgresStore(url)


def _invalid(value: object) -> InvalidOption:
    return InvalidOption(
        f"persist= cannot be {value!r:.80}.",
        hint="Pass True, False, the path of a file, a postgres:// URL, or a store.",
        option="persist",
        value=value,
    )
