"""What a model is to the loop. `models.py` makes real ones, `smokebox.testing` scripted ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence

    from smokebox.agents.messages import AssistantMessage, Image, Message

ThinkingLevel: TypeAlias = Literal["off", "minimal", "low", "medium", "high", "max"]
THINKING_LEVELS: tuple[ThinkingLevel, ...] = ("off", "minimal", "low", "medium", "high", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What is known of a model; None where nobody says.

    `native_results` is whether the provider holds an answer to a JSON schema by itself.
    """

    context_window: int | None = None
    max_output: int | None = None
    images: bool = True
    thinking: bool = False
    native_results: bool = False


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as the model is told of it; `parameters` is the JSON schema of an object."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """One turn. `system` and `tools` stay the same all through a session, and `messages`
    only grows at its end, so that providers can cache what they have seen.

    `result` is the JSON schema that the answer must have, where the model is `native_results`.
    `load` gives the bytes of an image.
    """

    system: str
    messages: Sequence[Message]
    tools: Sequence[ToolSpec] = ()
    result: Mapping[str, Any] | None = None
    thinking: ThinkingLevel | None = None
    max_tokens: int | None = None
    load: Callable[[Image], Awaitable[bytes]] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More words of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ThinkingDelta:
    """More of what the model thinks."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A tool call has begun, or grew: nothing to run yet, but a sign of life."""

    name: str


Delta: TypeAlias = TextDelta | ThinkingDelta | CallDelta


class Model(Protocol):
    """Answers requests. Raises the errors below `ModelError` and nothing else."""

    @property
    def name(self) -> str:
        """`provider/model`."""
        ...

    @property
    def info(self) -> ModelInfo:
        """What is known of it."""
        ...

    def stream(self, request: ModelRequest) -> AsyncGenerator[Delta | AssistantMessage, None]:
        """The answer as it comes; the whole of it is the last item. Closing it cancels."""
        ...

    async def aclose(self) -> None:
        """Let go of its connections."""
        ...
