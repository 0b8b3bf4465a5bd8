"""One run of a sandbox: its jail from waking to sleep, and how programs are started in it."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from smokebox.engine.images.users import User, lookup
from smokebox.engine.jail import agent
from smokebox.engine.names import check_user
from smokebox.errors import (
    InvalidOption,
    LimitReached,
    PathNotFound,
    SandboxGone,
    SmokeboxError,
    Unsupported,
)
from smokebox.options import check_command, check_env
from smokebox.sandbox import keeper
from smokebox.sandbox.filesystems.filesystem import from_os_error
from smokebox.sandbox.paths import resolve
from smokebox.sandbox.process import TERMINATE_SECONDS, encode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from smokebox.engine.images.image import Image
    from smokebox.engine.jail.api import Jail
    from smokebox.engine.limits import Limits, ProcessLimits
    from smokebox.sandbox.spill import SpillFolder

Command: TypeAlias = str | Sequence[str]

DESTROYED = "it was destroyed"

ROOT = User(name="root", uid=0, gid=0, home="/root", shell="/bin/bash")


class CannotStart(Exception):
    """A program that could not be started: a result for `exec`, in bash's own codes."""

    def __init__(self, exit_code: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What is to be started in a jail, checked and whole."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    user: User
    rlimits: dict[int, int]

    def pack(self, verb: bytes, *, timeout: float | None = None) -> bytes:
        """The request for it, as the agent reads it."""
        return agent.pack_program(
            verb=verb,
            argv=[encode(word, "command") for word in self.argv],
            env=[encode(f"{name}={value}", "env") for name, value in self.env.items()],
            cwd=encode(self.cwd, "cwd"),
            timeout=timeout or 0.0,
            grace=TERMINATE_SECONDS,
            user=agent.pack_user(self.user.uid, self.user.gid, self.user.groups),
            rlimits=self.rlimits,
        )

    def explain(self, stage: int, number: int) -> SmokeboxError | CannotStart:
        """Why it did not start, by the stage and the errno that the agent tells."""
        text = errno.errorcode.get(number, str(number))
        if stage == keeper.STAGE_CWD:
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
    """A woken sandbox. What it gives is good until the sandbox sleeps again.

    `read` reads a file of the sandbox, `generation` counts its runs, and `spills` holds what
    its commands write, where they can read it again.
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
        """What `command` means here: a string for bash, or words that are taken literally."""
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
        """The words to start: those given, or bash with a string."""
        words = check_command(command)
        return (self.shell, "-c", words) if isinstance(words, str) else tuple(words)

    async def user(self, name: str | None) -> User:
        """A user of the sandbox, as its own files have them."""
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
        """Who a program runs as, seen from outside; None for who we are ourselves."""
        owner = self.jail.owner
        if owner.count == 1:
            return None
        return owner.uid + program.user.uid, owner.gid + program.user.gid

    async def file(self, path: str) -> bytes:
        try:
            return await self.read(path)
        except PathNotFound:
            return b""

    def gone(self, reason: str) -> SandboxGone:
        """The error for a call that the end of this run cut short."""
        return SandboxGone(
            f"sandbox {self.id} stopped while the command was running ({reason}).",
            hint=f"Run it again: {what_is_next(reason)}.",
            reason=reason,
            sandbox_id=self.id,
        )


def what_is_next(reason: str) -> str:
    """What another call finds, after a run that ended for that reason."""
    if reason == DESTROYED:
        return "the next sandbox of this id is empty"
    return "the sandbox starts afresh, with its files"


def identity(user: User) -> dict[str, str]:
    """What a program's environment says of who it is."""
    return {"HOME": user.home, "USER": user.name, "LOGNAME": user.name, "SHELL": user.shell}
