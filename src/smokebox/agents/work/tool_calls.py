"""The tool calls of one turn: looked up, allowed, run side by side, and recorded."""

from __future__ import annotations

import asyncio
import difflib
import json
import logging
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from smokebox.agents.events import ToolEnd, ToolOutput, ToolStart
from smokebox.agents.log.records import ToolEnded, ToolStarted
from smokebox.agents.messages import Image, ToolReturn
from smokebox.agents.telemetry import span_tool
from smokebox.agents.tools.tool import ToolResult, failure
from smokebox.errors import MissingDependency, SandboxGone, SmokeboxError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from smokebox.agents.approval import ApprovalCheck
    from smokebox.agents.events import ToolStatus
    from smokebox.agents.messages import ToolCall
    from smokebox.agents.tools.tool import Tool, ToolContext
    from smokebox.agents.work.item import WorkContext
    from smokebox.types import OutputChunk


# How long a tool that was stopped may take to let go; after that it is left to itself.
GRACE = 5.0
# A model can mend one lost sandbox, as the next command starts it again; not one that stays lost.
MOST_LOSSES = 3
MAX_TEXT = 200_000

STOPPED = "The call was stopped before it ended. It may have had part of its effect."
UNKNOWN = (
    "The process was killed while this call ran. Whether it had its effect is unknown: look "
    "before calling again."
)

_log = logging.getLogger("smokebox.agents")
_abandoned: set[asyncio.Task[None]] = set()


@dataclass(slots=True, kw_only=True)
class ToolRunner:
    """Runs the tool calls of one piece of work."""

    work: WorkContext
    tools: Mapping[str, Tool]
    context: ToolContext
    approval: ApprovalCheck | None
    _losses: int = field(default=0, init=False)

    async def run(self, calls: Sequence[ToolCall], *, attempts: Mapping[str, int]) -> None:
        """Run them all, and return when what each came to is recorded.

        `attempts` counts the runs that a crash ended, by call. What stops this stops them,
        and has the record say so with its next flush.
        """
        prepared = [self._prepare(call, attempts.get(call.id, 0) + 1) for call in calls]
        for one in prepared:
            if self.approval is None and one.refusal is None:
                self.work.event_log.add(one.started(self.work.work_id))
        if self.approval is not None or any(one.refusal is None for one in prepared):
            await self.work.event_log.flush()
        tasks = [asyncio.ensure_future(self._one(call)) for call in prepared]
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError:
            await self._stop(prepared, tasks)
            raise
        for task in tasks:
            task.result()

    async def _stop(self, calls: Sequence[_Call], tasks: Sequence[asyncio.Task[None]]) -> None:
        self.context.aborted.set("the work was called off")
        for task in tasks:
            task.cancel()
        _, late = await asyncio.wait(tasks, timeout=GRACE)
        for task in late:
            _abandoned.add(task)
            task.add_done_callback(_abandoned.discard)
        for call in calls:
            if not call.ended:
                self._end(call, STOPPED, "aborted")

    def _prepare(self, call: ToolCall, attempt: int) -> _Call:
        tool = self.tools.get(call.name)
        if tool is None:
            return _Call(call, None, {}, attempt, refusal=_unknown_tool(call.name, self.tools))
        try:
            arguments = json.loads(call.arguments or "{}")
        except ValueError as error:
            said = f"The arguments of {call.name} are not JSON: {error}. Call it again with JSON."
            return _Call(call, tool, {}, attempt, refusal=said)
        if not isinstance(arguments, dict):
            said = f"The arguments of {call.name} must be a JSON object."
            return _Call(call, tool, {}, attempt, refusal=said)
        return _Call(call, tool, arguments, attempt)

    async def _one(self, one: _Call) -> None:
        if one.refusal is None and self.approval is not None:
            verdict = await self.approval.pass_through(one.call, one.arguments, self._context(one))
            if not verdict.allowed:
                self._end(one, f"This call was denied: {verdict.reason or 'no reason'}", "denied")
                await self.work.event_log.flush()
                return
            await self.work.event_log.append(one.started(self.work.work_id))
        self.work.emit(ToolStart(one.call.id, one.call.name, one.arguments))
        if one.refusal is not None or one.tool is None:
            self._end(one, one.refusal or "", "error")
        else:
            await self._run(one, one.tool)
        await self.work.event_log.flush()

    async def _run(self, one: _Call, tool: Tool) -> None:
        one.began = time.monotonic()
        with span_tool(tool.name, call_id=one.call.id) as span:
            try:
                result = await tool.run(
                    one.arguments, on_output=self._output(one.call), ctx=self._context(one)
                )
            except Exception as error:
                result = self._failed(one, error)
            status: ToolStatus = "ok"
            if result.is_error:
                status = "timeout" if result.timed_out else "error"
                span.failed(status)
        images = [await self._keep(image.media_type, image.data) for image in result.images]
        self._end(one, result.text, status, tuple(images))

    def _context(self, one: _Call) -> ToolContext:
        return replace(
            self.context,
            call_id=one.call.id,
            tool=one.call.name,
            key=f"{self.context.session}:{one.call.id}",
            attempt=one.attempt,
        )

    def _failed(self, one: _Call, error: Exception) -> ToolResult:
        """What the model is told of a failure that the tool did not put into words."""
        if isinstance(error, SandboxGone):
            self._losses += 1
            if self._losses >= MOST_LOSSES:
                self._end(one, str(error), "error")
                raise error
            return failure(str(error))
        if isinstance(error, MissingDependency):
            self._end(one, str(error), "error")
            raise error
        if not isinstance(error, SmokeboxError):
            _log.warning("the tool %s failed", one.call.name, exc_info=error)
        return failure(f"{one.call.name} failed: {type(error).__name__}: {error}")

    def _output(self, call: ToolCall) -> Callable[[OutputChunk], None]:
        def emit(chunk: OutputChunk) -> None:
            self.work.emit(ToolOutput(call.id, chunk))

        return emit

    async def _keep(self, media_type: str, data: bytes) -> Image:
        return Image(media_type, await self.work.event_log.store.put_blob(data), len(data))

    def _end(
        self, one: _Call, text: str, status: ToolStatus, images: tuple[Image, ...] = ()
    ) -> None:
        if one.ended:
            # Stopped, and left to itself: what it came to later is nobody's any more.
            return
        one.ended = True
        seconds = time.monotonic() - one.began if one.began else 0.0
        text = _shortened(text)
        told = ToolReturn(one.call.id, one.call.name, text, status != "ok", images)
        self.work.event_log.add(ToolEnded(one.call.id, told, status, round(seconds, 3)))
        self.work.emit(ToolEnd(one.call.id, one.call.name, status, text, seconds))


@dataclass(slots=True)
class _Call:
    """A tool call in progress. `refusal` tells the model why it cannot run."""

    call: ToolCall
    tool: Tool | None
    arguments: dict[str, Any]
    attempt: int
    refusal: str | None = None
    began: float = 0.0
    ended: bool = False

    def started(self, work_id: str) -> ToolStarted:
        durable = self.tool is not None and self.tool.durable
        return ToolStarted(work_id, self.call.id, self.call.name, durable)


def _unknown_tool(name: str, tools: Mapping[str, Tool]) -> str:
    near = difflib.get_close_matches(name, tools, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(tools) or 'none'}."
    return f"There is no tool {name!r}. {hint}"


def _shortened(text: str) -> str:
    """A text that a model can read; tools that know more of theirs have shortened it better."""
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n[{left_out} characters are left out here.]\n{text[-half:]}"
