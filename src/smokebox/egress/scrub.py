"""Takes secrets out of bytes that flow past, also where they are cut between two reads.

What stands in for a secret is as long as it was: a length that was announced stays true.
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

# Shorter values would strike innocent text; they are no secrets either.
_SHORTEST = 6
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
    """The values in `headers` that must not be seen, with and without their scheme."""
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
    return {value for value in found if len(value) >= _SHORTEST}


def secrets_in_query(url: str) -> set[str]:
    """The values in the query of a URL that would be secrets if somebody added them."""
    values = (value for _, value in parse_qsl(urlsplit(url).query))
    return {value for value in values if len(value) >= _SHORTEST}


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
    """What is seen of it in base64 wherever in a longer text it stands."""
    found = set()
    for before in range(3):
        # The characters at both ends hold bits of the neighbours too.
        first = (before * 8 + 5) // 6
        last = (before + len(raw)) * 8 // 6
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            found.add(encode(b"\0" * before + raw)[first:last])
    return found


class _Words:
    """What to look for. Made once for some secrets: a request is read faster than that."""

    def __init__(self, secrets: frozenset[str]) -> None:
        every = {word for secret in secrets for word in _spellings(secret)}
        # One that holds another is struck with it.
        words = {word for word in every if not any(o != word and o in word for o in every)}
        self.words = sorted(words, key=len, reverse=True)
        self.pattern = re.compile(b"|".join(map(re.escape, self.words)))
        self.beginnings = {word[:size] for word in words for size in range(1, len(word))}
        self.firsts = frozenset(word[0] for word in words)
        self.longest = max(map(len, words))

    def holds(self, data: bytes) -> bool:
        """Whether there is a secret in it."""
        # To look for each word is many times as fast as to match the pattern.
        return any(word in data for word in self.words)

    def strike(self, data: bytes) -> bytes:
        """The same without the secrets."""
        return self.pattern.sub(_mask, data) if self.holds(data) else data

    def begun(self, data: bytes) -> int:
        """How many bytes at the end are the beginning of a secret."""
        tail = data[-(self.longest - 1) :]
        for start, byte in enumerate(tail):
            if byte in self.firsts and tail[start:] in self.beginnings:
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
        """What of the stream so far can be shown: all but an end that may begin a secret."""
        words = self._words
        if words is None:
            return data
        clean = words.strike(self._held + data if self._held else data)
        keep = words.begun(clean)
        self._held = clean[len(clean) - keep :] if keep else b""
        return clean[: len(clean) - keep] if keep else clean

    def finish(self) -> bytes:
        """The end that was held back."""
        rest, self._held = self._held, b""
        return rest

    def finds_in(self, texts: Iterable[str]) -> bool:
        """Whether one of some texts holds a secret."""
        words = self._words
        return words is not None and words.holds("\n".join(texts).encode("utf-8", "replace"))

    def text(self, value: str) -> str:
        """One whole text, such as a header, without the secrets."""
        if self._words is None:
            return value
        raw = value.encode("utf-8", "replace")
        clean = self._words.strike(raw)
        return value if clean is raw else clean.decode("utf-8", "replace")


def _mask(found: re.Match[bytes]) -> bytes:
    return REDACTED[: len(found[0])].ljust(len(found[0]), b"*")
