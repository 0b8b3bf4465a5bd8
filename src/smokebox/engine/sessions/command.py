"""A command in the shell of a session: the request, its output and its end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self, TypedDict

from smokebox.engine.jail import shell_supervisor
from smokebox.engine.sessions import bash_protocol
from smokebox.engine.sessions.bash_protocol import export_script, pack_fields
from smokebox.engine.sessions.shell import CHECK_SECONDS, CommandNotRead
from smokebox.errors import InvalidOption, SandboxGone
from smokebox.foundation.paths import check_path
from smokebox.foundation.text import encode_option
from smokebox.options import check_env, check_timeout
from smokebox.runtime.pipes import Pipes
from smokebox.runtime.process import TERMINATE_SECONDS, Exit, cannot_start, encode, exit_code
from smokebox.runtime.supervisor_client import RESPONSE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from smokebox.engine.sessions.shell import SessionShell
    from smokebox.runtime.stream import Chunk

_NUMBERS = itertools.count(1)
# Time limit for an interrupted shell to report its state.
INTERRUPTED_SECONDS = 1.0
# Time limit for the whole sandbox to end after its supervisor.
JAIL_END_SECONDS = 0.5
_LARGE_STDIN = 1 << 16


class CommandOptions(TypedDict, total=False):
    """The options of a command in a session.

    `cwd`, relative to the session's directory, and `env` apply to this command only. `timeout`, in
    seconds, starts when the command does. `stdin` is data for standard input.
    """

    cwd: str | None
    env: Mapping[str, str] | None
    timeout: float | None
    stdin: str | bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRequest:
    """A checked command for a shell.

    `values` are the fields after those of `env` that `text` refers to. `number` is the unique
    index of its first field.
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
        """The content of the file that bash reads."""
        values = [encode(value, "env") for value in (*self.env.values(), *self.values)]
        return pack_fields([self.text, encode(self.cwd or "", "cwd"), *values])


def command_request(
    command: str,
    *,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    stdin: str | bytes | None = None,
) -> CommandRequest:
    """Check the options of a command."""
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
    """Return the request to export variables and unset others, whose names are checked."""
    request = CommandRequest(text=b"", values=tuple(values.values()))
    return replace(request, text=export_script(tuple(values), removed, request.number))


