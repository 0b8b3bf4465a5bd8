"""The tool calls of one answer, until all of them have come to something."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from smokebox.agents.log.work import PendingCall
from smokebox.agents.messages import AssistantMessage, ToolReturn, ToolReturns

if TYPE_CHECKING:
    from smokebox.agents.messages import ToolCall

UNKNOWN = (
    "It is not known what this call did: the process that ran it was killed before it ended. "
    "It may have had its effect, in part or in whole, and was not run again. Look before you "
    "repeat it."
)
NOT_RUN = "This call was not run: the work ended before."


@dataclass(slots=True, kw_only=True)
class Batch:
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
