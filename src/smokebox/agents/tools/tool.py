"""Tools: a name and a schema for the model, a function for the harness, a context for calls."""

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

from smokebox.agents.schemas import check_arguments
from smokebox.errors import (
    Aborted,
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
    """Set once, for good. A coroutine is cancelled besides; a thread has to look here."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._children: weakref.WeakSet[AbortSignal] = weakref.WeakSet()
        self._reason = ""

    def __bool__(self) -> bool:
        return self._event.is_set()

    @property
    def reason(self) -> str:
        """Why, as far as somebody said."""
        return self._reason

    def set(self, reason: str = "") -> None:
        """Call the work off, and what belongs to it. A second time changes nothing."""
        with self._lock:
            if self._event.is_set():
                return
            self._reason = reason
            self._event.set()
            children = list(self._children)
        for child in children:
            child.set(reason)

    def child(self) -> AbortSignal:
        """A sign of its own that is set with this one too."""
        child = AbortSignal()
        with self._lock:
            self._children.add(child)
            already = self._event.is_set()
        if already:
            child.set(self._reason)
        return child

    def wait(self, timeout: float | None = None) -> bool:
        """In a thread: sleep that ends early when the work is called off, and says whether."""
        return self._event.wait(timeout)

    def check(self) -> None:
        """Raise `Aborted` when the work was called off."""
        if self:
            raise Aborted("the work was called off.", hint=self._reason, reason=self._reason)


_log = logging.getLogger("smokebox.tools")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolContext:
    """One call of a tool. A function that has a parameter `ctx` gets it; the model does not.

    `key` is the same when a durable tool runs again after a crash, and belongs to no other
    call: what it names was perhaps already done. `attempt` counts those runs from 1.
    `harness` is what the agent runs in, and `env` what it was initialized with.
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
        """The files of the agent's workspace. Raises `Unsupported` where it has none."""
        if self.sandbox is None:
            raise Unsupported(
                f"the tool {self.tool!r} wants a workspace, and this agent has none.",
                hint="Leave sandbox=None out of the agent, or leave this tool out.",
                operation="fs",
            )
        return self.sandbox

    @property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger whose records say which session and which call they are about."""
        about = {"session": self.session, "tool": self.tool, "call_id": self.call_id}
        return logging.LoggerAdapter(_log, about)

    def output(self, text: str) -> None:
        """Show whoever watches how far the tool is; the model does not see it."""
        if self.on_output is not None:
            self.on_output(OutputChunk("stdout", text))


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
