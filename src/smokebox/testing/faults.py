"""Failures of a model provider, to place between the turns of a script.

FakeModelServer(faults.rate_limited(retry_after=1), faults.cut_off("Half an"), "An answer.")
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from smokebox.testing.scripted import Turn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from smokebox.testing.fake.provider_api import ErrorKind
    from smokebox.testing.scripted import TurnPart

StreamFault: TypeAlias = Literal["error", "cut", "garbage", "stop"]


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """Error response in the format of the provider."""

    kind: ErrorKind
    message: str
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BrokenStream:
    """Response that starts with a turn and ends with a fault."""

    turn: Turn
    fault: StreamFault
    kind: ErrorKind = "overloaded"


@dataclass(frozen=True, slots=True)
class RawBody:
    """Response with exactly this body."""

    body: bytes
    status: int = 200
    content_type: str = "application/json"


Fault: TypeAlias = ErrorResponse | BrokenStream | RawBody


def rate_limited(retry_after: float | None = None) -> ErrorResponse:
    """Status 429, with a Retry-After header if `retry_after` is given."""
    headers = {} if retry_after is None else {"retry-after": f"{retry_after:g}"}
    return ErrorResponse("rate_limited", "Rate limit reached, try again later.", headers=headers)


def overloaded() -> ErrorResponse:
    """Status 529 of Anthropic, 503 of the others."""
    return ErrorResponse("overloaded", "Overloaded")


def server_error(status: int = 500) -> ErrorResponse:
    """Internal error of the provider."""
    return ErrorResponse("internal", "Internal server error", status=status)


def unauthorized() -> ErrorResponse:
    """Status 401, as for an unknown key."""
    return ErrorResponse("unauthorized", "Incorrect API key provided.")


def context_overflow(tokens: int = 210_000, limit: int = 200_000) -> ErrorResponse:
    """Status 400 with the message by which clients recognize a conversation that is too long."""
    return ErrorResponse("too_long", context_overflow_message(tokens, limit))


def context_overflow_message(tokens: int, limit: int) -> str:
    """Return the message of a provider whose context window is exceeded."""
    return (
        f"prompt is too long: {tokens} tokens > {limit} maximum. This model's maximum context "
        f"length is {limit} tokens."
    )


def bad_request(message: str = "temperature: out of range") -> ErrorResponse:
    """Status 400, which a retry does not fix."""
    return ErrorResponse("invalid", message)


def stalled(parts: TurnPart | Sequence[TurnPart] = ()) -> Turn:
    """Send the parts, then nothing, and keep the connection open."""
    return Turn(parts, hang=True)


def cut_off(parts: TurnPart | Sequence[TurnPart] = "Half an") -> BrokenStream:
    """Send the parts, then reset the connection."""
    return BrokenStream(Turn(parts), "cut")


def ended_early(parts: TurnPart | Sequence[TurnPart] = "Half an") -> BrokenStream:
    """Send the parts, then end the stream cleanly without its final event."""
    return BrokenStream(Turn(parts), "stop")


def garbled(parts: TurnPart | Sequence[TurnPart] = "Half an") -> BrokenStream:
    """Send the parts, then an event that is not JSON."""
    return BrokenStream(Turn(parts), "garbage")


def failed_midway(
    parts: TurnPart | Sequence[TurnPart] = "Half an", kind: ErrorKind = "overloaded"
) -> BrokenStream:
    """Send the parts, then an error event, after a status of 200."""
    return BrokenStream(Turn(parts), "error", kind)


def garbage() -> RawBody:
    """Status 200 with a page of HTML, as a misconfigured proxy sends it."""
    return RawBody(b"<html><body>It works!</body></html>", content_type="text/html")
