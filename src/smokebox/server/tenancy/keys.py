"""API keys, stored as hashes, and their authentication."""

from __future__ import annotations

import asyncio
import functools
import hmac
import logging
import os
import re
import secrets
import time
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode

import msgspec

from smokebox.engine.names import LONGEST_ID, check_id
from smokebox.errors import InvalidOption, NotFound, Unauthorized
from smokebox.foundation.storage import DatabaseFormat, DatabaseWriter
from smokebox.foundation.tasks import run_to_completion
from smokebox.server.tenancy.principal import LOCAL, Principal
from smokebox.server.tenancy.profile import DEFAULT_PROFILE, Profile
from smokebox.wire.responses import KeyInfo, NewKey

if TYPE_CHECKING:
    import sqlite3

    from starlette.types import Scope

    from smokebox.server.settings import ServerSettings
    from smokebox.wire.requests import CreateKey

_log = logging.getLogger("smokebox.server")
_KEY = re.compile(rb"sbx_([0-9a-f]{12})_([0-9a-f]{64})")
_PREFIX = re.compile(r"([a-z0-9][a-z0-9-]*)?")
# Leaves room for a random id after the prefix.
_LONGEST_PREFIX = LONGEST_ID - 16
_LONGEST_NAME = 128
# How often the time of its last use is stored for a key.
_WRITE_SECONDS = 60.0
# Compared for an unknown id, so that timing does not reveal which ids exist.
_DUMMY = sha256(b"").digest()

KEY_STORE = DatabaseFormat(
    label="key store",
    # "SMKK"
    application_id=0x534D4B4B,
    migrations=(
        (
            """
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
            """,
        ),
    ),
    unmarked_table="keys",
    synchronous="FULL",
    busy_seconds=5.0,
    repair_hint=lambda _: "Restore it from a backup, or move it away and create keys again.",
)


@dataclass(slots=True)
class _StoredKey:
    """A key without its secret."""

    info: KeyInfo
    hash: bytes
    principal: Principal
    use_stored_at: float = 0.0


