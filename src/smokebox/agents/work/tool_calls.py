"""Runs the tool calls of one turn: checked, approved, concurrent, and recorded."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from smokebox.agents.approval import check_approval
from smokebox.agents.events import ToolEnd, ToolOutput, ToolStart
from smokebox.agents.log.records import ToolEnded, ToolStarted
from smokebox.agents.messages import ImagePart, ToolReturn
from smokebox.agents.telemetry import span_tool
from smokebox.agents.tools.tool import ToolResult, failure
from smokebox.errors import MissingDependency, SandboxGone, SmokeboxError
from smokebox.options import nearest_hint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from smokebox.agents.approval import Approval
    from smokebox.agents.events import ToolStatus
    from smokebox.agents.messages import ToolCall
    from smokebox.agents.tools.tool import Tool, ToolContext
    from smokebox.agents.work.item import WorkContext
    from smokebox.types import OutputChunk


# Seconds that a cancelled tool gets to stop; after that it is abandoned.
CANCEL_SECONDS = 5.0
# The next command starts a lost sandbox again, so a model can recover from a few losses.
MAX_SANDBOX_LOSSES = 3
MAX_CHARACTERS = 200_000

STOPPED = "The call was stopped before it ended. It may have had part of its effect."

_log = logging.getLogger("smokebox.agents")
_abandoned: set[asyncio.Task[None]] = set()


@dataclass(slots=True, kw_only=True)
class ToolRunner:
    """Runs the tool calls of one work item."""

    work: WorkContext
    tools: Mapping[str, Tool]
    context: ToolContext
    approval: Approval | None
    _losses: int = field(default=0, init=False)

    async def run(self, calls: Sequence[ToolCall], *, attempts: Mapping[str, int]) -> None:
        """Run calls concurrently, and return when all results are recorded.

        If this is cancelled, the calls are stopped, and the next flush records that.

        Args:
            calls: The calls of one reply.
            attempts: Number of earlier runs that a crash ended, by call id.
        """
        runs = [self._prepare(call, attempts.get(call.id, 0) + 1) for call in calls]
        log = self.work.event_log
        started = [run.started(self.work.work_id) for run in runs if run.refusal is None]
        if self.approval is None:
            log.add(*started)
        if self.approval is not None or started:
            await log.flush()
        tasks = [asyncio.ensure_future(self._run_one(run)) for run in runs]
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError:
            await self._stop(runs, tasks)
            raise
        for task in tasks:
            task.result()

    async def _stop(self, runs: Sequence[_ToolRun], tasks: Sequence[asyncio.Task[None]]) -> None:
        self.context.aborted.set("the work was aborted")
        for task in tasks:
            task.cancel()
        _, late = await asyncio.wait(tasks, timeout=CANCEL_SECONDS)
        for task in late:
            _abandoned.add(task)
            task.add_done_callback(_abandoned.discard)
        for run in runs:
            self._end(run, STOPPED, "aborted")

    def _prepare(self, call: ToolCall, attempt: int) -> _ToolRun:
        tool = self.tools.get(call.name)
        if tool is None:
            refusal = f"There is no tool {call.name!r}. {nearest_hint(call.name, self.tools)}"
            return _ToolRun(call, None, {}, attempt, refusal)
        try:
            arguments = json.loads(call.arguments or "{}")
        except ValueError as error:
            refusal = (
                f"The arguments of {call.name} are not JSON: {error}. Call it again with JSON."
            )
            return _ToolRun(call, tool, {}, attempt, refusal)
        if not isinstance(arguments, dict):
            refusal = f"The arguments of {call.name} must be a JSON object."
            return _ToolRun(call, tool, {}, attempt, refusal)
        return _ToolRun(call, tool, arguments, attempt)

    async def _run_one(self, run: _ToolRun) -> None:
        call = run.call
        if run.refusal is None and self.approval is not None:
            verdict = await check_approval(
                self.work, self.approval, call, run.arguments, self._context(run)
            )
            if verdict != "allow":
                self._end(run, f"This call was denied: {verdict.reason or 'no reason'}", "denied")
                await self.work.event_log.flush()
                return
            await self.work.event_log.append(run.started(self.work.work_id))
        self.work.emit(ToolStart(call.id, call.name, run.arguments))
        if run.refusal is not None or run.tool is None:
            self._end(run, run.refusal or "", "error")
        else:
            await self._run_tool(run, run.tool)
        await self.work.event_log.flush()

    async def _run_tool(self, run: _ToolRun, tool: Tool) -> None:
        run.started_at = time.monotonic()
        with span_tool(tool.name, call_id=run.call.id) as span:
            try:
                result = await tool.run(
                    run.arguments, on_output=self._on_output(run.call), ctx=self._context(run)
                )
            except Exception as error:
                result = self._failure(run, error)
            status: ToolStatus = "ok"
            if result.is_error:
                status = "timeout" if result.timed_out else "error"
                span.failed(status)
        images = []
        for image in result.images:
            blob = await self.work.event_log.store.put_blob(image.data)
            images.append(ImagePart(image.media_type, blob, len(image.data)))
        self._end(run, result.text, status, tuple(images))

    def _context(self, run: _ToolRun) -> ToolContext:
        return replace(
            self.context,
            call_id=run.call.id,
            tool=run.call.name,
            key=f"{self.context.session}:{run.call.id}",
            attempt=run.attempt,
        )

    def _failure(self, run: _ToolRun, error: Exception) -> ToolResult:
        """Return the result for an exception of a tool, or raise it to end the work."""
        if isinstance(error, SandboxGone):
            self._losses += 1
            if self._losses < MAX_SANDBOX_LOSSES:
                return failure(str(error))
        if isinstance(error, SandboxGone | MissingDependency):
            self._end(run, str(error), "error")
            raise error
        if not isinstance(error, SmokeboxError):
            _log.warning("the tool %s failed", run.call.name, exc_info=error)
        return failure(f"{run.call.name} failed: {type(error).__name__}: {error}")

    def _on_output(self, call: ToolCall) -> Callable[[OutputChunk], None]:
        emit, call_id = self.work.emit, call.id
        return lambda chunk: emit(ToolOutput(call_id, chunk))

    def _end(
        self, run: _ToolRun, text: str, status: ToolStatus, images: tuple[ImagePart, ...] = ()
    ) -> None:
        if run.ended:
            # A tool that was stopped and abandoned ended later.
            return
        run.ended = True
        call = run.call
        seconds = time.monotonic() - run.started_at if run.started_at else 0.0
        if len(text) > MAX_CHARACTERS:
            text = _truncate(text)
        result = ToolReturn(call.id, call.name, text, status != "ok", images)
        self.work.event_log.add(ToolEnded(call.id, result, status, round(seconds, 3)))
        self.work.emit(ToolEnd(call.id, call.name, status, text, seconds))


@dataclass(slots=True)
class _ToolRun:
    """A tool call in progress. `refusal` is why it cannot run, for the model."""

    call: ToolCall
    tool: Tool | None
    arguments: dict[str, Any]
    attempt: int
    refusal: str | None = None
    started_at: float = 0.0
    ended: bool = False

    def started(self, work_id: str) -> ToolStarted:
        durable = self.tool is not None and self.tool.durable
        return ToolStarted(work_id, self.call.id, self.call.name, durable)


def _truncate(text: str) -> str:
    """Return both ends of a text; tools that know their output truncate it better."""
    half = MAX_CHARACTERS // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n[{left_out} characters are left out here.]\n{text[-half:]}"
