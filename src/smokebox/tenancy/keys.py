"""API keys and their authentication."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import logging
import os
import re
import secrets
import sqlite3
import time
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Self
from urllib.parse import parse_qsl, urlencode

import msgspec

from smokebox.errors import Forbidden, SmokeboxError, Unauthorized
from smokebox.foundation.storage import DatabaseWriter
from smokebox.foundation.tasks import run_to_completion
from smokebox.tenancy.key_store import (
    FILE,
    KEY_STORE,
    check_new_key,
    check_profile,
    delete_key,
    insert_key,
    no_such_key,
    select_keys,
    store_use,
)
from smokebox.tenancy.principal import LOCAL, Principal
from smokebox.tenancy.profile import DEFAULT_PROFILE, Profile
from smokebox.tenancy.scopes import parse_scopes
from smokebox.wire.responses import KeyInfo, NewKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from starlette.types import Scope

    from smokebox.tenancy.peer import Peer
    from smokebox.wire.requests import CreateKey

_log = logging.getLogger("smokebox.server")
_ID = re.compile(r"[0-9a-f]{12}")
_KEY = re.compile(rb"sbx_([0-9a-f]{12})_([0-9a-f]{64})")
# Clients of other vendors send any text to a server that needs no key.
_INTENDED = re.compile(rb"\s*bearer\s+sbx_", re.IGNORECASE)
# How often the time of its last use is stored for a key.
_WRITE_SECONDS = 60.0
# Compared for an unknown id, so that timing does not reveal which ids exist.
_DUMMY = sha256(b"").digest()


@dataclass(slots=True)
class _StoredKey:
    """A key without its secret."""

    info: KeyInfo
    hash: bytes
    principal: Principal
    use_stored_at: float = 0.0


class Keys:
    """The keys of a state directory, as one process sees them.

    Other processes may change the file at any time. Every request looks for their changes, so that
    a key that one of them revoked is refused at once.

    Args:
        home: The state directory.
        profiles: Ceilings of keys by name.
        required: Every request by TCP needs a key.
        checks_peers: Without a key, only this user and root are served.
        operators: Keys of operators that are not in the file, in any form.
    """

    def __init__(
        self,
        home: str,
        profiles: Mapping[str, Profile] | None = None,
        *,
        required: bool = False,
        checks_peers: bool = False,
        operators: Iterable[str] = (),
    ) -> None:
        self.required = required
        self.checks_peers = checks_peers
        self._profiles = {DEFAULT_PROFILE: Profile(), **(profiles or {})}
        self._operators = {
            sha256(key.encode()).digest(): Principal(id=f"env-{number}", admin=True)
            for number, key in enumerate(operators, start=1)
        }
        self._path = os.path.join(home, FILE)
        self._reader: sqlite3.Connection | None = None
        self._writer: DatabaseWriter | None = None
        # The file that `_reader` has open, and its version: they tell that another was put there,
        # and that it changed.
        self._file: tuple[int, int] | None = None
        self._version: int | None = None
        self._opening = asyncio.Lock()
        self._keys: dict[bytes, _StoredKey] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def refresh(self) -> None:
        """Load the file if it changed. It is created with the first key."""
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            self._forget()
            return
        try:
            if self._reader is None or self._file != (status.st_dev, status.st_ino):
                self._forget()
                self._reader = KEY_STORE.open(self._path)
                self._file = (status.st_dev, status.st_ino)
            [(version,)] = self._reader.execute("PRAGMA data_version")
            if version != self._version:
                self._load(select_keys(self._reader))
                self._version = version
        except sqlite3.Error as error:
            raise KEY_STORE.translate(error, self._path) from error

    def principal(self, authorization: bytes | None, peer: Peer | None) -> Principal:
        """Authenticate a request by TCP from its `Authorization`, or by its peer.

        A key that was sent counts even if none is needed: its owner may do less than this user.

        Raises:
            Unauthorized: The key is missing or not valid.
            Forbidden: The key has a profile that the server lacks.
        """
        if self.required or (authorization is not None and _INTENDED.match(authorization)):
            return self.holder(authorization)
        if not self.checks_peers or (peer is not None and peer.trusted):
            return LOCAL
        if authorization is None:
            raise Unauthorized(
                "without an API key this server serves only the user that it runs as, and root.",
                hint="That user creates a key with `smokebox keys create`: send it in the header "
                "Authorization: Bearer <key>, or set SMOKEBOX_API_KEY.",
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
        if self._operators and (operator := self._operator(credentials.strip())) is not None:
            return operator
        found = _KEY.fullmatch(credentials.strip())
        if found is None:
            raise _refused("the key does not have the form sbx_<id>_<secret>.", "malformed")
        self.refresh()
        key = self._keys.get(found[1])
        expected = _DUMMY if key is None else key.hash
        if not hmac.compare_digest(sha256(found[2]).digest(), expected) or key is None:
            raise _refused("the key is unknown to this server, or was revoked.", "unknown")
        now = time.time()
        if _has_expired(key.info, now):
            raise _refused(f"the key {key.info.id} has expired.", "expired")
        key.info.last_used_at = now
        if now - key.use_stored_at >= _WRITE_SECONDS:
            key.use_stored_at = now
            self._store_use([key.info])
        return _usable(key)

    def ended(self, id: str) -> Unauthorized | None:
        """Return the error for running requests of a principal, if its key has ended."""
        if not _ID.fullmatch(id):
            return None
        key = self._keys.get(id.encode())
        if key is None:
            return _refused("the key of this request was revoked.", "revoked")
        if _has_expired(key.info, time.time()):
            return _refused("the key of this request has expired.", "expired")
        return None

    def get(self, id: str) -> KeyInfo:
        """Return a key. Raises `NotFound`."""
        return self._stored(id).info

    def principal_of(self, id: str) -> Principal:
        """Return the principal of a key. Raises `NotFound`, or `Forbidden` without its profile."""
        return _usable(self._stored(id))

    def all(self) -> list[KeyInfo]:
        """Return all keys in order of creation."""
        self.refresh()
        return [key.info for key in self._keys.values()]

    async def create(self, options: CreateKey) -> NewKey:
        """Create a key. Its secret is only in this result.

        Raises:
            InvalidOption: An option is not valid.
            Conflict: Its prefix overlaps with that of another key.
        """
        options = check_new_key(options)
        check_profile(options.profile, self._profiles)
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
        writer = await run_to_completion(self._open_writer())
        await writer.submit(
            lambda connection: insert_key(
                info, hash, overlap=options.overlap, connection=connection
            )
        )
        self.refresh()
        return NewKey(key=f"sbx_{info.id}_{secret}", **msgspec.structs.asdict(info))

    async def revoke(self, id: str) -> None:
        """Revoke a key at once. Raises `NotFound`."""
        self._stored(id)
        writer = await run_to_completion(self._open_writer())
        await writer.submit(functools.partial(delete_key, id))
        self.refresh()

    async def aclose(self) -> None:
        """Store when keys were last used, and close the file. Safe to repeat."""
        used = [key.info for key in self._keys.values() if key.info.last_used_at is not None]
        if used and self._reader is not None:
            self._store_use(used)
        writer, self._writer = self._writer, None
        self._forget()
        if writer is not None:
            await asyncio.to_thread(writer.close)

    async def _open_writer(self) -> DatabaseWriter:
        async with self._opening:
            if self._writer is None:
                connection = await asyncio.to_thread(KEY_STORE.open, self._path)
                self._set_writer(connection)
            assert self._writer is not None
            return self._writer

    def _set_writer(self, connection: sqlite3.Connection) -> None:
        self._writer = DatabaseWriter(
            connection,
            name="smokebox-keys",
            translate=lambda error: KEY_STORE.translate(error, self._path),
        )

    def _store_use(self, used: list[KeyInfo]) -> None:
        # Storing when a key was used must not fail a request.
        try:
            if self._writer is None:
                self._set_writer(KEY_STORE.connect(self._path))
            assert self._writer is not None
            stored = self._writer.submit(functools.partial(store_use, used))
        except SmokeboxError as error:
            _log_failure(error)
        else:
            stored.add_done_callback(_log_outcome)

    def _load(self, rows: list[tuple[KeyInfo, bytes]]) -> None:
        before, self._keys = self._keys, {}
        for info, hash in rows:
            known = before.get(info.id.encode())
            if known is not None and known.info.last_used_at is not None:
                info.last_used_at = max(info.last_used_at or 0.0, known.info.last_used_at)
            principal = Principal(
                id=info.id,
                prefix=info.prefix,
                admin=info.admin,
                profile=None if info.profile is None else self._profiles.get(info.profile),
                scopes=frozenset(info.scopes),
            )
            stored_at = 0.0 if known is None else known.use_stored_at
            self._keys[info.id.encode()] = _StoredKey(info, hash, principal, stored_at)

    def _forget(self) -> None:
        self._keys, self._file, self._version = {}, None, None
        reader, self._reader = self._reader, None
        if reader is not None:
            with contextlib.suppress(sqlite3.Error):
                reader.close()

    def _operator(self, credentials: bytes) -> Principal | None:
        digest, found = sha256(credentials).digest(), None
        for known, principal in self._operators.items():
            if hmac.compare_digest(digest, known):
                found = principal
        return found

    def _stored(self, id: str) -> _StoredKey:
        self.refresh()
        key = self._keys.get(id.encode())
        if key is None:
            raise no_such_key(id)
        return key

    def _missing(self) -> Unauthorized:
        with contextlib.suppress(SmokeboxError):
            self.refresh()
        if not self._keys and not self._operators:
            return Unauthorized(
                "this server requires an API key, and none has been created yet.",
                hint="Create one with `smokebox keys create`, on its machine and as the user that "
                "it runs as.",
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


def _has_expired(info: KeyInfo, now: float) -> bool:
    return info.expires_at is not None and info.expires_at <= now


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


def _log_outcome(stored: asyncio.Future[None]) -> None:
    if not stored.cancelled() and (error := stored.exception()) is not None:
        _log_failure(error)


def _log_failure(error: BaseException) -> None:
    _log.warning("cannot store when keys were last used: %s", error)
