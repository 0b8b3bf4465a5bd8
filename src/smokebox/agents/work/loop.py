"""The loop of a prompt: request a model, run its tool calls, and repeat until it is done."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from smokebox.agents.events import Fallback, Retry, TextEvent, ThinkingEvent, TurnStart, UsageEvent
from smokebox.agents.log.records import (
    MessageAdded,
    ReplyDelta,
    ReplyEnded,
    ReplyFailed,
    ReplyStarted,
)
from smokebox.agents.messages import AssistantMessage, Text, ToolCall, UserMessage
from smokebox.agents.model import ModelRequest, TextDelta, ThinkingDelta
from smokebox.agents.results import LoopResult, unavailable
from smokebox.agents.telemetry import span_chat
from smokebox.errors import ContextOverflow, ModelError, ModelUnavailable
from smokebox.foundation.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence, Set

    from smokebox.agents.limits import Durability
    from smokebox.agents.model import Model, ThinkingLevel, ToolSpec
    from smokebox.agents.results import ResultCollector
    from smokebox.agents.work.item import WorkContext
    from smokebox.agents.work.tool_calls import ToolRunner


# A provider that wants us to wait for longer is as good as one that is not there.
LONGEST_DELAY = 120.0


def delay_before(attempt: int, error: ModelError, durability: Durability) -> float | None:
    """Seconds to wait before the `attempt`-th repetition, or None where there is none to be.

    Jittered, so that many agents which one outage stopped do not come back all at once.
    """
    if not error.retryable or attempt > durability.retries:
        return None
    told = error.fields.get("retry_after")
    if isinstance(told, (int, float)):
        return float(told) if told <= LONGEST_DELAY else None
    delay: float = durability.retry_delay * 2 ** (attempt - 1)
    return min(delay, LONGEST_DELAY) * random.uniform(0.75, 1.0)


# A record for every piece that a provider sends would be most of the record.
DELTA_SECONDS = 1.0
LIVE_SECONDS = 0.1
DELTA_CHARACTERS = 4096


@dataclass(slots=True, kw_only=True)
class ModelRequester:
    """Asks the models of one piece of work, each from where the one before it failed."""

    work: WorkContext
    models: Sequence[Model]
    tools: Sequence[ToolSpec]
    thinking: ThinkingLevel | None
    result: Mapping[str, Any] | None
    shorten: Callable[[Model], Awaitable[bool]]
    """Makes the conversation shorter; False where that cannot be done (again)."""
    at: int = 0
    partial: str = ""
    """What the answer under way says up to now; empty once there is a whole one."""
    _turn: int = field(default=0, init=False)

    @property
    def model(self) -> Model:
        """The one that is asked."""
        return self.models[self.at]

    async def next_reply(self) -> AssistantMessage:
        """The next answer, whose records go out with the next flush."""
        self._turn += 1
        attempt = 0
        while True:
            try:
                return await self._request(self.model)
            except ContextOverflow as error:
                if not await self.shorten(self.model):
                    self._fall_back(error)
            except ModelError as error:
                attempt += 1
                delay = delay_before(attempt, error, self.work.session.setup.options.durability)
                if delay is None:
                    self._fall_back(error)
                    attempt = 0
                    continue
                self.work.emit(Retry(attempt, delay, self.model.name, str(error)))
                await asyncio.sleep(delay)

    def _fall_back(self, error: ModelError) -> None:
        if self.at + 1 >= len(self.models):
            raise error
        self.at += 1
        self.work.emit(Fallback(self.model.name, str(error)))

    async def _request(self, model: Model) -> AssistantMessage:
        self.work.emit(TurnStart(self._turn, model.name))
        request = ModelRequest(
            system=self.work.session.system,
            messages=self.work.event_log.conversation.messages,
            tools=self.tools,
            result=self.result,
            thinking=self.thinking,
            load=self.work.session.load_image,
        )
        answer = _ReplyLog(self.work, model.name)
        try:
            with span_chat(model.name) as span:
                message = await self._stream(model, request, answer)
                span.replied(message)
        except BaseException as error:
            answer.failed(error)
            raise
        self.partial = ""
        return answer.ended(message)

    async def _stream(
        self, model: Model, request: ModelRequest, answer: _ReplyLog
    ) -> AssistantMessage:
        self.partial = ""
        async with (
            contextlib.aclosing(model.stream(request)) as items,
            _Watch(self.work.session.setup.options.durability.stall, model.name) as watch,
        ):
            async for item in items:
                watch.alive()
                if isinstance(item, TextDelta):
                    self.partial += item.text
                    self.work.emit(TextEvent(item.text))
                    await answer.grew(item.text, thinking=False)
                elif isinstance(item, ThinkingDelta):
                    self.work.emit(ThinkingEvent(item.text))
                    await answer.grew(item.text, thinking=True)
                elif isinstance(item, AssistantMessage):
                    return item
        raise ModelUnavailable(
            f"{model.name} ended its answer in the middle.", model=model.name, retry_after=None
        )


class _ReplyLog:
    """The records of one answer. Short ones have none before their end."""

    def __init__(self, work: WorkContext, model: str) -> None:
        self._log = work.event_log
        self._id = new_id()
        self._started: ReplyStarted | None = ReplyStarted(work.work_id, self._id, model)
        self._pieces: list[str] = []
        self._size = 0
        self._thinking = False
        self._clock = asyncio.get_running_loop().time
        self._every = LIVE_SECONDS if self._log.live else DELTA_SECONDS
        # Who reads along sees the first piece at once.
        self._flushed = self._clock() - (self._every if self._log.live else 0.0)

    async def grew(self, text: str, *, thinking: bool) -> None:
        """Count a piece, and record those that are there once they are many or old."""
        if thinking is not self._thinking and self._pieces:
            self._settle()
        self._thinking = thinking
        self._pieces.append(text)
        self._size += len(text)
        if self._size >= DELTA_CHARACTERS or self._clock() - self._flushed >= self._every:
            self._settle()
            self._size, self._flushed = 0, self._clock()
            await self._log.flush()

    def ended(self, message: AssistantMessage) -> AssistantMessage:
        """Have the whole answer recorded, without the pieces that wait: they are part of it."""
        whole = _told_apart(message, self._log.conversation.call_ids)
        self._begin()
        self._log.add(ReplyEnded(self._id, whole))
        return whole

    def failed(self, error: BaseException) -> None:
        """Have it recorded that there will be no whole answer."""
        self._begin()
        code = error.code if isinstance(error, ModelError) else type(error).__name__
        self._log.add(ReplyFailed(self._id, str(error), code))

    def _settle(self) -> None:
        self._begin()
        self._log.add(ReplyDelta(self._id, "".join(self._pieces), self._thinking))
        self._pieces.clear()

    def _begin(self) -> None:
        if self._started is not None:
            self._log.add(self._started)
            self._started = None


def _told_apart(message: AssistantMessage, known: Set[str]) -> AssistantMessage:
    """The message with an id of its own for each call of the conversation.

    Some servers omit them, or number them anew in each answer, and others reject ids that come
    twice; a durable tool would take the second call for the first.
    """
    ids = [call.id for call in message.calls]
    if all(ids) and len(set(ids)) == len(ids) and known.isdisjoint(ids):
        return message
    parts = tuple(
        ToolCall(f"call_{new_id()}", part.name, part.arguments)
        if isinstance(part, ToolCall)
        else part
        for part in message.parts
    )
    return AssistantMessage(
        parts=parts, model=message.model, stop=message.stop, usage=message.usage
    )


class _Watch:
    """Ends a stream that stays silent. One timer, however many pieces come."""

    def __init__(self, seconds: float, model: str) -> None:
        self._seconds = seconds
        self._model = model
        self._loop = asyncio.get_running_loop()
        self._deadline = asyncio.timeout(None)

    async def __aenter__(self) -> _Watch:
        await self._deadline.__aenter__()
        self.alive()
        self._timer = self._loop.call_later(self._seconds, self._look)
        return self

    def alive(self) -> None:
        """Something came."""
        self._last = self._loop.time()

    def _look(self) -> None:
        due = self._last + self._seconds
        if self._loop.time() >= due:
            self._deadline.reschedule(due)
        else:
            self._timer = self._loop.call_at(due, self._look)

    async def __aexit__(self, *error: Any) -> None:
        self._timer.cancel()
        try:
            await self._deadline.__aexit__(*error)
        except TimeoutError as silence:
            raise ModelUnavailable(
                f"{self._model} sent nothing for {self._seconds:g} seconds.",
                hint="Raise Durability(stall=...) for a model that thinks for longer.",
                model=self._model,
                retry_after=None,
            ) from silence


# A model that was reminded this often will not give a result the next time either.
MOST_REMINDERS = 3


@dataclass(slots=True, kw_only=True)
class Loop:
    """Works on one prompt.

    `joins` adds the messages that came meanwhile, and says whether there were any; `settle`
    makes the conversation shorter where it has become too long.
    """

    work: WorkContext
    requester: ModelRequester
    calls: ToolRunner
    collector: ResultCollector[Any] | None
    settle: Callable[[Model], Awaitable[None]]
    _said: str = field(default="", init=False)
    _reminders: int = field(default=0, init=False)

    async def run(self, unsettled: Sequence[ToolCall], attempts: Mapping[str, int]) -> LoopResult:
        """Take turns until the end, first with the calls that a crash left open."""
        left = self.work.meter.seconds_left
        limit = asyncio.timeout(None if left == math.inf else max(left, 0.0))
        try:
            async with limit:
                return await self._run(unsettled, attempts)
        except TimeoutError:
            if not limit.expired():
                raise
            return self._stopped("budget: seconds")

    async def _run(self, unsettled: Sequence[ToolCall], attempts: Mapping[str, int]) -> LoopResult:
        if unsettled:
            await self.calls.run(unsettled, attempts=attempts)
            if (finish := self._handed_in()) is not None:
                return finish
        while True:
            self.work.join()
            if (limit := self.work.meter.exceeded()) is not None:
                return self._stopped(limit)
            await self.work.event_log.flush()
            await self.settle(self.requester.model)
            message = await self.requester.next_reply()
            self._count(message)
            calls = message.calls
            if calls:
                await self.calls.run(calls, attempts={})
                if (finish := self._handed_in()) is not None:
                    return finish
            elif (finish := self._answered(message)) is not None:
                return finish

    def _count(self, message: AssistantMessage) -> None:
        self.work.meter.add(message.usage, turns=1)
        self.work.emit(UsageEvent(self.work.meter.usage))
        self._said = message.text or self._said

    def _answered(self, message: AssistantMessage) -> LoopResult | None:
        """The end, unless somebody has joined meanwhile or a result is missing."""
        stopped = message.stop if message.stop in ("length", "refused") else None
        if self.collector is not None and stopped != "refused":
            if self.collector.read(message.text):
                return self._handed_in()
            self._remind(self.collector)
            return None
        if self.work.join():
            return None
        if self.collector is not None:
            raise unavailable("the model refused to answer", message.text)
        return LoopResult(text=message.text, model=message.model, stopped=stopped)

    def _remind(self, collector: ResultCollector[Any]) -> None:
        self._reminders += 1
        if self._reminders > MOST_REMINDERS:
            reason = f"the model gave none, though it was reminded {MOST_REMINDERS} times"
            raise unavailable(reason, self._said)
        told = UserMessage((Text(collector.reminder),), signal="result")
        self.work.event_log.add(MessageAdded(self.work.work_id, told))

    def _handed_in(self) -> LoopResult | None:
        if self.collector is None:
            return None
        return self.collector.finish(self._said, self.requester.model.name)

    def _stopped(self, limit: str) -> LoopResult:
        text = self.requester.partial or self._said
        if self.collector is not None:
            raise unavailable(limit, text)
        return LoopResult(text=text, model=self.requester.model.name, stopped=limit)
