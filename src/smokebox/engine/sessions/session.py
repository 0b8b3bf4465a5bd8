"""One session: its commands run one at a time, and its state lasts between them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

from smokebox.engine.record.rows import update
from smokebox.engine.run import CannotStart
from smokebox.engine.sessions.bash_protocol import SessionState
from smokebox.engine.sessions.command import (
    CommandOptions,
    CommandRequest,
    SessionCommand,
    command_request,
    export_request,
)
from smokebox.engine.sessions.shell import (
    MAX_STATE,
    SHELL_OPTIONS,
    CommandNotRead,
    SessionShell,
    close_if_ended,
    kill_tree,
)
from smokebox.errors import InvalidOption, NotFound, SandboxGone, SmokeboxError, from_os_error
from smokebox.foundation.paths import resolve
from smokebox.options import check_env
from smokebox.runtime.capture import collect, decode_stream, stream
from smokebox.runtime.output import MAX_OUTPUT
from smokebox.runtime.stream import ByteStream, Chunk, ExecStream
from smokebox.types import ExecResult

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    from smokebox.engine.record.record import Record
    from smokebox.engine.record.rows import SessionRow
    from smokebox.engine.run import Program, Run, UseRun

_log = logging.getLogger("smokebox.sessions")
_ATTEMPTS = 3


class ShellSession:
    """A bash that keeps its directory, variables, functions, aliases, options and traps.

    Commands run one at a time, in the order of their calls. A command that ends the shell
    (`exit 3`, `set -e; false`, `exec`, a signal) returns its exit code and `session_ended`; the
    next one starts with the session's first directory and environment, as after a logout. After
    `set -e`, every command with a non-zero exit code ends the shell. A command that times out or is
    cancelled leaves the session as it was at that moment, or as before the command if the shell
    was too busy to report its state. Background processes of earlier commands keep running.
    """

    def __init__(
        self, row: SessionRow, *, record: Record, use: UseRun, prepare: Callable[[Run], None]
    ) -> None:
        self._row = row
        self._record = record
        self._use = use
        self._prepare = prepare
        self._state = None if row.state is None else SessionState.unpack(row.state)
        self._shell: SessionShell | None = None
        self._command: SessionCommand | None = None
        # Control sockets of ended shells that left background processes.
        self._old_controls: list[socket.socket] = []
        self._lock = asyncio.Lock()
        self._deleted = False
        # Counts the runs of the sandbox that have ended.
        self._epoch = 0
        self._command_epoch = 0
        self._end_reason = ""
        self._saving: set[asyncio.Task[None]] = set()

    @property
    def name(self) -> str:
        """Its name in the sandbox."""
        return self._row.name

    @property
    def id(self) -> str:
        """The same as `name`."""
        return self._row.name

    @property
    def created_at(self) -> float:
        """Time of its creation, in seconds since the epoch."""
        return self._row.created_at

    @property
    def user(self) -> str:
        """The user of its commands; empty for the default user of the sandbox."""
        return self._row.user

    @property
    def busy(self) -> bool:
        """True if a command runs in it or waits to run."""
        return self._lock.locked()

    @property
    def cwd(self) -> str:
        """Its working directory, as last reported; empty for the default of the sandbox."""
        return self._state.cwd if self._state is not None else self._row.cwd

    async def exec(self, command: str, **options: Unpack[CommandOptions]) -> ExecResult:
        """Run a command in the session and wait for it."""
        request = command_request(command, **options)
        async with self._turn() as run:
            result = await self._execute(run, request)
        # The caller may rely on the state even if this process is killed next.
        await self.flush()
        return result

    def exec_stream(self, command: str, **options: Unpack[CommandOptions]) -> ExecStream:
        """Run a command in the session and stream its output as text."""
        return ExecStream(decode_stream(self._stream(command_request(command, **options))))

    def exec_bytes(self, command: str, **options: Unpack[CommandOptions]) -> ByteStream:
        """Run a command in the session and stream its output as raw bytes."""
        return ByteStream(self._stream(command_request(command, **options)))

    async def set_env(self, env: Mapping[str, str | None]) -> None:
        """Export variables in the session; None unsets one.

        They stay set after the shell has ended and started again.
        """
        if not isinstance(env, Mapping):
            check_env(env)
            return
        removed = [name for name, value in env.items() if value is None]
        checked = check_env({name: "" if value is None else value for name, value in env.items()})
        values = {name: value for name, value in checked.items() if name not in removed}
        if not checked:
            return
        request = export_request(values, removed)
        async with self._turn() as run:
            result = await self._execute(run, request)
            if not result.success:
                raise InvalidOption(
                    f"session {self.name} refused a variable: {result.stderr.strip()}",
                    hint="A readonly variable cannot be set or unset: use another name.",
                    option="env",
                )
            before = {name: v for name, v in self._row.env.items() if name not in removed}
            self._row = replace(self._row, env=before | values)
            await self._record.write(update(self._row))

    async def flush(self) -> None:
        """Wait until the state after the last finished command is in the record."""
        if self._saving:
            await asyncio.wait(self._saving)

    async def destroy(self) -> None:
        """Kill the shell and its background processes, and refuse waiting commands."""
        self._deleted = True
        self._stop()
        async with self._lock:
            if self._shell is not None:
                await self._shell.kill()
            for control in self._old_controls:
                await kill_tree(control)
                control.close()
            self._shell, self._old_controls = None, []

    def run_ended(self, reason: str) -> None:
        """Release the shells: the run of the sandbox ended."""
        self._epoch += 1
        self._end_reason = reason
        self._stop()
        if not self._lock.locked():
            self._close_shells()

    def _stop(self) -> None:
        if self._shell is not None and self._lock.locked():
            self._shell.stop()

    def _close_shells(self) -> None:
        if self._shell is not None:
            self._shell.close()
        for control in self._old_controls:
            control.close()
        self._shell, self._old_controls = None, []

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[Run]:
        """Wait for the right to use the shell: first come, first served."""
        epoch = self._epoch
        async with self._lock:
            self._check_usable(epoch)
            async with self._use() as run:
                # Waking the sandbox may have ended its former run.
                self._command_epoch = self._epoch
                try:
                    yield run
                finally:
                    if self._command_epoch != self._epoch:
                        self._close_shells()
                self._check_usable(self._command_epoch)

    def _check_usable(self, epoch: int) -> None:
        if self._deleted:
            raise NotFound(
                f"session {self.name!r} was deleted.",
                hint="Create it again.",
                kind="session",
                name=self.name,
            )
        if epoch != self._epoch:
            raise SandboxGone(
                f"the sandbox stopped before session {self.name} had run the command "
                f"({self._end_reason}).",
                hint="Run it again: the session continues from its last state.",
                reason=self._end_reason,
            )

    async def _execute(self, run: Run, request: CommandRequest) -> ExecResult:
        for _ in range(_ATTEMPTS):
            try:
                result = await collect(
                    functools.partial(self._start, run, request),
                    spills=run.spills,
                    max_output=MAX_OUTPUT,
                    timeout=request.timeout,
                    rate=run.limits.output_rate,
                )
                return self._add_session_ended(result)
            except CommandNotRead:
                continue
            except CannotStart as failure:
                return ExecResult(exit_code=failure.exit_code, stderr=f"smokebox: {failure}\n")
            finally:
                self._finish_command()
        raise self._no_shell()

    async def _stream(self, request: CommandRequest) -> AsyncGenerator[Chunk | ExecResult, None]:
        async with self._turn() as run:
            result = None
            for _ in range(_ATTEMPTS):
                start = functools.partial(self._start, run, request)
                items = stream(start, timeout=request.timeout, rate=run.limits.output_rate)
                try:
                    async with contextlib.aclosing(items):
                        async for item in items:
                            if isinstance(item, Chunk):
                                yield item
                            else:
                                result = self._add_session_ended(item)
                    break
                except CommandNotRead:
                    continue
                except CannotStart as failure:
                    yield Chunk("stderr", f"smokebox: {failure}\n".encode())
                    result = ExecResult(exit_code=failure.exit_code)
                    break
                finally:
                    self._finish_command()
        if result is None:
            raise self._no_shell()
        await self.flush()
        yield result

    async def _start(self, run: Run, request: CommandRequest) -> SessionCommand:
        try:
            shell = await self._get_shell(run)
            # A shell that was only starting could not be stopped.
            self._check_usable(self._command_epoch)
            if request.cwd is not None:
                request = replace(request, cwd=resolve(request.cwd, shell.cwd))
            self._command = await SessionCommand.start(shell, request)
            return self._command
        except OSError as error:
            if isinstance(error, SmokeboxError):
                raise
            # The files of a shell are on the host, whose disk may be full.
            raise from_os_error(error, run.directory) from error

    async def _get_shell(self, run: Run) -> SessionShell:
        """Return the current shell, or start one with its state."""
        if (shell := self._shell) is not None:
            await shell.wait_idle()
            if shell.usable and shell.run.jail is run.jail:
                return shell
            self._detach_shell(shell)
        self._prepare(run)
        program = await run.program(
            [run.shell, *SHELL_OPTIONS],
            cwd=self._row.cwd or None,
            env=self._row.env,
            user=self._row.user or None,
        )
        self._shell = await self._start_shell(run, program)
        return self._shell

    async def _start_shell(self, run: Run, program: Program) -> SessionShell:
        try:
            return await SessionShell.start(run, program, self._state)
        except CommandNotRead:
            if self._state is None:
                raise
            _log.warning("session %s: only its directory could be restored", self.name)
            return await SessionShell.start(run, program, replace(self._state, script=b""))

    def _add_session_ended(self, result: ExecResult) -> ExecResult:
        ended = self._command is not None and self._command.ended_shell
        return replace(result, session_ended=True) if ended else result

    def _finish_command(self) -> None:
        """Save the state of the shell after a command, and detach a shell that has ended."""
        shell, command, self._command = self._shell, self._command, None
        if shell is None or command is None:
            return
        if shell.usable:
            self._spawn_save(shell, shell.collect_state())
            return
        self._detach_shell(shell)
        if command.ended_shell:
            self._state = None
        self._spawn_save(shell, None)

    def _detach_shell(self, shell: SessionShell) -> None:
        """End a shell, keep its last state, and leave its background processes running."""
        self._state = shell.state or self._state
        self._shell = None
        self._old_controls = [one for one in self._old_controls if not close_if_ended(one)]
        if (control := shell.detach()) is not None:
            self._old_controls.append(control)

    def _spawn_save(self, shell: SessionShell, collecting: asyncio.Task[None] | None) -> None:
        task = asyncio.create_task(self._save(shell, collecting))
        self._saving.add(task)
        task.add_done_callback(self._saving.discard)

    async def _save(self, shell: SessionShell, collecting: asyncio.Task[None] | None) -> None:
        if collecting is not None:
            await asyncio.wait({collecting})
            self._state = shell.state or self._state
            if shell.oversized:
                _log.warning(
                    "session %s: its state is larger than %d bytes and was not saved",
                    self.name,
                    MAX_STATE,
                )
        data = None if self._state is None else self._state.pack()
        if data != self._row.state:
            self._row = replace(self._row, state=data)
            try:
                await self._record.write(update(self._row))
            except SmokeboxError as error:
                _log.warning("session %s: its state was not saved: %s", self.name, error)

    def _no_shell(self) -> SandboxGone:
        return SandboxGone(
            f"no shell of session {self.name} can read a command.",
            hint="Delete the session and create another.",
            reason="no shell",
        )
