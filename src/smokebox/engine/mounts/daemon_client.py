"""Client of the mount daemon: starts the process that mounts and serves, or unmounts, a bucket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

from smokebox.engine.jail import guest_requests
from smokebox.engine.jail.jail import start_time
from smokebox.errors import ServiceUnavailable, SmokeboxError
from smokebox.runtime.pipes import readable

if TYPE_CHECKING:
    from smokebox.engine.jail.jail import Jail

# Includes the first request to the store.
RESPONSE_SECONDS = 45.0
_MESSAGE_SIZE = 1 << 16
_MAIN = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from smokebox.engine.mounts.daemon import main
main()
"""
# Variables for the interpreter and TLS. The others may hold credentials.
_ENV = ("LD_LIBRARY_PATH", "PATH", "SSL_CERT_DIR", "SSL_CERT_FILE")


class MountDaemon:
    """The process that serves a mount, identified by its pid and start time."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.started = start_time(pid)
        self._pidfd = pidfd
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(pidfd, self._reap)

    @classmethod
    def find(cls, pid: int, started: int) -> MountDaemon | None:
        """Return a daemon that another engine started, if it still runs."""
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return None
        if start_time(pid) != started:
            os.close(pidfd)
            return None
        return cls(pid, pidfd)

    async def wait(self) -> None:
        """Wait for its end."""
        await self._ended.wait()

    def kill(self) -> None:
        """Kill it. Access to the mount fails with an error from then on."""
        if not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Release the descriptor, and leave it running."""
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
            self._ended.set()

    def _reap(self) -> None:
        # It is our child if the engine is the first process of a container.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        self.close()


async def serve(jail: Jail, fields: dict[str, object], spool: str) -> MountDaemon:
    """Mount a bucket and start its daemon. Raises the error of the daemon."""
    directory = os.open(spool, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        reply = await _run(jail, {**fields, "task": "mount", "spool": directory}, directory)
    finally:
        os.close(directory)
    pid = reply.get("pid")
    if not isinstance(pid, int):
        raise _failed()
    try:
        return MountDaemon(pid, os.pidfd_open(pid))
    except ProcessLookupError as error:
        raise _failed() from error


async def unmount(jail: Jail, path: str, *, lazy: bool) -> None:
    """Unmount a path. Raises `Conflict` while it is in use, unless `lazy`."""
    await _run(jail, {"task": "unmount", "path": path, "lazy": lazy})


async def _run(jail: Jail, fields: dict[str, object], *fds: int) -> dict[str, object]:
    """Start a process for one task and return its reply."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    owner = jail.owner
    with ours:
        with theirs, contextlib.ExitStack() as stack:
            user, mounts = await guest_requests.namespaces(jail)
            stack.callback(os.close, user)
            stack.callback(os.close, mounts)
            message = {
                **fields,
                "user_namespace": user,
                "mount_namespace": mounts,
                "root": jail.root,
                "mapped": owner.count > 1,
                "uid": owner.uid,
                "gid": owner.gid,
                "reply": theirs.fileno(),
            }
            passed = [theirs.fileno(), user, mounts, jail.root, *fds]
            process = await asyncio.to_thread(_start, passed, json.dumps(message).encode())
        try:
            if not await readable(ours.fileno(), RESPONSE_SECONDS):
                raise _failed("took too long")
            data = ours.recv(_MESSAGE_SIZE)
        finally:
            # A daemon is a child of this process and lives on.
            if process.poll() is None:
                process.kill()
            await asyncio.to_thread(process.wait)
    if not data:
        raise _failed()
    reply: dict[str, object] = json.loads(data)
    if "code" in reply:
        raise _decode_error(data)
    return reply


def _start(passed: list[int], message: bytes) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _MAIN, json.dumps(sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=passed,
        cwd="/",
        env={name: value for name, value in os.environ.items() if name in _ENV},
        start_new_session=True,
    )
    assert process.stdin is not None
    with process.stdin as stdin, contextlib.suppress(BrokenPipeError):
        stdin.write(message)
    return process


def _decode_error(data: bytes) -> SmokeboxError:
    # Imported here: without errors the engine needs only the standard library for this.
    import msgspec

    from smokebox.wire.failure import Failure, error_of

    return error_of(msgspec.json.decode(data, type=Failure))


def _failed(what: str = "ended") -> ServiceUnavailable:
    return ServiceUnavailable(
        f"the process that serves a bucket {what}.", hint="Try again.", service="mount"
    )