class SessionCommand:
    """A running command of a shell: `read` until None, then use `exit`.

    Leaving early kills it together with its shell; the state that the shell reports is kept.
    `ended_shell` is True if the command itself ended the shell.
    """

    def __init__(self, shell: SessionShell, request: CommandRequest) -> None:
        self.exit: Exit | None = None
        self.ended_shell = False
        self._shell = shell
        self._request = request
        self._interrupted = False
        self._timed_out = False
        self._idle_checks = 0
        self._next_check = time.monotonic() + CHECK_SECONDS
        self._deadline: float | None = None
        self._timers: list[asyncio.TimerHandle] = []
        handlers = {fd: self._handler(read) for fd, read in shell.readers.items()}
        self._pipes = Pipes(shell.directory.open_outputs(), handlers)
        if request.timeout is not None:
            loop = asyncio.get_running_loop()
            self._timers.append(loop.call_later(request.timeout, self._time_out))

    @classmethod
    async def start(cls, shell: SessionShell, request: CommandRequest) -> SessionCommand:
        """Start a command after the one before it has finished."""
        await shell.wait_idle()
        if not shell.usable:
            raise CommandNotRead
        try:
            stdin = await _write_stdin(shell, request.stdin)
            shell.directory.write_fields(request.fields)
            command = cls(shell, request)
        except OSError as error:
            raise cannot_start(error) from error
        shell.run_command(request, stdin)
        command._check_end()
        return command

    async def read(self) -> Chunk | None:
        """Return the next bytes of its output, or None at its end."""
        while True:
            try:
                chunk = await self._pipes.read(self._next_check)
            except TimeoutError:
                self._check_progress()
                continue
            if chunk is None:
                await self._check_result()
            return chunk

    async def aclose(self) -> None:
        """Kill the command if it runs, else leave its background processes running."""
        try:
            if self.exit is None:
                await self._kill()
            if (fds := self._pipes.open_fds) and not self._shell.reports:
                self._shell.send(shell_supervisor.DRAIN, fds)
                try:
                    self._shell.directory.replace_outputs()
                except OSError:
                    self._shell.broken = True
        finally:
            for timer in self._timers:
                timer.cancel()
            self._pipes.close()
            self._shell.directory.remove_stdin()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _handler(self, read: Callable[[], None]) -> Callable[[], None]:
        def handle() -> None:
            read()
            self._check_end()

        return handle

    def _check_end(self) -> None:
        """Check whether the command or its shell has ended."""
        shell = self._shell
        # A descriptor at its end, or one that is always readable, would be reported forever.
        if shell.broken:
            self._pipes.remove_handler(shell.directory.reports_fd)
        if not shell.alive:
            self._pipes.remove_handler(shell.control.fileno())
        if self.exit is not None:
            return
        if shell.broken and not self._interrupted:
            self._interrupt(shell_supervisor.END)
        if not shell.alive:
            shell.read_reports()
            self.ended_shell = not self._interrupted and not shell.stopped
            status = shell.exit_status
            self._set_exit(exit_code(status if status is not None else signal.SIGKILL))
        elif shell.status is not None and not self._interrupted:
            self._set_exit(shell.status)

    def _set_exit(self, code: int) -> None:
        self.exit = Exit(code=code, timed_out=self._timed_out, childless=False)
        self._pipes.start_drain()

    async def _check_result(self) -> None:
        shell = self._shell
        if bash_protocol.UNREAD in shell.reports:
            shell.broken = True
            raise CommandNotRead
        shell.check_directory(self._request.cwd or "", "Pass an existing directory as cwd.")
        if self.ended_shell and shell.exit_status is None:
            # The supervisor was killed: by a process inside, or with the whole sandbox.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(JAIL_END_SECONDS):
                    await shell.run.jail.wait()
                self.ended_shell = False
                raise shell.run.gone("jail ended")

    def _time_out(self) -> None:
        if self.exit is None:
            self._timed_out = True
            self._interrupt(shell_supervisor.INTERRUPT, TERMINATE_SECONDS)

    def _interrupt(self, message: bytes, grace: float = 0.0) -> None:
        """End the command through the supervisor, and then a shell that does not report."""
        self._interrupted = True
        self._shell.send(message)
        wait = grace + INTERRUPTED_SECONDS
        loop = asyncio.get_running_loop()
        self._timers.append(loop.call_later(wait, self._shell.send, shell_supervisor.END))
        self._deadline = time.monotonic() + wait + RESPONSE_SECONDS

    def _check_progress(self) -> None:
        """Check whether a silent command has lost its shell or its supervisor."""
        self._next_check = time.monotonic() + CHECK_SECONDS
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise SandboxGone(
                "the supervisor of the session does not respond.",
                hint="Run the command again: the session gets another shell.",
                reason="supervisor unresponsive",
            )
        # Bash reads its script byte by byte, so it reads the lines after a command only when the
        # command has ended.
        self._idle_checks = self._idle_checks + 1 if self._shell.directory.all_read else 0
        if self._idle_checks > 1 and not self._interrupted:
            self._shell.broken = True
            self._check_end()

    async def _kill(self) -> None:
        if not self._interrupted:
            self._interrupt(shell_supervisor.INTERRUPT_NOW)
        with contextlib.suppress(SandboxGone, CommandNotRead):
            while self.exit is None:
                await self.read()
        if self.exit is None:
            self._shell.broken = True


async def _write_stdin(shell: SessionShell, data: bytes | None) -> str | None:
    if data is None or len(data) <= _LARGE_STDIN:
        return shell.directory.write_stdin(data)
    return await asyncio.to_thread(shell.directory.write_stdin, data)
