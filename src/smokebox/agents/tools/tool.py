"""What a tool is: a name and a schema for the model, a function for us, a result for both."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from smokebox.agents.tools.arguments import check_arguments
from smokebox.agents.tools.toolcontext import ToolContext
from smokebox.errors import InvalidOption, MissingDependency, SandboxGone, SmokeboxError
from smokebox.types import OutputChunk

OnOutput = Callable[[OutputChunk], object]
"""Is called with each piece of output as it is written; what it raises stops the command."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolImage:
    """A picture for the model to look at."""

    media_type: str
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What the model gets back. With `is_error`, `text` says what to change in the call;
    `timed_out` is an error too, of a tool that took longer than its `timeout`."""

    text: str
    is_error: bool = False
    images: tuple[ToolImage, ...] = ()
    timed_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """Something a model can call.

    `parameters` is a JSON schema (draft 2020-12) of an object, and `function` takes its
    properties as keywords, checked. It answers with a `ToolResult`, or a str for short.
    With `streams`, it also takes `on_output`, which is an `OnOutput` or None; `context` names
    the keyword that takes a `ToolContext`. It is stopped after `timeout` seconds, if that is
    given. A `durable` one runs again where a crash left it without an end.
    """

    name: str
    description: str
    parameters: Mapping[str, object]
    function: Callable[..., Awaitable[ToolResult | str]]
    streams: bool = False
    context: str | None = None
    timeout: float | None = None
    durable: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidOption(
                f"{self.name!r} cannot be the name of a tool.",
                hint="Use at most 64 letters, digits, underscores and hyphens.",
                option="name",
                value=self.name,
            )
        if self.timeout is not None and not self.timeout > 0:
            raise InvalidOption(
                f"timeout={self.timeout!r} of the tool {self.name!r} is not more than 0.",
                hint="Pass seconds, or None for a tool that may take as long as the work it is in.",
                option="timeout",
                value=self.timeout,
            )

    @property
    def schema(self) -> dict[str, object]:
        """The name, description and parameters, as providers take them."""
        return {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }

    async def run(
        self,
        arguments: Mapping[str, object],
        *,
        on_output: OnOutput | None = None,
        ctx: ToolContext | None = None,
    ) -> ToolResult:
        """Check the arguments and call the function.

        What a model can mend comes back as a result with `is_error`. What it cannot is
        raised: a sandbox that is gone, an extra that is not installed, cancellation.
        """
        try:
            checked = check_arguments(self.name, self.parameters, arguments)
            if self.streams:
                checked["on_output"] = on_output
            if self.context is not None:
                checked[self.context] = self._context(ctx, on_output)
            result = await self._call(checked)
        except (SandboxGone, MissingDependency):
            raise
        except SmokeboxError as error:
            return failure(str(error))
        return ToolResult(text=result) if isinstance(result, str) else result

    def _context(self, ctx: ToolContext | None, on_output: OnOutput | None) -> ToolContext:
        given = ctx or ToolContext()
        # A sign of its own: what stops this call must not stop the others of its turn.
        return dataclasses.replace(
            given,
            tool=self.name,
            aborted=given.aborted.child(),
            on_output=on_output or given.on_output,
        )

    async def _call(self, checked: dict[str, object]) -> ToolResult | str:
        try:
            async with asyncio.timeout(self.timeout) as limit:
                return await self.function(**checked)
        except TimeoutError:
            if not limit.expired():
                raise
            said = f"{self.name} took longer than {self.timeout:g} seconds and was stopped."
            return ToolResult(text=said, is_error=True, timed_out=True)


def failure(text: str) -> ToolResult:
    """A result that says what went wrong, and what to do about it."""
    return ToolResult(text=text, is_error=True)
