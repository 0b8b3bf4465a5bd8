"""A model that says what a test wrote down, and remembers what it was sent."""

from __future__ import annotations

import asyncio
import operator
from dataclasses import replace
from typing import TYPE_CHECKING

from smokebox.agents.messages import (
    AssistantMessage,
    Text,
    Thinking,
    ToolCall,
    ToolReturns,
    Usage,
    UserMessage,
)
from smokebox.agents.model import (
    CallDelta,
    Delta,
    ModelInfo,
    ModelRequest,
    TextDelta,
    ThinkingDelta,
)
from smokebox.errors import ModelRefused
from smokebox.testing.turns import ask, estimate_tokens, last_text, parts_of, stop_of, written

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Sequence

    from smokebox.agents.messages import AssistantPart, Message
    from smokebox.testing.turns import Answer, TurnFunction


class ScriptExhausted(ModelRefused, AssertionError):
    """The model was asked for one turn more than its script has."""


class ScriptedModel:
    """A model whose turns are written down, for tests and examples without a key.

        model = ScriptedModel(call("bash", command="ls"), "There is one file.")

    Each turn answers one request, in order; see `smokebox.testing.turns` for what a turn can
    be. `then` answers every request after those; without it, one request too many raises
    `ScriptExhausted`. `requests` has what was sent, and `closed` whether it was let go of.
    """

    def __init__(
        self,
        *turns: Answer | TurnFunction,
        then: Answer | TurnFunction | None = None,
        name: str = "scripted/model",
        info: ModelInfo | None = None,
        chunk: int = 16,
    ) -> None:
        self._turns = turns
        self._then = then
        self._name = name
        self._info = info or ModelInfo(context_window=200_000, max_output=32_000, thinking=True)
        self._chunk = max(1, chunk)
        self._counted: dict[int, tuple[Message, int]] = {}
        self.requests: list[ModelRequest] = []
        self.closed = False

    @property
    def name(self) -> str:
        return self._name

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def remaining(self) -> int:
        """How many turns of the script were not asked for yet."""
        return max(0, len(self._turns) - len(self.requests))

    def assert_finished(self) -> None:
        """Fail unless every turn of the script was asked for."""
        if self.remaining:
            raise AssertionError(
                f"{self._name} was asked for {len(self.requests)} of its "
                f"{len(self._turns)} turns; the next is {self._turns[len(self.requests)]!r}."
            )

    async def stream(self, request: ModelRequest) -> AsyncGenerator[Delta | AssistantMessage, None]:
        # The list that a session hands over may grow: what was sent is what it is by now.
        kept = replace(request, messages=tuple(request.messages), tools=tuple(request.tools))
        self.requests.append(kept)
        number = len(self.requests)
        turn = await ask(self._turn(number, kept), kept)
        parts = parts_of(turn, number=number)
        await asyncio.sleep(turn.delay)
        for part in parts:
            for delta in self._deltas(part):
                yield delta
                await asyncio.sleep(turn.pace)
        if turn.hang:
            await asyncio.Event().wait()
        if turn.error is not None:
            raise turn.error
        yield AssistantMessage(
            parts=parts,
            model=self._name,
            stop=stop_of(turn, parts),
            usage=turn.usage or self._usage(number, parts),
        )

    async def aclose(self) -> None:
        self.closed = True

    def _turn(self, number: int, request: ModelRequest) -> Answer | TurnFunction:
        if number <= len(self._turns):
            return self._turns[number - 1]
        if self._then is not None:
            return self._then
        told = last_text(request)
        raise ScriptExhausted(
            f"{self._name} has {len(self._turns)} turns, and was asked for turn {number}. "
            f"It was told last: {told[:200]!r}.",
            hint="Write one more turn, or give then= what answers all further requests.",
            model=self._name,
        )

    def _deltas(self, part: AssistantPart) -> Iterator[Delta]:
        if isinstance(part, ToolCall):
            yield CallDelta(part.name)
        elif isinstance(part, Text | Thinking):
            kind = TextDelta if isinstance(part, Text) else ThinkingDelta
            for at in range(0, len(part.text), self._chunk):
                yield kind(part.text[at : at + self._chunk])

    def _usage(self, number: int, parts: Sequence[AssistantPart]) -> Usage:
        """What a provider would count, which has cached the request before if this continues it."""
        request = self.requests[number - 1]
        counts = [self._count(message) for message in request.messages]
        begin = estimate_tokens(request.system)
        cached = 0
        if number > 1:
            before = self.requests[number - 2].messages
            if len(before) <= len(counts) and all(map(operator.is_, before, request.messages)):
                cached = begin + sum(counts[: len(before)])
        return Usage(
            requests=1,
            input_tokens=begin + sum(counts),
            output_tokens=estimate_tokens(written(parts)),
            cache_read_tokens=cached,
        )

    def _count(self, message: Message) -> int:
        known = self._counted.get(id(message))
        if known is None or known[0] is not message:
            known = (message, estimate_tokens(_shown(message)))
            self._counted[id(message)] = known
        return known[1]


def _shown(message: Message) -> str:
    if isinstance(message, UserMessage):
        return "".join(part.text for part in message.parts if isinstance(part, Text))
    if isinstance(message, ToolReturns):
        return "".join(back.text for back in message.returns)
    return written(message.parts)
