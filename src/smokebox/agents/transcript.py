"""A conversation as text, for a model that is to summarize it and not to go on with it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from smokebox.agents.messages import AssistantMessage, Image, Text, ToolCall, UserMessage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from smokebox.agents.messages import AssistantPart, Message, UserPart

MAX_TOOL_LETTERS = 2000
_READERS = {"read"}
_WRITERS = {"write", "edit"}


def entries(messages: Iterable[Message]) -> Iterator[str]:
    """One text for each thing that was said or done, what tools gave cut to what matters."""
    for message in messages:
        if isinstance(message, UserMessage):
            yield f"[{_speaker(message)}]: {_words(message.parts)}"
        elif isinstance(message, AssistantMessage):
            yield from _answer(message)
        else:
            for one in message.returns:
                kind = "Tool error" if one.is_error else "Tool result"
                images = " [image]" * len(one.images)
                yield f"[{kind} of {one.name}]: {cut_middle(one.text, MAX_TOOL_LETTERS)}{images}"


def cut_middle(text: str, limit: int) -> str:
    """`text`, or both of its ends with how much is missing between them."""
    if len(text) <= limit:
        return text
    half = max(0, limit // 2)
    return f"{text[:half]}\n[... {len(text) - 2 * half} letters left out ...]\n{text[-half:]}"


def request_of(messages: Sequence[Message]) -> str | None:
    """What a person, or a program in their place, asked for last."""
    for message in reversed(messages):
        if isinstance(message, UserMessage) and message.signal is None:
            return _words(message.parts)
    return None


def files_read(messages: Iterable[Message]) -> list[str]:
    """The paths that the model has read, the last ones last."""
    return _paths(messages, _READERS)


def files_changed(messages: Iterable[Message]) -> list[str]:
    """The paths that the model has written or edited, the last ones last."""
    return _paths(messages, _WRITERS)


def _speaker(message: UserMessage) -> str:
    return "User" if message.signal is None else f"Harness, {message.signal}"


def _words(parts: Sequence[UserPart | AssistantPart]) -> str:
    words = [
        part.text if isinstance(part, Text) else "[image]"
        for part in parts
        if isinstance(part, (Text, Image))
    ]
    return "\n".join(words)


def _answer(message: AssistantMessage) -> Iterator[str]:
    if message.text:
        yield f"[Assistant]: {message.text}"
    for call in message.calls:
        yield f"[Assistant calls {call.name}]: {cut_middle(call.arguments, MAX_TOOL_LETTERS)}"


def _paths(messages: Iterable[Message], tools: set[str]) -> list[str]:
    found: dict[str, None] = {}
    for message in messages:
        for call in message.calls if isinstance(message, AssistantMessage) else ():
            path = _path(call) if call.name in tools else None
            if path is not None:
                found.pop(path, None)
                found[path] = None
    return list(found)


def _path(call: ToolCall) -> str | None:
    try:
        path = json.loads(call.arguments).get("path")
    except (ValueError, AttributeError):
        return None
    return path if isinstance(path, str) and "\n" not in path else None
