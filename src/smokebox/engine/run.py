"""One run of a sandbox: its jail between wake and sleep, and the programs it starts."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Protocol, TypeAlias

from smokebox.engine.images.users import ImageUser, lookup
from smokebox.engine.jail import guest_init
from smokebox.engine.names import check_user
from smokebox.errors import (
    AccessDenied,
    InvalidOption,
    LimitReached,
    PathNotFound,
    SandboxGone,
    SmokeboxError,
    Unsupported,
    from_os_error,
)
from smokebox.foundation.paths import resolve
from smokebox.foundation.text import encode_option
from smokebox.limits import parse_process_limits
from smokebox.options import check_command, check_env, check_timeout
from smokebox.runtime import supervisor
from smokebox.runtime.capture import collect, stream
from smokebox.runtime.output import MAX_OUTPUT
from smokebox.runtime.process import TERMINATE_SECONDS, SupervisedProcess, encode
from smokebox.runtime.stream import Chunk
from smokebox.types import ExecResult

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Mapping

    from smokebox.engine.images.image import Image
    from smokebox.engine.jail.jail import Jail
    from smokebox.limits import Limits, ProcessLimits
    from smokebox.runtime.spill import SpillFolder

Command: TypeAlias = str | Sequence[str]

DESTROYED = "it was destroyed"
EXPIRED = "its lifetime was over"
STOPPED = "the engine was stopped"

ROOT = ImageUser(name="root", uid=0, gid=0, home="/root", shell="/bin/bash")


async def _allow_programs() -> None:
    pass


class CannotStart(Exception):
    """A program could not be started: a result for `exec`, with bash's exit codes."""

    def __init__(self, exit_code: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A fully resolved program to start in a jail."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    user: ImageUser
    rlimits: dict[int, int]

    def pack(self, verb: bytes, *, timeout: float | None = None) -> bytes:
        """Encode the request to the guest init."""
        variables = [f"{name}={value}" for name, value in self.env.items()]
        return guest_init.pack_program(
            verb=verb,
            argv=[*map(encode, self.argv, repeat("command"))],
            env=[*map(encode, variables, repeat("env"))],
            cwd=encode(self.cwd, "cwd"),
            timeout=timeout or 0.0,
            grace=TERMINATE_SECONDS,
            user=guest_init.pack_user(self.user.uid, self.user.gid, self.user.groups),
            rlimits=self.rlimits,
        )

    def exec_error(self, stage: int, number: int) -> SmokeboxError | CannotStart:
        """Convert the stage and errno of a failed start to an error, or a result of `exec`."""
        text = errno.errorcode.get(number, str(number))
        if stage == supervisor.STAGE_CWD:
            return from_os_error(OSError(number, text), self.cwd)
        if number == errno.E2BIG:
            return InvalidOption(
                "the command and its environment are longer than the system takes.",
                hint="Write the script to a file and run that, or pass the data through stdin.",
                option="command",
            )
        if number in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE):
            return LimitReached(
                f"the sandbox cannot start another process ({text}).",
                hint="End some of its processes, or raise its limits (pids, memory, open_files).",
                limit="memory" if number == errno.ENOMEM else "pids",
            )
        if number in (errno.ENOENT, errno.ENOTDIR):
            return CannotStart(127, f"{self.argv[0]}: command not found")
        return CannotStart(126, f"{self.argv[0]}: cannot be run ({text})")

    def start_error(self, stage: int, number: int) -> SmokeboxError:
        """Convert the stage and errno of a failed start to an error."""
        error = self.exec_error(stage, number)
        if not isinstance(error, CannotStart):
            return error
        name = self.argv[0]
        if error.exit_code == 127:
            return PathNotFound(
                name,
                f"the sandbox has no program {name!r:.200}.",
                hint="Pass its path, or add its directory to PATH.",
            )
        return AccessDenied(name, f"{error}.", hint="Make it executable, and check its #! line.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run of a sandbox, valid until the sandbox sleeps.

    `read` reads a file of the sandbox, `generation` counts its runs, and `spills` holds the
    output of commands in files that they can read again. `check_disk` raises while it may start
    no programs.
    """

    id: str
    jail: Jail
    generation: int
    directory: str
    image: Image
    env: dict[str, str]
    cwd: str
    default_user: str
    shell: str
    limits: Limits
    spills: SpillFolder
    read: Callable[[str], Awaitable[bytes]]
    check_disk: Callable[[], Awaitable[None]] = _allow_programs

    async def program(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        limits: ProcessLimits | Mapping[str, object] | None = None,
    ) -> Program:
        """Resolve a command: a string for bash, or a list of literal words.

        Raises:
            LimitReached: The sandbox was stopped above its disk limit, and still is.
        """
        await self.check_disk()
        words, env = check_command(command), check_env(env)
        account = await self._find_user(user)
        directory = resolve(cwd, self.cwd) if cwd is not None else self.cwd
        return Program(
            argv=(self.shell, "-c", words) if isinstance(words, str) else tuple(words),
            env={
                **self.env,
                "HOME": account.home,
                "USER": account.name,
                "LOGNAME": account.name,
                "SHELL": account.shell,
                "PWD": directory,
                **env,
            },
            cwd=directory,
            user=account,
            # Without rlimits it is spawned, not forked, which is faster.
            rlimits={} if limits is None else parse_process_limits(limits).rlimits(),
        )

    def host_ids(self, user: ImageUser) -> tuple[int, int] | None:
        """Return the uid and gid of a user on the host; None for those of the engine."""
        owner = self.jail.owner
        return None if owner.count == 1 else (owner.uid + user.uid, owner.gid + user.gid)

    async def execute(
        self,
        program: Program,
        *,
        max_output: int = MAX_OUTPUT,
        timeout: float | None = None,
        stdin: str | bytes | None = None,
    ) -> ExecResult:
        """Run a program to its end and capture its output, bounded by `max_output`."""
        start = functools.partial(self.start, program, timeout=timeout, stdin=stdin)
        try:
            return await collect(
                start,
                spills=self.spills,
                max_output=max_output,
                timeout=timeout,
                rate=self.limits.output_rate,
            )
        except CannotStart as failure:
            return ExecResult(exit_code=failure.exit_code, stderr=f"smokebox: {failure}\n")

    async def stream(
        self,
        program: Program,
        *,
        timeout: float | None = None,
        stdin: str | bytes | None = None,
    ) -> AsyncGenerator[Chunk | ExecResult, None]:
        """Run a program and yield its output as it is written, then its result."""
        start = functools.partial(self.start, program, timeout=timeout, stdin=stdin)
        chunks = stream(start, timeout=timeout, rate=self.limits.output_rate)
        try:
            async with contextlib.aclosing(chunks):
                async for item in chunks:
                    yield item
        except CannotStart as failure:
            yield Chunk("stderr", f"smokebox: {failure}\n".encode())
            yield ExecResult(exit_code=failure.exit_code)

    async def start(
        self, program: Program, *, timeout: float | None = None, stdin: str | bytes | None = None
    ) -> SupervisedProcess:
        """Start a program that is killed when its handle is closed."""
        if timeout is not None:
            timeout = check_timeout(timeout)
        data = None if stdin is None else encode_option("stdin", stdin)
        # Packed first: it may raise, and an open connection would leak.
        request = program.pack(guest_init.RUN, timeout=timeout)
        owner = self.host_ids(program.user)
        return await SupervisedProcess.start_through(
            await self.jail.connect(),
            request,
            explain=program.exec_error,
            owner=owner,
            timeout=timeout,
            stdin=data,
        )

    def gone(self, reason: str) -> SandboxGone:
        """Return the error for a call that the end of this run interrupted."""
        return SandboxGone(
            f"sandbox {self.id} stopped while the command was running ({reason}).",
            hint=f"Run it again: {after_end(reason)}.",
            reason=reason,
            sandbox_id=self.id,
        )

    async def _find_user(self, name: str | None) -> ImageUser:
        """Look up a user in the sandbox's own /etc/passwd and /etc/group."""
        name = check_user(name) if name is not None else self.default_user
        if name in ("root", "0"):
            return ROOT
        owner = self.jail.owner
        if owner.count == 1:
            raise Unsupported(
                f"the engine has one user id, so no program can run as {name!r} in a sandbox.",
                hint="Run the engine as root to have other users, or leave user= out.",
                operation="user",
                sandbox=self.id,
            )
        found = lookup(
            name, await self._read_or_empty("/etc/passwd"), await self._read_or_empty("/etc/group")
        )
        if max(found.uid, found.gid, *found.groups, 0) >= owner.count:
            raise Unsupported(
                f"user {name!r} has the id {found.uid}, and a sandbox has ids below {owner.count}.",
                hint="Give the user a smaller id in /etc/passwd.",
                operation="user",
                sandbox=self.id,
            )
        return found

    async def _read_or_empty(self, path: str) -> bytes:
        try:
            return await self.read(path)
        except PathNotFound:
            return b""


UseRun: TypeAlias = Callable[[], AbstractAsyncContextManager[Run]]
"""Wakes a sandbox if needed, and keeps it awake inside the block."""


class RunOwner(Protocol):
    """The owner of the runs of a sandbox: its `Lifecycle`."""

    id: str

    @property
    def run(self) -> Run | None:
        """The current run, while the sandbox is awake."""

    def use(self) -> AbstractAsyncContextManager[Run]:
        """Wake the sandbox and keep it awake inside the block."""

    async def directory(self) -> str:
        """Return the directory of the sandbox on the host; empty before it was ever woken."""


class RunPart:
    """A component with state in the runs of a sandbox: files, processes, sessions and so on."""

    @property
    def busy(self) -> bool:
        """True if the sandbox should stay awake."""
        return False

    async def begin(self, run: Run) -> None:
        """Set up a run that starts, or whose egress policy or checkpoints changed."""

    async def adopt(self, run: Run) -> None:
        """Take over a run that another engine started."""

    async def before_end(self) -> None:
        """Finish pending work: the run is about to end."""

    async def ended(self, reason: str) -> None:
        """Release a run that ended, including one that was never adopted."""

    async def aclose(self) -> None:
        """Release everything, and leave what runs to the next engine."""


async def send_request(control: socket.socket, request: bytes, fds: Sequence[int] = ()) -> None:
    """Send a request with file descriptors to the guest init behind `control`."""
    data = supervisor.LENGTH.pack(len(request)) + request
    sent = socket.send_fds(control, [data], fds)
    # A supervisor that exits before it has read everything still reports why.
    with contextlib.suppress(ConnectionError):
        await asyncio.get_running_loop().sock_sendall(control, data[sent:])


def after_end(reason: str) -> str:
    """Describe what the next call finds after a run ended for that reason."""
    if reason in (DESTROYED, EXPIRED):
        return "the next sandbox of this id is empty"
    return "the sandbox restarts with its files"
