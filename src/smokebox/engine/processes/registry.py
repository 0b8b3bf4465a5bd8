"""The processes of one sandbox that outlive the engine: background processes and code contexts.

Each has a row in the record and files in the sandbox's `run` directory. The row is written before
the files are created, and the files before the process starts, so no process is unknown to the
record.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import os
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from smokebox.engine.processes.launch import EXIT, kill_started, launch, remove_files
from smokebox.engine.processes.lifetime import is_locked
from smokebox.engine.record.rows import ContextRow, ProcessRow, delete, put, update
from smokebox.engine.run import RunPart
from smokebox.errors import NotFound, SandboxGone, SmokeboxError, StorageFull

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

    from smokebox.engine.processes.lifetime import Lifetime
    from smokebox.engine.record.record import Record
    from smokebox.engine.run import Program, Run, RunOwner

T = TypeVar("T")
R = TypeVar("R", ProcessRow, ContextRow)
H = TypeVar("H", bound="ProcessHandle")


class ProcessHandle(Protocol):
    """A process with its row, and files whose paths begin with `stem`."""

    @property
    def id(self) -> str: ...

    @property
    def row(self) -> ProcessRow | ContextRow: ...

    @property
    def stem(self) -> str: ...

    @property
    def lifetime(self) -> Lifetime: ...

    def close(self) -> None:
        """Release the handle, and leave the process running."""


class ProcessRegistry(RunPart, abc.ABC, Generic[H, R]):
    """The handles of one kind of process, by id. Reading about processes wakes no sandbox."""

    def __init__(self, kind: type[R], owner: RunOwner, record: Record) -> None:
        self._kind: type[R] = kind
        self._id = owner.id
        self._use = owner.use
        self._owner = owner
        self._directory = ""
        self._record = record
        self._handles: dict[str, H] = {}
        self._loaded = False
        self._loading = asyncio.Lock()
        self._tasks: set[asyncio.Task[object]] = set()
        self._writes: set[asyncio.Task[None]] = set()

    @abc.abstractmethod
    def _open(self, row: R) -> H:
        """Create the handle of a row."""

    async def adopt(self, run: Run) -> None:
        """Take over the processes that another engine left in this run of the sandbox."""
        await self._load()
        for handle in list(self._handles.values()):
            lifetime = handle.lifetime
            if handle.row.generation != run.generation:
                if lifetime.running:
                    lifetime.run_ended("the engine stopped")
            elif lifetime.running or is_locked(handle.stem + EXIT):
                lifetime.attach(run)
        await self._flush()

    async def ended(self, reason: str) -> None:
        """Mark all processes as ended: the run of the sandbox ended."""
        await self._load()
        for handle in list(self._handles.values()):
            handle.lifetime.run_ended(reason)
            handle.close()
        await self._flush()

    async def aclose(self) -> None:
        """Release all handles, and leave the processes to the next engine. Safe to repeat."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        for handle in self._handles.values():
            handle.close()

    async def _load(self) -> None:
        async with self._loading:
            if self._loaded:
                return
            self._directory = await self._owner.directory()
            if not self._directory:
                return
            for row in await self._record.rows(self._kind, self._id):
                handle = self._open(row)
                self._handles[handle.id] = handle
            self._loaded = True

    def _stem(self, name: str) -> str:
        return os.path.join(self._directory, "run", name)

    async def _start(
        self, run: Run, program: Program, handle: H, *, stdin: bool, timeout: float | None = None
    ) -> H:
        """Start the process of a handle. A failed start leaves nothing."""
        row, lifetime = handle.row, handle.lifetime
        try:
            await self._record.write(put(row))
            record = await launch(run, program, handle.stem, stdin=stdin, timeout=timeout)
            lifetime.set_started(record)
            if handle.row != row:
                await self._record.write(put(handle.row))
            lifetime.attach(run)
        except BaseException:
            await self._discard(run, handle)
            raise
        return handle

    async def _discard(self, run: Run, handle: H) -> None:
        """Kill a process that may have started, and forget it."""
        handle.close()
        await kill_started(run, handle.stem)
        await self._forget([handle])

    async def _complete(self, run: Run, starting: Coroutine[object, object, H]) -> H:
        """Await a start in its own task, and undo it if the caller is cancelled."""
        task = self._spawn(starting)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._spawn(self._undo(run, task))
            raise

    async def _undo(self, run: Run, starting: asyncio.Task[H]) -> None:
        with contextlib.suppress(SmokeboxError, OSError):
            await self._discard(run, await starting)

    async def _forget(self, handles: Iterable[H]) -> None:
        """Remove the files and rows of processes."""
        handles = list(handles)
        for handle in handles:
            handle.close()
            remove_files(handle.stem)
            self._handles.pop(handle.id, None)
        with contextlib.suppress(SandboxGone):
            await self._record.write(*(delete(self._kind, self._id, one.id) for one in handles))

    def _on_exit(self, handle: H) -> None:
        if self._handles.get(handle.id) is handle:
            task = self._spawn(self._write_exit(handle))
            self._writes.add(task)
            task.add_done_callback(self._writes.discard)

    async def _write_exit(self, handle: H) -> None:
        # Not even on a full disk an error: the next engine finds out that the process ended.
        with contextlib.suppress(SandboxGone, NotFound, StorageFull):
            await self._record.write(update(handle.row))

    def _spawn(self, work: Coroutine[object, object, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _flush(self) -> None:
        if self._writes:
            await asyncio.wait(self._writes)
