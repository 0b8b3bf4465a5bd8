"""A command in the shell of a session: the request, its output and its end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

from smokebox.engine.jail import shell_supervisor
from smokebox.engine.sessions import driver
from smokebox.engine.sessions.driver import assignments, pack_fields
from smokebox.engine.sessions.shell import LOOK_SECONDS, CommandNotRead
from smokebox.errors import InvalidOption, SandboxGone
from smokebox.foundation.paths import check_path
from smokebox.foundation.text import encode_option
from smokebox.options import check_env, check_timeout
from smokebox.runtime.pipes import Pipes
from smokebox.runtime.process import TERMINATE_SECONDS, Exit, cannot_start, encode
from smokebox.runtime.supervisor_client import ANSWER_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from smokebox.engine.sessions.shell import SessionShell
    from smokebox.runtime.stream import Chunk

_NUMBERS = itertools.count(1)
# How long an interrupted shell may take to tell its state.
INTERRUPTED_SECONDS = 1.0
# How long it may take to learn that all of the sandbox has ended.
HANGUP_SECONDS = 0.5
_LARGE_STDIN = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRequest:
    """A command for a shell, checked: its text, and what holds for it alone.

    `values` are what the text refers to as fields after those of `env`; `number` is that of
    its first field, and no other order's.
    """

    text: bytes
    cwd: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    values: tuple[str, ...] = ()
    stdin: bytes | None = None
    timeout: float | None = None
    number: int = field(default_factory=_NUMBERS.__next__)

    @property
    def fields(self) -> bytes:
        """As bash reads it."""
        values = [encode(value, "env") for value in (*self.env.values(), *self.values)]
        return pack_fields([self.text, encode(self.cwd or "", "cwd"), *values])


def command_request(
    command: str,
    *,
    cwd: str | None,
    env: Mapping[str, str] | None,
    timeout: float | None,
    stdin: str | bytes | None,
) -> CommandRequest:
    """The order to run a command, once everything about it can be."""
    if not isinstance(command, str):
        raise InvalidOption(
            f"a command of a session is a str, not {type(command).__name__}.",
            hint="For a list of words, pass shlex.join(words).",
            option="command",
        )
    return CommandRequest(
        text=encode(command, "command"),
        cwd=None if cwd is None else check_path(cwd),
        env=check_env(env),
        timeout=check_timeout(timeout),
        stdin=None if stdin is None else encode_option("stdin", stdin),
    )


def export_request(values: Mapping[str, str], removed: Sequence[str]) -> CommandRequest:
    """The order to export variables, and to unset others; their names are checked."""
    order = CommandRequest(text=b"", values=tuple(values.values()))
    return replace(order, text=assignments(tuple(values), removed, order.number))


class SessionCommand:
    """A running command of a shell: `read` until None, then look at `exit`.

    Leaving early kills it, and with it the shell that waits for it, but for its state.
    `ended` says that the shell has ended by the command's doing.
    """

    def __init__(self, shell: SessionShell, order: CommandRequest) -> None:
        self.exit: Exit | None = None
        self.ended = False
        self._shell = shell
        self._order = order
        self._interrupted = False
        self._timed_out = False
        self._lost = 0
        self._look_at = time.monotonic() + LOOK_SECONDS
        self._give_up: float | None = None
        loop = asyncio.get_running_loop()
        self._timers: list[asyncio.TimerHandle] = []
        ears = {fd: self._heed(hear) for fd, hear in shell.ears.items()}
        self._pipes = Pipes(shell.folder.open_outputs(), ears)
        if order.timeout is not None:
            self._timers.append(loop.call_later(order.timeout, self._time_out))

    @classmethod
    async def start(cls, shell: SessionShell, order: CommandRequest) -> SessionCommand:
        """Start a command, once the one before it is done with."""
        await shell.settled()
        if not shell.fit:
            raise CommandNotRead
        try:
            name = await _put_stdin(shell, order.stdin)
            shell.folder.put(order.fields)
            command = cls(shell, order)
        except OSError as error:
            raise cannot_start(error) from error
        shell.give(order, name)
        command._see()
        return command

    async def read(self) -> Chunk | None:
        """The next bytes of its output, or None when it is over."""
        while True:
            try:
                chunk = await self._pipes.read(self._look_at)
            except TimeoutError:
                self._look()
                continue
            if chunk is None:
                await self._check()
            return chunk

    async def aclose(self) -> None:
        """Kill what runs, or after the end let the background run on; then let go."""
        try:
            if self.exit is None:
                await self._kill()
            if (left := self._pipes.open) and not self._shell.told:
                self._shell.say(shell_supervisor.DRAIN, left)
                self._renew_outputs()
        finally:
            for timer in self._timers:
                timer.cancel()
            self._pipes.close()
            self._shell.folder.take_stdin_away()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def cut_short(self) -> bool:
        """Whether the shell ended because we had to end the command."""
        return self._interrupted

    def _renew_outputs(self) -> None:
        try:
            self._shell.folder.renew_outputs()
        except OSError:
            self._shell.broken = True

    def _heed(self, hear: Callable[[], None]) -> Callable[[], None]:
        def heed() -> None:
            hear()
            self._see()

        return heed

    def _see(self) -> None:
        """Notice that the command has ended, or its shell."""
        shell = self._shell
        # What is at its end, or never ends, would be heard again and again.
        if shell.broken:
            self._pipes.forget(shell.folder.reports)
        if not shell.alive:
            self._pipes.forget(shell.control.fileno())
        if self.exit is not None:
            return
        if shell.broken and not self._interrupted:
            self._interrupt(shell_supervisor.END)
        if not shell.alive:
            shell.hear_reports()
            self.ended = not self._interrupted and not shell.stopped
            self._end(_code(shell.exit_status))
        elif shell.status is not None and not self._interrupted:
            self._end(shell.status)

    def _end(self, code: int) -> None:
        self.exit = Exit(code=code, timed_out=self._timed_out, alone=False)
        self._pipes.end()

    async def _check(self) -> None:
        shell = self._shell
        if driver.UNREAD in shell.told:
            shell.broken = True
            raise CommandNotRead
        shell.check_told(self._order.cwd or "", "Pass a directory that is there as cwd.")
        if self.ended and shell.exit_status is None:
            # Killed with its supervisor: by somebody inside, or with all the rest.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HANGUP_SECONDS):
                    await shell.run.jail.wait()
                self.ended = False
                raise shell.run.gone("jail ended")

    def _time_out(self) -> None:
        if self.exit is None:
            self._timed_out = True
            self._interrupt(shell_supervisor.INTERRUPT, TERMINATE_SECONDS)

    def _interrupt(self, word: bytes, grace: float = 0.0) -> None:
        """End the command by its supervisor; a shell that does not come back, as well."""
        self._interrupted = True
        self._shell.say(word)
        later = asyncio.get_running_loop().call_later
        wait = grace + INTERRUPTED_SECONDS
        self._timers.append(later(wait, self._shell.say, shell_supervisor.END))
        self._give_up = time.monotonic() + wait + ANSWER_SECONDS

    def _look(self) -> None:
        """See to a silent command: whether its shell has lost its way, or its supervisor."""
        self._look_at = time.monotonic() + LOOK_SECONDS
        if self._give_up is not None and time.monotonic() > self._give_up:
            raise SandboxGone(
                "the session's supervisor does not answer.",
                hint="Run the command again: the session gets another shell.",
                reason="supervisor silent",
            )
        # Byte by byte bash reads the lines after a command only when that is over.
        self._lost = self._lost + 1 if self._shell.folder.read else 0
        if self._lost > 1 and not self._interrupted:
            self._shell.broken = True
            self._see()

    async def _kill(self) -> None:
        if not self._interrupted:
            self._interrupt(shell_supervisor.INTERRUPT_NOW)
        with contextlib.suppress(SandboxGone, CommandNotRead):
            while self.exit is None:
                await self.read()
        if self.exit is None:
            self._shell.broken = True


async def _put_stdin(shell: SessionShell, data: bytes | None) -> str | None:
    if data is None or len(data) <= _LARGE_STDIN:
        return shell.folder.put_stdin(data)
    return await asyncio.to_thread(shell.folder.put_stdin, data)


def _code(status: int | None) -> int:
    try:
        code = os.waitstatus_to_exitcode(status if status is not None else 9)
    except ValueError:
        # No end of a process looks like that: somebody else is talking.
        return 255
    return 128 - code if code < 0 else code
