"""Which store the option `persist` means."""

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

# The stores of this process by path: its agents write to a file together.
_open: weakref.WeakValueDictionary[str, SqliteStore] = weakref.WeakValueDictionary()


def open_store(persist: Persist = True) -> SessionStore:
    """The store that is meant. Nothing is opened before it is used; each has its own `aclose`.

    True is a file in the state directory, False is memory, a string is the path of a file or
    the URL of a Postgres database. A store is given back as it is, and stays whoever's it was.
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
        hint="Give True, False, the path of a file, a postgres:// URL, or a store.",
        option="persist",
        value=value,
    )
