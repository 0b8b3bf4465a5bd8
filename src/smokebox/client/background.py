"""The server of this user, in the background: found, started when there is none, stopped.

Everything here blocks, for the command line and for threads.
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

from smokebox.client.place import short_path
from smokebox.errors import DeadlineExceeded, ServiceUnavailable
from smokebox.wire import API
from smokebox.wire.answers import Health
from smokebox.wire.codec import decode
from smokebox.wire.place import default_home, log_path, socket_path

if TYPE_CHECKING:
    from collections.abc import Iterator

IDLE_EXIT = 900.0
"""Seconds that a server which was started by itself waits for work before it ends."""

START_SECONDS = 60.0
STOP_SECONDS = 60.0
_ANSWER_SECONDS = 5.0
_POLL = 0.02
_LOG_LINES = 20
_LOCK = "start.lock"
_OWNER = "lock"
_CREDENTIALS = "3i"
_FORMER_SECONDS = 15.0
# A shell between us and the server, which is thus nobody's child, and leaves no zombie here.
_DETACH = '"$@" </dev/null >>"$0" 2>&1 & echo $!'


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A server that answers. `pid` and `uptime`, in seconds, are None where nobody can see."""

    home: str
    socket: str
    log: str
    version: str
    draining: bool
    pid: int | None
    uptime: float | None


def find(home: str | None = None) -> Status | None:
    """The server of a state directory, by default this user's, or None if nobody answers."""
    place = home or default_home()
    connection = _Connection(socket_path(place), _ANSWER_SECONDS)
    try:
        with contextlib.closing(connection):
            connection.request("GET", f"{API}/health")
            health = decode(Health, connection.getresponse().read())
    except (OSError, http.client.HTTPException, msgspec.MsgspecError):
        return None
    return Status(
        home=place,
        socket=socket_path(place),
        log=log_path(place),
        version=health.version,
        draining=health.draining,
        pid=connection.peer,
        uptime=_uptime(connection.peer),
    )


status = find


def start(home: str | None = None, *, idle_exit: float | None = IDLE_EXIT) -> Status:
    """The server of a state directory, started in the background if there is none.

    Of many who ask at once, one starts it. It ends after `idle_exit` seconds without work,
    never with None. Raises `ServiceUnavailable` with the end of its log if it cannot start.
    """
    place = home or default_home()
    if (found := _ready(place)) is not None:
        return found
    os.makedirs(place, mode=0o700, exist_ok=True)
    with _turn(place):
        found = _ready(place) or _after_former(place)
        return found or _await(place, _spawn(place, idle_exit))


def stop(home: str | None = None, *, keep: bool = False, timeout: float = STOP_SECONDS) -> bool:
    """Stop the server of a state directory; whether there was one.

    Its sandboxes sleep, or with `keep` run on for the next server. Returns once it is gone.
    """
    place = home or default_home()
    found = find(place)
    if found is None:
        return False
    asked = _ask_to_stop(place, keep=keep)
    if not asked and found.pid is not None:
        os.kill(found.pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout
    while find(place) is not None or _runs(found.pid):
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"the server of {place} did not stop in {timeout:g} s.",
                hint=f"See {log_path(place)}, or end it with `kill -9 {found.pid}`.",
                operation="stop",
                timeout=timeout,
            )
        time.sleep(_POLL)
    return True


def _ready(home: str) -> Status | None:
    """The server that is there and stays; one that is about to end is not."""
    found = find(home)
    return None if found is None or found.draining else found


@contextlib.contextmanager
def _turn(home: str) -> Iterator[None]:
    """Within the block nobody else starts a server of that directory."""
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


def _after_former(home: str) -> Status | None:
    """Wait until whoever has the state directory serves it, or has let go of it.

    A server that is about to end has closed its socket before it has put all to sleep. One
    who neither serves nor ends is left for the next server to complain of.
    """
    deadline = time.monotonic() + _FORMER_SECONDS
    while _is_taken(home) and time.monotonic() < deadline:
        if (found := _ready(home)) is not None:
            return found
        time.sleep(_POLL)
    return None


def _is_taken(home: str) -> bool:
    """Whether an engine has the state directory."""
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
    # The log is $0, for the words that follow are the server's.
    told = subprocess.run(
        ["/bin/sh", "-c", _DETACH, log_path(home), *serve],
        cwd="/",
        start_new_session=True,
        stdout=subprocess.PIPE,
        check=True,
    )
    return int(told.stdout)


def _await(home: str, pid: int) -> Status:
    deadline = time.monotonic() + START_SECONDS
    while (found := _ready(home)) is None:
        if not _runs(pid):
            raise ServiceUnavailable(
                f"the server of {home} ended as soon as it was started:\n{_last_lines(home)}",
                hint=f"Its log is {log_path(home)}; `smokebox doctor` looks for causes.",
                service="server",
            )
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            raise _too_slow(home)
        time.sleep(_POLL)
    return found


def _ask_to_stop(home: str, *, keep: bool) -> bool:
    connection = _Connection(socket_path(home), _ANSWER_SECONDS)
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
        f"the server of {home} did not answer in {START_SECONDS:g} s:\n{_last_lines(home)}",
        hint=f"Its log is {log_path(home)}.",
        service="server",
    )


def _last_lines(home: str) -> str:
    with contextlib.suppress(OSError), open(log_path(home), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - (1 << 16)))
        lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES:])
    return "(it has written nothing)"


def _runs(pid: int | None) -> bool:
    fields = _stat(pid)
    return fields is not None and fields[0] != "Z"


def _uptime(pid: int | None) -> float | None:
    fields = _stat(pid)
    if fields is None:
        return None
    began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)


def _stat(pid: int | None) -> list[str] | None:
    """What the kernel tells of a process, from its state on."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


class _Connection(http.client.HTTPConnection):
    """HTTP over a unix socket; `peer` is the process that listens on it, if one can see it."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path
        self.peer: int | None = None

    def connect(self) -> None:
        """Connect, and see who is there."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        with short_path(self._path) as path:
            self.sock.connect(path)
        size = struct.calcsize(_CREDENTIALS)
        told = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        self.peer = struct.unpack(_CREDENTIALS, told)[0] or None
