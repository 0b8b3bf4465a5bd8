"""Worker process as seen by its parent."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Self, TypeVar

from smokebox.sandbox.virtual.worker_messages import (
    REPLIES,
    AnyReply,
    CallAccepted,
    CallResponse,
    CancelCall,
    ScriptOutput,
    encode,
    receive,
)

if TYPE_CHECKING:
    from smokebox.sandbox.virtual.output import ChunkQueue
    from smokebox.sandbox.virtual.worker_messages import WorkerCall

T = TypeVar("T")

_MODULE = "smokebox.sandbox.virtual.worker"
# The parent's environment may hold secrets, so only these variables are passed.
_ENVIRONMENT = ("HOME", "LANG", "LC_ALL", "LC_CTYPE", "PATH", "TMPDIR", "TZ")


class WorkerDied(Exception):
    """The worker has exited. `exit_code` is as in a shell: 128 + n for signal n."""

    def __init__(self, exit_code: int, reason: str) -> None:
        super().__init__(reason)
        self.exit_code = exit_code
        self.reason = reason

    @classmethod
    def of(cls, returncode: int) -> Self:
        """Create from a return code of `subprocess`."""
        if returncode >= 0:
            return cls(returncode or 1, f"it exited with {returncode}")
        try:
            name = signal.Signals(-returncode).name
        except ValueError:
            name = f"signal {-returncode}"
        return cls(128 - returncode, f"it was killed by {name}")


class SentCall:
    """A call that was sent to a worker."""

    def __init__(self, worker: WorkerProcess, number: int, chunks: ChunkQueue | None) -> None:
        self.chunks = chunks
        self._worker = worker
        self.number = number
        self._loop = asyncio.get_running_loop()
        self._response: asyncio.Future[CallResponse | None] = self._loop.create_future()
        self._accepted: asyncio.Future[bool] = self._loop.create_future()

    async def accepted(self, timeout: float) -> bool:
        """Return whether the worker started it; if not, nothing has happened."""
        try:
            return await asyncio.wait_for(asyncio.shield(self._accepted), timeout)
        except TimeoutError:
            return False

    async def response(self, timeout: float) -> CallResponse:
        """Return the worker's response. After `TimeoutError` it can be awaited again.

        Raises:
            WorkerDied: The worker has exited.
        """
        response = await asyncio.wait_for(asyncio.shield(self._response), timeout)
        if response is None:
            raise WorkerDied.of(self._worker.returncode)
        return response

    def cancel(self) -> None:
        """Ask the worker to cancel the call; it still responds."""
        self._worker.send(encode(CancelCall(id=self.number)))

    def accept(self) -> None:
        """Mark the call as started; from any thread."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(_resolve, self._accepted, True)

    def deliver(self, response: CallResponse | None) -> None:
        """Deliver the response, from any thread."""
        # The loop may be closed, and then there is no waiter.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(_resolve, self._accepted, False)
            self._loop.call_soon_threadsafe(_resolve, self._response, response)


def _resolve(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


class WorkerProcess:
    """Process that runs one sandbox. Creating one blocks for the duration of a fork."""

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # Ctrl-C in a terminal is meant for the parent.
                start_new_session=True,
            )
        self._numbers = itertools.count(1)
        self._calls: dict[int, SentCall] = {}
        self._guard = threading.Lock()
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._exited = False
        self._killed = False
        self._reader = threading.Thread(target=self._read, name="smokebox-worker", daemon=True)
        self._reader.start()
        threading.Thread(target=self._write, name="smokebox-worker-calls", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_usable(self) -> bool:
        """True if it accepts calls: not killed, and running."""
        return not self._killed and self._process.poll() is None

    @property
    def returncode(self) -> int:
        """Return code after its exit."""
        return self._process.returncode or 0

    def call(self, message: WorkerCall, chunks: ChunkQueue | None = None) -> SentCall:
        """Send a call; its output goes to `chunks`."""
        message.id = next(self._numbers)
        data = encode(message)
        call = SentCall(self, message.id, chunks)
        with self._guard:
            exited = self._exited
            self._calls[message.id] = call
        if exited:
            call.deliver(None)
        else:
            self.send(data)
        return call

    def send(self, data: bytes) -> None:
        """Send an encoded message without waiting; ignored if the worker has exited."""
        self._outbox.put(data)

    def kill(self) -> None:
        """Kill the process. Safe to repeat."""
        self._killed = True
        with suppress(OSError):
            self._process.kill()

    def join(self, timeout: float) -> None:
        """Wait until it has exited and all callers were notified."""
        self._reader.join(timeout)

    def _read(self) -> None:
        # After anything but a valid message the worker is not used again.
        with suppress(Exception):
            while True:
                self._receive(receive(self._connection, REPLIES))
        self.kill()
        self._outbox.put(None)
        self._process.wait()
        with self._guard:
            self._exited = True
            calls = list(self._calls.values())
        self._connection.close()
        for call in calls:
            call.deliver(None)

    def _write(self) -> None:
        # A worker that does not read must not block the sender.
        with suppress(OSError):
            while (data := self._outbox.get()) is not None:
                self._connection.sendall(data)

    def _receive(self, reply: AnyReply) -> None:
        call = self._calls.get(reply.id)
        if call is None:
            return
        match reply:
            case CallAccepted():
                call.accept()
            case ScriptOutput():
                if call.chunks is not None:
                    call.chunks.put(reply.chunk)
            case CallResponse():
                with self._guard:
                    del self._calls[reply.id]
                call.deliver(reply)


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
