"""What is known of work, of tool calls and of child sessions, folded from records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from smokebox.agents.messages import Usage

if TYPE_CHECKING:
    from smokebox.agents.events import Outcome
    from smokebox.agents.log.records import WorkEnded, WorkKind
    from smokebox.agents.messages import AssistantMessage, ToolCall, UserMessage

Consent: TypeAlias = Literal["none", "asked", "allowed", "denied"]


@dataclass(slots=True, kw_only=True)
class Work:
    """A piece of accepted work.

    `applied` is whether the model has been told of it; `turns` and `usage` are of all its
    attempts; `reply` is the last whole answer. Of ended work only what may be asked for again
    is kept: its `message` and `options` are gone.
    """

    id: str
    kind: WorkKind
    accepted_at: float
    message: UserMessage | None = None
    options: dict[str, Any] = field(default_factory=dict)
    key: str | None = None
    attempts: int = 0
    applied: bool = False
    aborting: bool = False
    turns: int = 0
    usage: Usage = field(default_factory=Usage)
    reply: AssistantMessage | None = None
    end: WorkEnded | None = None

    @property
    def unfinished(self) -> bool:
        """Whether its one outcome is still to come."""
        return self.end is None


@dataclass(slots=True, kw_only=True)
class PendingCall:
    """A tool call without an end. Once `started` the tool may have had its effect.

    `task` is the child session that does it. `consent` says whether somebody was asked to
    allow it, and `reason` why they did not.
    """

    call: ToolCall
    work_id: str
    started: bool = False
    durable: bool = False
    task: str | None = None
    consent: Consent = "none"
    reason: str = ""


@dataclass(slots=True, kw_only=True)
class Task:
    """A child session; `outcome` is None while it works."""

    session: str
    work_id: str
    call_id: str | None = None
    agent: str | None = None
    outcome: Outcome | None = None


@dataclass(slots=True, kw_only=True)
class OpenReply:
    """An answer that has not come to its end, and what there is of it."""

    id: str
    work_id: str
    model: str
    text: str = ""
