"""Our end of the process that mounts, serves or unmounts: started, told what to do, heard."""

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
from smokebox.engine.jail.zygote_jail import start_time
from smokebox.errors import ServiceUnavailable, SmokeboxError
from smokebox.runtime.pipes import readable

if TYPE_CHECKING:
    from smokebox.engine.jail.api import Jail

# A store that does not answer is given up by then.
ANSWER_SECONDS = 45.0
_MESSAGE_SIZE = 1 << 16
_MAIN = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from smokebox.engine.mounts.daemon import main
main()
"""
# What an interpreter and TLS need of our environment, which may hold credentials of ours.
_ENV = ("LD_LIBRARY_PATH", "PATH", "SSL_CERT_DIR", "SSL_CERT_FILE")


class MountDaemon:
    """The process that serves a mount, found by its number and when it started."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.started = start_time(pid)
        self._pidfd = pidfd
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(pidfd, self._end)

    @classmethod
    def find(cls, pid: int, started: int) -> MountDaemon | None:
        """One of another engine's time, if it is there."""
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return None
        if start_time(pid) != started:
            os.close(pidfd)
            return None
        return cls(pid, pidfd)

    async def wait(self) -> None:
        """Return when it has ended."""
        await self._ended.wait()

    def kill(self) -> None:
        """End it at once: what is mounted answers with an error from here on."""
        if not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Let go of it, and leave it running."""
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
            self._ended.set()

    def _end(self) -> None:
        # Nobody else does, where the engine is the first process of a container.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        self.close()


async def serve(jail: Jail, words: dict[str, object], spool: str) -> MountDaemon:
    """Have a bucket mounted and served; raises what stopped that."""
    directory = os.open(spool, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        answer = await _run(jail, {**words, "task": "mount", "spool": directory}, directory)
    finally:
        os.close(directory)
    pid = answer.get("pid")
    if not isinstance(pid, int):
        raise _broken()
    try:
        return MountDaemon(pid, os.pidfd_open(pid))
    except ProcessLookupError as error:
        raise _broken() from error


async def unmount(jail: Jail, path: str, *, lazy: bool) -> None:
    """Have what is mounted at a path be so no more; raises EBUSY as a `PathError`."""
    await _run(jail, {"task": "unmount", "path": path, "lazy": lazy})


async def _run(jail: Jail, words: dict[str, object], *fds: int) -> dict[str, object]:
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    owner = jail.owner
    with ours:
        with theirs, contextlib.ExitStack() as stack:
            user, mounts = await guest_requests.namespaces(jail)
            stack.callback(os.close, user)
            stack.callback(os.close, mounts)
            told = {
                **words,
                "user": user,
                "mounts": mounts,
                "root": jail.root,
                "mapped": owner.count > 1,
                "uid": owner.uid,
                "gid": owner.gid,
                "report": theirs.fileno(),
            }
            passed = [theirs.fileno(), user, mounts, jail.root, *fds]
            process = await asyncio.to_thread(_start, passed, json.dumps(told).encode())
        try:
            if not await readable(ours.fileno(), ANSWER_SECONDS):
                raise _broken("took too long")
            message = ours.recv(_MESSAGE_SIZE)
        finally:
            # Of a mount this is only who started it.
            if process.poll() is None:
                process.kill()
            await asyncio.to_thread(process.wait)
    if not message:
        raise _broken()
    answer: dict[str, object] = json.loads(message)
    if "code" in answer:
        raise _refusal(message)
    return answer


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


def _refusal(message: bytes) -> SmokeboxError:
    # Not before it is needed: an engine that refuses nothing needs no more than the stdlib.
    import msgspec

    from smokebox.wire.failure import Failure, error_of

    return error_of(msgspec.json.decode(message, type=Failure))


def _broken(what: str = "ended") -> ServiceUnavailable:
    return ServiceUnavailable(
        f"the process that serves a bucket {what}.", hint="Try again.", service="mount"
    )
