"""What a model says in a test, written as data: turns, and the parts that they are made of.

A turn is a str, a tool call (`call`), a list of parts, an exception that the model fails
with, a `Turn` that says more than that, or a function that makes one of these of the request.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from smokebox.agents.messages import (
    AssistantPart,
    Native,
    StopReason,
    Text,
    Thinking,
    ToolCall,
    ToolReturn,
    ToolReturns,
    Usage,
    UserMessage,
)
from smokebox.agents.model import ModelRequest
from smokebox.errors import InvalidOption

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


Answer: TypeAlias = Turn | TurnPart | Sequence[TurnPart] | Exception
TurnFunction: TypeAlias = Callable[[ModelRequest], Answer | Awaitable[Answer]]
"""Makes a turn of what the model is sent, in a coroutine if it likes to wait."""


def call(tool: str, /, *, call_id: str = "", **arguments: object) -> ToolCall:
    """A tool call with these arguments. An id is given to it when it is sent, if it has none."""
    return ToolCall(id=call_id, name=tool, arguments=json.dumps(arguments))


def think(text: str, signature: str | None = None) -> Thinking:
    """A thought."""
    return Thinking(text=text, signature=signature)


async def ask(turn: Answer | TurnFunction, request: ModelRequest) -> Turn:
    """A turn as a `Turn`, made of the request if it is a function."""
    if not callable(turn):
        return as_turn(turn)
    made = turn(request)
    return as_turn(await made if inspect.isawaitable(made) else made)


def as_turn(answer: Answer) -> Turn:
    """Any of the short forms, as a `Turn`."""
    if isinstance(answer, Turn):
        return answer
    if isinstance(answer, Exception):
        return Turn(error=answer)
    return Turn(answer)


def parts_of(turn: Turn, *, number: int) -> tuple[AssistantPart, ...]:
    """The parts of a turn, each tool call with an id that only this turn gives."""
    given = turn.parts
    listed = (given,) if isinstance(given, str | Text | Thinking | ToolCall | Native) else given
    parts: list[AssistantPart] = []
    for at, part in enumerate(listed):
        if isinstance(part, str):
            parts.append(Text(part))
        elif isinstance(part, ToolCall) and not part.id:
            parts.append(ToolCall(f"call_{number}_{at + 1}", part.name, part.arguments))
        elif isinstance(part, Text | Thinking | ToolCall | Native):
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
    return "" if isinstance(part, Native) else part.text
