"""Tools: name and schema for the model, function for the harness, context for a call."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from smokebox.agents.model import ToolSpec
from smokebox.agents.schemas import check_arguments
from smokebox.errors import (
    Aborted,
    BuildFailed,
    InvalidOption,
    MissingDependency,
    SandboxGone,
    SmokeboxError,
    Unsupported,
)
from smokebox.types import OutputChunk

if TYPE_CHECKING:
    from smokebox.agents.harness import Harness
    from smokebox.sandbox.api import SandboxApi


class AbortSignal:
    """Flag that is set once when work is aborted, for threads, which cannot be cancelled."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._children: weakref.WeakSet[AbortSignal] = weakref.WeakSet()
        self._reason = ""

    def __bool__(self) -> bool:
        return self._event.is_set()

    @property
    def reason(self) -> str:
        """Reason that was passed to `set`."""
        return self._reason

    def set(self, reason: str = "") -> None:
        """Set this signal and its children. A second call changes nothing."""
        with self._lock:
            if self._event.is_set():
                return
            self._reason = reason
            self._event.set()
            children = list(self._children)
        for child in children:
            child.set(reason)

    def child(self) -> AbortSignal:
        """Return a signal that is set with this one, or alone."""
        child = AbortSignal()
        with self._lock:
            self._children.add(child)
            already = self._event.is_set()
        if already:
            child.set(self._reason)
        return child

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the signal is set, at most `timeout` seconds; return True if it is set."""
        return self._event.wait(timeout)

    def check(self) -> None:
        """Raise `Aborted` if the signal is set."""
        if self:
            raise Aborted("the work was aborted.", hint=self._reason, reason=self._reason)


_log = logging.getLogger("smokebox.tools")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolContext:
    """Context of one call of a tool, passed to a function with a parameter `ctx`.

    `key` is unique to the call, and the same when a durable tool runs again after a crash.
    `attempt` counts these runs from 1. `env` is that of the harness.
    """

    session: str = ""
    call_id: str = ""
    tool: str = ""
    key: str = ""
    attempt: int = 1
    sandbox: SandboxApi | None = None
    env: Any = None
    harness: Harness | None = None
    aborted: AbortSignal = field(default_factory=AbortSignal)
    on_output: Callable[[OutputChunk], object] | None = field(default=None, repr=False)

    @property
    def fs(self) -> SandboxApi:
        """The files of the agent's workspace. Raises `Unsupported` if it has none."""
        if self.sandbox is None:
            raise Unsupported(
                f"the tool {self.tool!r} needs a workspace, and this agent has none.",
                hint="Remove sandbox=None from the agent, or remove this tool.",
                operation="fs",
            )
        return self.sandbox

    @property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:
        """Logger whose records have the session, the tool and the call id."""
        fields = {"session": self.session, "tool": self.tool, "call_id": self.call_id}
        return logging.LoggerAdapter(_log, fields)

    def output(self, text: str) -> None:
        """Emit progress as a `ToolOutput` event; the model does not see it."""
        if self.on_output is not None:
            self.on_output(OutputChunk("stdout", text))


OnOutput = Callable[[OutputChunk], object]
"""Called with each chunk of output as it is written; an exception stops the command."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolImage:
    """An image for the model."""

    media_type: str
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """Result of a call, for the model.

    With `is_error`, `text` says what to change in the call. `timed_out` is set in addition if
    the tool took longer than its `timeout`.
    """

    text: str
    is_error: bool = False
    images: tuple[ToolImage, ...] = ()
    timed_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool(ToolSpec):
    """A tool that a model can call.

    Attributes:
        name: At most 64 letters, digits, underscores and hyphens.
        description: Text for the model.
        parameters: JSON schema (draft 2020-12) of an object.
        function: Called with the checked arguments as keywords. Returns a `ToolResult` or text.
        streams: Pass the keyword `on_output`, an `OnOutput` or None.
        context: Name of the keyword that takes the `ToolContext`, None for none.
        timeout: Seconds after which a call is stopped.
        durable: Run again after a crash if the call had started and not ended.
    """

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

    async def run(
        self,
        arguments: Mapping[str, object],
        *,
        on_output: OnOutput | None = None,
        ctx: ToolContext | None = None,
    ) -> ToolResult:
        """Check the arguments and call the function.

        Errors that a model can fix are returned as a result with `is_error`.

        Raises:
            SandboxGone: The sandbox has stopped.
            MissingDependency: An extra is not installed.
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
        except BuildFailed as error:
            # The place alone does not tell what to change.
            return failure(f"{error}\n{error.fields.get('output') or ''}".rstrip())
        except SmokeboxError as error:
            return failure(str(error))
        return ToolResult(text=result) if isinstance(result, str) else result

    def _context(self, ctx: ToolContext | None, on_output: OnOutput | None) -> ToolContext:
        ctx = ctx or ToolContext()
        # A child signal: stopping this call must not stop the others of its turn.
        return dataclasses.replace(
            ctx,
            tool=self.name,
            aborted=ctx.aborted.child(),
            on_output=on_output or ctx.on_output,
        )

    async def _call(self, checked: dict[str, object]) -> ToolResult | str:
        try:
            async with asyncio.timeout(self.timeout) as limit:
                return await self.function(**checked)
        except TimeoutError:
            if not limit.expired():
                raise
            text = f"{self.name} took longer than {self.timeout:g} seconds and was stopped."
            return ToolResult(text=text, is_error=True, timed_out=True)


def failure(text: str) -> ToolResult:
    """Return an error result; `text` says what went wrong and what to do about it."""
    return ToolResult(text=text, is_error=True)
