"""A conversation as data: what a model is shown and what it says, whoever the provider is.

Messages are values that never change once they are in the record, so whoever turns them
into something else may keep that for as long as the message lives.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

StopReason: TypeAlias = Literal["end", "tool_calls", "length", "refused"]
"""Why a model stopped: it was done, it wants tools run, it may not say more, or will not."""


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What requests to models took. `cost` is in US dollars, None where the price is unknown."""

    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    cost: float | None = 0.0

    @property
    def total_tokens(self) -> int:
        """All tokens, read or written; those from a cache are part of the input."""
        return self.input_tokens + self.output_tokens

    def __add__(self, other: Usage) -> Usage:
        known = self.cost is not None and other.cost is not None
        return Usage(
            requests=self.requests + other.requests,
            input_tokens=self.input_tokens + other.input_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            cache_read_tokens=self.cache_read_tokens + other.cache_read_tokens,
            cache_write_tokens=self.cache_write_tokens + other.cache_write_tokens,
            cost=(self.cost or 0.0) + (other.cost or 0.0) if known else None,
        )


class Text(msgspec.Struct, frozen=True, tag="text", omit_defaults=True):
    """Words. `extra` is what the provider that said them wants back with them."""

    text: str
    extra: dict[str, Any] | None = None


class Image(msgspec.Struct, frozen=True, tag="image"):
    """A picture, which lies beside the record under the hash of its bytes."""

    media_type: str
    blob: str
    size: int = 0


class Thinking(msgspec.Struct, frozen=True, tag="thinking", omit_defaults=True):
    """What a model thought. `signature` and `extra` are the provider's, sent back as they came."""

    text: str
    signature: str | None = None
    extra: dict[str, Any] | None = None


class ToolCall(msgspec.Struct, frozen=True, tag="tool_call", omit_defaults=True):
    """A tool that the model wants run. `arguments` is what it wrote, perhaps not even JSON.

    `extra` is what the provider wants back with it.
    """

    id: str
    name: str
    arguments: str
    extra: dict[str, Any] | None = None


class Native(msgspec.Struct, frozen=True, tag="native"):
    """A part that only its provider understands, sent back to it as it came."""

    provider: str
    data: dict[str, Any]


UserPart: TypeAlias = Text | Image
AssistantPart: TypeAlias = Text | Thinking | ToolCall | Native


class UserMessage(msgspec.Struct, frozen=True, tag="user", omit_defaults=True, weakref=True):
    """What the model is told. `signal` names what the harness says by itself, such as
    `interrupted` or `resources`; it is shown to the model as any other text."""

    parts: tuple[UserPart, ...]
    signal: str | None = None


class AssistantMessage(msgspec.Struct, frozen=True, tag="assistant", kw_only=True, weakref=True):
    """What a model said in one turn."""

    parts: tuple[AssistantPart, ...]
    model: str
    stop: StopReason = "end"
    usage: Usage = Usage()

    @property
    def text(self) -> str:
        """Its words, without its thoughts."""
        return "".join(part.text for part in self.parts if isinstance(part, Text))

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The tools that it wants run."""
        return tuple(part for part in self.parts if isinstance(part, ToolCall))


class ToolReturn(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one tool call came to, as the model is told."""

    call_id: str
    name: str
    text: str
    is_error: bool = False
    images: tuple[Image, ...] = ()


class ToolReturns(msgspec.Struct, frozen=True, tag="tools", weakref=True):
    """What all tool calls of one turn came to, in the order in which they were asked for."""

    returns: tuple[ToolReturn, ...]


Message: TypeAlias = UserMessage | AssistantMessage | ToolReturns
