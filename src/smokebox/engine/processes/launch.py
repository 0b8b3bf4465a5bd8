"""Start of a background process: its files, its stdin pipe and the request to the guest init."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
from typing import TYPE_CHECKING

from smokebox.engine.jail import guest_init, guest_requests
from smokebox.engine.processes.lifetime import is_locked, parse_exit_file, read_exit_file
from smokebox.engine.processes.logs import SUFFIXES
from smokebox.engine.run import send_request
from smokebox.errors import SandboxGone, Unsupported, from_os_error
from smokebox.foundation.text import encode_option
from smokebox.runtime import supervisor
from smokebox.runtime.pipes import writable

if TYPE_CHECKING:
    from smokebox.engine.processes.lifetime import ExitRecord
    from smokebox.engine.run import Program, Run

EXIT, STDIN = ".exit", ".in"

_CREATE = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_POLL_SECONDS = 0.01
# Interval in which a blocked write checks whether the process ended.
_WRITE_POLL_SECONDS = 0.1
_MAX_RESPONSE = 64


async def launch(
    run: Run, program: Program, stem: str, *, stdin: bool, timeout: float | None
) -> ExitRecord:
    """Create the files that begin with `stem`, and start the program with them.

    When it raises, the program may have started: call `kill_started`.
    """
    rate = b"%d" % (run.limits.output_rate or 0)
    request = program.pack(guest_init.START + b"\0" + rate, timeout=timeout)
    with contextlib.ExitStack() as stack:
        try:
            fds = _create_files(stem, stack, stdin=stdin)
        except OSError as error:
            raise from_os_error(error, stem) from error
        control = stack.enter_context(await run.jail.connect())
        try:
            async with asyncio.timeout(guest_requests.RESPONSE_SECONDS):
                await send_request(control, request, fds)
                response = await asyncio.get_running_loop().sock_recv(control, _MAX_RESPONSE)
        except (TimeoutError, OSError) as error:
            raise SandboxGone(
                f"the guest init of sandbox {run.id} does not respond.",
                hint="Start the process again.",
                reason="guest init unresponsive",
            ) from error
    record = parse_exit_file(response)
    if record.leader is not None:
        return record
    if len(response) == supervisor.MESSAGE.size and response[:1] == supervisor.FAILED:
        _, stage, number = supervisor.MESSAGE.unpack(response)
        raise program.start_error(stage, number)
    raise run.gone("its supervisor was killed")


async def kill_started(run: Run, stem: str) -> None:
    """Kill a process that may have been started, without its handle."""
    with contextlib.suppress(SandboxGone, TimeoutError):
        async with asyncio.timeout(guest_requests.RESPONSE_SECONDS):
            while is_locked(stem + EXIT):
                if pid := read_exit_file(stem + EXIT).supervisor_pid:
                    for scope in (guest_init.TREE, guest_init.SUPERVISOR):
                        await guest_requests.send_signal(run.jail, pid, signal.SIGKILL, scope)
                await asyncio.sleep(_POLL_SECONDS)


def remove_files(stem: str) -> None:
    """Remove all files of a process."""
    for suffix in (*SUFFIXES.values(), STDIN, EXIT):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(stem + suffix)


def _create_files(stem: str, stack: contextlib.ExitStack, *, stdin: bool) -> list[int]:
    """Create the files, and return the descriptors that the supervisor expects, in its order."""
    read, *write = _create_stdin(stem + STDIN, stack) if stdin else [_open_null(stack)]
    outputs = [_open(stem + suffix, os.O_WRONLY | _CREATE, stack) for suffix in SUFFIXES.values()]
    exit_file = _open(stem + EXIT, os.O_WRONLY | _CREATE, stack)
    fcntl.flock(exit_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return [read, *outputs, exit_file, *write]


def _create_stdin(path: str, stack: contextlib.ExitStack) -> list[int]:
    """Open both ends of a named pipe, which another engine can find."""
    os.mkfifo(path, 0o600)
    read = _open(path, os.O_RDONLY | os.O_NONBLOCK, stack)
    return [read, _open(path, os.O_WRONLY, stack)]


def _open_null(stack: contextlib.ExitStack) -> int:
    return _open(os.devnull, os.O_RDONLY, stack)


def _open(path: str, flags: int, stack: contextlib.ExitStack) -> int:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    stack.callback(os.close, fd)
    return fd


class Stdin:
    """The stdin pipe of a process. Writes never block the event loop, and take turns."""

    def __init__(self, path: str, process: str) -> None:
        self._path = path
        self._process = process
        self._fd: int | None = None
        self._lock = asyncio.Lock()

    async def write(self, data: str | bytes, exited: asyncio.Event) -> bool:
        """Write all data; return False if the process ended first."""
        left = memoryview(encode_option("data", data))
        async with self._lock:
            while left and not exited.is_set():
                try:
                    fd = self._open()
                    left = left[os.write(fd, left) :]
                except BlockingIOError:
                    await writable(fd, _WRITE_POLL_SECONDS)
                except BrokenPipeError:
                    if not exited.is_set():
                        await self._wait_for_exit(exited)
        if exited.is_set():
            self.release()
        return not left

    async def close(self) -> None:
        """Remove the pipe, so that no engine can write to it again."""
        async with self._lock:
            self._close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)

    def release(self) -> None:
        """Close this engine's end unless a write is waiting. The process does not notice."""
        if not self._lock.locked():
            self._close()

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> int:
        if self._fd is None:
            try:
                self._fd = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except FileNotFoundError:
                raise self._closed("was closed") from None
            except OSError as error:
                # ENXIO: the pipe has no reader.
                raise BrokenPipeError(error.errno, "no reader") from None
        return self._fd

    async def _wait_for_exit(self, exited: asyncio.Event) -> None:
        """Handle a pipe without a reader: the process is ending, or has closed its stdin."""
        try:
            async with asyncio.timeout(1.0):
                await exited.wait()
        except TimeoutError:
            raise self._closed("was closed by the process") from None

    def _closed(self, how: str) -> Unsupported:
        return Unsupported(
            f"the stdin of process {self._process} {how}.",
            hint="Start another process to write to.",
            operation="write_stdin",
        )
