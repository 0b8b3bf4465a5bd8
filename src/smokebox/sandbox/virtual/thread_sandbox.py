"""Virtual sandbox in this process: scripts run on threads with deep stacks."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

from smokebox.errors import PathNotDirectory
from smokebox.sandbox.virtual import threads
from smokebox.sandbox.virtual.output import ChunkQueue, CollectedOutput, StreamedOutput
from smokebox.sandbox.virtual.sandbox import VirtualSandbox
from smokebox.sandbox.virtual.shell import (
    ABORTED,
    RESTARTED,
    ScriptOutcome,
    ScriptStop,
    process_grew,
    timed_out,
)
from smokebox.sandbox.virtual.snapshot import Snapshot
from smokebox.sandbox.virtual.state import SandboxState
from smokebox.sandbox.virtual.threads import FifoLock

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from smokebox.sandbox.virtual.limits import VirtualLimits
    from smokebox.sandbox.virtual.output import OutputSink
    from smokebox.sandbox.virtual.sandbox import FileOperation
    from smokebox.sandbox.virtual.settings import VirtualSettings
    from smokebox.sandbox.virtual.shell import Script
    from smokebox.types import ExecResult, OutputChunk


# Seconds that a script may take to stop before it is abandoned.
GRACE = 2.0
# bashkit enforces wall_time itself; this is for when it cannot.
SLACK = 0.25
# Interval between checks of a running script.
WATCH = 0.1


class ThreadSandbox(VirtualSandbox):
    """Virtual sandbox whose shell runs on a thread of this process."""

    def __init__(self, settings: VirtualSettings, *, state: SandboxState | None = None) -> None:
        super().__init__(settings)
        self._state = state
        self._state_lock = threading.Lock()
        self._lock = FifoLock()
        self._stops: set[ScriptStop] = set()
        # Set if a script that did not stop still runs on a thread.
        self.has_abandoned_script = False

    @property
    def _isolation(self) -> Literal["interpreter"]:
        return "interpreter"

    async def snapshot(self) -> bytes:
        async with self._lock:
            state = self._get_state()
            return await threads.run(lambda: state.snapshot(whole=True).encode())

    async def restore(self, snapshot: bytes) -> None:
        self._check_open()
        decoded = await threads.run(lambda: Snapshot.decode(snapshot))
        async with self._lock:
            before = self._get_state()
            self._state = await threads.run(lambda: SandboxState(self._settings, decoded))
            before.close()

    async def _fork(self) -> ThreadSandbox:
        async with self._lock:
            state = self._get_state()
            snapshot = await threads.run(lambda: state.snapshot(whole=False))
        copy = await threads.run(lambda: SandboxState(self._settings, snapshot))
        return ThreadSandbox(self._settings, state=copy)

    async def aclose(self) -> None:
        self._closed = True
        for stop in list(self._stops):
            stop.request()
        # A command that does not stop keeps its thread, and nothing else.
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE), self._lock:
                pass
        state, self._state = self._state, None
        if state is not None:
            state.close()

    async def _exec(self, script: Script, timeout: float | None) -> ExecResult:
        async with self._lock:
            state = await self._ready(script)
            output = CollectedOutput(self._settings.limits.output)
            run = _Run(state, script, output, timeout, self._settings.limits)
            self._stops.add(run.stop)
            started = time.perf_counter()
            try:
                outcome = await run.outcome()
            finally:
                self._finish(run)
            return output.result(outcome, time.perf_counter() - started)

    async def _stream(
        self, script: Script, timeout: float | None
    ) -> AsyncGenerator[OutputChunk | ExecResult, None]:
        async with self._lock:
            state = await self._ready(script)
            chunks = ChunkQueue()
            output = StreamedOutput(self._settings.limits.output, chunks.put)
            run = _Run(state, script, output, timeout, self._settings.limits)
            self._stops.add(run.stop)
            started = time.perf_counter()
            ended = asyncio.create_task(run.outcome())
            ended.add_done_callback(lambda _: chunks.end())
            try:
                async for chunk in chunks:
                    yield chunk
                result = output.result(ended.result(), time.perf_counter() - started)
                for chunk in chunks.drain():
                    yield chunk
                yield result
            finally:
                ended.cancel()
                await asyncio.wait({ended})
                self._finish(run)

    async def _call_files(
        self, operation: FileOperation, *arguments: object, **options: object
    ) -> Any:
        state = self._get_state()
        method: Callable[..., object] = getattr(state.tree, operation)
        if state.in_memory and operation != "glob":
            return method(*arguments, **options)

        def work() -> object:
            state.refresh()
            return method(*arguments, **options)

        return await threads.run(work)

    async def _ready(self, script: Script) -> SandboxState:
        """Return the state after refreshing mounts and checking the script's directory."""
        state = self._get_state()
        if script.cwd is not None:
            info = await self._call_files("stat", script.cwd)
            if not info.is_directory:
                raise PathNotDirectory(script.cwd, hint="cwd= takes a directory.")
        elif not state.in_memory:
            await threads.run(state.refresh)
        return state

    def _get_state(self) -> SandboxState:
        self._check_open()
        with self._state_lock:
            if self._state is None:
                self._state = SandboxState(self._settings)
        self._state.use_loop(asyncio.get_running_loop())
        return self._state

    def _finish(self, run: _Run) -> None:
        self._stops.discard(run.stop)
        self.has_abandoned_script = self.has_abandoned_script or run.abandoned
        if self._settings.shell == "fresh" and self._state is not None:
            threads.start(threads.ThreadJob(self._state.prepare))


