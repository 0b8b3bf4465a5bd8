"""A model that says what a test wrote down, and remembers what it was sent."""

from __future__ import annotations

import asyncio
import inspect
import json
import operator
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from smokebox.agents.messages import (
    AssistantMessage,
    AssistantPart,
    NativePart,
    StopReason,
    Text,
    Thinking,
    ToolCall,
    ToolReturn,
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
from smokebox.errors import InvalidOption, ModelRefused

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from smokebox.agents.messages import Message


class ScriptExhausted(ModelRefused, AssertionError):
    """The model was asked for one turn more than its script has."""


class ScriptedModel:
    """A model whose turns are written down, for tests and examples without a key.

        model = ScriptedModel(call("bash", command="ls"), "There is one file.")

    Each turn answers one request, in order; see `smokebox.testing.scripted` for what a turn can
    be. `then` answers every request after those; without it, one request too many raises
    `ScriptExhausted`. `requests` has what was sent, and `closed` whether it was let go of.
    """

    def __init__(
        self,
        *turns: TurnLike | TurnFunction,
        then: TurnLike | TurnFunction | None = None,
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

    def _turn(self, number: int, request: ModelRequest) -> TurnLike | TurnFunction:
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


TurnPart: TypeAlias = str | AssistantPart
"""A str is `Text`."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer. `parts` is a str, one part, or a list of them.

    `delay` passes before its first piece, and `pace` between two. With `hang` it never
    ends: what there is comes, and then nothing. `error` is raised once the parts have come.
    """

    parts: TurnPart | Sequence[TurnPart] = ()
    stop: StopReason | None = None
    usage: Usage | None = None
    delay: float = 0.0
    pace: float = 0.0
    hang: bool = False
    error: Exception | None = None


TurnLike: TypeAlias = Turn | TurnPart | Sequence[TurnPart] | Exception
TurnFunction: TypeAlias = Callable[[ModelRequest], TurnLike | Awaitable[TurnLike]]
"""Makes a turn of what the model is sent, in a coroutine if it likes to wait."""


def call(tool: str, /, *, call_id: str = "", **arguments: object) -> ToolCall:
    """A tool call with these arguments. An id is given to it when it is sent, if it has none."""
    return ToolCall(id=call_id, name=tool, arguments=json.dumps(arguments))


def think(text: str, signature: str | None = None) -> Thinking:
    """A thought."""
    return Thinking(text=text, signature=signature)


async def ask(turn: TurnLike | TurnFunction, request: ModelRequest) -> Turn:
    """A turn as a `Turn`, made of the request if it is a function."""
    if not callable(turn):
        return as_turn(turn)
    made = turn(request)
    return as_turn(await made if inspect.isawaitable(made) else made)


def as_turn(answer: TurnLike) -> Turn:
    """Any of the short forms, as a `Turn`."""
    if isinstance(answer, Turn):
        return answer
    if isinstance(answer, Exception):
        return Turn(error=answer)
    return Turn(answer)


def parts_of(turn: Turn, *, number: int) -> tuple[AssistantPart, ...]:
    """The parts of a turn, each tool call with an id that only this turn gives."""
    given = turn.parts
    listed = (given,) if isinstance(given, str | Text | Thinking | ToolCall | NativePart) else given
    parts: list[AssistantPart] = []
    for at, part in enumerate(listed):
        if isinstance(part, str):
            parts.append(Text(part))
        elif isinstance(part, ToolCall) and not part.id:
            parts.append(ToolCall(f"call_{number}_{at + 1}", part.name, part.arguments))
        elif isinstance(part, Text | Thinking | ToolCall | NativePart):
            parts.append(part)
        else:
            raise InvalidOption(
                f"a turn of a model cannot have {part!r} in it.",
                hint='Use a str, call("tool", argument=...), think("...") or a part.',
                option="parts",
                value=part,
            )
    return tuple(parts)


def stop_of(turn: Turn, parts: Sequence[AssistantPart]) -> StopReason:
    """Why the turn ends: what it says, or what its parts do."""
    calls = any(isinstance(part, ToolCall) for part in parts)
    return turn.stop or ("tool_calls" if calls else "end")


def last_text(request: ModelRequest) -> str:
    """What the model was told last: the words of the last message that is not its own."""
    for message in reversed(request.messages):
        if isinstance(message, UserMessage):
            return "".join(part.text for part in message.parts if isinstance(part, Text))
        if isinstance(message, ToolReturns):
            return "\n".join(back.text for back in message.returns)
    return ""


def last_returns(request: ModelRequest) -> tuple[ToolReturn, ...]:
    """What the tool calls of the turn before came to; empty unless that is the last message."""
    last = request.messages[-1] if request.messages else None
    return last.returns if isinstance(last, ToolReturns) else ()


def estimate_tokens(text: str) -> int:
    """About how many tokens a text is: a test wants numbers that grow, not exact ones."""
    return -(-len(text) // 4)


def written(parts: Sequence[AssistantPart]) -> str:
    """All that a model wrote in one turn, thoughts and arguments too."""
    return "".join(_written(part) for part in parts)


def _written(part: AssistantPart) -> str:
    if isinstance(part, ToolCall):
        return part.name + part.arguments
    return "" if isinstance(part, NativePart) else part.text
