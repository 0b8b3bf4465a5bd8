"""The virtual sandbox in this process: scripts on deep-stack threads, files at hand."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

from smokebox.errors import PathNotDirectory
from smokebox.sandbox.virtual import threads
from smokebox.sandbox.virtual.chunks import Chunks
from smokebox.sandbox.virtual.ending import ABORTED, RESTARTED, Ending, outgrown, timed_out
from smokebox.sandbox.virtual.fifo_lock import FifoLock
from smokebox.sandbox.virtual.growth import Growth
from smokebox.sandbox.virtual.machine import Machine
from smokebox.sandbox.virtual.sandbox import VirtualSandbox
from smokebox.sandbox.virtual.shell import Stop
from smokebox.sandbox.virtual.snapshot import Snapshot
from smokebox.sandbox.virtual.transcript import Kept, Live

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from smokebox.sandbox.virtual.limits import Limits
    from smokebox.sandbox.virtual.sandbox import FileOperation
    from smokebox.sandbox.virtual.settings import Settings
    from smokebox.sandbox.virtual.shell import Script
    from smokebox.sandbox.virtual.transcript import Listener
    from smokebox.types import ExecResult, OutputChunk

# How long a script may take to stop before it is left behind.
GRACE = 2.0
# The engine keeps wall_time by itself; this is for when it cannot.
SLACK = 0.25
# How often to look at a script that runs.
WATCH = 0.1


class ThreadSandbox(VirtualSandbox):
    """A virtual sandbox whose shell runs on a thread of this process."""

    def __init__(self, settings: Settings, *, machine: Machine | None = None) -> None:
        super().__init__(settings)
        self._made = machine
        self._making = threading.Lock()
        self._turn = FifoLock()
        self._stops: set[Stop] = set()
        # Whether a script that would not stop still runs on some thread.
        self.has_left_behind = False

    @property
    def _isolation(self) -> Literal["interpreter"]:
        return "interpreter"

    async def snapshot(self) -> bytes:
        async with self._turn:
            machine = self._machine()
            return await threads.run(lambda: machine.snapshot(whole=True).encode())

    async def restore(self, snapshot: bytes) -> None:
        self._check_open()
        decoded = await threads.run(lambda: Snapshot.decode(snapshot))
        async with self._turn:
            before = self._machine()
            self._made = await threads.run(lambda: Machine(self._settings, decoded))
            before.close()

    async def fork(self) -> ThreadSandbox:
        async with self._turn:
            here = self._machine()
            taken = await threads.run(lambda: here.snapshot(whole=False))
        machine = await threads.run(lambda: Machine(self._settings, taken))
        return ThreadSandbox(self._settings, machine=machine)

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
            machine = await self._ready(script)
            kept = Kept(self._settings.limits.output)
            run = _Run(machine, script, kept, timeout, self._settings.limits)
            self._stops.add(run.stop)
            began = time.perf_counter()
            try:
                ending = await run.ending()
            finally:
                self._ended(run)
            return kept.result(ending, time.perf_counter() - began)

    async def _stream(
        self, script: Script, timeout: float | None
    ) -> AsyncGenerator[OutputChunk | ExecResult, None]:
        async with self._turn:
            machine = await self._ready(script)
            chunks = Chunks()
            live = Live(self._settings.limits.output, chunks.put)
            run = _Run(machine, script, live, timeout, self._settings.limits)
            self._stops.add(run.stop)
            began = time.perf_counter()
            ended = asyncio.create_task(run.ending())
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
        machine = self._machine()
        method: Callable[..., object] = getattr(machine.tree, operation)
        if machine.quick and operation != "glob":
            return method(*arguments, **options)

        def work() -> object:
            machine.refresh()
            return method(*arguments, **options)

        return await threads.run(work)

    async def _ready(self, script: Script) -> Machine:
        """The machine, once what is mounted is looked at anew and the directory is there."""
        machine = self._machine()
        if script.cwd is not None:
            info = await self._on_files("stat", script.cwd)
            if not info.is_directory:
                raise PathNotDirectory(script.cwd, hint="cwd= takes a directory.")
        elif not machine.quick:
            await threads.run(machine.refresh)
        return machine

    def _machine(self) -> Machine:
        self._check_open()
        with self._making:
            if self._made is None:
                self._made = Machine(self._settings)
        self._made.use_loop(asyncio.get_running_loop())
        return self._made

    def _ended(self, run: _Run) -> None:
        self._stops.discard(run.stop)
        self.has_left_behind = self.has_left_behind or run.lost
        if self._settings.shell == "fresh" and self._made is not None:
            threads.start(threads.Job(self._made.prepare))


class _Run:
    """One script under way: it ends by itself, by a limit, by its deadline, or with its caller."""

    def __init__(
        self,
        machine: Machine,
        script: Script,
        listener: Listener,
        timeout: float | None,
        limits: Limits,
    ) -> None:
        self._machine = machine
        self._limits = limits
        self._of_limit = timeout is None or timeout >= limits.wall_time
        self._seconds = limits.wall_time if timeout is None or self._of_limit else timeout
        self.stop = Stop()
        self.lost = False
        self._outgrown = False
        self._job = threads.Job(lambda: machine.run(script, listener, self.stop), self.stop.ask)

    async def ending(self) -> Ending:
        """Run it. Whoever cancels this stops the script, and has waited for that."""
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
        """Wait until it is done, or must not go on."""
        growth = Growth(self._limits.process_growth)
        deadline = time.monotonic() + self._seconds + (SLACK if self._of_limit else 0.0)
        while (left := deadline - time.monotonic()) > 0:
            if await self._job.wait(min(left, WATCH)):
                return
            if growth.is_too_much:
                self._outgrown = True
                return

    async def _forced_ending(self) -> Ending:
        await self._stop()
        if self._outgrown:
            return outgrown(self._limits.process_growth, lost=self.lost)
        return timed_out(self._seconds, of_limit=self._of_limit, lost=self.lost)

    def _own_ending(self) -> Ending:
        try:
            ending = self._job.result()
        except Exception:
            raise
        except BaseException as error:
            # A panic of the engine, which is no Exception: what is left of the shell is not used.
            words = f"smokebox: the shell failed: {error}\n{RESTARTED}"
            ending = Ending(exit_code=ABORTED, message=words, broken=True)
        if ending.broken:
            self._machine.restart_shell()
        return ending

    async def _stop(self) -> None:
        """Stop the script; one that does not is left behind, and its shell given up."""
        self.stop.ask()
        try:
            if not self._job.join(threads.QUICK):
                await self._job.wait(GRACE)
        finally:
            self.lost = not self._job.done
            if self.lost:
                self._machine.restart_shell()
