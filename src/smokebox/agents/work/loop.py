"""The loop of a prompt: request a reply of the model, run its tool calls, and repeat."""

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
from smokebox.agents.results import Reply, unavailable
from smokebox.agents.telemetry import span_chat
from smokebox.errors import ContextOverflow, ModelError, ModelUnavailable
from smokebox.foundation.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence, Set

    from smokebox.agents.limits import Durability
    from smokebox.agents.model import Model, ThinkingLevel, ToolSpec
    from smokebox.agents.results import ResultCollector
    from smokebox.agents.work.checkpoint import Checkpointer
    from smokebox.agents.work.item import WorkContext
    from smokebox.agents.work.tool_calls import ToolRunner


# A provider that demands a longer delay counts as unavailable.
MAX_DELAY = 120.0


def retry_delay(attempt: int, error: ModelError, durability: Durability) -> float | None:
    """Return the seconds to wait before a retry, or None for no retry.

    Jittered, so that many agents do not retry at the same moment after an outage.
    """
    if not error.retryable or attempt > durability.retries:
        return None
    retry_after = error.fields.get("retry_after")
    if isinstance(retry_after, (int, float)):
        return float(retry_after) if retry_after <= MAX_DELAY else None
    delay: float = durability.retry_delay * 2 ** (attempt - 1)
    return min(delay, MAX_DELAY) * random.uniform(0.75, 1.0)


# Deltas are combined: one record for each would make up most of the log.
DELTA_SECONDS = 1.0
LIVE_SECONDS = 0.1
DELTA_CHARACTERS = 4096


@dataclass(slots=True, kw_only=True)
class ModelRequester:
    """Sends the requests of one work item to its models; the next model takes over on failure."""

    work: WorkContext
    models: Sequence[Model]
    system: str
    tools: Sequence[ToolSpec]
    thinking: ThinkingLevel | None
    result: Mapping[str, Any] | None
    shorten: Callable[[Model], Awaitable[bool]]
    """Shorten the conversation; False if that is not possible (again)."""
    partial: str = ""
    """Text so far of the reply in progress."""
    _index: int = field(default=0, init=False)
    _turn: int = field(default=0, init=False)

    @property
    def model(self) -> Model:
        """The model in use."""
        return self.models[self._index]

    async def next_reply(self) -> AssistantMessage:
        """Return the next reply; its records are written with the next flush."""
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
                delay = retry_delay(attempt, error, self.work.session.setup.options.durability)
                if delay is None:
                    self._fall_back(error)
                    attempt = 0
                    continue
                self.work.emit(Retry(attempt, delay, self.model.name, str(error)))
                await asyncio.sleep(delay)

    def _fall_back(self, error: ModelError) -> None:
        if self._index + 1 >= len(self.models):
            raise error
        self._index += 1
        self.work.emit(Fallback(self.model.name, str(error)))

    async def _request(self, model: Model) -> AssistantMessage:
        self.work.emit(TurnStart(self._turn, model.name))
        request = ModelRequest(
            system=self.system,
            messages=self.work.event_log.conversation.messages,
            tools=self.tools,
            result=self.result,
            thinking=self.thinking,
            load=self.work.session.load_image,
        )
        recorder = _ReplyRecorder(self.work, model.name)
        try:
            with span_chat(model.name) as span:
                message = await self._stream(model, request, recorder)
                span.replied(message)
        except BaseException as error:
            recorder.failed(error)
            raise
        self.partial = ""
        return recorder.ended(message)

    async def _stream(
        self, model: Model, request: ModelRequest, recorder: _ReplyRecorder
    ) -> AssistantMessage:
        self.partial = ""
        async with (
            contextlib.aclosing(model.stream(request)) as items,
            _StallTimeout(self.work.session.setup.options.durability.stall, model.name) as stall,
        ):
            async for item in items:
                stall.reset()
                if isinstance(item, TextDelta):
                    self.partial += item.text
                    self.work.emit(TextEvent(item.text))
                    await recorder.add(item.text, thinking=False)
                elif isinstance(item, ThinkingDelta):
                    self.work.emit(ThinkingEvent(item.text))
                    await recorder.add(item.text, thinking=True)
                elif isinstance(item, AssistantMessage):
                    return item
        raise ModelUnavailable(
            f"{model.name} ended its answer in the middle.", model=model.name, retry_after=None
        )


class _ReplyRecorder:
    """Records one reply. A short one has no records before its end."""

    def __init__(self, work: WorkContext, model: str) -> None:
        self._log = work.event_log
        self._id = new_id()
        # The first record, None once it was added.
        self._start: ReplyStarted | None = ReplyStarted(work.work_id, self._id, model)
        self._texts: list[str] = []
        self._size = 0
        self._thinking = False
        self._clock = asyncio.get_running_loop().time
        self._interval = LIVE_SECONDS if self._log.live else DELTA_SECONDS
        # Readers that follow the log see the first text at once.
        self._flushed = self._clock() - (self._interval if self._log.live else 0.0)

    async def add(self, text: str, *, thinking: bool) -> None:
        """Buffer text, and write the buffer once it is large or old."""
        if thinking is not self._thinking and self._texts:
            self._add_delta()
        self._thinking = thinking
        self._texts.append(text)
        self._size += len(text)
        if self._size >= DELTA_CHARACTERS or self._clock() - self._flushed >= self._interval:
            self._add_delta()
            self._size, self._flushed = 0, self._clock()
            await self._log.flush()

    def ended(self, message: AssistantMessage) -> AssistantMessage:
        """Record the complete reply, and return it with unique call ids."""
        message = _with_unique_ids(message, self._log.conversation.call_ids)
        self._log.add(*self._first(), ReplyEnded(self._id, message))
        return message

    def failed(self, error: BaseException) -> None:
        """Record that the reply was cut off."""
        code = error.code if isinstance(error, ModelError) else type(error).__name__
        self._log.add(*self._first(), ReplyFailed(self._id, str(error), code))

    def _add_delta(self) -> None:
        delta = ReplyDelta(self._id, "".join(self._texts), self._thinking)
        self._log.add(*self._first(), delta)
        self._texts.clear()

    def _first(self) -> list[ReplyStarted]:
        start, self._start = self._start, None
        return [] if start is None else [start]


