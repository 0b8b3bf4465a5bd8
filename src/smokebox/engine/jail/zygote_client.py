"""Client of the zygote, which is started with the first jail and restarted when it died."""

from __future__ import annotations

import asyncio
import contextlib
import errno
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
from smokebox.engine.jail.namespace_setup import IN_FILE, MESSAGE_SIZE
from smokebox.errors import AccessDenied, IsolationUnavailable, ServiceUnavailable, SmokeboxError
from smokebox.runtime.supervisor import receive_fds

if TYPE_CHECKING:
    from collections.abc import Sequence

# Longest time without any response: a request also waits for those before it, of all tenants.
RESPONSE_SECONDS = 30.0

_MAIN = """
import sys
sys.path.insert(0, sys.argv[2])
from smokebox.engine.jail.zygote import main
main()
"""
# Variables that an interpreter may need to start. A jail's memory is a copy of the zygote's, so
# no variable of the engine that could be a secret is passed on.
_ENV = ("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD")


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstProcess:
    """The first process of a jail: its pid, and a pidfd, which a reused pid does not affect."""

    pid: int
    pidfd: int


class ZygoteClient:
    """Client of the process that jails are forked from. Used on one event loop."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._pending: dict[str, asyncio.Future[FirstProcess]] = {}
        self._limits: set[asyncio.Timeout] = set()

    @property
    def running(self) -> bool:
        """True if the zygote runs. The next `fork` restarts it."""
        return self._process is not None and self._process.poll() is None

    async def fork(self, request: dict[str, object], fds: Sequence[int]) -> FirstProcess:
        """Fork a jail. Raises OSError with the error of the kernel."""
        control = self._connect()
        future: asyncio.Future[FirstProcess] = asyncio.get_running_loop().create_future()
        key = str(request["key"])
        self._pending[key] = future
        try:
            async with asyncio.timeout(RESPONSE_SECONDS) as limit:
                self._limits.add(limit)
                try:
                    await self._send(control, json.dumps(request).encode(), fds)
                    return await future
                finally:
                    self._limits.discard(limit)
        except TimeoutError:
            self.close()
            raise unavailable("does not respond") from None
        finally:
            self._pending.pop(key, None)

    def close(self) -> None:
        """Stop the zygote. Its jails keep running."""
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
        for future in self._pending.values():
            if not future.done():
                future.set_exception(unavailable("was stopped"))

    def _connect(self) -> socket.socket:
        if self._control is not None and self.running:
            return self._control
        self.close()
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            with theirs, open(_sealed_copy(sys.executable), "rb") as interpreter:
                self._process = _start(theirs, interpreter.fileno())
        except OSError as error:
            ours.close()
            raise _start_error(error) from error
        self._control = ours
        asyncio.get_running_loop().add_reader(ours, self._receive)
        return ours

    async def _send(self, control: socket.socket, data: bytes, fds: Sequence[int]) -> None:
        with contextlib.ExitStack() as stack:
            if len(data) > MESSAGE_SIZE:
                file = _file_in_memory(data)
                stack.callback(os.close, file)
                data, fds = IN_FILE, [*fds, file]
            while True:
                try:
                    socket.send_fds(control, [data], list(fds))
                    return
                except BlockingIOError:
                    await asyncio.sleep(0.001)

    def _receive(self) -> None:
        control = self._control
        assert control is not None
        try:
            message, fds = receive_fds(control, MESSAGE_SIZE, 1)
        except BlockingIOError:
            return
        except OSError:
            message, fds = b"", []
        if not message:
            self.close()
            return
        later = asyncio.get_running_loop().time() + RESPONSE_SECONDS
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(later)
        response = json.loads(message)
        future = self._pending.get(response["key"])
        if future is None or future.done():
            for fd in fds:
                os.close(fd)
        elif "error" in response:
            future.set_exception(OSError(response["error"], response["text"]))
        else:
            future.set_result(FirstProcess(pid=response["pid"], pidfd=fds[0]))


def _file_in_memory(data: bytes) -> int:
    fd = os.memfd_create("smokebox", os.MFD_CLOEXEC)
    while data:
        data = data[os.write(fd, data) :]
    return fd


def _start(control: socket.socket, interpreter: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _MAIN, str(control.fileno()), _source()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        executable=f"/proc/self/fd/{interpreter}",
        pass_fds=[control.fileno(), interpreter],
        cwd="/",
        env=_environment(),
        start_new_session=True,
    )


def _start_error(error: OSError) -> SmokeboxError:
    """Return the error for a zygote that could not be started."""
    if isinstance(error, PermissionError):
        return AccessDenied(
            sys.executable,
            f"this user cannot read the Python interpreter {sys.executable}, of which every "
            "sandbox needs a copy",
            hint="Allow it with `chmod a+r` as the owner of that file, or run Smokebox with "
            "another Python.",
        )
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM):
        return ServiceUnavailable(
            f"this host has no room for another sandbox: {error.strerror}.",
            hint="Destroy sandboxes that are not needed, or raise `ulimit -n` and `ulimit -u`.",
            service="kernel",
        )
    return IsolationUnavailable(
        f"the process that creates sandboxes cannot be started from {sys.executable}: {error}.",
        hint="Run `smokebox doctor`.",
        tier="namespaces",
    )


def _sealed_copy(path: str) -> int:
    """Copy a program to memory that no process can change.

    /proc/self/exe of a jail's first process leads to the file that it was started from, and root
    inside may own that file (CVE-2019-5736).
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
    # Relocatable interpreters find their library beside themselves, and a copy has none there.
    paths = (os.path.join(sys.base_prefix, "lib"), env.get("LD_LIBRARY_PATH"))
    return {**env, "LD_LIBRARY_PATH": ":".join(filter(None, paths))}


def _source() -> str:
    """Return the directory that `smokebox` is imported from."""
    return str(Path(smokebox.__file__).parent.parent)


def unavailable(what: str) -> ServiceUnavailable:
    """Return the error for a sandbox that was not created because of the zygote."""
    return ServiceUnavailable(
        f"the process that creates sandboxes {what}.", hint="Try again.", service="engine"
    )
