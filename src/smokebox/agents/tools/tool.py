"""What a tool is: a name and a schema for the model, a function for us, a result for both."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from smokebox.agents.tools.arguments import check_arguments
from smokebox.errors import MissingDependency, SandboxGone, SmokeboxError
from smokebox.types import OutputChunk

OnOutput = Callable[[OutputChunk], object]
"""Is called with each piece of output as it is written; what it raises stops the command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolImage:
    """A picture for the model to look at."""

    media_type: str
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What the model gets back. With `is_error`, `text` says what to change in the call."""

    text: str
    is_error: bool = False
    images: tuple[ToolImage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """Something a model can call.

    `parameters` is a JSON schema (draft 2020-12) of an object, and `function` takes its
    properties as keywords, checked. It answers with a `ToolResult`, or a str for short.
    With `streams`, it also takes `on_output`, which is an `OnOutput` or None.
    """

    name: str
    description: str
    parameters: Mapping[str, object]
    function: Callable[..., Awaitable[ToolResult | str]]
    streams: bool = False

    @property
    def schema(self) -> dict[str, object]:
        """The name, description and parameters, as providers take them."""
        return {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }

    async def run(
        self, arguments: Mapping[str, object], *, on_output: OnOutput | None = None
    ) -> ToolResult:
        """Check the arguments and call the function.

        What a model can mend comes back as a result with `is_error`. What it cannot is
        raised: a sandbox that is gone, an extra that is not installed, cancellation.
        """
        try:
            checked = check_arguments(self.name, self.parameters, arguments)
            if self.streams:
                checked["on_output"] = on_output
            result = await self.function(**checked)
        except (SandboxGone, MissingDependency):
            raise
        except SmokeboxError as error:
            return failure(str(error))
        return ToolResult(text=result) if isinstance(result, str) else result


def failure(text: str) -> ToolResult:
    """A result that says what went wrong, and what to do about it."""
    return ToolResult(text=text, is_error=True)
