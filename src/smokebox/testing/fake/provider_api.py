"""Interface of a fake provider API: parse and check requests, encode replies and errors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from smokebox.agents.messages import AssistantPart, StopReason, Usage
    from smokebox.agents.model import ModelRequest

ErrorKind: TypeAlias = Literal[
    "invalid", "unauthorized", "not_found", "too_long", "rate_limited", "overloaded", "internal"
]
"""Kinds of errors; each API has its own status and format for them."""


class RequestRejected(Exception):
    """A request that the real provider rejects too."""

    def __init__(self, message: str, kind: ErrorKind = "invalid") -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A request in Smokebox's types.

    `blocks` are its parts in order, for token counts and the prompt cache. `caches` is when the
    provider caches them: never, always, or if the request marks them.
    """

    request: ModelRequest
    model: str
    stream: bool
    blocks: tuple[str, ...]
    caches: Literal["no", "always", "marked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeReply:
    """A reply to encode. The input tokens of `usage` include cached ones."""

    id: str
    model: str
    parts: tuple[AssistantPart, ...]
    stop: StopReason
    usage: Usage
    chunk: int


@dataclass(frozen=True, slots=True)
class EncodedError:
    """Status and JSON body of an error response."""

    status: int
    body: dict[str, Any]


class ProviderApi(Protocol):
    """The HTTP API of one kind of provider."""

    def authorized(self, headers: Mapping[str, str], key: str) -> bool:
        """Return whether the request has the key."""
        ...

    def parse(self, body: dict[str, Any], headers: Mapping[str, str]) -> ParsedRequest:
        """Parse and check a request. Raises `RequestRejected`."""
        ...

    def error(self, kind: ErrorKind, message: str) -> EncodedError:
        """Return an error response."""
        ...

    def error_event(self, kind: ErrorKind, message: str) -> bytes:
        """Return an error as an event of a stream."""
        ...

    def whole(self, reply: FakeReply) -> dict[str, Any]:
        """Return a reply that is not streamed."""
        ...

    def first_events(self, reply: FakeReply) -> bytes:
        """Return the events that open a stream."""
        ...

    def content_events(self, reply: FakeReply) -> Iterator[bytes]:
        """Yield the events with the content."""
        ...

    def last_events(self, reply: FakeReply) -> bytes:
        """Return the events that end a stream."""
        ...


def canonical(value: object) -> str:
    """Encode a value so that equal values are equal text, ignoring cache marks."""
    return json.dumps(_without_marks(value), sort_keys=True, separators=(",", ":"))


def _without_marks(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_marks(item) for key, item in value.items() if key != "cache_control"}
    return [_without_marks(item) for item in value] if isinstance(value, list) else value


def split(text: str, size: int) -> Iterator[str]:
    """Yield a text in pieces of `size` characters."""
    for at in range(0, len(text), size):
        yield text[at : at + size]


def require(condition: object, message: str) -> None:
    """Reject the request unless the condition holds."""
    if not condition:
        reject(message)


def reject(message: str) -> NoReturn:
    """Reject the request."""
    raise RequestRejected(message)