class _Run:
    """One running script: ends by itself, by a limit, by its deadline, or with its caller."""

    def __init__(
        self,
        state: SandboxState,
        script: Script,
        sink: OutputSink,
        timeout: float | None,
        limits: VirtualLimits,
    ) -> None:
        self._state = state
        self._limits = limits
        self._is_wall_time = timeout is None or timeout >= limits.wall_time
        self._seconds = limits.wall_time if timeout is None or self._is_wall_time else timeout
        self.stop = ScriptStop()
        self.abandoned = False
        self._grew = False
        self._job = threads.ThreadJob(lambda: state.run(script, sink, self.stop), self.stop.request)

    async def outcome(self) -> ScriptOutcome:
        """Run the script. Cancellation stops it and waits for that."""
        threads.start(self._job)
        try:
            if not self._job.join(threads.QUICK):
                await self._watch()
            if not self._job.done:
                return await self._stopped_outcome()
        except asyncio.CancelledError:
            await self._stop()
            raise
        return self._finished_outcome()

    async def _watch(self) -> None:
        """Wait until it is done, or must be stopped."""
        growth = Growth(self._limits.process_growth)
        deadline = time.monotonic() + self._seconds + (SLACK if self._is_wall_time else 0.0)
        while (remaining := deadline - time.monotonic()) > 0:
            if await self._job.wait(min(remaining, WATCH)):
                return
            if growth.is_too_much:
                self._grew = True
                return

    async def _stopped_outcome(self) -> ScriptOutcome:
        await self._stop()
        if self._grew:
            return process_grew(self._limits.process_growth, abandoned=self.abandoned)
        return timed_out(self._seconds, is_wall_time=self._is_wall_time, abandoned=self.abandoned)

    def _finished_outcome(self) -> ScriptOutcome:
        try:
            outcome = self._job.result()
        except Exception:
            raise
        except BaseException as error:
            # A panic in bashkit is not an Exception; its shell is not used again.
            message = f"smokebox: the shell failed: {error}\n{RESTARTED}"
            outcome = ScriptOutcome(exit_code=ABORTED, message=message, broken=True)
        if outcome.broken:
            self._state.restart_shell()
        return outcome

    async def _stop(self) -> None:
        """Stop the script; one that does not stop is abandoned with its shell."""
        self.stop.request()
        try:
            if not self._job.join(threads.QUICK):
                await self._job.wait(GRACE)
        finally:
            self.abandoned = not self._job.done
            if self.abandoned:
                self._state.restart_shell()


_STATM = "/proc/self/statm"
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class Growth:
    """Growth of the process since creation, including other work in it.

    bashkit keeps the output of a loop until the loop ends, and none of its limits counts that:
    `while :; do cat file; done > /dev/null` takes gigabytes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._start = resident_bytes()

    @property
    def is_too_much(self) -> bool:
        """True if the process has grown by more than the limit."""
        return resident_bytes() - self._start > self._limit


def resident_bytes() -> int:
    """Return the resident memory of this process, or 0 if unknown."""
    try:
        with open(_STATM, "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return 0
