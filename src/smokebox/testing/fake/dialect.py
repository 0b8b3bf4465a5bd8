"""What the dialects of providers have in common: a request is read and checked, a reply told."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from smokebox.agents.messages import AssistantPart, StopReason, Usage
    from smokebox.agents.model import ModelRequest

Trouble: TypeAlias = Literal[
    "invalid", "unauthorized", "not_found", "too_long", "rate_limited", "overloaded", "broken"
]
"""What went wrong, which each dialect has its own status and words for."""


class RequestRejected(Exception):
    """A request that the real one would answer with an error, too."""

    def __init__(self, message: str, trouble: Trouble = "invalid") -> None:
        super().__init__(message)
        self.message = message
        self.trouble = trouble


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A request as it was understood.

    `blocks` are its pieces in order, and `caches` whether they are cached: never, by
    themselves, or because the request marks where.
    """

    request: ModelRequest
    model: str
    stream: bool
    blocks: tuple[str, ...]
    caches: Literal["no", "always", "marked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeReply:
    """What is answered. The input tokens of `usage` have those from the cache in them."""

    id: str
    model: str
    parts: tuple[AssistantPart, ...]
    stop: StopReason
    usage: Usage
    chunk: int


@dataclass(frozen=True, slots=True)
class DialectError:
    """An error as HTTP: its status and its body."""

    status: int
    body: dict[str, Any]


class Dialect(Protocol):
    """How one kind of provider is spoken to."""

    def authorized(self, headers: Mapping[str, str], key: str) -> bool:
        """Whether the request has the key."""
        ...

    def parse(self, body: dict[str, Any], headers: Mapping[str, str]) -> ParsedRequest:
        """Read and check a request. Raises `RequestRejected`."""
        ...

    def failure(self, trouble: Trouble, message: str) -> DialectError:
        """An error in this dialect."""
        ...

    def error_event(self, trouble: Trouble, message: str) -> bytes:
        """An error in the middle of a stream."""
        ...

    def whole(self, reply: FakeReply) -> dict[str, Any]:
        """A reply that is not streamed."""
        ...

    def opening(self, reply: FakeReply) -> bytes:
        """What a stream begins with."""
        ...

    def pieces(self, reply: FakeReply) -> Iterator[bytes]:
        """What it says, piece by piece."""
        ...

    def closing(self, reply: FakeReply) -> bytes:
        """What it ends with."""
        ...


def canonical(value: object) -> str:
    """A value as text that is the same for the same value, without where the cache is marked."""
    return json.dumps(_unmarked(value), sort_keys=True, separators=(",", ":"))


def _unmarked(value: object) -> object:
    if isinstance(value, dict):
        return {key: _unmarked(item) for key, item in value.items() if key != "cache_control"}
    return [_unmarked(item) for item in value] if isinstance(value, list) else value


def cut(text: str, size: int) -> Iterator[str]:
    """A text in pieces."""
    for at in range(0, len(text), size):
        yield text[at : at + size]


def need(condition: object, message: str) -> None:
    """Reject the request unless that is so."""
    if not condition:
        reject(message)


def reject(message: str) -> NoReturn:
    """Reject the request."""
    raise RequestRejected(message)
