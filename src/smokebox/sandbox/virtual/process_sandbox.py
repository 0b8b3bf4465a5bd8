"""Virtual sandbox in a worker process, which may crash without harm.

The parent keeps a copy of the files as of the last finished call. If the worker dies, by a crash,
the kernel, or because it did not stop, the running call reports it, and the next one starts a
worker with those files.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
import time
import weakref
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from smokebox.errors import DeadlineExceeded, InvalidOption, SandboxGone
from smokebox.sandbox.virtual import threads
from smokebox.sandbox.virtual.output import ChunkQueue
from smokebox.sandbox.virtual.sandbox import VirtualSandbox
from smokebox.sandbox.virtual.shell import TIMED_OUT
from smokebox.sandbox.virtual.snapshot import Snapshot
from smokebox.sandbox.virtual.thread_sandbox import GRACE, SLACK
from smokebox.sandbox.virtual.threads import FifoLock
from smokebox.sandbox.virtual.worker_messages import (
    WorkerMessage,
    unpack_error,
    unpack_nodes,
    unpack_value,
)
from smokebox.sandbox.virtual.worker_process import WorkerDied, WorkerProcess
from smokebox.types import ExecResult, OutputChunk

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from smokebox.sandbox.virtual.sandbox import FileOperation
    from smokebox.sandbox.virtual.settings import VirtualSettings
    from smokebox.sandbox.virtual.shell import Script
    from smokebox.sandbox.virtual.snapshot import FileNode
    from smokebox.sandbox.virtual.worker_process import WorkerCall

START_DEADLINE = 60.0
BEGIN_DEADLINE = 10.0
ATTEMPTS = 3
FILE_DEADLINE = 60.0
# A worker stops or abandons a script itself; this is for one that does neither.
KILL_GRACE = GRACE + 1.5

_CHANGING = frozenset({"write", "mkdir", "remove"})


@dataclass(slots=True)
class _Copy:
    """State that a worker starts with: files, directory and environment."""

    image: dict[str, FileNode] = field(default_factory=dict)
    waiting: dict[str, str] = field(default_factory=dict)
    shell: bytes = b""
    cwd: str | None = None
    env: dict[str, str] = field(default_factory=dict)


class _Holder:
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
        self._copy: _Copy | None = None
        if snapshot is not None:
            self._copy = _Copy(dict(snapshot.image), dict(snapshot.waiting), snapshot.shell)
        self._held = _Holder()
        self._turn, self._starting = FifoLock(), FifoLock()
        weakref.finalize(self, self._held.kill)

    @property
    def _isolation(self) -> Literal["process"]:
        return "process"

    async def snapshot(self) -> bytes:
        async with self._turn:
            answer = await self._ask({"call": "snapshot", "changes": True})
            return answer.blobs[0]

    async def restore(self, snapshot: bytes) -> None:
        Snapshot.decode(snapshot)
        async with self._turn:
            await self._ask({"call": "restore", "changes": True}, [bytes(snapshot)])

    async def fork(self) -> ProcessSandbox:
        taken = await self.snapshot()
        return ProcessSandbox(self._settings, snapshot=Snapshot.decode(taken))

    async def aclose(self) -> None:
        self._closed = True
        worker = self._held.worker
        if worker is not None:
            worker.kill()
            await threads.run(lambda: worker.join(KILL_GRACE))

    async def _exec(self, script: Script, timeout: float | None) -> ExecResult:
        async with self._turn:
            call, began = await self._begin(*_request("exec", script, timeout)), time.perf_counter()
            try:
                answer = await self._run(call, timeout)
            except WorkerDied as death:
                return self._obituary(death, time.perf_counter() - began)
            return _result(answer)

    async def _stream(
        self, script: Script, timeout: float | None
    ) -> AsyncGenerator[OutputChunk | ExecResult, None]:
        async with self._turn:
            chunks = ChunkQueue()
            call = await self._begin(*_request("stream", script, timeout), chunks)
            began = time.perf_counter()
            ended = asyncio.create_task(self._run(call, timeout))
            ended.add_done_callback(lambda _: chunks.end())
            try:
                # If cancelled before its first step, it would not notify the worker.
                await asyncio.sleep(0)
                async for chunk in chunks:
                    yield chunk
                try:
                    yield _result(ended.result())
                except WorkerDied as death:
                    result = self._obituary(death, time.perf_counter() - began)
                    yield OutputChunk("stderr", result.stderr)
                    yield replace(result, stderr="")
            finally:
                ended.cancel()
                await asyncio.wait({ended})

    async def _on_files(
        self, operation: FileOperation, *arguments: object, **options: object
    ) -> Any:
        blobs = [one for one in arguments if isinstance(one, bytes)]
        header = {
            "call": "files",
            "operation": operation,
            "arguments": [one for one in arguments if not isinstance(one, bytes)],
            "options": options,
            "changes": operation in _CHANGING,
        }
        return unpack_value(await self._ask(header, blobs))

    async def _ask(self, header: dict[str, Any], blobs: Sequence[bytes] = ()) -> WorkerMessage:
        """Call the worker, apply its file changes to the copy, and raise its errors."""
        call = await self._begin(header, blobs)
        try:
            answer = await call.answer(FILE_DEADLINE)
        except TimeoutError:
            self._held.kill()
            raise DeadlineExceeded(
                f"the worker process did not respond within {FILE_DEADLINE:g} s and was killed.",
                hint="Repeat the call; files are as of the last completed call.",
                operation=str(header["call"]),
                timeout=FILE_DEADLINE,
            ) from None
        except WorkerDied as death:
            raise SandboxGone(
                f"the worker process died: {death.reason}.",
                hint="Repeat the call; files are as of the last completed call.",
                reason=death.reason,
            ) from None
        except asyncio.CancelledError:
            call.cancel()
            raise
        return self._learned(answer)

    async def _begin(
        self, header: dict[str, Any], blobs: Sequence[bytes] = (), chunks: ChunkQueue | None = None
    ) -> WorkerCall:
        """Send a call to a worker that accepts it: a worker may die unnoticed."""
        for _ in range(ATTEMPTS):
            worker = await self._worker()
            call = worker.call(header, blobs, chunks)
            try:
                if await call.begun(BEGIN_DEADLINE):
                    return call
            except asyncio.CancelledError:
                call.cancel()
                raise
            worker.kill()
        raise SandboxGone(
            f"{ATTEMPTS} worker processes died before they started.",
            hint="Check that the machine has free memory and processes.",
            reason="start",
        )

    async def _run(self, call: WorkerCall, timeout: float | None) -> WorkerMessage:
        """Wait for a script to end; kill the worker if it does not."""
        wall_time = self._settings.limits.wall_time
        seconds = min(wall_time, timeout or wall_time)
        try:
            answer = await call.answer(seconds + SLACK + KILL_GRACE)
        except TimeoutError:
            self._held.kill()
            reason = f"it did not stop after {seconds:g} s and was killed"
            raise WorkerDied(TIMED_OUT, reason) from None
        except asyncio.CancelledError:
            await self._cancel(call)
            raise
        return self._learned(answer)

    async def _cancel(self, call: WorkerCall) -> None:
        call.cancel()
        try:
            self._learned(await call.answer(KILL_GRACE))
        except (TimeoutError, WorkerDied):
            self._held.kill()
        except asyncio.CancelledError:
            self._held.kill()
            raise

    async def _worker(self) -> WorkerProcess:
        """Return the worker, starting one from the copy if there is none."""
        self._check_open()
        async with self._starting:
            worker = self._held.worker
            if worker is not None and worker.is_usable:
                return worker
            worker = self._held.worker = await threads.run(WorkerProcess)
            try:
                answer = await worker.call(*self._start_request()).answer(START_DEADLINE)
            except BaseException as error:
                worker.kill()
                if not isinstance(error, (TimeoutError, WorkerDied)):
                    raise
                raise SandboxGone(
                    f"the worker process did not start: {error or 'no response'}.",
                    hint="Try `python -m smokebox.sandbox.virtual.worker`, or isolation='thread'.",
                    reason="start",
                ) from error
            self._learned(answer)
            return worker

    def _start_request(self) -> tuple[dict[str, Any], list[bytes]]:
        copy = self._copy or _Copy()
        header = {
            "call": "start",
            "path": sys.path,
            "resume": self._copy is not None,
            "waiting": copy.waiting,
            "cwd": copy.cwd,
            "env": copy.env,
        }
        return header, [self._options, Snapshot(image=copy.image, shell=copy.shell).encode()]

    def _learned(self, answer: WorkerMessage) -> WorkerMessage:
        """Apply the response's changes to the copy; return its result or raise its error."""
        header = answer.header
        if "changes" in header:
            self._learn(header["changes"], answer.blobs[header.get("count", 0) :])
        if header.get("lost"):
            # An abandoned script ends only with its worker.
            self._held.kill()
        if "error" in header:
            raise unpack_error(header["error"])
        return WorkerMessage(header.get("answer", {}), answer.blobs[: header.get("count", 0)])

    def _learn(self, changes: dict[str, Any], blobs: Sequence[bytes]) -> None:
        copy = self._copy or _Copy()
        image = dict(copy.image)
        for path in changes["gone"]:
            image.pop(path, None)
        image.update(unpack_nodes(changes["nodes"], blobs))
        # Sorted, so that parents precede their contents.
        ordered = dict(sorted(image.items()))
        self._copy = _Copy(ordered, changes["waiting"], cwd=changes["cwd"], env=changes["env"])

    def _obituary(self, death: WorkerDied, duration: float) -> ExecResult:
        message = (
            f"smokebox: the worker process died: {death.reason}; "
            "files are as of the last completed call\n"
        )
        late = death.exit_code == TIMED_OUT
        if late:
            message = f"smokebox: timed out: {death.reason.removeprefix('it ')}\n{message}"
        return ExecResult(
            exit_code=death.exit_code, stderr=message, timed_out=late, duration=duration
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


def _request(
    call: str, script: Script, timeout: float | None
) -> tuple[dict[str, Any], list[bytes]]:
    header = {
        "call": call,
        "command": script.command,
        "cwd": script.cwd,
        "env": dict(script.env),
        "timeout": timeout,
        "changes": True,
    }
    return header, [] if script.stdin is None else [script.stdin]


def _result(answer: WorkerMessage) -> ExecResult:
    stdout, stderr = (blob.decode() for blob in answer.blobs)
    return ExecResult(stdout=stdout, stderr=stderr, **answer.header)
