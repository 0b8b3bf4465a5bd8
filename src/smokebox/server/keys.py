"""API keys: kept as hashes, each for what it was made for, until it expires or is revoked."""

from __future__ import annotations

import asyncio
import functools
import hmac
import logging
import os
import re
import secrets
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import parse_qsl, urlencode

import msgspec

from smokebox.engine.names import LONGEST_ID, check_id
from smokebox.errors import InvalidOption, NotFound, Unauthorized
from smokebox.server.keystore import Keystore, StoredKey
from smokebox.server.principal import LOCAL, Principal
from smokebox.wire.answers import KeyInfo, NewKey

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Scope

    from smokebox.server.settings import Settings
    from smokebox.wire.requests import CreateKey

T = TypeVar("T")

_log = logging.getLogger("smokebox.server")
_KEY = re.compile(rb"sbx_([0-9a-f]{12})_([0-9a-f]{64})")
_PREFIX = re.compile(r"([a-z0-9][a-z0-9-]*)?")
# What a random id needs after it.
_LONGEST_PREFIX = LONGEST_ID - 16
_LONGEST_NAME = 128
_WRITE_SECONDS = 60.0
# Somebody who guesses ids learns nothing from how long the answer takes.
_DUMMY = sha256(b"").digest()


class Keys:
    """The keys of one server: in memory, where each request looks, and in a file.

    The state directory is ours alone, so nobody else changes the file. Made by `Keys(...)`
    once the directory is there; `aclose` writes down what is not yet.
    """

    def __init__(self, settings: Settings) -> None:
        self._needed = settings.needs_keys
        self._path = os.path.join(settings.home, "keys.db")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="smokebox-keys")
        self._store: Keystore | None = None
        self._keys: dict[bytes, StoredKey] = {}
        self._principals: dict[bytes, Principal] = {}
        self._written: dict[bytes, float] = {}
        if os.path.exists(self._path):
            self._store = Keystore(self._path)
            for key in self._store.load():
                self._add(key)

    def principal(self, told: bytes | None) -> Principal:
        """Whoever sent a request by TCP with that `Authorization`. Raises `Unauthorized`."""
        return self.holder(told) if self._needed else LOCAL

    def holder(self, told: bytes | None) -> Principal:
        """Whoever has the key of that `Authorization`, whether or not keys are needed."""
        if told is None:
            raise self._none_told()
        scheme, _, credentials = told.strip().partition(b" ")
        if scheme.lower() != b"bearer":
            raise _refused("the header Authorization is not 'Bearer <key>'.", "malformed")
        return self._check(credentials.strip())

    def _check(self, told: bytes) -> Principal:
        found = _KEY.fullmatch(told)
        if found is None:
            raise _refused("the key has not the form sbx_<id>_<secret>.", "malformed")
        key = self._keys.get(found[1])
        expected = _DUMMY if key is None else key.hash
        if not hmac.compare_digest(sha256(found[2]).digest(), expected) or key is None:
            raise _refused("this server does not know the key, or it was revoked.", "unknown")
        now = time.time()
        if key.expires_at is not None and key.expires_at <= now:
            raise _refused(f"the key {key.id} has expired.", "expired")
        self._used(found[1], key, now)
        return self._principals[found[1]]

    def _used(self, id: bytes, key: StoredKey, now: float) -> None:
        key.last_used_at = now
        if now - self._written.get(id, 0.0) >= _WRITE_SECONDS and self._store is not None:
            self._written[id] = now
            self._writer.submit(_quietly, functools.partial(self._store.touch, key.id, now))

    def all(self) -> list[KeyInfo]:
        """Every key, in the order in which they were made."""
        return [_info(key) for key in self._keys.values()]

    async def create(self, asked: CreateKey) -> NewKey:
        """Make a key. Only this answer has its secret."""
        _check_asked(asked)
        secret = secrets.token_hex(32)
        now = time.time()
        key = StoredKey(
            id=secrets.token_hex(6),
            name=asked.name,
            # Not a slow hash: it is 256 random bits, which nobody tries out, and each request
            # pays for it.
            hash=sha256(secret.encode()).digest(),
            prefix=asked.prefix,
            admin=asked.admin,
            created_at=now,
            expires_at=None if asked.expires_in is None else now + asked.expires_in,
            last_used_at=None,
        )
        if self._store is None:
            self._store = await self._write(functools.partial(Keystore, self._path))
        await self._write(functools.partial(self._store.add, key))
        self._add(key)
        return NewKey(key=f"sbx_{key.id}_{secret}", **msgspec.structs.asdict(_info(key)))

    async def revoke(self, id: str) -> None:
        """Have a key open nothing any more, from this moment on."""
        if self._store is None or id.encode() not in self._keys:
            raise NotFound(
                f"there is no key {id!r}.",
                hint="See `smokebox keys list` for those that there are.",
                kind="key",
                name=id,
            )
        await self._write(functools.partial(self._store.remove, id))
        self._keys.pop(id.encode(), None)
        self._principals.pop(id.encode(), None)
        self._written.pop(id.encode(), None)

    async def aclose(self) -> None:
        """Write down when keys were last used, and close the file. Safe to repeat."""
        store, self._store = self._store, None
        if store is not None:
            used = [(key.id, key.last_used_at) for key in self._keys.values() if key.last_used_at]
            await self._write(lambda: _quietly(lambda: store.touch_all(used)))
            await self._write(store.close)
        self._writer.shutdown()

    def _add(self, key: StoredKey) -> None:
        id = key.id.encode()
        self._keys[id] = key
        self._principals[id] = Principal(id=key.id, prefix=key.prefix, admin=key.admin)

    async def _write(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._writer, work)

    def _none_told(self) -> Unauthorized:
        if not self._keys:
            return Unauthorized(
                "this server wants a key, and has none yet.",
                hint="Make one with `smokebox keys create` on its machine: that asks by the "
                "unix socket, which needs none.",
                reason="missing",
            )
        return Unauthorized(
            "this server wants a key.",
            hint="Send the header Authorization: Bearer <key>, or set SMOKEBOX_API_KEY; "
            "see `smokebox keys create`.",
            reason="missing",
        )


