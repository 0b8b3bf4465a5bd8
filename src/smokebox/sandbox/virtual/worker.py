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
from typing import TYPE_CHECKING, Any

from smokebox.errors import InvalidOption
from smokebox.sandbox.virtual.shell import Script
from smokebox.sandbox.virtual.snapshot import Snapshot, node_at, survey
from smokebox.sandbox.virtual.state import SandboxState
from smokebox.sandbox.virtual.thread_sandbox import ThreadSandbox
from smokebox.sandbox.virtual.worker_messages import (
    WorkerMessage,
    pack_error,
    pack_nodes,
    pack_value,
    reader_of,
    receive,
)
from smokebox.types import OutputChunk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from smokebox.types import ExecResult, FileInfo


class ChangeTracker:
    """Files that the parent already has, so that only changes are sent."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[object, ...]] = {}

    def changes(self, state: SandboxState) -> WorkerMessage:
        """Return the changes since the last call, with contents."""
        waiting = state.waiting
        seen = {info.path: info for info in survey(state.root) if info.path not in waiting}
        marks = {path: _mark(info) for path, info in seen.items()}
        changed = {
            path: node_at(state.root, info)
            for path, info in seen.items()
            if self._known.get(path) != marks[path]
        }
        gone = [path for path in self._known if path not in marks]
        self._known = marks
        packed = pack_nodes(changed)
        cwd, env = state.place
        header = {**packed.header, "gone": gone, "waiting": waiting, "cwd": cwd, "env": env}
        return WorkerMessage(header, packed.blobs)


def _mark(info: FileInfo) -> tuple[object, ...]:
    return (info.type, info.size, info.mtime, info.mode)


class Worker:
    """Serves the parent's calls, each in its own task."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._ledger = ChangeTracker()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._sandbox: ThreadSandbox | None = None

    async def serve(self, group: asyncio.TaskGroup) -> None:
        """Serve calls until the parent closes the socket, then exit."""
        loop = asyncio.get_running_loop()

        def take(message: WorkerMessage) -> None:
            number = message.header["id"]
            if message.header["call"] == "cancel":
                if number in self._tasks:
                    self._tasks[number].cancel()
                return
            self._tasks[number] = group.create_task(self._answer(number, message))

        def read() -> None:
            read_exactly = reader_of(self._connection)
            try:
                while True:
                    loop.call_soon_threadsafe(take, receive(read_exactly))
            except (EOFError, OSError, ValueError):
                # Exit at once: a script may be running, and its result is no longer needed.
                os._exit(0)

        threading.Thread(target=read, daemon=True).start()
        await loop.create_future()

    async def _answer(self, number: int, message: WorkerMessage) -> None:
        self._send(WorkerMessage({"id": number, "begun": True}))
        header: dict[str, Any] = {"id": number, "end": True}
        blobs: Sequence[bytes] = ()
        try:
            answer = await self._call(number, message)
            header |= {"answer": answer.header, "count": len(answer.blobs)}
            blobs = answer.blobs
        except asyncio.CancelledError:
            header["cancelled"] = True
        except Exception as error:
            header["error"] = pack_error(error)
        finally:
            self._tasks.pop(number, None)
        if self._sandbox is not None:
            header["lost"] = self._sandbox.has_left_behind
            if message.header.get("changes"):
                changes = self._ledger.changes(self._sandbox._get_state())
                header["changes"] = changes.header
                blobs = [*blobs, *changes.blobs]
        self._send(WorkerMessage(header, blobs))

    async def _call(self, number: int, message: WorkerMessage) -> WorkerMessage:
        header, blobs = message.header, message.blobs
        if header["call"] == "start":
            return self._start(header, blobs)
        assert self._sandbox is not None
        match header["call"]:
            case "exec":
                return _pack_result(await self._sandbox._exec(_script(message), header["timeout"]))
            case "stream":
                return await self._stream(number, message)
            case "files":
                value = await self._sandbox._on_files(
                    header["operation"], *header["arguments"], *blobs, **header["options"]
                )
                return pack_value(value)
            case "snapshot":
                return WorkerMessage({}, [await self._sandbox.snapshot()])
            case "restore":
                await self._sandbox.restore(blobs[0])
                return WorkerMessage({})
            case _:
                raise InvalidOption(f"no such call: {header['call']!r}")

    def _start(self, header: dict[str, Any], blobs: Sequence[bytes]) -> WorkerMessage:
        sys.path[:] = header["path"]
        try:
            settings = pickle.loads(blobs[0])
        except Exception as error:
            raise InvalidOption(
                f"an option cannot be loaded in the worker process: {error}",
                hint="Define functions at the top of a module that can be imported, "
                "not in the main script, or use isolation='thread'.",
            ) from error
        snapshot = None
        if header["resume"]:
            decoded = Snapshot.decode(blobs[1])
            snapshot = Snapshot(image=decoded.image, shell=decoded.shell, waiting=header["waiting"])
        state = SandboxState(settings, snapshot)
        if header["cwd"] is not None:
            state.resume(header["cwd"], header["env"])
        self._sandbox = ThreadSandbox(settings, state=state)
        return WorkerMessage({})

    async def _stream(self, number: int, message: WorkerMessage) -> WorkerMessage:
        assert self._sandbox is not None
        stream = self._sandbox._stream(_script(message), message.header["timeout"])
        async for item in stream:
            if not isinstance(item, OutputChunk):
                return _pack_result(item)
            chunk = {"id": number, "end": False, "stream": item.stream, "data": item.data}
            self._send(WorkerMessage(chunk))
        raise AssertionError("a stream ends with a result")

    def _send(self, message: WorkerMessage) -> None:
        with self._sending:
            self._connection.sendall(message.encode())


def _script(message: WorkerMessage) -> Script:
    header, blobs = message.header, message.blobs
    return Script(
        command=header["command"],
        cwd=header["cwd"],
        env=header["env"],
        stdin=blobs[0] if blobs else None,
    )


def _pack_result(result: ExecResult) -> WorkerMessage:
    header = {
        "exit_code": result.exit_code,
        "truncated": result.truncated,
        "timed_out": result.timed_out,
        "duration": result.duration,
    }
    return WorkerMessage(header, [result.stdout.encode(), result.stderr.encode()])


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
