"""Client of the helper process that starts commands, and the running commands of a sandbox.

`SUPERVISOR_CLIENT` is started with the first command, shared by all sandboxes of this Python
process, and restarted when it died.
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

from smokebox.runtime import supervisor

# Time for a supervisor to kill its processes and to confirm it.
RESPONSE_SECONDS = 2 * supervisor.KILL_SECONDS + 1

# Variables that an interpreter may need to start; nothing else is passed on.
_ENV = ("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD")


class RunningCommands:
    """The running commands of one sandbox. Closing it kills them all.

    It is a pair of sockets; every supervisor holds `supervisor_end`. Shutting down our end
    notifies them, and it reads end of file once the last of them is gone.
    """

    def __init__(self) -> None:
        self._end, self.supervisor_end = socket.socketpair()
        self._end.setblocking(False)
        self.closed = False
        _OPEN.add(self)

    def kill_all(self) -> None:
        """Make all supervisors kill their processes. Never blocks, safe to repeat."""
        if not self.closed:
            self.closed = True
            self.supervisor_end.close()
            with contextlib.suppress(OSError):
                self._end.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Kill all commands without waiting for them."""
        self.kill_all()
        self._end.close()

    async def aclose(self) -> None:
        """Kill all commands, and wait up to `RESPONSE_SECONDS` until they are gone."""
        self.kill_all()
        try:
            async with asyncio.timeout(RESPONSE_SECONDS):
                await asyncio.get_running_loop().sock_recv(self._end, 1)
        except (TimeoutError, OSError, ValueError):
            pass  # Already gone, or stuck in the kernel.
        finally:
            self.close()

    def close_after_fork(self) -> None:
        """Close the sockets in a forked copy of this process; the original keeps its commands."""
        self.closed = True
        self.supervisor_end.close()
        self._end.close()


class SupervisorClient:
    """Client of the helper process. Calls may come from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def send(self, control: socket.socket) -> None:
        """Send one end of a control socket to a supervisor, or raise OSError."""
        with self._lock:
            # Supervisors hold the other end too, so the socket alone does not show it.
            if self._process is None or self._process.poll() is not None:
                self._stop()
                self._start()
            assert self._requests is not None
            socket.send_fds(self._requests, [b"+"], [control.fileno()])

    def stop(self) -> None:
        """Stop the helper process, which waits a moment for its supervisors."""
        with self._lock:
            self._stop()

    def release_after_fork(self) -> None:
        """Leave the helper process to the process that this one was forked from."""
        self._lock = threading.Lock()
        if self._requests is not None:
            self._requests.close()
            self._requests = None
        if self._process is not None:
            # It is not our child: Popen would wait for it, or warn that it was not waited for.
            self._process.returncode = 0
            self._process = None

    def _start(self) -> None:
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs, contextlib.ExitStack() as stack:
            stack.callback(ours.close)
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", supervisor.__file__, str(theirs.fileno())],
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
                self._process.wait(2 * supervisor.SHUTDOWN_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


def _stop_at_exit() -> None:
    for commands in list(_OPEN):
        commands.kill_all()
    SUPERVISOR_CLIENT.stop()


def _release_after_fork() -> None:
    SUPERVISOR_CLIENT.release_after_fork()
    for commands in list(_OPEN):
        commands.close_after_fork()


_OPEN: weakref.WeakSet[RunningCommands] = weakref.WeakSet()
SUPERVISOR_CLIENT = SupervisorClient()
atexit.register(_stop_at_exit)
os.register_at_fork(after_in_child=_release_after_fork)
