"""What commands on the host hang on: the helper that starts them, and their sandbox.

`SUPERVISOR_CLIENT` is our end of the helper process of `keeper`: started with the first command,
shared by all sandboxes, started again when it died. A `CommandGroup` is a sandbox's hold on
all its commands.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import socket
import subprocess
import sys
import threading
import weakref
from pathlib import Path

from smokebox.runtime import supervisor

# How long the helper's side may take to kill and to say so.
ANSWER_SECONDS = 2 * supervisor.KILL_SECONDS + 1

# What an interpreter may need to start at all; everything else stays out of its environ.
_ENV = ("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD")


class CommandGroup:
    """A sandbox's hold on its commands: when it is closed they all end.

    A pair of sockets, one end given to every minder. Shutting ours down tells them, and
    when the last of them is gone we read the end of file.
    """

    def __init__(self) -> None:
        self._ours, self.theirs = socket.socketpair()
        self._ours.setblocking(False)
        self.closed = False
        _OPEN.add(self)

    def end(self) -> None:
        """Tell all minders to kill what they have. Never blocks, safe to repeat."""
        if not self.closed:
            self.closed = True
            self.theirs.close()
            with contextlib.suppress(OSError):
                self._ours.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """`end`, and let go of the sockets."""
        self.end()
        self._ours.close()

    async def aclose(self) -> None:
        """`end`, wait for a bounded time until all are gone, and let go."""
        self.end()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await asyncio.get_running_loop().sock_recv(self._ours, 1)
        except (TimeoutError, OSError, ValueError):
            pass  # Gone already, or held by the kernel: there is nothing more to do.
        finally:
            self.close()

    def forget(self) -> None:
        """Close the sockets in a forked copy of this process; the original keeps its commands."""
        self.closed = True
        self.theirs.close()
        self._ours.close()


class SupervisorClient:
    """Our end of the helper process. Calls may come from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def hand_over(self, control: socket.socket) -> None:
        """Give one end of a control socket to a minder, or raise OSError."""
        with self._lock:
            # Minders hold the other end too, so the socket alone does not tell.
            if self._process is None or self._process.poll() is not None:
                self._stop()
                self._start()
            assert self._requests is not None
            socket.send_fds(self._requests, [b"+"], [control.fileno()])

    def stop(self) -> None:
        """Let the helper end, which waits a moment for its minders to do so."""
        with self._lock:
            self._stop()

    def forget(self) -> None:
        """Leave the helper to the process that this one was forked from."""
        self._lock = threading.Lock()
        if self._requests is not None:
            self._requests.close()
            self._requests = None
        if self._process is not None:
            # It is not our child: Popen would wait for it, or warn that nobody did.
            self._process.returncode = 0
            self._process = None

    def _start(self) -> None:
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs, contextlib.ExitStack() as stack:
            stack.callback(ours.close)
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", _script(), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd="/",
                env={name: value for name, value in os.environ.items() if name in _ENV},
                start_new_session=True,
            )
            self._requests = ours
            stack.pop_all()

    def _stop(self) -> None:
        if self._requests is not None:
            self._requests.close()
            self._requests = None
        if self._process is not None:
            try:
                self._process.wait(2 * supervisor.LEAVE_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


def _script() -> str:
    return str(Path(supervisor.__file__).with_suffix(".py"))


def _end_all() -> None:
    for group in list(_OPEN):
        group.end()
    SUPERVISOR_CLIENT.stop()


def _forget_all() -> None:
    SUPERVISOR_CLIENT.forget()
    for group in list(_OPEN):
        group.forget()


_OPEN: weakref.WeakSet[CommandGroup] = weakref.WeakSet()
SUPERVISOR_CLIENT = SupervisorClient()
atexit.register(_end_all)
os.register_at_fork(after_in_child=_forget_all)
