"""The background processes of one sandbox: start, get, list, kill, clean up."""

from __future__ import annotations

import asyncio
import os
import shlex
import time
from typing import TYPE_CHECKING, TypedDict

from smokebox.engine.names import check_process_id
from smokebox.engine.processes.background_process import (
    GRACE_SECONDS,
    BackgroundProcess,
    check_grace,
    check_signal,
)
from smokebox.engine.processes.logs import SUFFIXES
from smokebox.engine.processes.registry import ProcessRegistry
from smokebox.engine.record.rows import ProcessRow, update
from smokebox.errors import Conflict, InvalidOption, NotFound, SandboxGone, SmokeboxError
from smokebox.foundation.ids import new_id
from smokebox.options import check_timeout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from smokebox.engine.record.record import Record
    from smokebox.engine.run import Command, Run, RunOwner
    from smokebox.limits import ProcessLimits

# Ended processes to keep, and bytes of their logs.
MAX_ENDED = 100
MAX_LOG_BYTES = 1 << 30


class ProcessOptions(TypedDict, total=False):
    """The options of `Processes.start`."""

    process_id: str | None
    cwd: str | None
    env: Mapping[str, str] | None
    user: str | None
    limits: ProcessLimits | Mapping[str, object] | None
    stdin: bool
    timeout: float | None


class Processes(ProcessRegistry[BackgroundProcess, ProcessRow]):
    """The processes of a sandbox that run or ended recently."""

    def __init__(self, owner: RunOwner, record: Record) -> None:
        super().__init__(ProcessRow, owner, record)

    async def start(
        self,
        command: Command,
        *,
        process_id: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        limits: ProcessLimits | Mapping[str, object] | None = None,
        stdin: bool = False,
        timeout: float | None = None,
    ) -> BackgroundProcess:
        """Start a process that runs until it ends, is killed, or the sandbox sleeps.

        It outlives this engine. Its output is limited to the `output_rate` of the sandbox.

        Args:
            command: A string for bash, or a list of literal words.
            process_id: Id of the process; by default a random one.
            cwd: Working directory; by default that of the sandbox.
            env: Environment variables to add.
            user: A user of the sandbox; by default root.
            limits: Limits of this process alone.
            stdin: Keep a pipe to standard input open for writing.
            timeout: Seconds before the whole process tree is killed.

        Raises:
            Conflict: The process id is taken.
            PathNotFound: The program does not exist. (A string is for bash, which reports a
                missing program in the log, with exit code 127.)
            AccessDenied: The program cannot be run.
            PathError: The working directory is not valid.
        """
        name = check_process_id(process_id) if process_id is not None else new_id("p")
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
            if name in self._handles:
                raise Conflict(
                    f"sandbox {self._id} already has a process {name!r}.",
                    hint="Use another id, or remove ended processes with cleanup().",
                    kind="process",
                    name=name,
                )
            process = self._handles[name] = self._open(
                ProcessRow(
                    sandbox_id=self._id,
                    process_id=name,
                    generation=run.generation,
                    command=command if isinstance(command, str) else shlex.join(command),
                    argv=program.argv,
                    cwd=program.cwd,
                    user=program.user.name,
                    started_at=time.time(),
                    stdin=stdin,
                )
            )
            return await self._complete(
                run, self._start(run, program, process, stdin=stdin, timeout=timeout)
            )

    async def list(self) -> list[BackgroundProcess]:
        """Return running processes and recently ended ones, in order of their start."""
        await self._load()
        return [process for process in self._handles.values() if process.status != "starting"]

    async def get(self, id: str) -> BackgroundProcess:
        """Return a process by id. Raises `NotFound`."""
        await self._load()
        found = self._handles.get(check_process_id(id))
        if found is None or found.status == "starting":
            raise NotFound(
                f"sandbox {self._id} has no process {id!r}.",
                hint="See list() for its processes; ended ones are kept for a while only.",
                kind="process",
                name=id,
            )
        return found

    async def kill(
        self, id: str, signal: str | int | None = None, *, grace: float = GRACE_SECONDS
    ) -> None:
        """Kill a process, or send it a signal. See `BackgroundProcess.kill`."""
        await (await self.get(id)).kill(signal, grace=grace)

    async def kill_all(
        self, signal: str | int | None = None, *, grace: float = GRACE_SECONDS
    ) -> int:
        """Kill all processes, or send all a signal. Return the number that received it.

        An ended process counts if it left background processes.
        """
        check_signal(signal)
        check_grace(grace)
        await self._load()
        alive = [process for process in self._handles.values() if not process.tree_ended]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_kill(process, signal, grace)) for process in alive]
        results = [task.result() for task in tasks]
        for result in results:
            if isinstance(result, SmokeboxError):
                raise result
        return results.count(True)

    async def cleanup(self) -> int:
        """Forget the ended processes and their logs. Return their number."""
        await self._load()
        ended = self._ended()
        await self._forget(ended)
        return len(ended)

    async def adopt(self, run: Run) -> None:
        """Take over the processes that another engine left in this run of the sandbox."""
        await super().adopt(run)
        running = (update(one.row) for one in self._handles.values() if one.running)
        await self._record.write(*running)

    def _open(self, row: ProcessRow) -> BackgroundProcess:
        return BackgroundProcess(
            row,
            stem=self._stem(row.process_id),
            use=self._use,
            on_exit=self._on_exit,
            on_tree_end=self._on_tree_end,
        )

    async def _write_exit(self, handle: BackgroundProcess) -> None:
        if handle.pid is None:
            # It never started: the engine ended after it wrote the row.
            await self._forget([handle])
        else:
            await super()._write_exit(handle)

    def _ended(self) -> Sequence[BackgroundProcess]:
        return [process for process in self._handles.values() if process.tree_ended]

    def _on_tree_end(self) -> None:
        if len(self._ended()) > 1:
            self._spawn(self._forget_surplus())

    async def _forget_surplus(self) -> None:
        if surplus := _surplus(sorted(self._ended(), key=lambda one: one.row.ended_at or 0.0)):
            await self._forget(surplus)


async def _kill(
    process: BackgroundProcess, signal: str | int | None, grace: float
) -> bool | SmokeboxError:
    """Kill a process, and return an error instead of raising: the others are killed too."""
    try:
        return await process.kill(signal, grace=grace)
    except SandboxGone:
        return False
    except SmokeboxError as error:
        return error


def _surplus(ended: list[BackgroundProcess]) -> list[BackgroundProcess]:
    """Return the oldest of the ended processes, beyond the limits. The last one is always kept."""
    kept = size = 0
    for process in reversed(ended):
        size += sum(_disk_usage(process.log.path(stream)) for stream in SUFFIXES)
        if kept and size > MAX_LOG_BYTES:
            break
        kept += 1
    return ended[: len(ended) - min(kept, MAX_ENDED)]


def _disk_usage(path: str) -> int:
    try:
        return os.stat(path).st_blocks * 512
    except FileNotFoundError:
        return 0
