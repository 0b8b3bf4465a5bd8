"""Removes secrets from streams of bytes, also secrets that are split between two reads.

A replacement is as long as its secret, so that a Content-Length stays correct.
"""

from __future__ import annotations

import base64
import binascii
import functools
import html
import json
import re
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, quote_plus, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

REDACTED = b"[redacted]"

# Shorter values would match ordinary text, and are not secrets either.
_MIN_SECRET = 6
_NOT_SECRET = frozenset(
    (
        "accept",
        "accept-encoding",
        "accept-language",
        "cache-control",
        "content-encoding",
        "content-length",
        "content-type",
        "date",
        "host",
        "origin",
        "range",
        "referer",
        "user-agent",
        "x-amz-content-sha256",
        "x-amz-date",
    )
)


UNREADABLE = frozenset({"accept-encoding", "if-range", "range", "sec-websocket-extensions"})
"""Request headers to drop where secrets were added: the response must be readable and whole."""


def added_secrets(
    fields: Iterable[tuple[str, str]],
    url: str,
    *,
    sent_fields: Iterable[tuple[str, str]],
    sent_url: str,
) -> set[str]:
    """Return the secrets that a handler added to the request that a sandbox sent."""
    sent = set(sent_fields)
    secrets = secrets_in([field for field in fields if field not in sent])
    if url != sent_url:
        secrets |= secrets_in_query(url) - secrets_in_query(sent_url)
    return secrets


def secrets_in(headers: Mapping[str, str] | Iterable[tuple[str, str]]) -> set[str]:
    """Return the values of headers that may be secret, with and without their scheme."""
    found: set[str] = set()
    pairs = headers.items() if hasattr(headers, "items") else headers
    for name, value in pairs:
        if name.lower() in _NOT_SECRET:
            continue
        scheme, _, rest = value.partition(" ")
        found |= {value, rest.strip()}
        if scheme.lower() == "basic":
            found |= _user_and_password(rest)
        if name.lower() == "cookie":
            found |= {pair.partition("=")[2].strip() for pair in value.split(";")}
    return {value for value in found if len(value) >= _MIN_SECRET}


def secrets_in_query(url: str) -> set[str]:
    """Return the values in the query of a URL that may be secret."""
    values = (value for _, value in parse_qsl(urlsplit(url).query))
    return {value for value in values if len(value) >= _MIN_SECRET}


def _user_and_password(encoded: str) -> set[str]:
    try:
        pair = base64.b64decode(encoded, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return set()
    return {pair, pair.partition(":")[2]}


def _spellings(secret: str) -> set[bytes]:
    raw = secret.encode()
    texts = {secret, quote(secret), quote(secret, safe=""), quote_plus(secret)}
    texts |= {secret.replace("/", "\\/"), html.escape(secret), json.dumps(secret)[1:-1]}
    encoded = {raw.hex().encode(), raw.hex().upper().encode(), *_in_base64(raw)}
    return {text.encode() for text in texts} | encoded


def _in_base64(raw: bytes) -> set[bytes]:
    """Return the part of its base64 that is the same at any offset in a longer text."""
    found = set()
    for before in range(3):
        # The characters at both ends also encode bits of the neighbours.
        first = (before * 8 + 5) // 6
        last = (before + len(raw)) * 8 // 6
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            found.add(encode(b"\0" * before + raw)[first:last])
    return found


class _Words:
    """Spellings of some secrets to search for. Cached: building it takes longer than a request."""

    def __init__(self, secrets: frozenset[str]) -> None:
        every = {word for secret in secrets for word in _spellings(secret)}
        # A word that contains another is found with it.
        words = {word for word in every if not any(o != word and o in word for o in every)}
        self.words = sorted(words, key=len, reverse=True)
        self.pattern = re.compile(b"|".join(map(re.escape, self.words)))
        self.prefixes = {word[:size] for word in words for size in range(1, len(word))}
        self.first_bytes = frozenset(word[0] for word in words)
        self.longest = max(map(len, words))

    def found_in(self, data: bytes) -> bool:
        """Return whether there is a secret in `data`."""
        # Searching for each word is many times as fast as matching the pattern.
        return any(word in data for word in self.words)

    def redact(self, data: bytes) -> bytes:
        """Return `data` without the secrets."""
        return self.pattern.sub(_mask, data) if self.found_in(data) else data

    def partial(self, data: bytes) -> int:
        """Return the number of bytes at the end that may be the start of a secret."""
        tail = data[-(self.longest - 1) :]
        for start, byte in enumerate(tail):
            if byte in self.first_bytes and tail[start:] in self.prefixes:
                return len(tail) - start
        return 0


_words = functools.lru_cache(64)(_Words)


class Scrubber:
    """Replaces every spelling of some secrets in a stream of bytes."""

    def __init__(self, secrets: Iterable[str]) -> None:
        found = frozenset(secrets)
        self._words = _words(found) if found else None
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Return the stream so far without secrets, except an end that may start one."""
        words = self._words
        if words is None:
            return data
        clean = words.redact(self._held + data if self._held else data)
        keep = words.partial(clean)
        self._held = clean[len(clean) - keep :] if keep else b""
        return clean[: len(clean) - keep] if keep else clean

    def finish(self) -> bytes:
        """Return the end that was held back."""
        rest, self._held = self._held, b""
        return rest

    def finds_in(self, texts: Iterable[str]) -> bool:
        """Return whether one of the texts has a secret."""
        words = self._words
        return words is not None and words.found_in("\n".join(texts).encode("utf-8", "replace"))

    def text(self, value: str) -> str:
        """Return a whole text, such as a header, without secrets."""
        if self._words is None:
            return value
        raw = value.encode("utf-8", "replace")
        clean = self._words.redact(raw)
        return value if clean is raw else clean.decode("utf-8", "replace")


def _mask(found: re.Match[bytes]) -> bytes:
    return REDACTED[: len(found[0])].ljust(len(found[0]), b"*")
