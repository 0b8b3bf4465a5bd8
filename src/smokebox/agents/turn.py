"""One turn: a request to a model, its answer as it streams, and what is done when it fails."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from secrets import token_hex
from typing import TYPE_CHECKING

from smokebox.agents.events import Fallback, Retry, TextEvent, ThinkingEvent, TurnStart
from smokebox.agents.log.records import ReplyDelta, ReplyEnded, ReplyFailed, ReplyStarted
from smokebox.agents.messages import AssistantMessage, ToolCall
from smokebox.agents.model import ModelRequest, TextDelta, ThinkingDelta
from smokebox.agents.retry import delay_before
from smokebox.agents.telemetry import span_chat
from smokebox.errors import ContextOverflow, ModelError, ModelUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
    from typing import Any

    from smokebox.agents.durability import Durability
    from smokebox.agents.events import Event
    from smokebox.agents.journal import Journal
    from smokebox.agents.messages import Image
    from smokebox.agents.model import Model, ThinkingLevel, ToolSpec

# A record for every piece that a provider sends would be most of the record.
DELTA_SECONDS = 1.0
LIVE_SECONDS = 0.1
DELTA_CHARACTERS = 4096


@dataclass(slots=True, kw_only=True)
class Asking:
    """Asks the models of one piece of work, each from where the one before it failed."""

    work_id: str
    journal: Journal
    emit: Callable[[Event], None]
    models: Sequence[Model]
    system: str
    tools: Sequence[ToolSpec]
    thinking: ThinkingLevel | None
    result: Mapping[str, Any] | None
    durability: Durability
    load: Callable[[Image], Awaitable[bytes]]
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

    async def ask(self) -> AssistantMessage:
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
                delay = delay_before(attempt, error, self.durability)
                if delay is None:
                    self._fall_back(error)
                    attempt = 0
                    continue
                self.emit(Retry(attempt, delay, self.model.name, str(error)))
                await asyncio.sleep(delay)

    def _fall_back(self, error: ModelError) -> None:
        if self.at + 1 >= len(self.models):
            raise error
        self.at += 1
        self.emit(Fallback(self.model.name, str(error)))

    async def _request(self, model: Model) -> AssistantMessage:
        self.emit(TurnStart(self._turn, model.name))
        request = ModelRequest(
            system=self.system,
            messages=self.journal.conversation.messages,
            tools=self.tools,
            result=self.result,
            thinking=self.thinking,
            load=self.load,
        )
        answer = _Answer(self.journal, self.work_id, model.name)
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
        self, model: Model, request: ModelRequest, answer: _Answer
    ) -> AssistantMessage:
        self.partial = ""
        async with (
            contextlib.aclosing(model.stream(request)) as items,
            _Watch(self.durability.stall, model.name) as watch,
        ):
            async for item in items:
                watch.alive()
                if isinstance(item, TextDelta):
                    self.partial += item.text
                    self.emit(TextEvent(item.text))
                    await answer.grew(item.text, thinking=False)
                elif isinstance(item, ThinkingDelta):
                    self.emit(ThinkingEvent(item.text))
                    await answer.grew(item.text, thinking=True)
                elif isinstance(item, AssistantMessage):
                    return item
        raise ModelUnavailable(
            f"{model.name} ended its answer in the middle.", model=model.name, retry_after=None
        )


class _Answer:
    """The records of one answer. Short ones have none before their end."""

    def __init__(self, journal: Journal, work_id: str, model: str) -> None:
        self._journal = journal
        self._id = token_hex(8)
        self._started: ReplyStarted | None = ReplyStarted(work_id, self._id, model)
        self._pieces: list[str] = []
        self._size = 0
        self._thinking = False
        self._clock = asyncio.get_running_loop().time
        self._every = LIVE_SECONDS if journal.live else DELTA_SECONDS
        # Who reads along sees the first piece at once.
        self._flushed = self._clock() - (self._every if journal.live else 0.0)

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
            await self._journal.flush()

    def ended(self, message: AssistantMessage) -> AssistantMessage:
        """Have the whole answer recorded, without the pieces that wait: they are part of it."""
        whole = _told_apart(message, self._journal.conversation.call_ids)
        self._begin()
        self._journal.add(ReplyEnded(self._id, whole))
        return whole

    def failed(self, error: BaseException) -> None:
        """Have it recorded that there will be no whole answer."""
        self._begin()
        code = error.code if isinstance(error, ModelError) else type(error).__name__
        self._journal.add(ReplyFailed(self._id, str(error), code))

    def _settle(self) -> None:
        self._begin()
        self._journal.add(ReplyDelta(self._id, "".join(self._pieces), self._thinking))
        self._pieces.clear()

    def _begin(self) -> None:
        if self._started is not None:
            self._journal.add(self._started)
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
        ToolCall(f"call_{token_hex(8)}", part.name, part.arguments)
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
