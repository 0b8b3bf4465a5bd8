"""`ScriptedModel`: a model with scripted turns that records its requests."""

from __future__ import annotations

import asyncio
import inspect
import json
import operator
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias, TypeVar

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


T = TypeVar("T")


class ScriptExhausted(ModelRefused, AssertionError):
    """More turns were requested than the script has."""


class ScriptedModel:
    """Model with scripted turns, for tests and examples without an API key.

        model = ScriptedModel(call("bash", command="ls"), "There is one file.")

    `requests` has the requests received, and `closed` is True after `aclose`.

    Args:
        *turns: One turn for each request, in order: a str, a part, a list of them, a `Turn`,
            an exception to raise, or a function of the request that returns one of these.
        then: Turn for every further request; without it they raise `ScriptExhausted`.
        name: Name of the model.
        info: Properties of the model, such as its context window.
        chunk: Number of characters in each delta of text.
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
        """Number of turns that have not been requested yet."""
        return max(0, len(self._turns) - len(self.requests))

    def assert_finished(self) -> None:
        """Raise `AssertionError` unless every turn was requested."""
        if self.remaining:
            raise AssertionError(
                f"only {len(self.requests)} of {len(self._turns)} turns of {self._name} were "
                f"requested; the next is {self._turns[len(self.requests)]!r}."
            )

    async def stream(self, request: ModelRequest) -> AsyncGenerator[Delta | AssistantMessage, None]:
        # A copy, since a session may append to its list later.
        kept = replace(request, messages=tuple(request.messages), tools=tuple(request.tools))
        self.requests.append(kept)
        number = len(self.requests)
        turn = as_turn(await call_if_function(self._turn(number, kept), kept))
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
        raise ScriptExhausted(
            f"the script of {self._name} has {len(self._turns)} turns, but turn {number} was "
            f"requested. The last message was: {last_text(request)[:200]!r}.",
            hint="Add a turn, or pass then= for all further requests.",
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
        """Return the usage reported by a provider that caches the previous request."""
        request = self.requests[number - 1]
        counts = [self._count(message) for message in request.messages]
        system = estimate_tokens(request.system)
        cached = 0
        if number > 1:
            before = self.requests[number - 2].messages
            if len(before) <= len(counts) and all(map(operator.is_, before, request.messages)):
                cached = system + sum(counts[: len(before)])
        return Usage(
            requests=1,
            input_tokens=system + sum(counts),
            output_tokens=estimate_tokens(text_of(parts)),
            cache_read_tokens=cached,
        )

    def _count(self, message: Message) -> int:
        known = self._counted.get(id(message))
        if known is None or known[0] is not message:
            known = (message, estimate_tokens(_message_text(message)))
            self._counted[id(message)] = known
        return known[1]


def _message_text(message: Message) -> str:
    if isinstance(message, UserMessage):
        return "".join(part.text for part in message.parts if isinstance(part, Text))
    if isinstance(message, ToolReturns):
        return "".join(one.text for one in message.returns)
    return text_of(message.parts)


TurnPart: TypeAlias = str | AssistantPart
"""A str is `Text`."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a model. `parts` is a str, one part, or a list of them.

    `delay` is the seconds before the first delta, `pace` those between two. With `hang`, the
    parts are sent and the turn never ends. `error` is raised after the parts.
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
"""Function of the request, async or not, that returns a turn."""


def call(tool: str, /, *, call_id: str = "", **arguments: object) -> ToolCall:
    """Return a tool call with these arguments. Without a `call_id` it gets one when it is sent."""
    return ToolCall(id=call_id, name=tool, arguments=json.dumps(arguments))


def think(text: str, signature: str | None = None) -> Thinking:
    """Return thinking text."""
    return Thinking(text=text, signature=signature)


async def call_if_function(
    item: T | Callable[[ModelRequest], T | Awaitable[T]], request: ModelRequest
) -> T:
    """Return a script's item; a function is called with the request first."""
    if not callable(item):
        return item
    value = item(request)
    return await value if inspect.isawaitable(value) else value


def as_turn(value: TurnLike) -> Turn:
    """Return any short form of a turn as a `Turn`."""
    if isinstance(value, Turn):
        return value
    return Turn(error=value) if isinstance(value, Exception) else Turn(value)


def parts_of(turn: Turn, *, number: int) -> tuple[AssistantPart, ...]:
    """Return the parts of a turn, with unique ids for tool calls that have none."""
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
                f"a turn of a model cannot contain {part!r}.",
                hint='Use a str, call("tool", argument=...), think("...") or a part.',
                option="parts",
                value=part,
            )
    return tuple(parts)


def stop_of(turn: Turn, parts: Sequence[AssistantPart]) -> StopReason:
    """Return the stop reason of a turn, by default the one that its parts imply."""
    calls = any(isinstance(part, ToolCall) for part in parts)
    return turn.stop or ("tool_calls" if calls else "end")


def last_text(request: ModelRequest) -> str:
    """Return the text of the last message that is not the model's own."""
    for message in reversed(request.messages):
        if isinstance(message, UserMessage):
            return "".join(part.text for part in message.parts if isinstance(part, Text))
        if isinstance(message, ToolReturns):
            return "\n".join(one.text for one in message.returns)
    return ""


def last_returns(request: ModelRequest) -> tuple[ToolReturn, ...]:
    """Return the results of tool calls in the last message; empty if it has none."""
    last = request.messages[-1] if request.messages else None
    return last.returns if isinstance(last, ToolReturns) else ()


def estimate_tokens(text: str) -> int:
    """Estimate the number of tokens of a text."""
    return -(-len(text) // 4)


def text_of(parts: Sequence[AssistantPart]) -> str:
    """Return everything a model wrote in a turn, including thinking and tool arguments."""
    return "".join(
        part.name + part.arguments if isinstance(part, ToolCall) else part.text
        for part in parts
        if not isinstance(part, NativePart)
    )
