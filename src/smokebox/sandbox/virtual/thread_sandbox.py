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
from smokebox.sandbox.virtual.output import CapturedOutput, ChunkQueue, StreamedOutput
from smokebox.sandbox.virtual.sandbox import VirtualSandbox
from smokebox.sandbox.virtual.shell import (
    ABORTED,
    RESTARTED,
    ScriptOutcome,
    ScriptStop,
    outgrown,
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
        self._made = state
        self._making = threading.Lock()
        self._turn = FifoLock()
        self._stops: set[ScriptStop] = set()
        # Set if a script that did not stop still runs on some thread.
        self.has_left_behind = False

    @property
    def _isolation(self) -> Literal["interpreter"]:
        return "interpreter"

    async def snapshot(self) -> bytes:
        async with self._turn:
            state = self._get_state()
            return await threads.run(lambda: state.snapshot(whole=True).encode())

    async def restore(self, snapshot: bytes) -> None:
        self._check_open()
        decoded = await threads.run(lambda: Snapshot.decode(snapshot))
        async with self._turn:
            before = self._get_state()
            self._made = await threads.run(lambda: SandboxState(self._settings, decoded))
            before.close()

    async def fork(self) -> ThreadSandbox:
        async with self._turn:
            here = self._get_state()
            taken = await threads.run(lambda: here.snapshot(whole=False))
        state = await threads.run(lambda: SandboxState(self._settings, taken))
        return ThreadSandbox(self._settings, state=state)

    async def aclose(self) -> None:
        self._closed = True
        for stop in list(self._stops):
            stop.ask()
        # A command that does not stop keeps its thread, and nothing else.
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE), self._turn:
                pass
        made, self._made = self._made, None
        if made is not None:
            made.close()

    async def _exec(self, script: Script, timeout: float | None) -> ExecResult:
        async with self._turn:
            state = await self._ready(script)
            kept = CapturedOutput(self._settings.limits.output)
            run = _Run(state, script, kept, timeout, self._settings.limits)
            self._stops.add(run.stop)
            began = time.perf_counter()
            try:
                outcome = await run.outcome()
            finally:
                self._ended(run)
            return kept.result(outcome, time.perf_counter() - began)

    async def _stream(
        self, script: Script, timeout: float | None
    ) -> AsyncGenerator[OutputChunk | ExecResult, None]:
        async with self._turn:
            state = await self._ready(script)
            chunks = ChunkQueue()
            live = StreamedOutput(self._settings.limits.output, chunks.put)
            run = _Run(state, script, live, timeout, self._settings.limits)
            self._stops.add(run.stop)
            began = time.perf_counter()
            ended = asyncio.create_task(run.outcome())
            ended.add_done_callback(lambda _: chunks.end())
            try:
                async for chunk in chunks:
                    yield chunk
                result = live.result(ended.result(), time.perf_counter() - began)
                for chunk in chunks.left():
                    yield chunk
                yield result
            finally:
                ended.cancel()
                await asyncio.wait({ended})
                self._ended(run)

    async def _on_files(
        self, operation: FileOperation, *arguments: object, **options: object
    ) -> Any:
        state = self._get_state()
        method: Callable[..., object] = getattr(state.tree, operation)
        if state.quick and operation != "glob":
            return method(*arguments, **options)

        def work() -> object:
            state.refresh()
            return method(*arguments, **options)

        return await threads.run(work)

    async def _ready(self, script: Script) -> SandboxState:
        """Return the state after refreshing mounts and checking the script's directory."""
        state = self._get_state()
        if script.cwd is not None:
            info = await self._on_files("stat", script.cwd)
            if not info.is_directory:
                raise PathNotDirectory(script.cwd, hint="cwd= takes a directory.")
        elif not state.quick:
            await threads.run(state.refresh)
        return state

    def _get_state(self) -> SandboxState:
        self._check_open()
        with self._making:
            if self._made is None:
                self._made = SandboxState(self._settings)
        self._made.use_loop(asyncio.get_running_loop())
        return self._made

    def _ended(self, run: _Run) -> None:
        self._stops.discard(run.stop)
        self.has_left_behind = self.has_left_behind or run.lost
        if self._settings.shell == "fresh" and self._made is not None:
            threads.start(threads.ThreadJob(self._made.prepare))


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
        self._of_limit = timeout is None or timeout >= limits.wall_time
        self._seconds = limits.wall_time if timeout is None or self._of_limit else timeout
        self.stop = ScriptStop()
        self.lost = False
        self._outgrown = False
        self._job = threads.ThreadJob(lambda: state.run(script, sink, self.stop), self.stop.ask)

    async def outcome(self) -> ScriptOutcome:
        """Run the script. Cancellation stops it and waits for that."""
        threads.start(self._job)
        try:
            if not self._job.join(threads.QUICK):
                await self._watch()
            if not self._job.done:
                return await self._forced_ending()
        except asyncio.CancelledError:
            await self._stop()
            raise
        return self._own_ending()

    async def _watch(self) -> None:
        """Wait until it is done, or must be stopped."""
        growth = Growth(self._limits.process_growth)
        deadline = time.monotonic() + self._seconds + (SLACK if self._of_limit else 0.0)
        while (left := deadline - time.monotonic()) > 0:
            if await self._job.wait(min(left, WATCH)):
                return
            if growth.is_too_much:
                self._outgrown = True
                return

    async def _forced_ending(self) -> ScriptOutcome:
        await self._stop()
        if self._outgrown:
            return outgrown(self._limits.process_growth, lost=self.lost)
        return timed_out(self._seconds, of_limit=self._of_limit, lost=self.lost)

    def _own_ending(self) -> ScriptOutcome:
        try:
            outcome = self._job.result()
        except Exception:
            raise
        except BaseException as error:
            # A panic in bashkit is not an Exception; its shell is not used again.
            words = f"smokebox: the shell failed: {error}\n{RESTARTED}"
            outcome = ScriptOutcome(exit_code=ABORTED, message=words, broken=True)
        if outcome.broken:
            self._state.restart_shell()
        return outcome

    async def _stop(self) -> None:
        """Stop the script; one that does not stop is abandoned with its shell."""
        self.stop.ask()
        try:
            if not self._job.join(threads.QUICK):
                await self._job.wait(GRACE)
        finally:
            self.lost = not self._job.done
            if self.lost:
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
        """Return whether the process has grown by more than the limit."""
        return resident_bytes() - self._start > self._limit


def resident_bytes() -> int:
    """Return the resident memory of this process, or 0 if unknown."""
    try:
        with open(_STATM, "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return 0
