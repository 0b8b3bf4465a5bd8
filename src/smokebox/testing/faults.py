"""What can go wrong between an agent and a model, to be written among the turns of a script.

FakeModelServer(faults.rate_limited(retry_after=1), faults.cut_off("Half an"), "An answer.")
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from smokebox.testing.scripted import Turn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from smokebox.testing.fake.dialect import Trouble
    from smokebox.testing.scripted import TurnPart

Ending: TypeAlias = Literal["error", "cut", "garbage", "stop"]


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """An answer that is an error, in the words of the dialect."""

    trouble: Trouble
    message: str
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BrokenStream:
    """An answer that begins well, and does not end so."""

    turn: Turn
    ending: Ending
    trouble: Trouble = "overloaded"


@dataclass(frozen=True, slots=True)
class RawBody:
    """A body that is sent as it is."""

    body: bytes
    status: int = 200
    content_type: str = "application/json"


Fault: TypeAlias = ErrorResponse | BrokenStream | RawBody


def rate_limited(retry_after: float | None = None) -> ErrorResponse:
    """429, with Retry-After where a time is given."""
    headers = {} if retry_after is None else {"retry-after": f"{retry_after:g}"}
    return ErrorResponse("rate_limited", "Rate limit reached, try again later.", headers=headers)


def overloaded() -> ErrorResponse:
    """529 from Anthropic, 503 from others."""
    return ErrorResponse("overloaded", "Overloaded")


def server_error(status: int = 500) -> ErrorResponse:
    """The server's own fault."""
    return ErrorResponse("broken", "Internal server error", status=status)


def unauthorized() -> ErrorResponse:
    """401, as for a key that nobody knows."""
    return ErrorResponse("unauthorized", "Incorrect API key provided.")


def context_overflow(tokens: int = 210_000, limit: int = 200_000) -> ErrorResponse:
    """The conversation is too long, said in the words that clients look for."""
    return ErrorResponse(
        "too_long",
        f"prompt is too long: {tokens} tokens > {limit} maximum. This model's maximum context "
        f"length is {limit} tokens.",
    )


def bad_request(message: str = "temperature: out of range") -> ErrorResponse:
    """400, for a reason that no retry mends."""
    return ErrorResponse("invalid", message)


def stalled(parts: TurnPart | Sequence[TurnPart] = ()) -> Turn:
    """The parts come, and then nothing, on a connection that stays open."""
    return Turn(parts, hang=True)


def cut_off(parts: TurnPart | Sequence[TurnPart] = "Half an") -> BrokenStream:
    """The parts come, and then the connection is reset."""
    return BrokenStream(Turn(parts), "cut")


def ended_early(parts: TurnPart | Sequence[TurnPart] = "Half an") -> BrokenStream:
    """The parts come, and then the stream ends as if that were all, with no last event."""
    return BrokenStream(Turn(parts), "stop")


def garbled(parts: TurnPart | Sequence[TurnPart] = "Half an") -> BrokenStream:
    """The parts come, and then an event that is not JSON."""
    return BrokenStream(Turn(parts), "garbage")


def failed_midway(
    parts: TurnPart | Sequence[TurnPart] = "Half an", trouble: Trouble = "overloaded"
) -> BrokenStream:
    """The parts come, and then an event that is an error, after a status of 200."""
    return BrokenStream(Turn(parts), "error", trouble)


def garbage() -> RawBody:
    """A status of 200, and a page of a proxy that went mad."""
    return RawBody(b"<html><body>It works!</body></html>", content_type="text/html")
