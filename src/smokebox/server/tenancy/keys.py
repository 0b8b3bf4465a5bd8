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
from smokebox.errors import Conflict, Forbidden, InvalidOption, NotFound, Unauthorized
from smokebox.foundation.storage import DatabaseFormat, DatabaseWriter
from smokebox.foundation.tasks import run_to_completion
from smokebox.options import nearest_hint
from smokebox.server.tenancy.principal import LOCAL, Principal
from smokebox.server.tenancy.profile import DEFAULT_PROFILE, Profile
from smokebox.server.tenancy.scopes import SCOPES, parse_scopes
from smokebox.wire.responses import KeyInfo, NewKey

if TYPE_CHECKING:
    import sqlite3

    from starlette.types import Scope

    from smokebox.server.settings import ServerSettings
    from smokebox.server.tenancy.peer import Peer
    from smokebox.wire.requests import CreateKey

_log = logging.getLogger("smokebox.server")
_KEY = re.compile(rb"sbx_([0-9a-f]{12})_([0-9a-f]{64})")
_PREFIX = re.compile(r"([a-z0-9][a-z0-9-]*)?")
# Leaves room for a hyphen and a random id after the prefix.
_LONGEST_PREFIX = LONGEST_ID - 17
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
        (
            # NULL: the default profile, and all scopes.
            "ALTER TABLE keys ADD COLUMN profile TEXT",
            "ALTER TABLE keys ADD COLUMN scopes TEXT",
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
        self._checks_peers = settings.checks_peers
        self._profiles = {DEFAULT_PROFILE: Profile(), **settings.profiles}
        self._path = os.path.join(settings.home, "keys.db")
        self._writer: DatabaseWriter | None = None
        self._creating = asyncio.Lock()
        self._keys: dict[bytes, _StoredKey] = {}

    async def load(self) -> None:
        """Load the stored keys. The file is created with the first key."""
        if await asyncio.to_thread(os.path.exists, self._path):
            await self._open_file()

    def principal(self, authorization: bytes | None, peer: Peer | None) -> Principal:
        """Authenticate a request by TCP from its `Authorization`, or by its peer.

        Raises:
            Unauthorized: The key is missing or not valid.
            Forbidden: The key has a profile that the server lacks.
        """
        if self._required:
            return self.holder(authorization)
        if not self._checks_peers or (peer is not None and peer.trusted):
            return LOCAL
        if authorization is None:
            raise Unauthorized(
                "without an API key this server serves only the user that it runs as, and root.",
                hint="That user creates a key with `smokebox keys create`: send it in the header "
                "Authorization: Bearer <key>, or set SMOKEBOX_API_KEY. The unix socket in the "
                "state directory needs no key.",
                reason="peer",
            )
        return self.holder(authorization)

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
        return _usable(key)

    def get(self, id: str) -> KeyInfo:
        """Return a key. Raises `NotFound`."""
        return self._stored(id).info

    def principal_of(self, id: str) -> Principal:
        """Return the principal of a key. Raises `NotFound`, or `Forbidden` without its profile."""
        return _usable(self._stored(id))

    def all(self) -> list[KeyInfo]:
        """Return all keys in order of creation."""
        return [key.info for key in self._keys.values()]

    async def create(self, options: CreateKey) -> NewKey:
        """Create a key. Its secret is only in this result.

        Raises:
            InvalidOption: An option is not valid.
            Conflict: Its prefix overlaps with that of another key.
        """
        options = self._check(options)
        secret = secrets.token_hex(32)
        now = time.time()
        info = KeyInfo(
            id=secrets.token_hex(6),
            name=options.name,
            prefix=options.prefix,
            admin=options.admin,
            profile=options.profile,
            scopes=list(parse_scopes(options.scopes)),
            created_at=now,
            expires_at=None if options.expires_in is None else now + options.expires_in,
            last_used_at=None,
        )
        # Not a slow hash: 256 random bits cannot be guessed, and every request computes it.
        hash = sha256(secret.encode()).digest()
        async with self._creating:
            if not options.overlap:
                self._check_overlap(info)
            if self._writer is None:
                await run_to_completion(self._open_file())
            assert self._writer is not None
            await self._writer.submit(functools.partial(_insert, info, hash))
            self._add(info, hash)
        return NewKey(key=f"sbx_{info.id}_{secret}", **msgspec.structs.asdict(info))

    async def revoke(self, id: str) -> None:
        """Revoke a key at once."""
        self._stored(id)
        assert self._writer is not None
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
        profile = None if info.profile is None else self._profiles.get(info.profile)
        principal = Principal(
            id=info.id,
            prefix=info.prefix,
            admin=info.admin,
            profile=profile,
            scopes=frozenset(info.scopes),
        )
        self._keys[info.id.encode()] = _StoredKey(info, hash, principal)

    def _stored(self, id: str) -> _StoredKey:
        key = self._keys.get(id.encode())
        if key is None:
            raise NotFound(
                f"there is no key {id!r}.",
                hint="List the keys with `smokebox keys list`.",
                kind="key",
                name=id,
            )
        return key

    def _check(self, options: CreateKey) -> CreateKey:
        """Return the options of a key in normal form. Raises `InvalidOption`."""
        _check_options(options)
        prefix, profile = options.prefix, options.profile
        if prefix and not prefix.endswith("-"):
            # Otherwise a key for "team" would be one for "teammate" too.
            prefix += "-"
        if not options.admin:
            profile = profile or DEFAULT_PROFILE
            if profile not in self._profiles:
                raise InvalidOption(
                    f"this server has no profile {profile!r:.80}.",
                    hint=f"{nearest_hint(profile, self._profiles)} The operator adds "
                    "[profiles.NAME] to the server's server.toml and restarts the server.",
                    option="profile",
                    value=profile,
                )
        return msgspec.structs.replace(options, prefix=prefix, profile=profile)

    def _check_overlap(self, new: KeyInfo) -> None:
        """Raise `Conflict` if a key shares sandboxes with one of another tenant.

        Keys with the same prefix and profile are of one tenant. A key without a prefix is for all.
        """
        now = time.time()
        for key in self.all():
            if not key.prefix or not new.prefix or (key.expires_at or now + 1) <= now:
                continue
            same = (key.prefix, key.profile) == (new.prefix, new.profile)
            longer, shorter = sorted((key.prefix, new.prefix), key=len, reverse=True)
            if not same and longer.startswith(shorter):
                raise Conflict(
                    f"the prefix {new.prefix!r} overlaps with {key.prefix!r}, of the key "
                    f"{key.name!r} ({key.id}), with the profile {key.profile!r}.",
                    hint="Use another prefix, or pass --overlap if both keys may use the same "
                    "sandboxes.",
                    kind="key",
                    name=new.prefix,
                )

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
    long = len(options.prefix.removesuffix("-")) > _LONGEST_PREFIX
    if long or not _PREFIX.fullmatch(options.prefix):
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
    if options.admin and (options.profile is not None or options.scopes is not None):
        raise InvalidOption(
            "an administrator's key has no profile and no scopes: it may do everything.",
            hint="Leave out --admin, or the other option.",
            option="profile" if options.profile is not None else "scopes",
            value=options.profile or options.scopes,
        )
    parse_scopes(options.scopes)


def _usable(key: _StoredKey) -> Principal:
    """Return the principal of a key. Raises `Forbidden` if the server lacks its profile."""
    info = key.info
    if info.profile is not None and key.principal.profile is None:
        raise Forbidden(
            f"the profile {info.profile!r} of this key is not in the server's configuration.",
            hint=f"The operator adds [profiles.{info.profile}] to the server's server.toml, or "
            "creates another key with `smokebox keys create --profile NAME`.",
            key=info.id,
            reason="profile",
        )
    return key.principal


def _refused(message: str, reason: str) -> Unauthorized:
    return Unauthorized(
        message,
        hint="Create another with `smokebox keys create`, or get one from the operator.",
        reason=reason,
    )


def _select(connection: sqlite3.Connection) -> list[tuple[KeyInfo, bytes]]:
    rows = connection.execute(
        "SELECT id, name, prefix, admin, created_at, expires_at, last_used_at, profile, scopes, "
        "hash FROM keys ORDER BY rowid"
    )
    return [
        (
            KeyInfo(
                id=id,
                name=name,
                prefix=prefix,
                admin=bool(admin),
                profile=None if admin else profile or DEFAULT_PROFILE,
                scopes=list(SCOPES) if scopes is None else scopes.split(),
                created_at=created_at,
                expires_at=expires_at,
                last_used_at=last_used_at,
            ),
            hash,
        )
        for (
            id,
            name,
            prefix,
            admin,
            created_at,
            expires_at,
            last_used_at,
            profile,
            scopes,
            hash,
        ) in rows
    ]


def _insert(info: KeyInfo, hash: bytes, connection: sqlite3.Connection) -> None:
    connection.execute(
        "INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            info.id,
            info.name,
            hash,
            info.prefix,
            info.admin,
            info.created_at,
            info.expires_at,
            info.last_used_at,
            info.profile,
            " ".join(info.scopes),
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
