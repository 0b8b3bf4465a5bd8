"""Worker process of `isolation="process"`: serves one virtual sandbox over a socket.

Run as `python -m smokebox.sandbox.virtual.worker FD`. It exits when the socket closes, so that no
worker outlives its parent.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import resource
import socket
import sys
import threading
from typing import TYPE_CHECKING

from smokebox.errors import InvalidOption
from smokebox.sandbox.virtual.shell import Script
from smokebox.sandbox.virtual.snapshot import Snapshot, node_at, walk_entries
from smokebox.sandbox.virtual.state import SandboxState
from smokebox.sandbox.virtual.thread_sandbox import ThreadSandbox
from smokebox.sandbox.virtual.worker_messages import (
    CALLS,
    AnyCall,
    CallAccepted,
    CallFiles,
    CallResponse,
    CancelCall,
    RestoreSnapshot,
    RunScript,
    ScriptOutput,
    StartWorker,
    StateChanges,
    TakeSnapshot,
    WorkerReply,
    encode,
    pack_error,
    receive,
)
from smokebox.types import ExecResult

if TYPE_CHECKING:
    from smokebox.types import FileInfo

_CHANGING = frozenset({"write", "mkdir", "remove"})


class ChangeTracker:
    """Files that the parent already has, so that only changes are sent."""

    def __init__(self) -> None:
        self._sent: dict[str, tuple[object, ...]] = {}

    def changes(self, state: SandboxState) -> StateChanges:
        """Return the changes since the last call, with contents."""
        unloaded = state.unloaded
        entries = {one.path: one for one in walk_entries(state.root) if one.path not in unloaded}
        versions = {path: _version(info) for path, info in entries.items()}
        nodes = {
            path: node_at(state.root, info)
            for path, info in entries.items()
            if self._sent.get(path) != versions[path]
        }
        removed = [path for path in self._sent if path not in versions]
        self._sent = versions
        cwd, env = state.cwd_and_env
        return StateChanges(nodes=nodes, removed=removed, unloaded=unloaded, cwd=cwd, env=env)


def _version(info: FileInfo) -> tuple[object, ...]:
    return (info.type, info.size, info.mtime, info.mode)


class Worker:
    """Serves the parent's calls, each in its own task."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._tracker = ChangeTracker()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._sandbox: ThreadSandbox | None = None

    async def serve(self, group: asyncio.TaskGroup) -> None:
        """Serve calls until the parent closes the socket, then exit."""
        loop = asyncio.get_running_loop()

        def accept(call: AnyCall) -> None:
            if not isinstance(call, CancelCall):
                self._tasks[call.id] = group.create_task(self._serve_call(call))
            elif call.id in self._tasks:
                self._tasks[call.id].cancel()

        def read() -> None:
            try:
                while True:
                    loop.call_soon_threadsafe(accept, receive(self._connection, CALLS))
            except (EOFError, OSError, ValueError):
                # Exit at once: a script may be running, and its result is no longer needed.
                os._exit(0)

        threading.Thread(target=read, daemon=True).start()
        await loop.create_future()

    async def _serve_call(self, call: AnyCall) -> None:
        self._send(CallAccepted(id=call.id))
        response = CallResponse(id=call.id)
        try:
            response.result = await self._call(call)
        except asyncio.CancelledError:
            pass
        except Exception as error:
            response.error = pack_error(error)
        finally:
            self._tasks.pop(call.id, None)
        if self._sandbox is not None:
            response.abandoned = self._sandbox.has_abandoned_script
            reads = isinstance(call, CallFiles) and call.operation not in _CHANGING
            if not reads and not isinstance(call, StartWorker):
                response.changes = self._tracker.changes(self._sandbox._get_state())
        self._send(response)

    async def _call(self, call: AnyCall) -> object:
        if isinstance(call, StartWorker):
            self._start(call)
            return None
        assert self._sandbox is not None
        match call:
            case RunScript():
                return await self._run(call)
            case CallFiles():
                return await self._sandbox._call_files(
                    call.operation,  # type: ignore[arg-type]
                    *call.arguments,
                    **call.options,
                )
            case TakeSnapshot():
                return await self._sandbox.snapshot()
            case RestoreSnapshot():
                await self._sandbox.restore(call.snapshot)
        return None

    def _start(self, call: StartWorker) -> None:
        sys.path[:] = [os.fsdecode(entry) for entry in call.path]
        try:
            settings = pickle.loads(call.settings)
        except Exception as error:
            raise InvalidOption(
                f"an option cannot be loaded in the worker process: {error}",
                hint="Define functions at the top of a module that can be imported, "
                "not in the main script, or use isolation='thread'.",
            ) from error
        before, snapshot = call.state, None
        if before is not None:
            snapshot = Snapshot(image=before.image, shell=before.shell, unloaded=before.unloaded)
        state = SandboxState(settings, snapshot)
        if before is not None and before.cwd is not None:
            state.resume(before.cwd, before.env)
        self._sandbox = ThreadSandbox(settings, state=state)

    async def _run(self, call: RunScript) -> ExecResult:
        assert self._sandbox is not None
        script = Script(command=call.command, cwd=call.cwd, env=call.env, stdin=call.stdin)
        if not call.streamed:
            return await self._sandbox._exec(script, call.timeout)
        async for item in self._sandbox._stream(script, call.timeout):
            if isinstance(item, ExecResult):
                return item
            self._send(ScriptOutput(id=call.id, chunk=item))
        raise AssertionError("a stream ends with a result")

    def _send(self, reply: WorkerReply) -> None:
        data = encode(reply)
        with self._sending:
            self._connection.sendall(data)


async def _serve(connection: socket.socket) -> None:
    async with asyncio.TaskGroup() as group:
        await Worker(connection).serve(group)


def main() -> None:
    """Serve the socket whose descriptor is the only argument."""
    # A crash of bashkit is expected here: do not dump gigabytes of core to disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    asyncio.run(_serve(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