def _with_unique_ids(message: AssistantMessage, known: Set[str]) -> AssistantMessage:
    """Return the message with call ids that are unique in the conversation.

    Some servers omit ids, or number them from the start in each reply. Others reject repeated
    ids, and a durable tool would take the second call for the first.
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


class _StallTimeout:
    """Times out a stream that sends nothing. Uses one timer, however many items arrive."""

    def __init__(self, seconds: float, model: str) -> None:
        self._seconds = seconds
        self._model = model
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> _StallTimeout:
        await self._timeout.__aenter__()
        self.reset()
        self._timer = self._loop.call_later(self._seconds, self._check)
        return self

    def reset(self) -> None:
        """Restart the timeout."""
        self._last = self._loop.time()

    def _check(self) -> None:
        due = self._last + self._seconds
        if self._loop.time() >= due:
            self._timeout.reschedule(due)
        else:
            self._timer = self._loop.call_at(due, self._check)

    async def __aexit__(self, *error: Any) -> None:
        self._timer.cancel()
        try:
            await self._timeout.__aexit__(*error)
        except TimeoutError as stalled:
            raise ModelUnavailable(
                f"{self._model} sent nothing for {self._seconds:g} seconds.",
                hint="Raise Durability(stall=...) for a model that thinks for longer.",
                model=self._model,
                retry_after=None,
            ) from stalled


MAX_REMINDERS = 3


@dataclass(slots=True, kw_only=True)
class Loop:
    """Requests replies and runs tool calls until a prompt is answered.

    `compact` summarizes the conversation if it has become too long for the model.
    """

    work: WorkContext
    requester: ModelRequester
    tools: ToolRunner
    collector: ResultCollector[Any] | None
    compact: Callable[[Model], Awaitable[None]]
    checkpoints: Checkpointer
    _text: str = field(default="", init=False)
    _reminders: int = field(default=0, init=False)

    async def run(self, pending: Sequence[ToolCall], attempts: Mapping[str, int]) -> Reply[Any]:
        """Run the calls that a crash left pending, then take turns until the end."""
        left = self.work.meter.seconds_left
        limit = asyncio.timeout(None if left == math.inf else max(left, 0.0))
        try:
            async with limit:
                return await self._run(pending, attempts)
        except TimeoutError:
            if not limit.expired():
                raise
            return self._stopped("budget: seconds")

    async def _run(self, pending: Sequence[ToolCall], attempts: Mapping[str, int]) -> Reply[Any]:
        if pending:
            await self.tools.run(pending, attempts=attempts)
            await self.checkpoints.end_turn(pending, resumed=True)
            if (reply := self._collected()) is not None:
                return reply
        else:
            await self.checkpoints.begin()
        while True:
            self.work.join()
            if (limit := self.work.meter.exceeded()) is not None:
                return self._stopped(limit)
            await self.work.event_log.flush()
            await self.compact(self.requester.model)
            message = await self.requester.next_reply()
            self.work.meter.add(message.usage, turns=1)
            text, calls = message.text, message.calls
            self.work.emit(UsageEvent(self.work.meter.usage))
            self._text = text or self._text
            if calls:
                await self.tools.run(calls, attempts={})
                await self.checkpoints.end_turn(calls)
                reply = self._collected()
            else:
                reply = self._answered(message, text)
            if reply is not None:
                return reply

    def _answered(self, message: AssistantMessage, text: str) -> Reply[Any] | None:
        """Return the reply, or None if a message has joined or the result is missing."""
        stopped = message.stop if message.stop in ("length", "refused") else None
        if self.collector is not None and stopped != "refused":
            if self.collector.read(text):
                return self._collected()
            self._remind(self.collector)
            return None
        if self.work.join():
            return None
        if self.collector is not None:
            raise unavailable("the model refused to answer", text)
        return self._reply(text, message.model, stopped=stopped)

    def _remind(self, collector: ResultCollector[Any]) -> None:
        self._reminders += 1
        if self._reminders > MAX_REMINDERS:
            reason = f"the model gave none after {MAX_REMINDERS} reminders"
            raise unavailable(reason, self._text)
        message = UserMessage((Text(collector.reminder),), signal="result")
        self.work.event_log.add(MessageAdded(self.work.work_id, message))

    def _collected(self) -> Reply[Any] | None:
        if self.collector is None or not self.collector.finished(self._text):
            return None
        return self._reply(self._text, self.requester.model.name, data=self.collector.value)

    def _stopped(self, limit: str) -> Reply[Any]:
        text = self.requester.partial or self._text
        if self.collector is not None:
            raise unavailable(limit, text)
        return self._reply(text, self.requester.model.name, stopped=limit)

    def _reply(
        self, text: str, model: str, *, data: Any = None, stopped: str | None = None
    ) -> Reply[Any]:
        usage = self.work.meter.usage
        return Reply(text=text, data=data, model=model, usage=usage, stopped=stopped)
