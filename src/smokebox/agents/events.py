"""What happens while an agent works, as whoever watches an operation gets it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from smokebox.agents.messages import Usage
    from smokebox.types import OutputChunk

ToolStatus: TypeAlias = Literal["ok", "error", "denied", "timeout", "aborted", "unknown"]
"""How a tool call ended; `unknown` is one that was running when the process was killed."""
Outcome: TypeAlias = Literal["completed", "failed", "aborted"]


@dataclass(frozen=True, slots=True)
class TurnStart:
    """A request goes to a model."""

    turn: int
    model: str


@dataclass(frozen=True, slots=True)
class TextEvent:
    """More words of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ThinkingEvent:
    """More of what the model thinks."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolStart:
    """A tool begins to run."""

    call_id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """A tool wrote something."""

    call_id: str
    chunk: OutputChunk


@dataclass(frozen=True, slots=True)
class ToolEnd:
    """A tool has ended; `text` is what the model is told."""

    call_id: str
    name: str
    status: ToolStatus
    text: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ApprovalNeeded:
    """A tool call waits for somebody to allow it."""

    call_id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class UsageEvent:
    """What the operation took up to now."""

    usage: Usage


@dataclass(frozen=True, slots=True)
class Retry:
    """A request failed for a reason that may pass, and is made again after `delay` seconds."""

    attempt: int
    delay: float
    model: str
    error: str


@dataclass(frozen=True, slots=True)
class Fallback:
    """A model failed for good, and the next of the list takes over."""

    model: str
    error: str


@dataclass(frozen=True, slots=True)
class CompactionStart:
    """The conversation is being summarized."""

    tokens: int


@dataclass(frozen=True, slots=True)
class CompactionEnd:
    """The conversation was summarized, or could not be, as `error` says."""

    tokens: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class TaskStart:
    """A child session begins to work."""

    session: str
    agent: str | None
    prompt: str


@dataclass(frozen=True, slots=True)
class TaskEvent:
    """Something happened in a child session."""

    session: str
    event: Event


@dataclass(frozen=True, slots=True)
class TaskEnd:
    """A child session has done its work."""

    session: str
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class OperationEnd:
    """The end of the operation: the last event of each."""

    outcome: Outcome
    text: str
    usage: Usage


Event: TypeAlias = (
    TurnStart
    | TextEvent
    | ThinkingEvent
    | ToolStart
    | ToolOutput
    | ToolEnd
    | ApprovalNeeded
    | UsageEvent
    | Retry
    | Fallback
    | CompactionStart
    | CompactionEnd
    | TaskStart
    | TaskEvent
    | TaskEnd
    | OperationEnd
)
