"""Events of an operation, as iterating over it yields them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from smokebox.agents.messages import Usage
    from smokebox.types import OutputChunk

ToolStatus: TypeAlias = Literal["ok", "error", "denied", "timeout", "aborted", "unknown"]
"""Outcome of a tool call; `unknown` if it was running when the process was killed."""
Outcome: TypeAlias = Literal["completed", "failed", "aborted"]


@dataclass(frozen=True, slots=True)
class TurnStart:
    """A request is sent to a model."""

    turn: int
    model: str


@dataclass(frozen=True, slots=True)
class TextEvent:
    """More text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ThinkingEvent:
    """More text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolStart:
    """A tool starts."""

    call_id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """A running tool wrote output."""

    call_id: str
    chunk: OutputChunk


@dataclass(frozen=True, slots=True)
class ToolEnd:
    """A tool has ended; `text` is the result that the model gets."""

    call_id: str
    name: str
    status: ToolStatus
    text: str
    seconds: float


@dataclass(frozen=True, slots=True)
class ApprovalNeeded:
    """A tool call waits for approval."""

    call_id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class UsageEvent:
    """Usage of the operation so far."""

    usage: Usage


@dataclass(frozen=True, slots=True)
class Retry:
    """A request failed with a temporary error, and is retried after `delay` seconds."""

    attempt: int
    delay: float
    model: str
    error: str


@dataclass(frozen=True, slots=True)
class Fallback:
    """A model failed permanently, and the next in the list takes over."""

    model: str
    error: str


@dataclass(frozen=True, slots=True)
class CompactionStart:
    """The conversation is being summarized."""

    tokens: int


@dataclass(frozen=True, slots=True)
class CompactionEnd:
    """The conversation was summarized, or summarizing failed with `error`."""

    tokens: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class TaskStart:
    """A child session starts its task."""

    session: str
    agent: str | None
    prompt: str


@dataclass(frozen=True, slots=True)
class TaskEvent:
    """An event of a child session."""

    session: str
    event: Event


@dataclass(frozen=True, slots=True)
class TaskEnd:
    """A child session has ended its task."""

    session: str
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class CheckpointEnd:
    """The files were kept as the checkpoint `id`, or that failed with `error`."""

    turn: int
    id: str | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class OperationEnd:
    """The operation has ended. Always the last event."""

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
    | CheckpointEnd
    | OperationEnd
)
