"""What is added to a record before the work of a process that was killed goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.agents.log.batch import UNKNOWN
from smokebox.agents.log.records import ReplyFailed, ToolEnded
from smokebox.agents.messages import ToolReturn

if TYPE_CHECKING:
    from smokebox.agents.log.conversation import Conversation
    from smokebox.agents.log.records import Record
    from smokebox.agents.log.work import PendingCall


def settle(conversation: Conversation) -> list[Record]:
    """The ends of what was under way and cannot go on.

    Answers that were cut off failed, and are asked for again. Tools that may have run have an
    unknown end, which the model is told, and are never run again. What is left pending after
    that is safe to run: calls that had not started, durable ones, and those whose child
    session can be gone on with.
    """
    failed: list[Record] = [
        ReplyFailed(reply.id, "the process that read it was killed", code="interrupted")
        for reply in conversation.replies.values()
    ]
    return failed + [
        unknown(pending)
        for pending in conversation.pending_calls
        if pending.started and not pending.durable and pending.task is None
    ]


def unknown(pending: PendingCall) -> ToolEnded:
    """The end of a call that may have had its effect."""
    call = pending.call
    result = ToolReturn(call.id, call.name, UNKNOWN, is_error=True)
    return ToolEnded(call.id, result, status="unknown")
