"""The model interface of the loop. `models.py` has providers, `smokebox.testing` scripted ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence

    from smokebox.agents.messages import AssistantMessage, ImagePart, Message

ThinkingLevel: TypeAlias = Literal["off", "minimal", "low", "medium", "high", "max"]
THINKING_LEVELS: tuple[ThinkingLevel, ...] = ("off", "minimal", "low", "medium", "high", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Capabilities of a model; None if unknown.

    With `native_results` the provider itself enforces a JSON schema on the answer.
    """

    context_window: int | None = None
    max_output: int | None = None
    images: bool = True
    thinking: bool = False
    native_results: bool = False


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as described to the model; `parameters` is the JSON schema of an object."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    @property
    def schema(self) -> dict[str, Any]:
        """Name, description and parameters, as providers expect them."""
        return {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """Request of one turn. `system` and `tools` are constant during a session, and `messages`
    grows only at its end, so that providers can cache the prefix.

    `result` is the JSON schema of the answer, for a model with `native_results`. `load`
    returns the bytes of an image.
    """

    system: str
    messages: Sequence[Message]
    tools: Sequence[ToolSpec] = ()
    result: Mapping[str, Any] | None = None
    thinking: ThinkingLevel | None = None
    max_tokens: int | None = None
    load: Callable[[ImagePart], Awaitable[bytes]] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ThinkingDelta:
    """More text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A tool call has started or grown. It cannot run yet, but the model is not stalled."""

    name: str


Delta: TypeAlias = TextDelta | ThinkingDelta | CallDelta


class Model(Protocol):
    """A model that answers requests. Raises only subclasses of `ModelError`."""

    @property
    def name(self) -> str:
        """`provider/model`."""
        ...

    @property
    def info(self) -> ModelInfo:
        """Capabilities of the model."""
        ...

    def stream(self, request: ModelRequest) -> AsyncGenerator[Delta | AssistantMessage, None]:
        """Stream the answer; the last item is the whole message. Closing the stream cancels."""
        ...

    async def aclose(self) -> None:
        """Close its connections."""
        ...
