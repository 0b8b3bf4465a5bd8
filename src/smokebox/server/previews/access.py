"""Access to previews: tokens, signed URLs that expire, and private ports.

401 without a token, 404 for a bad one, 410 for a port of an earlier run. A preview never wakes a
sandbox.
"""

from __future__ import annotations

import base64
import hmac
import os
import secrets
import time
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

from smokebox.engine.names import check_id
from smokebox.engine.ports import is_token
from smokebox.errors import InvalidOption, NotFound, SandboxGone, SmokeboxError, Unauthorized
from smokebox.server.previews.credentials import tokens_in
from smokebox.server.previews.error_page import Refusal

if TYPE_CHECKING:
    from smokebox.engine import Host, Sandbox
    from smokebox.engine.ports import Ports
    from smokebox.engine.record.rows import PortRow
    from smokebox.engine.run import Run
    from smokebox.server.previews.credentials import PreviewCredentials
    from smokebox.tenancy.keys import Keys
    from smokebox.wire.preview import PreviewTarget

_KEY_FILE = "previews.key"
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
# Seconds since the epoch in base 36, until the year 4453; and a MAC of 100 bits.
_EXPIRY_LENGTH, _MAC_LENGTH = 7, 20
SIGNED_LENGTH = _EXPIRY_LENGTH + _MAC_LENGTH
"""Length of a signed token, longer than any token of a port."""

LATEST_EXPIRY = 36**_EXPIRY_LENGTH - 1


@dataclass(frozen=True, slots=True)
class Route:
    """The port of a running sandbox that a request may reach; `key` is the API key it needed."""

    ports: Ports
    run: Run
    port: int
    row: PortRow
    key: str | None


class PreviewAccess:
    """Checks every request, so that revoking a port or ending a run takes effect at once."""

    def __init__(self, host: Host, keys: Keys, signer: TokenSigner) -> None:
        self._host = host
        self._keys = keys
        self._signer = signer

    def sandbox(self, target: PreviewTarget) -> Sandbox:
        """Return the sandbox of a preview. Raises `Refusal`."""
        try:
            return self._host.sandbox(check_id(target.id))
        except InvalidOption:
            raise not_found() from None

    async def route(
        self, sandbox: Sandbox, target: PreviewTarget, credentials: PreviewCredentials, path: str
    ) -> Route:
        """Return where a request goes.

        Args:
            path: Path of the request, which may hold a token.

        Raises:
            Refusal: The request may not reach the port.
        """
        ports = sandbox.ports
        row = (ports.rows if ports.rows is not None else await ports.load()).get(target.port)
        if row is None:
            raise not_found()
        if target.slug:
            if target.slug != row.slug:
                raise not_found()
            tokens = (*credentials.tokens, *tokens_in(path))
        else:
            tokens = (target.token,)
        key = None
        if not any(self.opens(row, token) for token in tokens):
            key = self._check_other(row, tokens, credentials.authorization)
        run = ports.run_of(row)
        if run is None:
            raise _stale(target)
        return Route(ports, run, target.port, row, key)

    def opens(self, row: PortRow, token: str) -> bool:
        """Tell whether a token alone grants access to a port."""
        if len(token) == SIGNED_LENGTH:
            return self._signer.is_valid(row, token)
        return not row.private and is_token(row, token)

    def knows(self, row: PortRow, token: str) -> bool:
        """Tell whether a token is one of a port; a private one may need a key besides."""
        return self.opens(row, token) or is_token(row, token)

    def _check_other(self, row: PortRow, tokens: tuple[str, ...], authorization: str) -> str:
        """Return the id of the key that grants access, as no token does. Raises `Refusal`."""
        if row.private and (key := self._key(row, authorization)) is not None:
            return key
        if tokens and not any(is_token(row, token) for token in tokens):
            raise not_found()
        raise _private(authorization) if row.private else _token_missing()

    def _key(self, row: PortRow, authorization: str) -> str | None:
        try:
            principal = self._keys.holder(authorization.encode("latin-1"))
            principal.check_sandbox(row.sandbox_id)
        except SmokeboxError:
            return None
        return principal.id


class TokenSigner:
    """Signs tokens that expire, with a secret in the state directory. It stores no token.

    A signed token depends on the slug and the token of the port, so unexposing it revokes them.
    """

    def __init__(self, home: str) -> None:
        self._path = os.path.join(home, _KEY_FILE)
        self._secret: bytes | None = None

    def sign(self, row: PortRow, expires_at: int) -> str:
        """Return a token for a port that is valid until `expires_at`."""
        expiry = _base36(min(expires_at, LATEST_EXPIRY))
        return expiry + self._mac(row, expiry)

    def is_valid(self, row: PortRow, token: str) -> bool:
        """Tell whether a token was signed for that port and has not expired."""
        if len(token) != SIGNED_LENGTH or not token.isascii():
            return False
        expiry, mac = token[:_EXPIRY_LENGTH], token[_EXPIRY_LENGTH:]
        good = hmac.compare_digest(mac, self._mac(row, expiry))
        return good and "_" not in expiry and int(expiry, 36) > time.time()

    def _mac(self, row: PortRow, expiry: str) -> str:
        if self._secret is None:
            self._secret = _read_or_create(self._path)
        message = f"{row.sandbox_id}/{row.port}/{row.slug}/{row.token}/{expiry}"
        digest = hmac.digest(self._secret, message.encode(), sha256)
        return base64.b32encode(digest)[:_MAC_LENGTH].decode().lower()


def not_found() -> Refusal:
    """Return the refusal of a preview that does not exist, or whose token is wrong."""
    return Refusal(
        404,
        NotFound(
            "no port is exposed under this name.",
            hint="The port is no longer exposed, or the URL is incomplete or has expired.",
            kind="preview",
        ),
    )


def _private(authorization: str) -> Refusal:
    return Refusal(
        401,
        Unauthorized(
            "this preview is private: it needs an API key of this server.",
            hint="Open a URL that expires, made with get_preview_url(expires_in=...), "
            "or send the header Authorization: Bearer <key>.",
            reason="unknown" if authorization else "missing",
        ),
    )


def _token_missing() -> Refusal:
    return Refusal(
        401,
        Unauthorized(
            "this preview needs its token, which the address of an open page does not have.",
            hint="Open the URL that expose_port() or get_preview_url() returned, with ?token=..., "
            "or send its token in the header X-Smokebox-Token.",
            reason="missing",
        ),
    )


def _stale(target: PreviewTarget) -> Refusal:
    return Refusal(
        410,
        SandboxGone(
            f"sandbox {target.id} was restarted or stopped since port {target.port} was exposed.",
            hint="Start the server in the sandbox again and call expose_port() once more: the URL "
            "stays the same.",
            reason="stale",
            sandbox_id=target.id,
        ),
    )


def _read_or_create(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        pass
    secret = secrets.token_bytes(32)
    # Written beside it and renamed, so that a crash leaves no partial secret.
    partial = f"{path}.new"
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(secret)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    return secret


def _base36(number: int) -> str:
    digits = ""
    for _ in range(_EXPIRY_LENGTH):
        number, digit = divmod(number, 36)
        digits = _DIGITS[digit] + digits
    return digits
