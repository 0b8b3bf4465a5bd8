"""About how many tokens something is, where no model has said."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from smokebox.agents.messages import (
    AssistantMessage,
    Native,
    Text,
    Thinking,
    ToolCall,
    ToolReturns,
    UserMessage,
)

if TYPE_CHECKING:
    from smokebox.agents.log.records import SessionCreated
    from smokebox.agents.messages import AssistantPart, Message, UserPart

LETTERS_PER_TOKEN = 4
IMAGE_TOKENS = 1200
# What a message costs besides its words.
_MESSAGE_TOKENS = 4


def estimate(message: Message) -> int:
    """About how many tokens a message is."""
    match message:
        case UserMessage() | AssistantMessage():
            size = sum(_part(part) for part in message.parts)
        case ToolReturns():
            size = sum(_words(one.text) + IMAGE_TOKENS * len(one.images) for one in message.returns)
    return size + _MESSAGE_TOKENS


def estimate_prefix(created: SessionCreated) -> int:
    """About how many tokens precede each conversation: the system prompt and the tools."""
    return _words(created.system) + sum(_words(json.dumps(tool)) for tool in created.tools)


def _part(part: UserPart | AssistantPart) -> int:
    match part:
        case Text() | Thinking():
            return _words(part.text)
        case ToolCall():
            return _words(part.name) + _words(part.arguments)
        case Native():
            return _words(json.dumps(part.data))
        case _:
            return IMAGE_TOKENS


def _words(text: str) -> int:
    return len(text) // LETTERS_PER_TOKEN + 1
