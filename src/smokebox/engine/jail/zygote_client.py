"""Our end of the zygote: started with the first jail, started again when it died."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import smokebox
from smokebox.engine.jail.namespace_setup import MESSAGE_SIZE
from smokebox.errors import ServiceUnavailable
from smokebox.runtime.supervisor import receive_fds

if TYPE_CHECKING:
    from collections.abc import Sequence

ANSWER_SECONDS = 30.0

_MAIN = """
import sys
sys.path.insert(0, sys.argv[2])
from smokebox.engine.jail.zygote import main
main()
"""
# What an interpreter may need to start at all. A jail's memory is a copy of the zygote's, so
# no variable of the engine's that could be a secret goes there.
_ENV = ("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD")


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstProcess:
    """A jail's first process: its pid, and a descriptor that stays its own."""

    pid: int
    pidfd: int


class ZygoteClient:
    """The helper process that jails are forked from. Used on one event loop."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._waiting: dict[str, asyncio.Future[FirstProcess]] = {}

    @property
    def running(self) -> bool:
        """Whether the helper is there. It is started again by the next `make`."""
        return self._process is not None and self._process.poll() is None

    async def make(self, words: dict[str, object], fds: Sequence[int]) -> FirstProcess:
        """Have a jail forked; raises OSError with what the kernel said."""
        control = self._running()
        future: asyncio.Future[FirstProcess] = asyncio.get_running_loop().create_future()
        key = str(words["key"])
        self._waiting[key] = future
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._send(control, json.dumps(words).encode(), fds)
                return await future
        except TimeoutError:
            self._stop()
            raise unavailable("does not answer") from None
        finally:
            self._waiting.pop(key, None)

    def close(self) -> None:
        """Let the helper end. What it made runs on."""
        self._stop()

    def _running(self) -> socket.socket:
        if not self.running or self._control is None:
            self._stop()
            self._start()
        assert self._control is not None
        return self._control

    def _start(self) -> None:
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs, open(_sealed_copy(sys.executable), "rb") as interpreter:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _MAIN, str(theirs.fileno()), _source()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                executable=f"/proc/self/fd/{interpreter.fileno()}",
                pass_fds=[theirs.fileno(), interpreter.fileno()],
                cwd="/",
                env=_environment(),
                start_new_session=True,
            )
        self._control = ours
        asyncio.get_running_loop().add_reader(ours, self._hear)

    def _stop(self) -> None:
        control, self._control = self._control, None
        if control is not None:
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop().remove_reader(control)
            control.close()
        process, self._process = self._process, None
        if process is not None:
            try:
                process.wait(2)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(unavailable("was stopped"))

    async def _send(self, control: socket.socket, data: bytes, fds: Sequence[int]) -> None:
        while True:
            try:
                socket.send_fds(control, [data], list(fds))
                return
            except BlockingIOError:
                await asyncio.sleep(0.001)

    def _hear(self) -> None:
        control = self._control
        assert control is not None
        try:
            message, fds = receive_fds(control, MESSAGE_SIZE, 1)
        except BlockingIOError:
            return
        except OSError:
            message, fds = b"", []
        if not message:
            self._stop()
            return
        words = json.loads(message)
        future = self._waiting.get(words["key"])
        if future is None or future.done():
            for fd in fds:
                os.close(fd)
        elif "error" in words:
            future.set_exception(OSError(words["error"], words["text"]))
        else:
            future.set_result(FirstProcess(pid=words["pid"], pidfd=fds[0]))


def _sealed_copy(path: str) -> int:
    """A program in memory that nobody can change.

    /proc/self/exe of a jail's first process leads to what it was started from, and root
    inside may be who owns that (CVE-2019-5736).
    """
    copy = os.memfd_create("smokebox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(path, "rb") as program:
        left = os.fstat(program.fileno()).st_size
        while left:
            left -= os.sendfile(copy, program.fileno(), None, left)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(copy, fcntl.F_ADD_SEALS, seals)
    return copy


def _environment() -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name in _ENV}
    # Interpreters that can be moved find their library beside themselves, and a copy has none.
    paths = (os.path.join(sys.base_prefix, "lib"), env.get("LD_LIBRARY_PATH"))
    return {**env, "LD_LIBRARY_PATH": ":".join(filter(None, paths))}


def _source() -> str:
    """The directory that `smokebox` is imported from."""
    return str(Path(smokebox.__file__).parent.parent)


def unavailable(what: str) -> ServiceUnavailable:
    """The error for a sandbox that was not made because the helper was not there."""
    return ServiceUnavailable(
        f"the process that makes sandboxes {what}.", hint="Try again.", service="engine"
    )
