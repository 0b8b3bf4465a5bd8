"""Virtual sandbox in a worker process, which may crash without harm.

The parent keeps a copy of the files as of the last finished call. If the worker dies, by a crash,
the kernel, or because it did not stop, the running call reports it, and the next one starts a
worker with those files.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import time
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from smokebox.errors import DeadlineExceeded, InvalidOption, SandboxGone
from smokebox.sandbox.virtual import threads
from smokebox.sandbox.virtual.output import ChunkQueue
from smokebox.sandbox.virtual.sandbox import VirtualSandbox
from smokebox.sandbox.virtual.shell import TIMED_OUT
from smokebox.sandbox.virtual.snapshot import Snapshot
from smokebox.sandbox.virtual.thread_sandbox import GRACE, SLACK
from smokebox.sandbox.virtual.threads import FifoLock
from smokebox.sandbox.virtual.worker_messages import (
    CallFiles,
    RestoreSnapshot,
    RunScript,
    StartWorker,
    TakeSnapshot,
    WorkerState,
)
from smokebox.sandbox.virtual.worker_process import WorkerDied, WorkerProcess
from smokebox.types import ExecResult, FileInfo, OutputChunk
from smokebox.wire.failure import error_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from smokebox.sandbox.virtual.sandbox import FileOperation
    from smokebox.sandbox.virtual.settings import VirtualSettings
    from smokebox.sandbox.virtual.shell import Script
    from smokebox.sandbox.virtual.worker_messages import CallResponse, StateChanges, WorkerCall
    from smokebox.sandbox.virtual.worker_process import SentCall

T = TypeVar("T")

START_DEADLINE = 60.0
ACCEPT_DEADLINE = 10.0
START_ATTEMPTS = 3
FILE_DEADLINE = 60.0
# A worker stops or abandons a script itself; this is for one that does neither.
KILL_GRACE = GRACE + 1.5

# Types of the results of file calls; the others return None.
_RESULTS: dict[FileOperation, Any] = {
    "read": bytes,
    "stat": FileInfo,
    "readdir": list[str],
    "exists": bool,
    "glob": list[str],
}


class _WorkerRef:
    """Reference to the worker for the finalizer, which must not reference the sandbox."""

    def __init__(self) -> None:
        self.worker: WorkerProcess | None = None

    def kill(self) -> None:
        if self.worker is not None:
            self.worker.kill()


class ProcessSandbox(VirtualSandbox):
    """Virtual sandbox that runs in a worker process."""

    def __init__(self, settings: VirtualSettings, *, snapshot: Snapshot | None = None) -> None:
        super().__init__(settings)
        self._options = _pickled(settings)
        self._state: WorkerState | None = None
        if snapshot is not None:
            image, unloaded = dict(snapshot.image), dict(snapshot.unloaded)
            self._state = WorkerState(image, unloaded, snapshot.shell)
        self._worker_ref = _WorkerRef()
        self._lock, self._start_lock = FifoLock(), FifoLock()
        weakref.finalize(self, self._worker_ref.kill)

    @property
    def _isolation(self) -> Literal["process"]:
        return "process"

    async def snapshot(self) -> bytes:
        async with self._lock:
            return await self._call(TakeSnapshot(), bytes)

    async def restore(self, snapshot: bytes) -> None:
        Snapshot.decode(snapshot)
        async with self._lock:
            await self._call(RestoreSnapshot(snapshot=bytes(snapshot)), type(None))

    async def _fork(self) -> ProcessSandbox:
        snapshot = Snapshot.decode(await self.snapshot())
        return ProcessSandbox(self._settings, snapshot=snapshot)

    async def aclose(self) -> None:
        self._closed = True
        worker = self._worker_ref.worker
        if worker is not None:
            worker.kill()
            await threads.run(lambda: worker.join(KILL_GRACE))

    async def _exec(self, script: Script, timeout: float | None) -> ExecResult:
        async with self._lock:
            call = await self._start_call(_run_script(script, timeout, streamed=False))
            started = time.perf_counter()
            try:
                return await self._run(call, timeout)
            except WorkerDied as error:
                return self._death_result(error, time.perf_counter() - started)

    async def _stream(
        self, script: Script, timeout: float | None
    ) -> AsyncGenerator[OutputChunk | ExecResult, None]:
        async with self._lock:
            chunks = ChunkQueue()
            call = await self._start_call(_run_script(script, timeout, streamed=True), chunks)
            started = time.perf_counter()
            ended = asyncio.create_task(self._run(call, timeout))
            ended.add_done_callback(lambda _: chunks.end())
            try:
                # If cancelled before its first step, it would not notify the worker.
                await asyncio.sleep(0)
                async for chunk in chunks:
                    yield chunk
                try:
                    yield ended.result()
                except WorkerDied as error:
                    result = self._death_result(error, time.perf_counter() - started)
                    yield OutputChunk("stderr", result.stderr)
                    yield replace(result, stderr="")
            finally:
                ended.cancel()
                await asyncio.wait({ended})

    async def _call_files(
        self, operation: FileOperation, *arguments: object, **options: object
    ) -> Any:
        call = CallFiles(operation=operation, arguments=list(arguments), options=options)
        return await self._call(call, _RESULTS.get(operation, type(None)))

    async def _call(self, message: WorkerCall, kind: type[T]) -> T:
        """Call the worker, apply its file changes to the copy, and raise its errors."""
        call = await self._start_call(message)
        try:
            response = await call.response(FILE_DEADLINE)
        except TimeoutError:
            self._worker_ref.kill()
            raise DeadlineExceeded(
                f"the worker process did not respond within {FILE_DEADLINE:g} s and was killed.",
                hint="Repeat the call; files are as of the last completed call.",
                operation=type(message).__name__,
                timeout=FILE_DEADLINE,
            ) from None
        except WorkerDied as error:
            raise SandboxGone(
                f"the worker process died: {error.reason}.",
                hint="Repeat the call; files are as of the last completed call.",
                reason=error.reason,
            ) from None
        except asyncio.CancelledError:
            call.cancel()
            raise
        return self._apply_response(response, kind)

    async def _start_call(self, message: WorkerCall, chunks: ChunkQueue | None = None) -> SentCall:
        """Send a call to a worker that accepts it: a worker may die unnoticed."""
        for _ in range(START_ATTEMPTS):
            worker = await self._get_worker()
            call = worker.call(message, chunks)
            try:
                if await call.accepted(ACCEPT_DEADLINE):
                    return call
            except asyncio.CancelledError:
                call.cancel()
                raise
            worker.kill()
        raise SandboxGone(
            f"{START_ATTEMPTS} worker processes died before they started.",
            hint="Check that the machine has free memory and processes.",
            reason="start",
        )

    async def _run(self, call: SentCall, timeout: float | None) -> ExecResult:
        """Wait for a script to end; kill the worker if it does not."""
        wall_time = self._settings.limits.wall_time
        seconds = min(wall_time, timeout or wall_time)
        try:
            response = await call.response(seconds + SLACK + KILL_GRACE)
        except TimeoutError:
            self._worker_ref.kill()
            reason = f"it did not stop after {seconds:g} s and was killed"
            raise WorkerDied(TIMED_OUT, reason) from None
        except asyncio.CancelledError:
            await self._cancel(call)
            raise
        return self._apply_response(response, ExecResult)

    async def _cancel(self, call: SentCall) -> None:
        call.cancel()
        try:
            self._apply_response(await call.response(KILL_GRACE), object)
        except (TimeoutError, WorkerDied):
            self._worker_ref.kill()
        except asyncio.CancelledError:
            self._worker_ref.kill()
            raise

    async def _get_worker(self) -> WorkerProcess:
        """Return the worker, starting one from the copy if there is none."""
        self._check_open()
        async with self._start_lock:
            worker = self._worker_ref.worker
            if worker is not None and worker.is_usable:
                return worker
            worker = self._worker_ref.worker = await threads.run(WorkerProcess)
            try:
                response = await worker.call(self._start_message()).response(START_DEADLINE)
            except BaseException as error:
                worker.kill()
                if not isinstance(error, (TimeoutError, WorkerDied)):
                    raise
                raise SandboxGone(
                    f"the worker process did not start: {error or 'no response'}.",
                    hint="Try `python -m smokebox.sandbox.virtual.worker`, or isolation='thread'.",
                    reason="start",
                ) from error
            self._apply_response(response, type(None))
            return worker

    def _start_message(self) -> StartWorker:
        path = [os.fsencode(entry) for entry in sys.path]
        return StartWorker(path=path, settings=self._options, state=self._state)

    def _apply_response(self, response: CallResponse, kind: type[T]) -> T:
        """Apply the response's changes to the copy; return its result or raise its error."""
        if response.changes is not None:
            self._apply_changes(response.changes)
        if response.abandoned:
            # An abandoned script ends only with its worker.
            self._worker_ref.kill()
        if response.error is not None:
            raise error_of(response.error)
        return msgspec.convert(response.result, kind)

    def _apply_changes(self, changes: StateChanges) -> None:
        image = {} if self._state is None else dict(self._state.image)
        for path in changes.removed:
            image.pop(path, None)
        image.update(changes.nodes)
        # Sorted, so that parents precede their contents.
        ordered = dict(sorted(image.items()))
        self._state = WorkerState(ordered, changes.unloaded, cwd=changes.cwd, env=changes.env)

    def _death_result(self, died: WorkerDied, duration: float) -> ExecResult:
        message = (
            f"smokebox: the worker process died: {died.reason}; "
            "files are as of the last completed call\n"
        )
        late = died.exit_code == TIMED_OUT
        if late:
            message = f"smokebox: timed out: {died.reason.removeprefix('it ')}\n{message}"
        return ExecResult(
            exit_code=died.exit_code, stderr=message, timed_out=late, duration=duration
        )


def _pickled(settings: VirtualSettings) -> bytes:
    try:
        return pickle.dumps(settings)
    except Exception as error:
        raise InvalidOption(
            f"isolation='process' needs options that can be pickled: {error}.",
            hint="Use functions from a module and folders of the host, or isolation='thread'.",
            option="isolation",
        ) from error


def _run_script(script: Script, timeout: float | None, *, streamed: bool) -> RunScript:
    return RunScript(
        command=script.command,
        cwd=script.cwd,
        env=dict(script.env),
        stdin=script.stdin,
        timeout=timeout,
        streamed=streamed,
    )
