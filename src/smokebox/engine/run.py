"""One run of a sandbox: its jail between wake and sleep, and the programs it starts."""

from __future__ import annotations

import contextlib
import errno
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from smokebox.engine.images.users import User, lookup
from smokebox.engine.jail import guest_init
from smokebox.engine.names import check_user
from smokebox.errors import (
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
from smokebox.options import check_command, check_env, check_timeout
from smokebox.runtime import supervisor
from smokebox.runtime.capture import collect, stream
from smokebox.runtime.output import MAX_OUTPUT
from smokebox.runtime.process import TERMINATE_SECONDS, Process, encode
from smokebox.runtime.stream import Chunk
from smokebox.types import ExecResult

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

    from smokebox.engine.images.image import Image
    from smokebox.engine.jail.api import Jail
    from smokebox.limits import Limits, ProcessLimits
    from smokebox.runtime.spill import SpillFolder

Command: TypeAlias = str | Sequence[str]

DESTROYED = "it was destroyed"

ROOT = User(name="root", uid=0, gid=0, home="/root", shell="/bin/bash")


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
    user: User
    rlimits: dict[int, int]

    def pack(self, verb: bytes, *, timeout: float | None = None) -> bytes:
        """Encode the request to the guest init."""
        return guest_init.pack_program(
            verb=verb,
            argv=[encode(word, "command") for word in self.argv],
            env=[encode(f"{name}={value}", "env") for name, value in self.env.items()],
            cwd=encode(self.cwd, "cwd"),
            timeout=timeout or 0.0,
            grace=TERMINATE_SECONDS,
            user=guest_init.pack_user(self.user.uid, self.user.gid, self.user.groups),
            rlimits=self.rlimits,
        )

    def explain(self, stage: int, number: int) -> SmokeboxError | CannotStart:
        """Turn the stage and errno of a failed start into an error."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run of a sandbox, valid until the sandbox sleeps.

    `read` reads a file of the sandbox, `generation` counts its runs, and `spills` holds the
    output of commands in files that they can read again.
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

    async def program(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        limits: ProcessLimits | None = None,
    ) -> Program:
        """Resolve a command: a string for bash, or a list of literal words."""
        who = await self.user(user)
        directory = resolve(cwd, self.cwd) if cwd is not None else self.cwd
        return Program(
            argv=self.words(command),
            env={**self.env, **identity(who), "PWD": directory, **check_env(env)},
            cwd=directory,
            user=who,
            rlimits=limits.rlimits() if limits is not None else {},
        )

    def words(self, command: Command) -> tuple[str, ...]:
        """Return the words to start: those given, or bash with a string."""
        words = check_command(command)
        return (self.shell, "-c", words) if isinstance(words, str) else tuple(words)

    async def user(self, name: str | None) -> User:
        """Look up a user in the sandbox's own /etc/passwd and /etc/group."""
        name = check_user(name) if name is not None else self.default_user
        if name in ("root", "0"):
            return ROOT
        owner = self.jail.owner
        if owner.count == 1:
            raise Unsupported(
                f"the engine has one user id to give, so nothing can run as {name!r} inside.",
                hint="Run the engine as root to have other users, or leave user= out.",
                operation="user",
                sandbox=self.id,
            )
        found = lookup(name, await self.file("/etc/passwd"), await self.file("/etc/group"))
        if max(found.uid, found.gid, *found.groups, 0) >= owner.count:
            raise Unsupported(
                f"user {name!r} has the id {found.uid}, and a sandbox has ids below {owner.count}.",
                hint="Give the user a smaller id in /etc/passwd.",
                operation="user",
                sandbox=self.id,
            )
        return found

    def owner(self, program: Program) -> tuple[int, int] | None:
        """Return the uid and gid of a program on the host; None for those of the engine."""
        owner = self.jail.owner
        if owner.count == 1:
            return None
        return owner.uid + program.user.uid, owner.gid + program.user.gid

    async def file(self, path: str) -> bytes:
        try:
            return await self.read(path)
        except PathNotFound:
            return b""

    async def execute(
        self,
        program: Program,
        *,
        spills: SpillFolder | None = None,
        max_output: int = MAX_OUTPUT,
        timeout: float | None = None,
        stdin: str | bytes | None = None,
    ) -> ExecResult:
        """Run a program to its end and capture its output, bounded by `max_output`."""
        start = functools.partial(self.start, program, timeout=timeout, stdin=stdin)
        try:
            return await collect(
                start,
                spills=spills or self.spills,
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
    ) -> Process:
        """Start a program that is killed when its handle is closed."""
        timeout = check_timeout(timeout)
        data = None if stdin is None else encode_option("stdin", stdin)
        # Packed first: it may raise, and an open connection would leak.
        request = program.pack(guest_init.RUN, timeout=timeout)
        return await Process.begin(
            await self.jail.connect(),
            request,
            explain=program.explain,
            owner=self.owner(program),
            timeout=timeout,
            stdin=data,
        )

    def gone(self, reason: str) -> SandboxGone:
        """Return the error for a call that the end of this run interrupted."""
        return SandboxGone(
            f"sandbox {self.id} stopped while the command was running ({reason}).",
            hint=f"Run it again: {what_is_next(reason)}.",
            reason=reason,
            sandbox_id=self.id,
        )


def what_is_next(reason: str) -> str:
    """Describe what the next call finds after a run ended for that reason."""
    if reason == DESTROYED:
        return "the next sandbox of this id is empty"
    return "the sandbox restarts with its files"


def identity(user: User) -> dict[str, str]:
    """Return the environment variables that describe a user."""
    return {"HOME": user.home, "USER": user.name, "LOGNAME": user.name, "SHELL": user.shell}
