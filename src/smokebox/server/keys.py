"""API keys, stored as hashes, and the principals that they authenticate."""

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
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import parse_qsl, urlencode

import msgspec

from smokebox.engine.names import LONGEST_ID, check_id, random_id
from smokebox.errors import Forbidden, InvalidOption, NotFound, PathError, Unauthorized
from smokebox.wire.responses import KeyInfo, NewKey

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Scope

    from smokebox.server.settings import ServerSettings
    from smokebox.wire.requests import CreateKey

T = TypeVar("T")

_log = logging.getLogger("smokebox.server")
_KEY = re.compile(rb"sbx_([0-9a-f]{12})_([0-9a-f]{64})")
_PREFIX = re.compile(r"([a-z0-9][a-z0-9-]*)?")
# Leaves room for a random id after the prefix.
_LONGEST_PREFIX = LONGEST_ID - 16
_LONGEST_NAME = 128
_WRITE_SECONDS = 60.0
# Compared for an unknown id, so that timing does not reveal which ids exist.
_DUMMY = sha256(b"").digest()


class Keys:
    """The keys of one server, in memory for requests, and in a file.

    This process owns the state directory, so no other changes the file. The directory must
    exist. `aclose` writes pending changes.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._needed = settings.needs_keys
        self._path = os.path.join(settings.home, "keys.db")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="smokebox-keys")
        self._store: KeyStore | None = None
        self._keys: dict[bytes, StoredKey] = {}
        self._principals: dict[bytes, Principal] = {}
        self._written: dict[bytes, float] = {}
        if os.path.exists(self._path):
            self._store = KeyStore(self._path)
            for key in self._store.load():
                self._add(key)

    def principal(self, authorization: bytes | None) -> Principal:
        """Authenticate a request by TCP from its `Authorization`. Raises `Unauthorized`."""
        return self.holder(authorization) if self._needed else LOCAL

    def holder(self, authorization: bytes | None) -> Principal:
        """Return the principal of an `Authorization`, even if the server needs no keys."""
        if authorization is None:
            raise self._missing()
        scheme, _, credentials = authorization.strip().partition(b" ")
        if scheme.lower() != b"bearer":
            raise _refused("the header Authorization is not 'Bearer <key>'.", "malformed")
        return self._check(credentials.strip())

    def _check(self, credentials: bytes) -> Principal:
        found = _KEY.fullmatch(credentials)
        if found is None:
            raise _refused("the key does not have the form sbx_<id>_<secret>.", "malformed")
        key = self._keys.get(found[1])
        expected = _DUMMY if key is None else key.hash
        if not hmac.compare_digest(sha256(found[2]).digest(), expected) or key is None:
            raise _refused("the key is unknown to this server, or was revoked.", "unknown")
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
        """Return all keys in order of creation."""
        return [_info(key) for key in self._keys.values()]

    async def create(self, options: CreateKey) -> NewKey:
        """Create a key. Its secret is only in this result."""
        _check_options(options)
        secret = secrets.token_hex(32)
        now = time.time()
        key = StoredKey(
            id=secrets.token_hex(6),
            name=options.name,
            # Not a slow hash: 256 random bits cannot be guessed, and every request computes it.
            hash=sha256(secret.encode()).digest(),
            prefix=options.prefix,
            admin=options.admin,
            created_at=now,
            expires_at=None if options.expires_in is None else now + options.expires_in,
            last_used_at=None,
        )
        if self._store is None:
            self._store = await self._write(functools.partial(KeyStore, self._path))
        await self._write(functools.partial(self._store.add, key))
        self._add(key)
        return NewKey(key=f"sbx_{key.id}_{secret}", **msgspec.structs.asdict(_info(key)))

    async def revoke(self, id: str) -> None:
        """Revoke a key at once."""
        if self._store is None or id.encode() not in self._keys:
            raise NotFound(
                f"there is no key {id!r}.",
                hint="List the keys with `smokebox keys list`.",
                kind="key",
                name=id,
            )
        await self._write(functools.partial(self._store.remove, id))
        self._keys.pop(id.encode(), None)
        self._principals.pop(id.encode(), None)
        self._written.pop(id.encode(), None)

    async def aclose(self) -> None:
        """Store when keys were last used, and close the file. Safe to repeat."""
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

    def _missing(self) -> Unauthorized:
        if not self._keys:
            return Unauthorized(
                "this server requires an API key, and none has been created yet.",
                hint="Create one with `smokebox keys create` on its machine: the unix socket "
                "needs no key.",
                reason="missing",
            )
        return Unauthorized(
            "this server requires an API key.",
            hint="Send the header Authorization: Bearer <key>, or set SMOKEBOX_API_KEY; "
            "see `smokebox keys create`.",
            reason="missing",
        )


def take_authorization(scope: Scope) -> bytes | None:
    """Return the `Authorization` in the URL of a WebSocket: web pages cannot set the header.

    Removes it from the URL, which may be logged.
    """
    query: bytes = scope["query_string"]
    if b"authorization=" not in query:
        return None
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    scope["query_string"] = urlencode([one for one in pairs if one[0] != "authorization"]).encode()
    values = [value for name, value in pairs if name == "authorization"]
    return values[-1].encode("utf-8", "replace") if values else None


def _check_options(options: CreateKey) -> None:
    if not 1 <= len(options.name) <= _LONGEST_NAME or not options.name.isprintable():
        raise InvalidOption(
            f"the name of a key has 1 to {_LONGEST_NAME} printable characters.",
            hint="Name the person or program that uses it.",
            option="name",
            value=options.name,
        )
    if len(options.prefix) > _LONGEST_PREFIX or not _PREFIX.fullmatch(options.prefix):
        raise InvalidOption(
            f"{options.prefix!r} cannot be a prefix of sandbox ids.",
            hint=f"Use at most {_LONGEST_PREFIX} of a-z, 0-9 and hyphens, without one in front.",
            option="prefix",
            value=options.prefix,
        )
    check_id(options.prefix + "0")
    if options.admin and options.prefix:
        raise InvalidOption(
            "an administrator's key has no prefix: it is for all sandboxes.",
            hint="Leave out one of the two.",
            option="prefix",
            value=options.prefix,
        )


def _refused(message: str, reason: str) -> Unauthorized:
    return Unauthorized(
        message,
        hint="Create another with `smokebox keys create`, or get one from the operator.",
        reason=reason,
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
    """Run `work` and log its error: storing when a key was used must not fail a request."""
    try:
        work()
    except sqlite3.Error as error:
        _log.warning("cannot store when keys were last used: %s", error)


_SCHEMA = """
CREATE TABLE IF NOT EXISTS keys (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    hash BLOB NOT NULL,
    prefix TEXT NOT NULL,
    admin INTEGER NOT NULL,
    created_at REAL NOT NULL,
    expires_at REAL,
    last_used_at REAL
)
"""


@dataclass(slots=True, kw_only=True)
class StoredKey:
    """A key without its secret. Times are seconds since the epoch."""

    id: str
    name: str
    hash: bytes
    prefix: str
    admin: bool
    created_at: float
    expires_at: float | None
    last_used_at: float | None


class KeyStore:
    """Keys in SQLite. A revoked key is a row that is gone."""

    def __init__(self, path: str) -> None:
        # Other users may be able to read the state directory; they must not read the hashes.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        try:
            self._connection.execute("PRAGMA synchronous = FULL")
            self._connection.execute(_SCHEMA)
        except sqlite3.DatabaseError as error:
            self._connection.close()
            raise PathError(
                path,
                f"the keys in {path} cannot be read: {error}",
                hint="Restore the file from a backup, or move it away and create keys again.",
            ) from error

    def load(self) -> list[StoredKey]:
        """Return every key in order of creation."""
        rows = self._connection.execute(
            "SELECT id, name, hash, prefix, admin, created_at, expires_at, last_used_at "
            "FROM keys ORDER BY rowid"
        )
        return [
            StoredKey(
                id=row[0],
                name=row[1],
                hash=row[2],
                prefix=row[3],
                admin=bool(row[4]),
                created_at=row[5],
                expires_at=row[6],
                last_used_at=row[7],
            )
            for row in rows
        ]

    def add(self, key: StoredKey) -> None:
        """Insert a key."""
        self._connection.execute("INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, ?, ?)", astuple(key))

    def remove(self, id: str) -> None:
        """Delete a key."""
        self._connection.execute("DELETE FROM keys WHERE id = ?", (id,))

    def touch(self, id: str, used: float) -> None:
        """Store when a key was last used."""
        self.touch_all([(id, used)])

    def touch_all(self, used: Iterable[tuple[str, float]]) -> None:
        """Store when keys were last used."""
        with self._connection:
            self._connection.executemany(
                "UPDATE keys SET last_used_at = ? WHERE id = ?",
                [(at, id) for id, at in used],
            )

    def close(self) -> None:
        """Close the file."""
        self._connection.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """The authenticated sender of a request. Ids of its sandboxes start with `prefix`."""

    id: str
    prefix: str = ""
    admin: bool = False

    def check_sandbox(self, id: str) -> None:
        """Raise `Forbidden` for a sandbox that it may not use."""
        if not id.startswith(self.prefix):
            raise Forbidden(
                f"this key is for sandboxes whose id begins with {self.prefix!r}, not for {id!r}.",
                hint="Use such an id, or another key: see `smokebox keys create --help`.",
                key=self.id,
                reason="scope",
            )

    def check_admin(self) -> None:
        """Raise `Forbidden` unless it is an administrator."""
        if not self.admin:
            raise Forbidden(
                "this request needs an administrator's key.",
                hint="Use a key made with `smokebox keys create --admin`.",
                key=self.id,
                reason="admin",
            )

    def random_id(self) -> str:
        """Return a random id for a sandbox, with the prefix."""
        return self.prefix + random_id()


LOCAL = Principal(id="local", admin=True)
"""The user of the unix socket, and of a server without keys. May do everything."""

# No id of a sandbox has this prefix.
ANONYMOUS = Principal(id="nobody", prefix="\0")
"""The sender of a request to a public path, which needs no key."""
