"""Tool calls that somebody has to allow: who waits for it, and who says so."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from smokebox.agents.approval import Approval, Deny, ProposedCall
from smokebox.agents.events import ApprovalNeeded
from smokebox.agents.log.records import ApprovalAsked, ApprovalGiven
from smokebox.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.agents.events import Event
    from smokebox.agents.journal import Journal
    from smokebox.agents.messages import ToolCall
    from smokebox.agents.tools.toolcontext import ToolContext


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a call may run, and what the model is told where it may not."""

    allowed: bool
    reason: str = ""


@dataclass(slots=True)
class Desk:
    """The calls of a session that wait for somebody, and what somebody said."""

    journal: Journal
    _waiting: dict[str, tuple[ApprovalNeeded, asyncio.Future[Verdict]]] = field(
        default_factory=dict
    )

    @property
    def waiting(self) -> list[ApprovalNeeded]:
        """Those that wait, the first first."""
        return [needed for needed, _ in self._waiting.values()]

    async def wait(self, needed: ApprovalNeeded) -> Verdict:
        """Wait for somebody."""
        answer: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._waiting[needed.call_id] = (needed, answer)
        try:
            return await answer
        finally:
            self._waiting.pop(needed.call_id, None)

    async def decide(self, call_id: str, verdict: Verdict) -> None:
        """Say what becomes of a call. It is recorded before it has any effect."""
        if call_id not in self._waiting:
            known = ", ".join(self._waiting) or "none"
            raise NotFound(
                f"no tool call {call_id!r} waits to be allowed.",
                hint=f"Those that wait: {known}.",
                kind="approval",
                name=call_id,
            )
        _, answer = self._waiting.pop(call_id)
        await self.journal.append(ApprovalGiven(call_id, verdict.allowed, verdict.reason))
        if not answer.done():
            answer.set_result(verdict)


@dataclass(slots=True, kw_only=True)
class Gate:
    """What the calls of one piece of work have to pass."""

    work_id: str
    approval: Approval
    desk: Desk
    journal: Journal
    emit: Callable[[Event], None]

    async def pass_through(
        self, call: ToolCall, arguments: dict[str, Any], ctx: ToolContext
    ) -> Verdict:
        """Wait until it is known whether a call may run; also what a killed process asked."""
        before = {one.call.id: one for one in self.journal.conversation.pending_calls}
        known = before.get(call.id)
        consent = "none" if known is None else known.consent
        if known is not None and consent in ("allowed", "denied"):
            return Verdict(consent == "allowed", known.reason)
        if consent == "none":
            decision = await self.approval.decide(ProposedCall(call.name, arguments, call.id), ctx)
            if isinstance(decision, Deny):
                return Verdict(False, decision.reason)
            if decision == "allow":
                return Verdict(True)
            await self.journal.append(
                ApprovalAsked(self.work_id, call.id, call.name, call.arguments)
            )
        needed = ApprovalNeeded(call.id, call.name, arguments)
        self.emit(needed)
        return await self.desk.wait(needed)
