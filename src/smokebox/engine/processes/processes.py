"""The lasting processes of one sandbox: started, found again, listed, ended, forgotten.

Each has a row in the record and files in the sandbox's `run` directory. The row comes before
the files and the files before the process, so nothing runs that the record does not know.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import time
from typing import TYPE_CHECKING

from smokebox.engine.names import check_process_id
from smokebox.engine.processes.background_process import (
    GRACE_SECONDS,
    BackgroundProcess,
    check_grace,
    check_signal,
)
from smokebox.engine.processes.launch import EXIT, abandon, launch, remove_files
from smokebox.engine.processes.lifetime import is_held
from smokebox.engine.processes.logs import SUFFIXES
from smokebox.engine.record.rows import ProcessRow, delete, put, update
from smokebox.errors import (
    Conflict,
    InvalidOption,
    NotFound,
    SandboxGone,
    SmokeboxError,
    StorageFull,
)
from smokebox.foundation.ids import new_id
from smokebox.options import check_timeout

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from smokebox.engine.record.record import Record
    from smokebox.engine.run import Command, Program, Run
    from smokebox.limits import ProcessLimits

# What is kept of processes that have ended: so many, and so many bytes of their logs.
MOST_ENDED = 100
MOST_LOGS = 1 << 30


class Processes:
    """What long-running processes a sandbox has, and had lately.

    `locate` gives the sandbox's directory on the host, as in `Run`. `use` gives the sandbox's
    run, woken if need be; reading about processes, or their logs, never wakes it.
    """

    def __init__(
        self,
        *,
        id: str,
        locate: Callable[[], Awaitable[str]],
        record: Record,
        use: Callable[[], AbstractAsyncContextManager[Run]],
    ) -> None:
        self._id = id
        self._locate = locate
        self._directory = ""
        self._record = record
        self._use = use
        self._known: dict[str, BackgroundProcess] = {}
        self._loaded = False
        self._loading = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writes: set[asyncio.Task[None]] = set()

    async def start(
        self,
        command: Command,
        *,
        process_id: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        limits: ProcessLimits | None = None,
        stdin: bool = False,
        timeout: float | None = None,
        session: str | None = None,
    ) -> BackgroundProcess:
        """Start a process that runs until it ends, is killed, or the sandbox sleeps.

        It outlives this engine. Its output is held to the `output_rate` of the sandbox.
        `timeout` is how long it may live: its supervisor in the sandbox keeps that time, and
        ends it with code 124. Without `stdin` it reads /dev/null.

        A program that is not there raises `PathNotFound`, one that cannot be run
        `AccessDenied`, a bad `cwd` what is wrong with it; nothing of such a start is left.
        A string is for bash, whose own complaint is in the log, with exit code 127.
        """
        name = check_process_id(process_id) if process_id is not None else _random_id()
        timeout = check_timeout(timeout)
        if not isinstance(stdin, bool):
            raise InvalidOption(
                f"stdin is True or False, not {stdin!r:.80}.",
                hint="Pass stdin=True, and then use write_stdin().",
                option="stdin",
                value=stdin,
            )
        async with self._use() as run:
            await self._load()
            program = await run.program(command, cwd=cwd, env=env, user=user, limits=limits)
            process = self._reserve(
                ProcessRow(
                    sandbox_id=self._id,
                    process_id=name,
                    generation=run.generation,
                    command=command if isinstance(command, str) else shlex.join(command),
                    argv=program.argv,
                    cwd=program.cwd,
                    user=program.user.name,
                    started_at=time.time(),
                    session=session,
                    stdin=stdin,
                )
            )
            # In a task of its own: who stops waiting must not leave half of it behind.
            starting = self._spawn(self._begin(run, program, process, timeout))
            try:
                await asyncio.shield(starting)
            except asyncio.CancelledError:
                self._spawn(self._undo(run, starting, process))
                raise
            return process

    async def list(self) -> list[BackgroundProcess]:
        """All that run, and those kept of the ended, in the order of their start."""
        await self._load()
        return [process for process in self._known.values() if process.status != "starting"]

    async def get(self, id: str) -> BackgroundProcess:
        """The process of that id; raises `NotFound`."""
        await self._load()
        found = self._known.get(check_process_id(id))
        if found is None or found.status == "starting":
            raise NotFound(
                f"sandbox {self._id} has no process {id!r}.",
                hint="See list() for those it has; ended ones are kept for a while only.",
                kind="process",
                name=id,
            )
        return found

    async def kill(
        self, id: str, signal: str | int | None = None, *, grace: float = GRACE_SECONDS
    ) -> None:
        """End a process, or send it a signal, as its handle does."""
        await (await self.get(id)).kill(signal, grace=grace)

    async def kill_all(
        self, signal: str | int | None = None, *, grace: float = GRACE_SECONDS
    ) -> int:
        """End all processes, or send all a signal; how many there were to end.

        One whose end is known counts only where it has left something in the background.
        """
        check_signal(signal)
        check_grace(grace)
        await self._load()
        alive = [process for process in self._known.values() if not process.gone]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_kill(process, signal, grace)) for process in alive]
        ended = [task.result() for task in tasks]
        for fault in ended:
            if isinstance(fault, SmokeboxError):
                raise fault
        return ended.count(True)

    async def cleanup(self) -> int:
        """Forget the processes that have ended, with their logs; how many."""
        await self._load()
        return await self._forget([one for one in self._known.values() if one.gone])

    async def adopt(self, run: Run) -> None:
        """Take over what another engine left running in this run of the sandbox."""
        await self._load()
        for process in list(self._known.values()):
            held = is_held(process.stem + EXIT)
            if process.generation != run.generation:
                if process.running:
                    process.lifetime.cut_off(self._id, "the engine stopped")
            elif process.running or held:
                process.lifetime.attach(run)
        await self._written()
        await self._record.write(*(update(one.row) for one in self._known.values() if one.running))

    async def ended(self, reason: str, *, destroyed: bool = False) -> None:
        """The run of the sandbox is over: what ran was killed, and who waits hears why."""
        await self._load()
        for process in list(self._known.values()):
            process.lifetime.cut_off(self._id, reason, destroyed=destroyed)
            process.close()
        await self._written()

    async def aclose(self) -> None:
        """Let go of everything, and leave what runs for another engine. Safe to repeat."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        for process in self._known.values():
            process.close()

    async def _load(self) -> None:
        async with self._loading:
            if self._loaded:
                return
            self._directory = await self._locate()
            if not self._directory:
                return
            for row in await self._record.rows(ProcessRow, self._id):
                self._known[row.process_id] = self._process(row)
            self._loaded = True

    def _process(self, row: ProcessRow) -> BackgroundProcess:
        stem = os.path.join(self._directory, "run", row.process_id)
        return BackgroundProcess(
            row, stem=stem, use=self._use, on_end=self._on_end, on_gone=self._on_gone
        )

    def _reserve(self, row: ProcessRow) -> BackgroundProcess:
        if row.process_id in self._known:
            raise Conflict(
                f"sandbox {self._id} has a process {row.process_id!r} already.",
                hint="Use another id; one that has ended makes room with cleanup().",
                kind="process",
                name=row.process_id,
            )
        self._known[row.process_id] = process = self._process(row)
        return process

    async def _begin(
        self, run: Run, program: Program, process: BackgroundProcess, timeout: float | None
    ) -> None:
        row = process.row
        try:
            await self._record.write(put(row))
            told = await launch(run, program, process.stem, stdin=row.stdin, timeout=timeout)
            process.lifetime.begin(told)
            await self._record.write(put(process.row))
            process.lifetime.attach(run)
        except BaseException:
            process.close()
            await abandon(run, process.stem)
            self._known.pop(row.process_id, None)
            with contextlib.suppress(SandboxGone):
                await self._record.write(delete(ProcessRow, *_key(row)))
            raise

    async def _undo(
        self, run: Run, starting: asyncio.Task[None], process: BackgroundProcess
    ) -> None:
        """End and forget a process whose start nobody waited for."""
        with contextlib.suppress(SmokeboxError, OSError):
            await starting
            await abandon(run, process.stem)
            await self._forget([process])

    def _on_end(self, process: BackgroundProcess) -> None:
        task = self._spawn(self._write_end(process))
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)

    def _on_gone(self) -> None:
        if sum(process.gone for process in self._known.values()) > 1:
            self._spawn(self._make_room())

    async def _write_end(self, process: BackgroundProcess) -> None:
        if process.pid is None:
            # It never began: the engine ended between the row and the process.
            await self._forget([process])
            return
        # On a full disk too: the next engine finds out by itself that it has ended.
        with contextlib.suppress(SandboxGone, NotFound, StorageFull):
            await self._record.write(update(process.row))

    async def _make_room(self) -> None:
        ended = [process for process in self._known.values() if process.gone]
        ended.sort(key=lambda process: process.ended_at or 0.0)
        if surplus := _surplus(ended):
            await self._forget(surplus)

    async def _forget(self, processes: Sequence[BackgroundProcess]) -> int:
        for process in processes:
            process.close()
            remove_files(process.stem)
            self._known.pop(process.id, None)
        with contextlib.suppress(SandboxGone):
            await self._record.write(*(delete(ProcessRow, *_key(one.row)) for one in processes))
        return len(processes)

    def _spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _written(self) -> None:
        if self._writes:
            await asyncio.wait(self._writes)


async def _kill(
    process: BackgroundProcess, signal: str | int | None, grace: float
) -> bool | SmokeboxError:
    """Whether there was anything to end, or why it could not be ended: one that cannot must not
    save the others."""
    try:
        return await process.kill(signal, grace=grace)
    except SandboxGone:
        return False
    except SmokeboxError as error:
        return error


def _key(row: ProcessRow) -> tuple[str, str]:
    return row.sandbox_id, row.process_id


def _random_id() -> str:
    return new_id("p")


def _surplus(ended: list[BackgroundProcess]) -> list[BackgroundProcess]:
    """Those to forget of the ended, oldest first: beyond what may be kept."""
    kept = size = 0
    for process in reversed(ended):
        size += sum(_blocks(process.log.path(stream)) for stream in SUFFIXES)
        if kept and size > MOST_LOGS:
            break
        kept += 1
    return ended[: len(ended) - min(kept, MOST_ENDED)]


def _blocks(path: str) -> int:
    try:
        return os.stat(path).st_blocks * 512
    except FileNotFoundError:
        return 0
