"""One code context: a lasting process in the sandbox that runs code, one piece at a time."""

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
    error_of,
    result_of,
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
    from contextlib import AbstractAsyncContextManager

    from smokebox.engine.interpreter.frames import KernelFrame, KernelListener
    from smokebox.engine.record.rows import ContextRow
    from smokebox.engine.run import Run
    from smokebox.sandbox.code import CodeEvent
    from smokebox.types import CodeLanguage

START_SECONDS = 30.0
# How long interrupted code may take to end, before its context is.
INTERRUPT_SECONDS = 3.0
AGAIN_SECONDS = 1.0
# What a kernel calls the error of code that it has ended by itself when its time was up.
INTERRUPTED = "Interrupted"
# The most that one piece of code may show.
MOST_RESULTS = 1000
LARGEST_RESULTS = 32 << 20


class CodeContext:
    """The handle of one context, whose state is what its code did. Made by `Contexts.create`.

    Code runs in the order in which it was asked for. Once the context has ended, or the run
    of the sandbox that it is of, everything raises what became of it.
    """

    def __init__(
        self,
        row: ContextRow,
        *,
        stem: str,
        use: Callable[[], AbstractAsyncContextManager[Run]],
        on_end: Callable[[CodeContext], None],
        on_gone: Callable[[CodeContext], None],
    ) -> None:
        self.row = row
        self.used_at = row.created_at
        self.process = BackgroundProcess(
            _process_row(row),
            stem=stem,
            use=use,
            on_end=self._ended,
            on_gone=lambda: on_gone(self),
        )
        self._use = use
        self._on_end = on_end
        self._reader = FrameReader(stem + SUFFIXES["stdout"])
        self._turns = asyncio.Lock()
        self._settling: asyncio.Task[None] | None = None
        self._deleted = False
        self._fate = ""

    @property
    def id(self) -> str:
        """Its name in the sandbox."""
        return self.row.context_id

    @property
    def language(self) -> CodeLanguage:
        """What is spoken in it."""
        return self.row.language

    @property
    def running(self) -> bool:
        """Whether it takes code."""
        return self.process.running and not self._deleted

    @property
    def busy(self) -> bool:
        """Whether code runs in it, or waits."""
        return self._turns.locked()

    @property
    def info(self) -> CodeContextInfo:
        """What its users see of it."""
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

    async def ready(self) -> None:
        """Wait until the kernel takes code. Raises `ProcessEnded` when it ends instead."""
        try:
            async with asyncio.timeout(START_SECONDS):
                with self._reader.watched() as ear:
                    while not any(isinstance(one, KernelReady) for one in await self._hear(ear)):
                        pass
        except TimeoutError:
            raise DeadlineExceeded(
                f"the kernel of code context {self.id} did not begin within {START_SECONDS:g} s.",
                hint="Try again, or raise the limits of the sandbox.",
                operation="create_code_context",
                timeout=START_SECONDS,
            ) from None

    async def recover(self) -> None:
        """Be as after a piece of code, in an engine that does not know of any.

        What runs was asked for by somebody who cannot hear of it any more.
        """
        self._reader.skip()
        with contextlib.suppress(SmokeboxError):
            await self.process.kill("SIGINT")

    async def stream(
        self, code: str, *, env: Mapping[str, str], timeout: float | None
    ) -> AsyncGenerator[CodeEvent | CodeExecution, None]:
        """Run code, give what it writes and shows as it comes, and last how it ended.

        Closing it interrupts the code. `timeout` counts from when its turn has come.
        """
        self.check()
        async with self._turns, self._use():
            await self._settled()
            self.check()
            piece = _Piece(self.row, timeout)
            with self._reader.watched() as ear:
                try:
                    await self._ask(piece, code, env)
                    while not piece.over:
                        for event in piece.take(await self._hear(ear, piece.deadline)):
                            yield event
                        piece.check_time()
                except TimeoutError:
                    async with contextlib.aclosing(self._wind_up(piece, ear)) as rest:
                        async for event in rest:
                            yield event
                finally:
                    self.used_at = time.time()
                    if not piece.over and self.process.running:
                        # Also when whoever asked has gone, and this with them.
                        self._settling = asyncio.create_task(self._interrupt(piece.id))
                        await asyncio.shield(self._settling)
            yield piece.execution()

    def check(self) -> None:
        """Raise what became of it, where it takes no code any more."""
        if not self.running:
            raise self._gone()

    async def kill(self) -> None:
        """End it at once, with all that its code started. Not to be used again."""
        self._deleted = True
        with contextlib.suppress(SandboxGone):
            await self.process.kill(grace=0)

    def clear(self) -> None:
        """Remove what nobody reads of one that has ended: all but its last words."""
        for suffix in (SUFFIXES["stdout"], STDIN):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.process.stem + suffix)

    def close(self) -> None:
        """Let go, and leave it for another engine. Safe to repeat."""
        if self._settling is not None:
            self._settling.cancel()
        self.process.close()

    async def _ask(self, piece: _Piece, code: str, env: Mapping[str, str]) -> None:
        request = json.dumps(
            {"id": piece.id, "code": code, "env": dict(env), "timeout": piece.left}
        )
        try:
            async with asyncio.timeout(piece.left):
                # In ASCII, so that any string is a line.
                await self.process.write_stdin(f"{request}\n".encode())
        except ProcessEnded as error:
            raise self._gone() from error

    async def _hear(self, ear: KernelListener, deadline: float | None = None) -> list[KernelFrame]:
        """What the kernel tells next. Raises what became of it, or TimeoutError when late."""
        over = self.process.lifetime.over
        while True:
            heard, last = ear.bell.listen(), over.is_set()
            if frames := await self._reader.read(ear):
                # A kernel that tells something all the time would keep the loop to itself.
                await asyncio.sleep(0)
                return frames
            if last:
                raise self._gone()
            await _either(heard, over, deadline)

    async def _wind_up(self, piece: _Piece, ear: KernelListener) -> AsyncGenerator[CodeEvent, None]:
        """End code whose time is up: by an interrupt, and with its context if it must be."""
        piece.timed_out = True
        deadline = time.monotonic() + INTERRUPT_SECONDS
        try:
            await self.process.kill("SIGINT")
            while not piece.over:
                for event in piece.take(await self._hear_interrupted(ear, deadline)):
                    yield event
                _check(deadline, over=piece.over)
        except (TimeoutError, ProcessEnded):
            await self._give_up()
            piece.context_ended = True
        if (late := piece.too_late()) is not None:
            yield late

    async def _interrupt(self, id: str) -> None:
        """End code that nobody waits for; its context where it must be."""
        with contextlib.suppress(SmokeboxError, OSError), self._reader.watched() as ear:
            deadline = time.monotonic() + INTERRUPT_SECONDS
            try:
                await self.process.kill("SIGINT")
                while not _ends(id, await self._hear_interrupted(ear, deadline)):
                    _check(deadline)
            except TimeoutError:
                await self._give_up()

    async def _hear_interrupted(self, ear: KernelListener, deadline: float) -> list[KernelFrame]:
        """As `_hear`, with another interrupt after a silence: the first may have come too early.

        Code that has not begun heeds none.
        """
        while True:
            try:
                return await self._hear(ear, min(deadline, time.monotonic() + AGAIN_SECONDS))
            except TimeoutError:
                _check(deadline)
                await self.process.kill("SIGINT")

    async def _give_up(self) -> None:
        if self.process.running:
            self._fate = ": its code did not heed an interrupt, and it was killed"
            await self.process.kill(grace=0)

    async def _settled(self) -> None:
        if self._settling is not None:
            await asyncio.wait({self._settling})
            self._settling = None

    def _ended(self, _: BackgroundProcess) -> None:
        lifetime = self.process.lifetime
        self.row = replace(
            self.row,
            exit_code=lifetime.row.exit_code,
            ended_at=lifetime.row.ended_at,
            reason=None if lifetime.stale is None else str(lifetime.stale.fields["reason"]),
        )
        self._on_end(self)

    def _gone(self) -> SmokeboxError:
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
                hint="Create another: contexts end with the sandbox's sleep, files stay.",
                reason=self.row.reason,
                sandbox_id=self.row.sandbox_id,
            )
        code = self.row.exit_code
        said = last_lines(self.process.log.path("stderr"))
        return ProcessEnded(
            f"code context {self.id} has ended with exit code {code}{self._fate or _meaning(code)}."
            + (f" Its last words: {said}" if said else ""),
            hint="Create another context.",
            process=self.id,
            exit_code=code,
        )


