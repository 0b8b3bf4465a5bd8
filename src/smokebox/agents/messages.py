"""Messages of a conversation, independent of the provider.

Messages are immutable, so a conversion of one can be cached for as long as it lives.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

StopReason: TypeAlias = Literal["end", "tool_calls", "length", "refused"]
"""Why a model stopped: finished, waiting for tools, cut at its output limit, or refusing."""


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Usage of requests to models. `cost` is in US dollars, None if a price is unknown."""

    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    cost: float | None = 0.0

    @property
    def total_tokens(self) -> int:
        """Input and output tokens; cached tokens are part of the input."""
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
    """Text. `extra` is provider data to send back with it."""

    text: str
    extra: dict[str, Any] | None = None


class ImagePart(msgspec.Struct, frozen=True, tag="image"):
    """An image, stored as a blob under the hash of its bytes."""

    media_type: str
    blob: str
    size: int = 0


class Thinking(msgspec.Struct, frozen=True, tag="thinking", omit_defaults=True):
    """Reasoning of a model. `signature` and `extra` are provider data, sent back unchanged."""

    text: str
    signature: str | None = None
    extra: dict[str, Any] | None = None


class ToolCall(msgspec.Struct, frozen=True, tag="tool_call", omit_defaults=True):
    """A tool call of a model. `arguments` is its raw text, which may not be valid JSON.

    `extra` is provider data to send back with it.
    """

    id: str
    name: str
    arguments: str
    extra: dict[str, Any] | None = None


class NativePart(msgspec.Struct, frozen=True, tag="native"):
    """A part that only its provider understands, sent back to it unchanged."""

    provider: str
    data: dict[str, Any]


UserPart: TypeAlias = Text | ImagePart
AssistantPart: TypeAlias = Text | Thinking | ToolCall | NativePart


class UserMessage(msgspec.Struct, frozen=True, tag="user", omit_defaults=True, weakref=True):
    """Input to the model. `signal` marks a message of the harness itself, such as
    `interrupted` or `resources`; the model sees it as any other text."""

    parts: tuple[UserPart, ...]
    signal: str | None = None


class AssistantMessage(msgspec.Struct, frozen=True, tag="assistant", kw_only=True, weakref=True):
    """Response of a model in one turn."""

    parts: tuple[AssistantPart, ...]
    model: str
    stop: StopReason = "end"
    usage: Usage = Usage()

    @property
    def text(self) -> str:
        """Its text, without reasoning."""
        return "".join(part.text for part in self.parts if isinstance(part, Text))

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """Its tool calls."""
        return tuple(part for part in self.parts if isinstance(part, ToolCall))


class ToolReturn(msgspec.Struct, frozen=True, omit_defaults=True):
    """Result of one tool call, as the model sees it."""

    call_id: str
    name: str
    text: str
    is_error: bool = False
    images: tuple[ImagePart, ...] = ()


class ToolReturns(msgspec.Struct, frozen=True, tag="tools", weakref=True):
    """Results of all tool calls of one turn, in the order of the calls."""

    returns: tuple[ToolReturn, ...]


Message: TypeAlias = UserMessage | AssistantMessage | ToolReturns