def take_authorization(scope: Scope) -> bytes | None:
    """What the URL of a WebSocket has instead of the header, which no web page can set.

    It is taken out of there: others log URLs.
    """
    query: bytes = scope["query_string"]
    if b"authorization=" not in query:
        return None
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    scope["query_string"] = urlencode([one for one in pairs if one[0] != "authorization"]).encode()
    told = [value for name, value in pairs if name == "authorization"]
    return told[-1].encode("utf-8", "replace") if told else None


def _check_asked(asked: CreateKey) -> None:
    if not 1 <= len(asked.name) <= _LONGEST_NAME or not asked.name.isprintable():
        raise InvalidOption(
            f"the name of a key has 1 to {_LONGEST_NAME} printable characters.",
            hint="Name who or what uses it.",
            option="name",
            value=asked.name,
        )
    if len(asked.prefix) > _LONGEST_PREFIX or not _PREFIX.fullmatch(asked.prefix):
        raise InvalidOption(
            f"no id of a sandbox begins with {asked.prefix!r} and goes on.",
            hint=f"Use at most {_LONGEST_PREFIX} of a-z, 0-9 and hyphens, without one in front.",
            option="prefix",
            value=asked.prefix,
        )
    check_id(asked.prefix + "0")
    if asked.admin and asked.prefix:
        raise InvalidOption(
            "a key for administrators has no prefix: it opens everything.",
            hint="Leave out one of the two.",
            option="prefix",
            value=asked.prefix,
        )


def _refused(message: str, reason: str) -> Unauthorized:
    return Unauthorized(
        message, hint="Make another with `smokebox keys create`, or ask who did.", reason=reason
    )


def _info(key: StoredKey) -> KeyInfo:
    return KeyInfo(
        id=key.id,
        name=key.name,
        prefix=key.prefix,
        admin=key.admin,
        created_at=key.created_at,
        expires_at=key.expires_at,
        last_used_at=key.last_used_at,
    )


def _quietly(work: Callable[[], None]) -> None:
    """When a key was last used is nice to know: no request fails for it."""
    try:
        work()
    except sqlite3.Error as error:
        _log.warning("when keys were last used was not written: %s", error)
