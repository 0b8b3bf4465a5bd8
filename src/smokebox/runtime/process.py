"""Running a command on the host so that nothing of it outlives its owner.

This side holds the pipes and reads them on whatever event loop is running; the other side
is `keeper`, a helper process that starts the command and kills its tree. A helper, because
only a subreaper sees all that a command starts, and being one is process-wide: our own
process would be handed the orphans of every other library in it. Starting an interpreter
for each command would take ten times as long as the command; a fork of the helper takes
less than bash itself.
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
from smokebox.runtime.supervisor_client import ANSWER_SECONDS, SUPERVISOR_CLIENT, CommandGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from smokebox.runtime.stream import Chunk
    from smokebox.types import Stream

# How long a command may take to end by itself once its time is up.
TERMINATE_SECONDS = 2.0

_FAR = 1e6
_MARGIN = TERMINATE_SECONDS + ANSWER_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a command ended. `alone` when nothing of it runs on in the background."""

    code: int
    timed_out: bool
    alone: bool


class Process:
    """A running command: `read` until None, then look at `exit`. Leaving early kills it."""

    def __init__(
        self,
        control: socket.socket,
        pipes: dict[int, Stream],
        explain: Callable[[int, int], Exception],
    ) -> None:
        self.exit: Exit | None = None
        self._control = control
        self._pipes = Pipes(pipes, {control.fileno(): self._hear})
        self._explain = explain
        self._until: float | None = None

    @classmethod
    async def start(
        cls,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str,
        commands: CommandGroup,
        timeout: float | None = None,
        stdin: bytes | None = None,
    ) -> Process:
        """Hand a command to the keeper. What keeps it from starting is raised by `read`."""
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
            other.setblocking(True)
            with other:
                try:
                    await _hand_over(other)
                except BaseException:
                    control.close()
                    raise
        except OSError as error:
            raise cannot_start(error) from error
        return await cls.begin(
            control,
            body,
            besides=[commands.theirs.fileno()],
            timeout=timeout,
            stdin=stdin,
            explain=functools.partial(_start_error, cwd),
        )

    @classmethod
    async def begin(
        cls,
        control: socket.socket,
        body: bytes,
        *,
        explain: Callable[[int, int], Exception],
        besides: Sequence[int] = (),
        owner: tuple[int, int] | None = None,
        timeout: float | None = None,
        stdin: bytes | None = None,
    ) -> Process:
        """Send a request to the supervisor behind `control`, which is the process's from here on.

        `besides` are descriptors that go with the three of every command; `explain` makes
        an error of the stage and the errno that kept it from starting. A command that is
        another user's has its pipes owned by `owner`, or could not open /dev/stderr.
        """
        request = supervisor.LENGTH.pack(len(body)) + body
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            ours.callback(control.close)
            try:
                source = _source(stdin, theirs)
                (stdout, out), (stderr, err) = _pipe(ours, theirs), _pipe(ours, theirs)
                if owner is not None:
                    os.fchown(out, *owner)
                    os.fchown(err, *owner)
                process = cls(control, {stdout: "stdout", stderr: "stderr"}, explain)
                ours.pop_all()
                ours.callback(control.close)
                ours.callback(process._pipes.close)
                if timeout is not None and timeout < _FAR:
                    process._until = time.monotonic() + timeout + _MARGIN
                sent = socket.send_fds(control, [request], [source, out, err, *besides])
            except ConnectionError as error:
                raise _supervisor_killed() from error
            except OSError as error:
                raise cannot_start(error) from error
            # A supervisor that ends before it has read everything says why, and `read` hears it.
            with contextlib.suppress(ConnectionError):
                await asyncio.get_running_loop().sock_sendall(control, request[sent:])
            ours.pop_all()
            return process

    async def read(self) -> Chunk | None:
        """The next bytes of either pipe, or None when the command is over."""
        try:
            return await self._pipes.read(self._until)
        except TimeoutError:
            # The supervisor keeps the time; this is for one that was stopped itself.
            raise SandboxGone(
                "the command's supervisor does not answer.",
                hint="Run the command again.",
                reason="supervisor silent",
            ) from None

    async def aclose(self) -> None:
        """Kill what runs, or after the end let the background run on; then let go."""
        try:
            if not self._pipes.over:
                await self._kill()
            elif self.exit is not None and not self.exit.alone:
                with contextlib.suppress(OSError):
                    socket.send_fds(self._control, [supervisor.RELEASE], self._pipes.open)
        finally:
            self._control.close()
            self._pipes.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _hear(self) -> None:
        """Take the supervisor's only message: how the command ended, or why it did not start."""
        self._pipes.forget(self._control.fileno())
        try:
            message = self._control.recv(supervisor.MESSAGE.size)
        except ConnectionError:
            message = b""
        if len(message) < supervisor.MESSAGE.size:
            raise _supervisor_killed()
        kind, flags, value = supervisor.MESSAGE.unpack(message)
        if kind == supervisor.FAILED:
            raise self._explain(flags, value)
        self._ended(flags, value)

    def _ended(self, flags: int, status: int) -> None:
        if flags & supervisor.KILLED:
            raise SandboxGone(
                "the sandbox was closed while the command ran.",
                hint="Wait for commands before aclose().",
                reason="closed",
            )
        try:
            code = os.waitstatus_to_exitcode(status)
        except ValueError:
            # No end of a process looks like that: in a jail, somebody else is talking.
            code = 255
        self.exit = Exit(
            code=128 - code if code < 0 else code,
            timed_out=bool(flags & supervisor.TIMED_OUT),
            alone=bool(flags & supervisor.ALONE),
        )
        self._pipes.end()

    async def _kill(self) -> None:
        """Have the tree killed and wait until it is, for a bounded time."""
        try:
            self._control.send(supervisor.KILL)
            async with asyncio.timeout(ANSWER_SECONDS):
                loop = asyncio.get_running_loop()
                while await loop.sock_recv(self._control, supervisor.MESSAGE.size):
                    pass
        except (TimeoutError, OSError):
            pass  # Gone already, or held by the kernel: its supervisor goes on by itself.


async def _hand_over(control: socket.socket) -> None:
    """Give `control` to the keeper; a burst of commands waits for it to keep up."""
    until = time.monotonic() + ANSWER_SECONDS
    while True:
        try:
            return SUPERVISOR_CLIENT.hand_over(control)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(0.005)


def _pipe(ours: contextlib.ExitStack, theirs: contextlib.ExitStack) -> tuple[int, int]:
    read, write = os.pipe()
    ours.callback(os.close, read)
    theirs.callback(os.close, write)
    os.set_blocking(read, False)
    return read, write


def _supervisor_killed() -> SandboxGone:
    return SandboxGone(
        "the command's supervisor was killed, and the command with it.",
        hint="Run the command again, without killing its parent.",
        reason="supervisor killed",
    )


def _source(data: bytes | None, theirs: contextlib.ExitStack) -> int:
    """What the command reads: nothing, or `data` in memory, as if from `< file`.

    A file needs no feeding, so neither side can wait for the other for ever.
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
    theirs.callback(os.close, source)
    return source


def encode(text: str, option: str) -> bytes:
    """Text that goes to the kernel as a word, which holds no NUL."""
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
    """The error for a machine that is out of processes, files or memory for one more command."""
    return ServiceUnavailable(
        f"this machine cannot start another command: {error.strerror or error}.",
        hint="Wait for running commands to end, or raise the limits (`ulimit -n`, `ulimit -u`).",
        service="local",
        number=error.errno,
    )
