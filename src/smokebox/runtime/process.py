"""A command on the host of which no process outlives its owner.

This side holds the pipes and reads them on the running event loop. The other side is
`supervisor`, a helper process that starts the command and kills its process tree. It is a
separate process because only a subreaper sees everything that a command starts, and that is a
process-wide setting: this process would get the orphans of every other library in it. Starting
an interpreter per command would take ten times as long as the command; a fork of the helper
takes less than bash itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from smokebox.errors import (
    InvalidOption,
    SandboxGone,
    ServiceUnavailable,
    SmokeboxError,
    from_os_error,
)
from smokebox.runtime import supervisor
from smokebox.runtime.pipes import Pipes
from smokebox.runtime.supervisor_client import (
    RESPONSE_SECONDS,
    SUPERVISOR_CLIENT,
    RunningCommands,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from smokebox.runtime.stream import Chunk
    from smokebox.types import Stream

# Time for a command to exit after SIGTERM, at its timeout.
TERMINATE_SECONDS = 2.0

_LONGEST_TIMEOUT = 1e6
_MARGIN = TERMINATE_SECONDS + RESPONSE_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """Exit of a command. `childless` if it left no background process."""

    code: int
    timed_out: bool
    childless: bool


class SupervisedProcess:
    """A running command. Call `read` until it returns None, then see `exit`.

    Leaving its block early kills it.
    """

    def __init__(
        self,
        control: socket.socket,
        pipes: dict[int, Stream],
        explain: Callable[[int, int], Exception],
    ) -> None:
        self.exit: Exit | None = None
        self._control = control
        self._pipes = Pipes(pipes, {control.fileno(): self._receive})
        self._explain = explain
        self._deadline: float | None = None

    @classmethod
    async def start(
        cls,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str,
        commands: RunningCommands,
        timeout: float | None = None,
        stdin: bytes | None = None,
    ) -> SupervisedProcess:
        """Start a command. `read` raises the error if it cannot start."""
        body = supervisor.pack(
            argv=[encode(word, "command") for word in argv],
            env=[encode(f"{name}={value}", "env") for name, value in env.items()],
            cwd=encode(cwd, "cwd"),
            timeout=timeout or 0.0,
            grace=TERMINATE_SECONDS,
        )
        try:
            control, other = socket.socketpair()
            control.setblocking(False)
            # `socket.setdefaulttimeout` makes new sockets non-blocking.
            other.setblocking(True)
            with other:
                try:
                    await _send_control(other)
                except BaseException:
                    control.close()
                    raise
        except OSError as error:
            raise cannot_start(error) from error
        return await cls.start_through(
            control,
            body,
            extra_fds=[commands.supervisor_end.fileno()],
            timeout=timeout,
            stdin=stdin,
            explain=functools.partial(_start_error, cwd),
        )

    @classmethod
    async def start_through(
        cls,
        control: socket.socket,
        body: bytes,
        *,
        explain: Callable[[int, int], Exception],
        extra_fds: Sequence[int] = (),
        owner: tuple[int, int] | None = None,
        timeout: float | None = None,
        stdin: bytes | None = None,
    ) -> SupervisedProcess:
        """Send a request to the supervisor behind `control`, which this process owns from now on.

        Args:
            control: Connection to a supervisor.
            body: Encoded request.
            explain: Makes an error of the stage and the errno of a failed start.
            extra_fds: Descriptors to send after the three of every command.
            owner: Uid and gid of the pipes, for a command that runs as another user: otherwise
                it could not open /dev/stderr.
            timeout: Timeout of the command, which the supervisor enforces.
            stdin: Input of the command.
        """
        request = supervisor.LENGTH.pack(len(body)) + body
        with contextlib.ExitStack() as always, contextlib.ExitStack() as on_failure:
            on_failure.callback(control.close)
            try:
                source = _open_stdin(stdin, always)
                stdout, stdout_writer = _pipe(on_failure, always)
                stderr, stderr_writer = _pipe(on_failure, always)
                if owner is not None:
                    os.fchown(stdout_writer, *owner)
                    os.fchown(stderr_writer, *owner)
                process = cls(control, {stdout: "stdout", stderr: "stderr"}, explain)
                on_failure.pop_all()
                on_failure.callback(control.close)
                on_failure.callback(process._pipes.close)
                if timeout is not None and timeout < _LONGEST_TIMEOUT:
                    process._deadline = time.monotonic() + timeout + _MARGIN
                fds = [source, stdout_writer, stderr_writer, *extra_fds]
                sent = socket.send_fds(control, [request], fds)
            except ConnectionError as error:
                raise _supervisor_killed() from error
            except OSError as error:
                raise cannot_start(error) from error
            # A supervisor that exits before it has read everything still reports why.
            with contextlib.suppress(ConnectionError):
                await asyncio.get_running_loop().sock_sendall(control, request[sent:])
            on_failure.pop_all()
            return process

    async def read(self) -> Chunk | None:
        """Return the next bytes of either pipe, or None at the end."""
        try:
            return await self._pipes.read(self._deadline)
        except TimeoutError:
            # The supervisor enforces the timeout; this is for one that was stopped.
            raise SandboxGone(
                "the command's supervisor does not respond.",
                hint="Run the command again.",
                reason="supervisor silent",
            ) from None

    async def aclose(self) -> None:
        """Kill a running command; leave background processes of a finished one running."""
        try:
            if not self._pipes.finished:
                await self._kill()
            elif self.exit is not None and not self.exit.childless:
                with contextlib.suppress(OSError):
                    socket.send_fds(self._control, [supervisor.RELEASE], self._pipes.open_fds)
        finally:
            self._control.close()
            self._pipes.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _receive(self) -> None:
        """Receive the supervisor's only message: the exit, or why the command did not start."""
        self._pipes.remove_handler(self._control.fileno())
        try:
            message = self._control.recv(supervisor.MESSAGE.size)
        except ConnectionError:
            message = b""
        if len(message) < supervisor.MESSAGE.size:
            raise _supervisor_killed()
        kind, flags, value = supervisor.MESSAGE.unpack(message)
        if kind == supervisor.FAILED:
            raise self._explain(flags, value)
        if flags & supervisor.KILLED:
            raise SandboxGone(
                "the sandbox was closed while the command ran.",
                hint="Wait for commands before aclose().",
                reason="closed",
            )
        self.exit = Exit(
            code=exit_code(value),
            timed_out=bool(flags & supervisor.TIMED_OUT),
            childless=bool(flags & supervisor.CHILDLESS),
        )
        self._pipes.start_drain()

    async def _kill(self) -> None:
        """Kill the process tree, and wait up to `RESPONSE_SECONDS` for it."""
        try:
            self._control.send(supervisor.KILL)
            async with asyncio.timeout(RESPONSE_SECONDS):
                loop = asyncio.get_running_loop()
                while await loop.sock_recv(self._control, supervisor.MESSAGE.size):
                    pass
        except (TimeoutError, OSError):
            pass  # Already gone, or stuck in the kernel: its supervisor keeps trying.


