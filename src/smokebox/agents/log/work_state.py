"""The state of work, tool calls and child sessions, folded from records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from smokebox.agents.messages import AssistantMessage, ToolReturn, ToolReturns, Usage

if TYPE_CHECKING:
    from smokebox.agents.events import Outcome
    from smokebox.agents.log.records import WorkEnded, WorkKind
    from smokebox.agents.messages import ToolCall, UserMessage


Consent: TypeAlias = Literal["none", "asked", "allowed", "denied"]


@dataclass(slots=True, kw_only=True)
class WorkState:
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


UNKNOWN = (
    "It is not known what this call did: the process that ran it was killed before it ended. "
    "It may have had its effect, in part or in whole, and was not run again. Look before you "
    "repeat it."
)
NOT_RUN = "This call was not run: the work ended before."


@dataclass(slots=True, kw_only=True)
class CallBatch:
    """An answer that asks for tools, what is known of each call, and those that have ended."""

    message: AssistantMessage
    work_id: str
    calls: dict[str, PendingCall]
    ended: dict[str, ToolReturn] = field(default_factory=dict)

    @classmethod
    def of(cls, message: AssistantMessage, work_id: str) -> Self:
        """None of the calls has begun."""
        calls = {call.id: PendingCall(call=call, work_id=work_id) for call in message.calls}
        return cls(message=message, work_id=work_id, calls=calls)

    @property
    def pending(self) -> list[PendingCall]:
        """Those that have not ended."""
        return [one for id, one in self.calls.items() if id not in self.ended]

    def end(self, call_id: str, result: ToolReturn) -> None:
        """A call came to something; what it came to first stands."""
        self.ended.setdefault(call_id, result)

    def returns(self) -> ToolReturns:
        """What each came to, in the order of the model; those without an end too."""
        return ToolReturns(tuple(self._return(call) for call in self.message.calls))

    def _return(self, call: ToolCall) -> ToolReturn:
        if call.id in self.ended:
            return self.ended[call.id]
        text = UNKNOWN if self.calls[call.id].started else NOT_RUN
        return ToolReturn(call.id, call.name, text, is_error=True)
