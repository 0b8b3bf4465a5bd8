"""The user's server in the background: find, start and stop it.

Everything here blocks: for the command line and for threads.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from smokebox.client.address import short_socket_path
from smokebox.errors import DeadlineExceeded, ServiceUnavailable
from smokebox.foundation.endpoint import default_home, log_path, socket_path
from smokebox.wire import API
from smokebox.wire.codec import decode
from smokebox.wire.responses import Health

if TYPE_CHECKING:
    from collections.abc import Iterator

IDLE_EXIT = 900.0
"""Idle seconds after which a server that was started automatically exits."""

START_SECONDS = 60.0
STOP_SECONDS = 60.0
_RESPONSE_SECONDS = 5.0
_POLL = 0.02
_LOG_LINES = 20
_LOCK = "start.lock"
_OWNER = "lock"
_CREDENTIALS = "3i"
_OWNER_SECONDS = 15.0
# A shell in between makes the server an orphan, so that it leaves no zombie in this process.
_DETACH = '"$@" </dev/null >>"$0" 2>&1 & echo $!'


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """A running server. `pid` and `uptime` (in seconds) are None if they cannot be read."""

    home: str
    socket: str
    log: str
    version: str
    draining: bool
    pid: int | None
    uptime: float | None


def find(home: str | None = None) -> ServerStatus | None:
    """Return the server of a state directory, by default the user's; None if none responds."""
    home = home or default_home()
    connection = _Connection(socket_path(home), _RESPONSE_SECONDS)
    try:
        with contextlib.closing(connection):
            connection.request("GET", f"{API}/health")
            health = decode(Health, connection.getresponse().read())
    except (OSError, http.client.HTTPException, msgspec.MsgspecError):
        return None
    return ServerStatus(
        home=home,
        socket=socket_path(home),
        log=log_path(home),
        version=health.version,
        draining=health.draining,
        pid=connection.peer,
        uptime=_uptime(connection.peer),
    )


def start(home: str | None = None, *, idle_exit: float | None = IDLE_EXIT) -> ServerStatus:
    """Return the server of a state directory; start it in the background if needed.

    Of several concurrent callers, one starts it.

    Args:
        home: State directory, by default the user's.
        idle_exit: Seconds without work after which it exits; None for never.

    Raises:
        ServiceUnavailable: It cannot start. The message has the end of its log.
    """
    home = home or default_home()
    if (server := _ready(home)) is not None:
        return server
    os.makedirs(home, mode=0o700, exist_ok=True)
    with _start_lock(home):
        server = _ready(home) or _wait_for_owner(home)
        return server or _wait_until_ready(home, _spawn(home, idle_exit))


def stop(home: str | None = None, *, keep: bool = False, timeout: float = STOP_SECONDS) -> bool:
    """Stop the server of a state directory, and wait until it has exited.

    Args:
        home: State directory, by default the user's.
        keep: Leave sandboxes running for the next server; otherwise they sleep.
        timeout: Seconds to wait.

    Returns:
        False if no server was running.

    Raises:
        DeadlineExceeded: It did not exit within `timeout` seconds.
    """
    home = home or default_home()
    server = find(home)
    if server is None:
        return False
    accepted = _request_stop(home, keep=keep)
    if not accepted and server.pid is not None:
        os.kill(server.pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout
    while find(home) is not None or _is_running(server.pid):
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"the server of {home} did not stop within {timeout:g} s.",
                hint=f"See {log_path(home)}, or kill it: kill -9 {server.pid}.",
                operation="stop",
                timeout=timeout,
            )
        time.sleep(_POLL)
    return True


def _ready(home: str) -> ServerStatus | None:
    """Return the running server, unless it is shutting down."""
    server = find(home)
    return None if server is None or server.draining else server


@contextlib.contextmanager
def _start_lock(home: str) -> Iterator[None]:
    """Hold the lock for starting a server of that directory."""
    with open(os.path.join(home, _LOCK), "ab") as file:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise _too_slow(home) from None
            time.sleep(_POLL)
        yield


def _wait_for_owner(home: str) -> ServerStatus | None:
    """Wait until the current owner of the state directory serves it or releases it.

    A server that shuts down closes its socket before all its sandboxes sleep. An owner that
    neither serves nor exits is reported by the next server.
    """
    deadline = time.monotonic() + _OWNER_SECONDS
    while _is_owned(home) and time.monotonic() < deadline:
        if (server := _ready(home)) is not None:
            return server
        time.sleep(_POLL)
    return None


def _is_owned(home: str) -> bool:
    """Return whether an engine owns the state directory."""
    try:
        with open(os.path.join(home, _OWNER), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _spawn(home: str, idle_exit: float | None) -> int:
    serve = [sys.executable, "-m", "smokebox", "serve", "--home", home, "--no-tcp"]
    if idle_exit is not None:
        serve += ["--idle-exit", f"{idle_exit:g}"]
    log = os.open(log_path(home), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        # One that an earlier version created may be readable for others.
        os.fchmod(log, 0o600)
    finally:
        os.close(log)
    # The log is $0; the words after it are the command of the server.
    started = subprocess.run(
        ["/bin/sh", "-c", _DETACH, log_path(home), *serve],
        cwd="/",
        start_new_session=True,
        stdout=subprocess.PIPE,
        check=True,
    )
    return int(started.stdout)


def _wait_until_ready(home: str, pid: int) -> ServerStatus:
    deadline = time.monotonic() + START_SECONDS
    while (server := _ready(home)) is None:
        if not _is_running(pid):
            raise ServiceUnavailable(
                f"the server of {home} exited during its start:\n{_last_lines(home)}",
                hint=f"Its log is {log_path(home)}; `smokebox doctor` checks this machine.",
                service="server",
            )
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            raise _too_slow(home)
        time.sleep(_POLL)
    return server


def _request_stop(home: str, *, keep: bool) -> bool:
    connection = _Connection(socket_path(home), _RESPONSE_SECONDS)
    body = msgspec.json.encode({"sandboxes": "keep" if keep else "sleep"})
    try:
        with contextlib.closing(connection):
            headers = {"content-type": "application/json"}
            connection.request("POST", f"{API}/shutdown", body, headers)
            return connection.getresponse().status < 300
    except (OSError, http.client.HTTPException):
        return False


def _too_slow(home: str) -> ServiceUnavailable:
    return ServiceUnavailable(
        f"the server of {home} did not respond within {START_SECONDS:g} s:\n{_last_lines(home)}",
        hint=f"Its log is {log_path(home)}.",
        service="server",
    )


def _last_lines(home: str) -> str:
    with contextlib.suppress(OSError), open(log_path(home), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - (1 << 16)))
        lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES:])
    return "(its log is empty)"


def _is_running(pid: int | None) -> bool:
    fields = _stat(pid)
    return fields is not None and fields[0] != "Z"


def _uptime(pid: int | None) -> float | None:
    fields = _stat(pid)
    if fields is None:
        return None
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)


def _stat(pid: int | None) -> list[str] | None:
    """Return the fields of /proc/PID/stat, from the state on."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


class _Connection(http.client.HTTPConnection):
    """HTTP over a unix socket. `peer` is the pid of the listening process, if visible."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path
        self.peer: int | None = None

    def connect(self) -> None:
        """Connect, and read the credentials of the peer."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        with short_socket_path(self._path) as path:
            self.sock.connect(path)
        size = struct.calcsize(_CREDENTIALS)
        credentials = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        self.peer = struct.unpack(_CREDENTIALS, credentials)[0] or None
