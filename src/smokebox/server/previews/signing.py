"""Tokens that open a port for a while: signed by the server, kept nowhere."""

from __future__ import annotations

import base64
import hmac
import os
import secrets
import time
from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smokebox.engine.record.rows import PortRow

_NAME = "previews.key"
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
# Seconds since the epoch in base 36, until the year 4453; and 100 bits that nobody guesses.
_EXPIRY, _MAC = 7, 20
LENGTH = _EXPIRY + _MAC
"""How long they are: longer than any token that a port has."""

LATEST = 36**_EXPIRY - 1


class Signer:
    """Signs with a secret of the state directory, made when it is first needed.

    What was signed ends with the token of the port: whoever unexposes it revokes all.
    """

    def __init__(self, home: str) -> None:
        self._path = os.path.join(home, _NAME)
        self._secret: bytes | None = None

    def sign(self, row: PortRow, expires_at: int) -> str:
        """A token for a port until then."""
        expiry = _base36(min(expires_at, LATEST))
        return expiry + self._mac(row, expiry)

    def is_good(self, row: PortRow, token: str) -> bool:
        """Whether a token was signed for that port, and has not expired."""
        if len(token) != LENGTH or not token.isascii():
            return False
        expiry, mac = token[:_EXPIRY], token[_EXPIRY:]
        good = hmac.compare_digest(mac, self._mac(row, expiry))
        return good and "_" not in expiry and int(expiry, 36) > time.time()

    def _mac(self, row: PortRow, expiry: str) -> str:
        message = f"{row.sandbox_id}/{row.port}/{row.token}/{expiry}"
        digest = hmac.digest(self._key(), message.encode(), sha256)
        return base64.b32encode(digest)[:_MAC].decode().lower()

    def _key(self) -> bytes:
        if self._secret is None:
            self._secret = _read_or_make(self._path)
        return self._secret


def _read_or_make(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        pass
    secret = secrets.token_bytes(32)
    # The state directory is ours alone; whole or not at all, also after a crash.
    half = f"{path}.new"
    fd = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(secret)
        file.flush()
        os.fsync(file.fileno())
    os.replace(half, path)
    return secret


def _base36(number: int) -> str:
    digits = ""
    for _ in range(_EXPIRY):
        number, digit = divmod(number, 36)
        digits = _DIGITS[digit] + digits
    return digits
