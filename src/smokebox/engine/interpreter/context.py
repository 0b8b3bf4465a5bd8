"""One code context: a background process in the sandbox that runs code, one execution at a time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from smokebox.engine.interpreter.frames import (
    FrameReader,
    KernelDropped,
    KernelEnd,
    KernelError,
    KernelOutput,
    KernelReady,
    KernelResult,
)
from smokebox.engine.processes.background_process import BackgroundProcess
from smokebox.engine.processes.launch import STDIN
from smokebox.engine.processes.logs import SUFFIXES, last_lines
from smokebox.engine.record.rows import ProcessRow
from smokebox.errors import (
    DeadlineExceeded,
    NotFound,
    ProcessEnded,
    SandboxGone,
    SandboxRestarted,
    SmokeboxError,
)
from smokebox.foundation.ids import new_id
from smokebox.types import CodeContextInfo, CodeError, CodeExecution, OutputChunk

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

    from smokebox.engine.interpreter.frames import KernelFrame, KernelListener
    from smokebox.engine.record.rows import ContextRow
    from smokebox.engine.run import UseRun
    from smokebox.sandbox.code import CodeEvent
    from smokebox.types import CodeLanguage

START_SECONDS = 30.0
# Time limit for interrupted code to end, before its context is killed.
INTERRUPT_SECONDS = 3.0
INTERRUPT_AGAIN_SECONDS = 1.0
# Name of the error of code that the JavaScript kernel ended at its timeout.
INTERRUPTED = "Interrupted"
# Limits of the results of one execution.
MAX_RESULTS = 1000
MAX_RESULT_BYTES = 32 << 20


class CodeContext:
    """The handle of one code context. Made by `Contexts.create`.

    Executions run in the order of their calls. Once the context or its run of the sandbox has
    ended, all methods raise the reason.
    """

    def __init__(
        self,
        row: ContextRow,
        *,
        stem: str,
        use: UseRun,
        on_exit: Callable[[CodeContext], None],
        on_tree_end: Callable[[CodeContext], None],
    ) -> None:
        self.row = row
        self.stem = stem
        self.used_at = row.created_at
        self.process = BackgroundProcess(
            _process_row(row),
            stem=stem,
            use=use,
            on_exit=self._exited,
            on_tree_end=lambda: on_tree_end(self),
        )
        self.lifetime = self.process.lifetime
        self._use = use
        self._on_exit = on_exit
        self._reader = FrameReader(stem + SUFFIXES["stdout"])
        self._lock = asyncio.Lock()
        self._interrupting: asyncio.Task[None] | None = None
        self._deleted = False
        self._kill_reason = ""

    @property
    def id(self) -> str:
        """Its id in the sandbox."""
        return self.row.context_id

    @property
    def language(self) -> CodeLanguage:
        """Its language."""
        return self.row.language

    @property
    def running(self) -> bool:
        """True if it accepts code."""
        return self.process.running and not self._deleted

    @property
    def busy(self) -> bool:
        """True if code runs in it or waits to run."""
        return self._lock.locked()

    @property
    def info(self) -> CodeContextInfo:
        """Its description for users."""
        return CodeContextInfo(
            id=self.id,
            language=self.language,
            cwd=self.row.cwd,
            timeout=self.row.timeout,
            created_at=self.row.created_at,
            used_at=self.used_at,
            default=self.row.shared,
            busy=self.busy,
        )

    async def wait_ready(self) -> None:
        """Wait until the kernel accepts code. Raises `ProcessEnded` if it ends instead."""
        try:
            async with asyncio.timeout(START_SECONDS):
                with self._reader.listen() as listener:
                    while not any(
                        isinstance(frame, KernelReady) for frame in await self._read(listener)
                    ):
                        pass
        except FileNotFoundError:
            # It has ended already, and `remove_pipes` was called.
            raise self._ended_error() from None
        except TimeoutError:
            raise DeadlineExceeded(
                f"the kernel of code context {self.id} did not start within {START_SECONDS:g} s.",
                hint="Try again, or raise the limits of the sandbox.",
                operation="create_code_context",
                timeout=START_SECONDS,
            ) from None

    def recover(self) -> None:
        """Interrupt code that another engine started: its caller is gone. The next code waits."""
        self._interrupting = asyncio.create_task(self._recover())

    async def _recover(self) -> None:
        self._reader.skip()
        with contextlib.suppress(SmokeboxError):
            await self.process.kill("SIGINT")

    async def stream(
        self, code: str, *, env: Mapping[str, str], timeout: float | None
    ) -> AsyncGenerator[CodeEvent | CodeExecution, None]:
        """Run code, yield its output and results as they arrive, and last the execution.

        Closing the generator interrupts the code. `timeout` starts when the code does.
        """
        self.check_running()
        async with self._lock, self._use():
            if self._interrupting is not None:
                await asyncio.wait({self._interrupting})
                self._interrupting = None
            self.check_running()
            execution = _Execution(self.row, timeout)
            with self._reader.listen() as listener:
                try:
                    await self._send(execution, code, env)
                    while not execution.ended:
                        frames = await self._read(listener, execution.deadline)
                        for event in execution.convert(frames):
                            yield event
                        execution.check_time()
                except TimeoutError:
                    rest = self._end_late(execution, listener)
                    async with contextlib.aclosing(rest):
                        async for event in rest:
                            yield event
                finally:
                    self.used_at = time.time()
                    if not execution.ended and self.process.running:
                        # In a task: the caller may have been cancelled.
                        self._interrupting = asyncio.create_task(self._interrupt(execution.id))
                        await asyncio.shield(self._interrupting)
            yield execution.result()

    def check_running(self) -> None:
        """Raise the reason if it no longer accepts code."""
        if not self.running:
            raise self._ended_error()

    async def kill(self) -> None:
        """Kill it with all processes that its code started. It cannot be used again."""
        self._deleted = True
        with contextlib.suppress(SandboxGone):
            await self.process.kill(grace=0)

    def remove_pipes(self) -> None:
        """Remove the files of an ended context except its stderr, which explains the end."""
        for suffix in (SUFFIXES["stdout"], STDIN):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.stem + suffix)

    def close(self) -> None:
        """Release the handle, and leave the context running. Safe to repeat."""
        if self._interrupting is not None:
            self._interrupting.cancel()
        self.process.close()

    async def _send(self, execution: _Execution, code: str, env: Mapping[str, str]) -> None:
        # json.dumps escapes all non-ASCII characters, so any string fits in one line.
        request = json.dumps(
            {"id": execution.id, "code": code, "env": dict(env), "timeout": execution.time_left}
        )
        try:
            async with asyncio.timeout(execution.time_left):
                await self.process.write_stdin(f"{request}\n".encode())
        except ProcessEnded as error:
            raise self._ended_error() from error

    async def _read(
        self, listener: KernelListener, deadline: float | None = None
    ) -> list[KernelFrame]:
        """Wait for the next frames. Raises the reason if the kernel ended, or TimeoutError."""
        exited = self.lifetime.exited
        while True:
            changed, last = listener.changed.event, exited.is_set()
            if frames := await self._reader.read(listener):
                # A kernel that writes all the time must not starve the event loop.
                await asyncio.sleep(0)
                return frames
            if last:
                raise self._ended_error()
            await _wait_for_any(changed, exited, deadline=deadline)

    async def _end_late(
        self, execution: _Execution, listener: KernelListener
    ) -> AsyncGenerator[CodeEvent, None]:
        """Interrupt code at its timeout, and kill the context if the code does not end."""
        execution.timed_out = True
        deadline = time.monotonic() + INTERRUPT_SECONDS
        try:
            await self.process.kill("SIGINT")
            while not execution.ended:
                frames = await self._read_interrupted(listener, deadline)
                for event in execution.convert(frames):
                    yield event
                if not execution.ended:
                    _check_deadline(deadline)
        except (TimeoutError, ProcessEnded):
            await self._kill_uninterruptible()
            execution.context_ended = True
        if (error := execution.timeout_error()) is not None:
            yield error

    async def _interrupt(self, id: str) -> None:
        """Interrupt code whose caller left, and kill the context if the code does not end."""
        with contextlib.suppress(SmokeboxError, OSError), self._reader.listen() as listener:
            deadline = time.monotonic() + INTERRUPT_SECONDS
            try:
                await self.process.kill("SIGINT")
                while not any(
                    isinstance(frame, KernelEnd) and frame.id == id
                    for frame in await self._read_interrupted(listener, deadline)
                ):
                    _check_deadline(deadline)
            except TimeoutError:
                await self._kill_uninterruptible()

    async def _read_interrupted(
        self, listener: KernelListener, deadline: float
    ) -> list[KernelFrame]:
        """Do as `_read` does, and repeat the interrupt: code that has not begun ignores it."""
        while True:
            try:
                until = min(deadline, time.monotonic() + INTERRUPT_AGAIN_SECONDS)
                return await self._read(listener, until)
            except TimeoutError:
                _check_deadline(deadline)
                await self.process.kill("SIGINT")

    async def _kill_uninterruptible(self) -> None:
        if self.process.running:
            self._kill_reason = ": its code did not end after an interrupt, and it was killed"
            await self.process.kill(grace=0)

    def _exited(self, _: BackgroundProcess) -> None:
        run_error = self.lifetime.run_error
        self.row = replace(
            self.row,
            exit_code=self.lifetime.row.exit_code,
            ended_at=self.lifetime.row.ended_at,
            reason=None if run_error is None else str(run_error.fields["reason"]),
        )
        self._on_exit(self)

    def _ended_error(self) -> SmokeboxError:
        if self._deleted:
            return NotFound(
                f"code context {self.id!r} was deleted.",
                hint="Create another.",
                kind="context",
                name=self.id,
            )
        if self.row.reason is not None:
            return SandboxRestarted(
                f"code context {self.id} ended with a run of sandbox {self.row.sandbox_id}: "
                f"{self.row.reason}.",
                hint="Create another: contexts end when the sandbox sleeps, files stay.",
                reason=self.row.reason,
                sandbox_id=self.row.sandbox_id,
            )
        code = self.row.exit_code
        how = self._kill_reason or _describe_exit(code)
        output = last_lines(self.process.log.path("stderr"))
        return ProcessEnded(
            f"code context {self.id} has ended with exit code {code}{how}."
            + (f" Its last output: {output}" if output else ""),
            hint="Create another context.",
            process=self.id,
            exit_code=code,
        )


class _Execution:
    """The state of one execution, updated from frames."""

    def __init__(self, row: ContextRow, timeout: float | None) -> None:
        self.id = new_id()
        self.ended = False
        self.timed_out = False
        self.context_ended = False
        self.deadline = None if timeout is None else time.monotonic() + timeout
        self._row = row
        self._timeout = timeout
        self._started = time.monotonic()
        self._truncated = False
        self._error: CodeError | None = None
        self._count: int | None = None
        self._results = 0
        self._result_bytes = 0

    @property
    def time_left(self) -> float | None:
        """Seconds until its timeout."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def check_time(self) -> None:
        """Raise TimeoutError after the timeout, also if the code writes all the time."""
        if self.deadline is not None and not self.ended:
            _check_deadline(self.deadline)

    def convert(self, frames: list[KernelFrame]) -> list[CodeEvent]:
        """Convert frames to events for the caller. Frames after the end are dropped."""
        events = [self._event(frame) for frame in frames if not self.ended]
        return [event for event in events if event is not None]

    def _event(self, frame: KernelFrame) -> CodeEvent | None:
        if isinstance(frame, KernelDropped):
            self._truncated = True
            return None
        if frame.id != self.id:
            return None
        if isinstance(frame, KernelOutput):
            return OutputChunk(frame.stream, frame.data) if frame.data else None
        if isinstance(frame, KernelResult):
            return frame.to_result() if self._count_result(frame) else None
        if isinstance(frame, KernelError):
            # On a busy machine, a kernel may notice the timeout before this process does.
            self.timed_out |= frame.name == INTERRUPTED and self.time_left == 0
            if self.timed_out:
                return self.timeout_error(frame.traceback)
            self._error = frame.to_error()
            return self._error
        if isinstance(frame, KernelEnd):
            self.ended, self._count = True, frame.count
        return None

    def timeout_error(self, traceback: str = "") -> CodeError | None:
        """Return the error of code that timed out; None if it already has an error."""
        if self._error is not None:
            return None
        message = f"the code ran for longer than {self._timeout:g} s"
        self._error = CodeError(name="TimeoutError", message=message, traceback=traceback)
        return self._error

    def result(self) -> CodeExecution:
        """Return the result for users."""
        return CodeExecution(
            context=self._row.context_id,
            language=self._row.language,
            error=self._error,
            count=self._count,
            duration=time.monotonic() - self._started,
            truncated=self._truncated,
            timed_out=self.timed_out,
            context_ended=self.context_ended,
        )

    def _count_result(self, frame: KernelResult) -> bool:
        """Count a result, and return whether it is within the limits."""
        self._results += 1
        self._result_bytes += frame.size
        fits = self._results <= MAX_RESULTS and self._result_bytes <= MAX_RESULT_BYTES
        self._truncated |= not fits
        return fits


async def _wait_for_any(*events: asyncio.Event, deadline: float | None) -> None:
    """Wait for one of the events. Raises TimeoutError at the deadline."""
    left = None if deadline is None else deadline - time.monotonic()
    tasks = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        done, _ = await asyncio.wait(tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    if not done:
        raise TimeoutError


def _check_deadline(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError


def _describe_exit(code: int | None) -> str:
    if code == 137:
        return " (it was killed: out of memory, or by a process inside)"
    return f" (by signal {code - 128})" if code is not None and 128 < code <= 192 else ""


def _process_row(row: ContextRow) -> ProcessRow:
    """Return a row for the process of a context, as far as it is known."""
    return ProcessRow(
        sandbox_id=row.sandbox_id,
        process_id=row.context_id,
        generation=row.generation,
        command=f"{row.language} code",
        argv=(),
        cwd=row.cwd,
        user="",
        started_at=row.created_at,
        status="starting" if row.ended_at is None else "killed",
        exit_code=row.exit_code,
        ended_at=row.ended_at,
        stdin=True,
    )
