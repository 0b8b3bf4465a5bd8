"""The loop: a model is asked, its tools are run, until it has nothing left to do."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from smokebox.agents.events import UsageEvent
from smokebox.agents.finish import Finish, unavailable
from smokebox.agents.log.records import UserSaid
from smokebox.agents.messages import Text, UserMessage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from smokebox.agents.budget import Meter
    from smokebox.agents.calls import Calls
    from smokebox.agents.events import Event
    from smokebox.agents.handin import HandIn
    from smokebox.agents.journal import Journal
    from smokebox.agents.messages import AssistantMessage, ToolCall
    from smokebox.agents.model import Model
    from smokebox.agents.turn import Asking

# A model that was reminded this often will not give a result the next time either.
MOST_REMINDERS = 3


@dataclass(slots=True, kw_only=True)
class Loop:
    """Works on one prompt.

    `joins` adds the messages that came meanwhile, and says whether there were any; `settle`
    makes the conversation shorter where it has become too long.
    """

    work_id: str
    journal: Journal
    emit: Callable[[Event], None]
    asking: Asking
    calls: Calls
    meter: Meter
    hand_in: HandIn[Any] | None
    joins: Callable[[], bool]
    settle: Callable[[Model], Awaitable[None]]
    _said: str = field(default="", init=False)
    _reminders: int = field(default=0, init=False)

    async def run(self, unsettled: Sequence[ToolCall], attempts: Mapping[str, int]) -> Finish:
        """Take turns until the end, first with the calls that a crash left open."""
        left = self.meter.seconds_left
        limit = asyncio.timeout(None if left == math.inf else max(left, 0.0))
        try:
            async with limit:
                return await self._run(unsettled, attempts)
        except TimeoutError:
            if not limit.expired():
                raise
            return self._stopped("budget: seconds")

    async def _run(self, unsettled: Sequence[ToolCall], attempts: Mapping[str, int]) -> Finish:
        if unsettled:
            await self.calls.run(unsettled, attempts=attempts)
            if (finish := self._handed_in()) is not None:
                return finish
        while True:
            self.joins()
            if (limit := self.meter.exceeded()) is not None:
                return self._stopped(limit)
            await self.journal.flush()
            await self.settle(self.asking.model)
            message = await self.asking.ask()
            self._count(message)
            calls = message.calls
            if calls:
                await self.calls.run(calls, attempts={})
                if (finish := self._handed_in()) is not None:
                    return finish
            elif (finish := self._answered(message)) is not None:
                return finish

    def _count(self, message: AssistantMessage) -> None:
        self.meter.add(message.usage, turns=1)
        self.emit(UsageEvent(self.meter.usage))
        self._said = message.text or self._said

    def _answered(self, message: AssistantMessage) -> Finish | None:
        """The end, unless somebody has joined meanwhile or a result is missing."""
        stopped = message.stop if message.stop in ("length", "refused") else None
        if self.hand_in is not None and stopped != "refused":
            if self.hand_in.read(message.text):
                return self._handed_in()
            self._remind(self.hand_in)
            return None
        if self.joins():
            return None
        if self.hand_in is not None:
            raise unavailable("the model refused to answer", message.text)
        return Finish(text=message.text, model=message.model, stopped=stopped)

    def _remind(self, hand_in: HandIn[Any]) -> None:
        self._reminders += 1
        if self._reminders > MOST_REMINDERS:
            reason = f"the model gave none, though it was reminded {MOST_REMINDERS} times"
            raise unavailable(reason, self._said)
        told = UserMessage((Text(hand_in.reminder),), signal="result")
        self.journal.add(UserSaid(self.work_id, told))

    def _handed_in(self) -> Finish | None:
        if self.hand_in is None:
            return None
        return self.hand_in.finish(self._said, self.asking.model.name)

    def _stopped(self, limit: str) -> Finish:
        text = self.asking.partial or self._said
        if self.hand_in is not None:
            raise unavailable(limit, text)
        return Finish(text=text, model=self.asking.model.name, stopped=limit)
