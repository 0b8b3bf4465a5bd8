"""What can go wrong between an agent and a model, to be written among the turns of a script.

FakeModelServer(faults.rate_limited(retry_after=1), faults.cut_off("Half an"), "An answer.")
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from smokebox.testing.turns import Turn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from smokebox.testing.fake.dialect import Trouble
    from smokebox.testing.turns import TurnPart

Ending: TypeAlias = Literal["error", "cut", "garbage", "stop"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that is an error, in the words of the dialect."""

    trouble: Trouble
    message: str
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Broken:
    """An answer that begins well, and does not end so."""

    turn: Turn
    ending: Ending
    trouble: Trouble = "overloaded"


@dataclass(frozen=True, slots=True)
class Raw:
    """A body that is sent as it is."""

    body: bytes
    status: int = 200
    content_type: str = "application/json"


Fault: TypeAlias = Refusal | Broken | Raw


def rate_limited(retry_after: float | None = None) -> Refusal:
    """429, with Retry-After where a time is given."""
    headers = {} if retry_after is None else {"retry-after": f"{retry_after:g}"}
    return Refusal("rate_limited", "Rate limit reached, try again later.", headers=headers)


def overloaded() -> Refusal:
    """529 from Anthropic, 503 from others."""
    return Refusal("overloaded", "Overloaded")


def server_error(status: int = 500) -> Refusal:
    """The server's own fault."""
    return Refusal("broken", "Internal server error", status=status)


def unauthorized() -> Refusal:
    """401, as for a key that nobody knows."""
    return Refusal("unauthorized", "Incorrect API key provided.")


def context_overflow(tokens: int = 210_000, limit: int = 200_000) -> Refusal:
    """The conversation is too long, said in the words that clients look for."""
    return Refusal(
        "too_long",
        f"prompt is too long: {tokens} tokens > {limit} maximum. This model's maximum context "
        f"length is {limit} tokens.",
    )


def bad_request(message: str = "temperature: out of range") -> Refusal:
    """400, for a reason that no retry mends."""
    return Refusal("invalid", message)


def stalled(parts: TurnPart | Sequence[TurnPart] = ()) -> Turn:
    """The parts come, and then nothing, on a connection that stays open."""
    return Turn(parts, hang=True)


def cut_off(parts: TurnPart | Sequence[TurnPart] = "Half an") -> Broken:
    """The parts come, and then the connection is reset."""
    return Broken(Turn(parts), "cut")


def ended_early(parts: TurnPart | Sequence[TurnPart] = "Half an") -> Broken:
    """The parts come, and then the stream ends as if that were all, with no last event."""
    return Broken(Turn(parts), "stop")


def garbled(parts: TurnPart | Sequence[TurnPart] = "Half an") -> Broken:
    """The parts come, and then an event that is not JSON."""
    return Broken(Turn(parts), "garbage")


def failed_midway(
    parts: TurnPart | Sequence[TurnPart] = "Half an", trouble: Trouble = "overloaded"
) -> Broken:
    """The parts come, and then an event that is an error, after a status of 200."""
    return Broken(Turn(parts), "error", trouble)


def garbage() -> Raw:
    """A status of 200, and a page of a proxy that went mad."""
    return Raw(b"<html><body>It works!</body></html>", content_type="text/html")