class Keys:
    """The keys of one server: in memory for requests, and in a file.

    This process owns the state directory, so no other process changes the file.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._required = settings.needs_keys
        self._profiles = settings.profiles
        self._path = os.path.join(settings.home, "keys.db")
        self._writer: DatabaseWriter | None = None
        self._creating = asyncio.Lock()
        self._keys: dict[bytes, _StoredKey] = {}

    async def load(self) -> None:
        """Load the stored keys. The file is created with the first key."""
        if await asyncio.to_thread(os.path.exists, self._path):
            await self._open_file()

    def principal(self, authorization: bytes | None) -> Principal:
        """Authenticate a request by TCP from its `Authorization`. Raises `Unauthorized`."""
        return self.holder(authorization) if self._required else LOCAL

    def holder(self, authorization: bytes | None) -> Principal:
        """Return the principal of an `Authorization`, even if the server needs no keys."""
        if authorization is None:
            raise self._missing()
        scheme, _, credentials = authorization.strip().partition(b" ")
        if scheme.lower() != b"bearer":
            raise _refused("the header Authorization is not 'Bearer <key>'.", "malformed")
        found = _KEY.fullmatch(credentials.strip())
        if found is None:
            raise _refused("the key does not have the form sbx_<id>_<secret>.", "malformed")
        key = self._keys.get(found[1])
        expected = _DUMMY if key is None else key.hash
        if not hmac.compare_digest(sha256(found[2]).digest(), expected) or key is None:
            raise _refused("the key is unknown to this server, or was revoked.", "unknown")
        now = time.time()
        if key.info.expires_at is not None and key.info.expires_at <= now:
            raise _refused(f"the key {key.info.id} has expired.", "expired")
        key.info.last_used_at = now
        if now - key.use_stored_at >= _WRITE_SECONDS and self._writer is not None:
            key.use_stored_at = now
            stored = self._writer.submit(functools.partial(_store_use, [key.info]))
            stored.add_done_callback(_log_failure)
        return key.principal

    def all(self) -> list[KeyInfo]:
        """Return all keys in order of creation."""
        return [key.info for key in self._keys.values()]

    async def create(self, options: CreateKey) -> NewKey:
        """Create a key. Its secret is only in this result."""
        _check_options(options)
        secret = secrets.token_hex(32)
        now = time.time()
        info = KeyInfo(
            id=secrets.token_hex(6),
            name=options.name,
            prefix=options.prefix,
            admin=options.admin,
            created_at=now,
            expires_at=None if options.expires_in is None else now + options.expires_in,
            last_used_at=None,
        )
        # Not a slow hash: 256 random bits cannot be guessed, and every request computes it.
        hash = sha256(secret.encode()).digest()
        async with self._creating:
            if self._writer is None:
                await run_to_completion(self._open_file())
            assert self._writer is not None
            await self._writer.submit(functools.partial(_insert, info, hash))
            self._add(info, hash)
        return NewKey(key=f"sbx_{info.id}_{secret}", **msgspec.structs.asdict(info))

    async def revoke(self, id: str) -> None:
        """Revoke a key at once."""
        if self._writer is None or id.encode() not in self._keys:
            raise NotFound(
                f"there is no key {id!r}.",
                hint="List the keys with `smokebox keys list`.",
                kind="key",
                name=id,
            )
        await self._writer.submit(functools.partial(_delete, id))
        self._keys.pop(id.encode(), None)

    async def aclose(self) -> None:
        """Store when keys were last used, and close the file. Safe to repeat."""
        writer, self._writer = self._writer, None
        if writer is not None:
            stored = writer.submit(functools.partial(_store_use, self.all()))
            stored.add_done_callback(_log_failure)
            await asyncio.to_thread(writer.close)

    async def _open_file(self) -> None:
        connection = await asyncio.to_thread(KEY_STORE.open, self._path)
        self._writer = DatabaseWriter(
            connection,
            name="smokebox-keys",
            translate=lambda error: KEY_STORE.translate(error, self._path),
        )
        for info, hash in await self._writer.submit(_select):
            self._add(info, hash)

    def _add(self, info: KeyInfo, hash: bytes) -> None:
        profile = None if info.admin else self._profiles.get(DEFAULT_PROFILE, Profile())
        principal = Principal(id=info.id, prefix=info.prefix, admin=info.admin, profile=profile)
        self._keys[info.id.encode()] = _StoredKey(info, hash, principal)

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
    scope["query_string"] = urlencode(
        [(name, value) for name, value in pairs if name != "authorization"]
    ).encode()
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


def _select(connection: sqlite3.Connection) -> list[tuple[KeyInfo, bytes]]:
    rows = connection.execute(
        "SELECT id, name, prefix, admin, created_at, expires_at, last_used_at, hash "
        "FROM keys ORDER BY rowid"
    )
    names = KeyInfo.__struct_fields__
    return [
        (msgspec.convert(dict(zip(names, fields, strict=True)), KeyInfo, strict=False), hash)
        for *fields, hash in rows
    ]


def _insert(info: KeyInfo, hash: bytes, connection: sqlite3.Connection) -> None:
    connection.execute(
        "INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (
            info.id,
            info.name,
            hash,
            info.prefix,
            info.admin,
            info.created_at,
            info.expires_at,
            info.last_used_at,
        ),
    )


def _delete(id: str, connection: sqlite3.Connection) -> None:
    connection.execute("DELETE FROM keys WHERE id = ?", (id,))


def _store_use(keys: list[KeyInfo], connection: sqlite3.Connection) -> None:
    connection.executemany(
        "UPDATE keys SET last_used_at = ? WHERE id = ?",
        [(key.last_used_at, key.id) for key in keys],
    )


def _log_failure(stored: asyncio.Future[None]) -> None:
    # Storing when a key was used must not fail a request.
    if not stored.cancelled() and (error := stored.exception()) is not None:
        _log.warning("cannot store when keys were last used: %s", error)