async def _send_control(control: socket.socket) -> None:
    """Send `control` to the helper; a burst of commands waits for it to keep up."""
    until = time.monotonic() + RESPONSE_SECONDS
    while True:
        try:
            return SUPERVISOR_CLIENT.send(control)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(0.005)


def _pipe(on_failure: contextlib.ExitStack, always: contextlib.ExitStack) -> tuple[int, int]:
    read, write = os.pipe()
    on_failure.callback(os.close, read)
    always.callback(os.close, write)
    os.set_blocking(read, False)
    return read, write


def _supervisor_killed() -> SandboxGone:
    return SandboxGone(
        "the command's supervisor was killed, and the command with it.",
        hint="Run the command again, without killing its parent.",
        reason="supervisor killed",
    )


def _open_stdin(data: bytes | None, always: contextlib.ExitStack) -> int:
    """Open stdin of a command: /dev/null, or `data` in memory, as if from `< file`.

    A file needs no writer, so the two sides cannot deadlock.
    """
    path = "/dev/null"
    with contextlib.ExitStack() as stack:
        if data is not None:
            memory = os.memfd_create("stdin")
            stack.callback(os.close, memory)
            view = memoryview(data)
            while view:
                view = view[os.write(memory, view) :]
            path = f"/proc/self/fd/{memory}"
        source = os.open(path, os.O_RDONLY)
    always.callback(os.close, source)
    return source


def exit_code(status: int) -> int:
    """Convert a wait status to the exit code that a shell would report."""
    try:
        code = os.waitstatus_to_exitcode(status)
    except ValueError:
        # No wait status looks like that: in a jail, another process has sent it.
        return 255
    return 128 - code if code < 0 else code


def encode(text: str, option: str) -> bytes:
    """Encode an argument, variable or path, which cannot hold a NUL."""
    try:
        data = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        data = b"\0"
    if b"\0" in data:
        raise InvalidOption(
            f"the {option} holds a NUL or is not valid UTF-8.",
            hint="Remove that character, or pass the data through stdin.",
            option=option,
        )
    return data


def _start_error(cwd: str, stage: int, number: int) -> SmokeboxError:
    if stage == supervisor.STAGE_CWD:
        return from_os_error(OSError(number, os.strerror(number)), cwd)
    if number == errno.E2BIG:
        return InvalidOption(
            "the command and its environment are longer than the system takes.",
            hint="Write the script to a file and run that, or pass the data through stdin.",
            option="command",
        )
    return cannot_start(OSError(number, os.strerror(number)))


def cannot_start(error: OSError) -> ServiceUnavailable:
    """Return the error for a machine without processes, files or memory for another command."""
    return ServiceUnavailable(
        f"this machine cannot start another command: {error.strerror or error}.",
        hint="Wait for running commands to end, or raise the limits (`ulimit -n`, `ulimit -u`).",
        service="local",
        number=error.errno,
    )
