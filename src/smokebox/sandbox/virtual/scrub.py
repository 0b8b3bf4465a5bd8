"""Takes secrets out of bytes that flow past, also where they are cut between two reads."""

from __future__ import annotations

import base64
import binascii
import html
import re
from typing import TYPE_CHECKING
from urllib.parse import quote, quote_plus

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

REDACTED = b"[redacted]"

# Shorter values would strike innocent text; they are no secrets either.
_SHORTEST = 6
_NOT_SECRET = frozenset({"accept", "accept-language", "content-type", "user-agent"})


def secrets_in(headers: Mapping[str, str]) -> set[str]:
    """The values in `headers` that must not be seen, with and without their scheme."""
    found: set[str] = set()
    for name, value in headers.items():
        if name.lower() in _NOT_SECRET:
            continue
        scheme, _, rest = value.partition(" ")
        found |= {value, rest.strip()}
        if scheme.lower() == "basic":
            found |= _user_and_password(rest)
    return {value for value in found if len(value) >= _SHORTEST}


def _user_and_password(encoded: str) -> set[str]:
    try:
        pair = base64.b64decode(encoded, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return set()
    return {pair, pair.partition(":")[2]}


def _spellings(secret: str) -> set[bytes]:
    raw = secret.encode()
    texts = {secret, quote(secret), quote(secret, safe=""), quote_plus(secret)}
    texts |= {secret.replace("/", "\\/"), html.escape(secret), secret.replace('"', '\\"')}
    encoded = {base64.b64encode(raw), base64.urlsafe_b64encode(raw), raw.hex().encode()}
    return {text.encode() for text in texts} | {code.rstrip(b"=") for code in encoded}


class Scrubber:
    """Replaces every spelling of some secrets in a stream of bytes."""

    def __init__(self, secrets: Iterable[str]) -> None:
        words = {word for secret in secrets for word in _spellings(secret)}
        ordered = sorted(words, key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, ordered))) if words else None
        self._longest = max(map(len, words), default=0)
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """What of the stream so far can be shown: all but an end that may begin a secret."""
        if self._pattern is None:
            return data
        clean = self._pattern.sub(REDACTED, self._held + data)
        keep = min(self._longest - 1, len(clean))
        self._held = clean[len(clean) - keep :]
        return clean[: len(clean) - keep]

    def finish(self) -> bytes:
        """The end that was held back."""
        rest, self._held = self._held, b""
        return rest

    def text(self, value: str) -> str:
        """One whole text, such as a header, without the secrets."""
        if self._pattern is None:
            return value
        return self._pattern.sub(REDACTED, value.encode("utf-8", "replace")).decode(
            "utf-8", "replace"
        )
