"""The other side of `isolation="process"`: one virtual sandbox, served over a socket.

Run as `python -m smokebox.sandbox.virtual.worker FD`. It ends when the socket does, so that
no worker outlives its parent.
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
from smokebox.sandbox.virtual.image import node_at, survey
from smokebox.sandbox.virtual.machine import Machine
from smokebox.sandbox.virtual.messages import (
    Message,
    pack_error,
    pack_nodes,
    pack_value,
    reader_of,
    receive,
)
from smokebox.sandbox.virtual.shell import Script
from smokebox.sandbox.virtual.snapshot import Snapshot
from smokebox.sandbox.virtual.threaded import ThreadSandbox
from smokebox.types import OutputChunk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from smokebox.types import ExecResult, FileInfo


class Ledger:
    """What the parent knows of the files, so that only what changed is sent."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[object, ...]] = {}

    def changes(self, machine: Machine) -> Message:
        """What is different since the last time, with contents."""
        waiting = machine.waiting
        seen = {info.path: info for info in survey(machine.root) if info.path not in waiting}
        marks = {path: _mark(info) for path, info in seen.items()}
        changed = {
            path: node_at(machine.root, info)
            for path, info in seen.items()
            if self._known.get(path) != marks[path]
        }
        gone = [path for path in self._known if path not in marks]
        self._known = marks
        packed = pack_nodes(changed)
        cwd, env = machine.place
        header = {**packed.header, "gone": gone, "waiting": waiting, "cwd": cwd, "env": env}
        return Message(header, packed.blobs)


def _mark(info: FileInfo) -> tuple[object, ...]:
    return (info.type, info.size, info.mtime, info.mode)


class Worker:
    """Answers the parent's calls, each in a task of its own."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._ledger = Ledger()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._sandbox: ThreadSandbox | None = None

    async def serve(self, group: asyncio.TaskGroup) -> None:
        """Take calls until the parent is gone, which ends the process."""
        loop = asyncio.get_running_loop()

        def take(message: Message) -> None:
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
                # No farewell: a script may be running, and nobody waits for it.
                os._exit(0)

        threading.Thread(target=read, daemon=True).start()
        await loop.create_future()

    async def _answer(self, number: int, message: Message) -> None:
        self._send(Message({"id": number, "begun": True}))
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
                changes = self._ledger.changes(self._sandbox._machine())
                header["changes"] = changes.header
                blobs = [*blobs, *changes.blobs]
        self._send(Message(header, blobs))

    async def _call(self, number: int, message: Message) -> Message:
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
                return Message({}, [await self._sandbox.snapshot()])
            case "restore":
                await self._sandbox.restore(blobs[0])
                return Message({})
            case _:
                raise InvalidOption(f"no such call: {header['call']!r}")

    def _start(self, header: dict[str, Any], blobs: Sequence[bytes]) -> Message:
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
        machine = Machine(settings, snapshot)
        if header["cwd"] is not None:
            machine.resume(header["cwd"], header["env"])
        self._sandbox = ThreadSandbox(settings, machine=machine)
        return Message({})

    async def _stream(self, number: int, message: Message) -> Message:
        assert self._sandbox is not None
        stream = self._sandbox._stream(_script(message), message.header["timeout"])
        async for item in stream:
            if not isinstance(item, OutputChunk):
                return _pack_result(item)
            chunk = {"id": number, "end": False, "stream": item.stream, "data": item.data}
            self._send(Message(chunk))
        raise AssertionError("a stream ends with a result")

    def _send(self, message: Message) -> None:
        with self._sending:
            self._connection.sendall(message.encode())


def _script(message: Message) -> Script:
    header, blobs = message.header, message.blobs
    return Script(
        command=header["command"],
        cwd=header["cwd"],
        env=header["env"],
        stdin=blobs[0] if blobs else None,
    )


def _pack_result(result: ExecResult) -> Message:
    header = {
        "exit_code": result.exit_code,
        "truncated": result.truncated,
        "timed_out": result.timed_out,
        "duration": result.duration,
    }
    return Message(header, [result.stdout.encode(), result.stderr.encode()])


async def _serve(connection: socket.socket) -> None:
    async with asyncio.TaskGroup() as group:
        await Worker(connection).serve(group)


def main() -> None:
    """Serve the socket whose number is the only argument."""
    # A crash of the engine is an answer here, not something to leave gigabytes on disk for.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    asyncio.run(_serve(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