class _Piece:
    """One piece of code: what came of it so far."""

    def __init__(self, row: ContextRow, timeout: float | None) -> None:
        self.id = new_id()
        self.over = False
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
        self._shown = 0

    @property
    def left(self) -> float | None:
        """Seconds until its time is up."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def check_time(self) -> None:
        """Raise TimeoutError when its time is up, also where it writes all the time."""
        _check(self.deadline, over=self.over)

    def take(self, frames: list[KernelFrame]) -> list[CodeEvent]:
        """What frames are to whoever asked for the code. Nothing comes after the end."""
        events = [self._event(frame) for frame in frames if not self.over]
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
            return result_of(frame) if self._may_show(frame) else None
        if isinstance(frame, KernelError):
            # A kernel may have noticed before us, on a machine with much else to do.
            self.timed_out |= frame.name == INTERRUPTED and self.left == 0
            if self.timed_out:
                return self.too_late(frame.traceback)
            self._error = error_of(frame)
            return self._error
        if isinstance(frame, KernelEnd):
            self.over, self._count = True, frame.count
        return None

    def too_late(self, traceback: str = "") -> CodeError | None:
        """The error of code whose time was up; None when it was told already."""
        if self._error is not None:
            return None
        message = f"the code ran for longer than {self._timeout:g} s"
        self._error = CodeError(name="TimeoutError", message=message, traceback=traceback)
        return self._error

    def execution(self) -> CodeExecution:
        """How it ended."""
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

    def _may_show(self, frame: KernelResult) -> bool:
        self._results += 1
        self._shown += frame.size
        fits = self._results <= MOST_RESULTS and self._shown <= LARGEST_RESULTS
        self._truncated |= not fits
        return fits


async def _either(one: asyncio.Event, other: asyncio.Event, deadline: float | None) -> None:
    """Wait for one of two events. Raises TimeoutError at the deadline."""
    left = None if deadline is None else deadline - time.monotonic()
    tasks = [asyncio.ensure_future(event.wait()) for event in (one, other)]
    try:
        done, _ = await asyncio.wait(tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    if not done:
        raise TimeoutError


def _check(deadline: float | None, *, over: bool = False) -> None:
    if deadline is not None and not over and time.monotonic() > deadline:
        raise TimeoutError


def _ends(id: str, frames: list[KernelFrame]) -> bool:
    return any(isinstance(one, KernelEnd) and one.id == id for one in frames)


def _meaning(code: int | None) -> str:
    if code == 137:
        return " (it was killed: out of memory, or by something inside)"
    return f" (by signal {code - 128})" if code is not None and 128 < code <= 192 else ""


def _process_row(row: ContextRow) -> ProcessRow:
    """The process that a context is, as far as it is known."""
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
