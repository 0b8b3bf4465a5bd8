"""One session: its commands one after the other, and its state between them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from smokebox.engine.record.rows import update
from smokebox.engine.run import CannotStart
from smokebox.engine.sessions.command import (
    CommandRequest,
    SessionCommand,
    command_request,
    export_request,
)
from smokebox.engine.sessions.driver import SessionState
from smokebox.engine.sessions.shell import (
    LARGEST_STATE,
    SHELL_OPTIONS,
    CommandNotRead,
    SessionShell,
    hung_up,
    kill_all_of,
)
from smokebox.errors import InvalidOption, NotFound, SandboxGone, SmokeboxError, from_os_error
from smokebox.foundation.paths import resolve
from smokebox.options import check_env
from smokebox.runtime.capture import collect, decoded, stream
from smokebox.runtime.stream import ByteStream, Chunk, ExecStream
from smokebox.types import ExecResult

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncGenerator, AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from smokebox.engine.record.record import Record
    from smokebox.engine.record.rows import SessionRow
    from smokebox.engine.run import Program, Run

_log = logging.getLogger("smokebox.sessions")
_ATTEMPTS = 3


class ShellSession:
    """A bash that remembers: `cd`, variables, functions, aliases (which expand), options, traps.

    Commands run one at a time, in the order in which they were asked for. One that ends
    the shell (`exit 3`, `set -e; false`, `exec`, a signal) gives its exit code and
    `session_ended`; the next begins afresh with the session's first directory and
    environment, as after a logout. After `set -e` that goes for every command whose exit
    code is not zero, as for one of `eval`. One that is cut short by its timeout or cancelled
    leaves the session as it was at that moment, or, where the shell was too busy to tell,
    as it was before the command; what earlier commands left in the background runs on.
    """

    def __init__(
        self,
        row: SessionRow,
        *,
        record: Record,
        use: Callable[[], AbstractAsyncContextManager[Run]],
        prepare: Callable[[Run], None],
        max_output: int,
    ) -> None:
        self._row = row
        self._record = record
        self._use = use
        self._prepare = prepare
        self._max_output = max_output
        self._state = None if row.state is None else SessionState.unpack(row.state)
        self._shell: SessionShell | None = None
        self._command: SessionCommand | None = None
        self._former: list[socket.socket] = []
        self._turns = asyncio.Lock()
        self._deleted = False
        self._epoch = 0
        self._begun_in = 0
        self._reason = ""
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
        """When it was made, in seconds since the epoch."""
        return self._row.created_at

    @property
    def user(self) -> str:
        """Who its commands run as; empty for the sandbox's own user."""
        return self._row.user

    @property
    def busy(self) -> bool:
        """Whether a command runs in it, or waits."""
        return self._turns.locked()

    @property
    def cwd(self) -> str:
        """Where it is, as far as is known; empty for the sandbox's own directory."""
        return self._state.cwd if self._state is not None else self._row.cwd

    async def exec(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: str | bytes | None = None,
    ) -> ExecResult:
        """Run a command in the session and wait for it.

        `cwd`, relative to where the session is, and `env` hold for this command only: the
        session goes back to where it was. `timeout` counts from when the turn has come.
        """
        order = command_request(command, cwd=cwd, env=env, timeout=timeout, stdin=stdin)
        async with self._turn() as run:
            result = await self._execute(run, order)
        # What the caller knows to be done is done, whatever becomes of this process.
        await self.saved()
        return result

    def exec_stream(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: str | bytes | None = None,
    ) -> ExecStream:
        """Run a command in the session and give its output as it is written."""
        order = command_request(command, cwd=cwd, env=env, timeout=timeout, stdin=stdin)
        return ExecStream(decoded(self._stream(order)))

    def exec_bytes(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: str | bytes | None = None,
    ) -> ByteStream:
        """As `exec_stream`, with the bytes themselves."""
        order = command_request(command, cwd=cwd, env=env, timeout=timeout, stdin=stdin)
        return ByteStream(self._stream(order))

    async def set_env(self, env: Mapping[str, str | None]) -> None:
        """Export variables in the session, from here on; None unsets one.

        They are also there after the shell has ended and begun afresh.
        """
        if not isinstance(env, Mapping):
            check_env(env)
            return
        removed = [name for name, value in env.items() if value is None]
        checked = check_env({name: "" if value is None else value for name, value in env.items()})
        kept = {name: value for name, value in checked.items() if name not in removed}
        if not checked:
            return
        order = export_request(kept, removed)
        async with self._turn() as run:
            result = await self._execute(run, order)
            if not result.success:
                raise InvalidOption(
                    f"session {self.name} refused a variable: {result.stderr.strip()}",
                    hint="A readonly variable cannot be set or unset: use another name.",
                    option="env",
                )
            before = {name: v for name, v in self._row.env.items() if name not in removed}
            self._row = replace(self._row, env=before | kept)
            await self._record.write(update(self._row))

    async def saved(self) -> None:
        """Wait until the state after the last finished command is in the record."""
        if self._saving:
            await asyncio.wait(self._saving)

    async def destroy(self) -> None:
        """End the shell and what it left, and refuse what still waits. Not to be used again."""
        self._deleted = True
        self._stop()
        async with self._turns:
            if self._shell is not None:
                await self._shell.kill()
            for control in self._former:
                await kill_all_of(control)
                control.close()
            self._shell, self._former = None, []

    def ended(self, reason: str) -> None:
        """The run of the sandbox has ended, and all shells with it."""
        self._epoch += 1
        self._reason = reason
        self._stop()
        if not self._turns.locked():
            self._forget()

    def _stop(self) -> None:
        if self._shell is not None and self._turns.locked():
            self._shell.stop()

    def _forget(self) -> None:
        if self._shell is not None:
            self._shell.close()
        for control in self._former:
            control.close()
        self._shell, self._former = None, []

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[Run]:
        """The right to use the shell: one at a time, first come, first served."""
        epoch = self._epoch
        async with self._turns:
            self._check(epoch)
            async with self._use() as run:
                # Waking the sandbox may have ended its former run.
                self._begun_in = self._epoch
                try:
                    yield run
                finally:
                    if self._begun_in != self._epoch:
                        self._forget()
                self._check(self._begun_in)

    def _check(self, epoch: int) -> None:
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
                f"({self._reason}).",
                hint="Run it again: the session goes on from its last state.",
                reason=self._reason,
            )

    async def _execute(self, run: Run, order: CommandRequest) -> ExecResult:
        for _ in range(_ATTEMPTS):
            try:
                result = await collect(
                    functools.partial(self._start, run, order),
                    spills=run.spills,
                    max_output=self._max_output,
                    timeout=order.timeout,
                    rate=run.limits.output_rate,
                )
                return self._marked(result)
            except CommandNotRead:
                continue
            except CannotStart as failure:
                return ExecResult(exit_code=failure.exit_code, stderr=f"smokebox: {failure}\n")
            finally:
                self._finish()
        raise self._unreadable()

    async def _stream(self, order: CommandRequest) -> AsyncGenerator[Chunk | ExecResult, None]:
        async with self._turn() as run:
            result = None
            for _ in range(_ATTEMPTS):
                starting = functools.partial(self._start, run, order)
                rate = run.limits.output_rate
                items = stream(starting, timeout=order.timeout, rate=rate)
                try:
                    async with contextlib.aclosing(items):
                        async for item in items:
                            if isinstance(item, Chunk):
                                yield item
                            else:
                                result = self._marked(item)
                    break
                except CommandNotRead:
                    continue
                except CannotStart as failure:
                    yield Chunk("stderr", f"smokebox: {failure}\n".encode())
                    result = ExecResult(exit_code=failure.exit_code)
                    break
                finally:
                    self._finish()
        if result is None:
            raise self._unreadable()
        await self.saved()
        yield result

    async def _start(self, run: Run, order: CommandRequest) -> SessionCommand:
        try:
            return await self._give(run, order)
        except OSError as error:
            if isinstance(error, SmokeboxError):
                raise
            # What the shell is told goes through files of the host's, whose disk may be full.
            raise from_os_error(error, run.directory) from error

    async def _give(self, run: Run, order: CommandRequest) -> SessionCommand:
        shell = await self._ready(run)
        # A shell that was only being made could not be told to stop.
        self._check(self._begun_in)
        if order.cwd is not None:
            order = replace(order, cwd=resolve(order.cwd, shell.cwd))
        self._command = await SessionCommand.start(shell, order)
        return self._command

    async def _ready(self, run: Run) -> SessionShell:
        """The shell that waits for a command: the one there is, or another in its state."""
        if (shell := self._shell) is not None:
            await shell.settled()
            if shell.fit and shell.run.jail is run.jail:
                return shell
            self._leave(shell)
        self._prepare(run)
        program = await run.program(
            [run.shell, *SHELL_OPTIONS],
            cwd=self._row.cwd or None,
            env=self._row.env,
            user=self._row.user or None,
        )
        if self._state is None:
            self._shell = await SessionShell.start(run, program, None)
        else:
            self._shell = await self._restore(run, program, self._state)
        return self._shell

    async def _restore(self, run: Run, program: Program, state: SessionState) -> SessionShell:
        try:
            return await SessionShell.start(run, program, state)
        except CommandNotRead:
            _log.warning("session %s: its state could not be restored, but for its cwd", self.name)
            return await SessionShell.start(run, program, replace(state, script=b""))

    def _marked(self, result: ExecResult) -> ExecResult:
        ended = self._command is not None and self._command.ended
        return replace(result, session_ended=True) if ended else result

    def _finish(self) -> None:
        """See what comes of the shell after a command, and keep its state."""
        shell, command, self._command = self._shell, self._command, None
        if shell is None or command is None:
            return
        if shell.fit:
            self._keep(shell, shell.settle())
            return
        self._leave(shell)
        if command.ended:
            self._state = None
        self._keep(shell, None)

    def _leave(self, shell: SessionShell) -> None:
        """Let a shell go, and take over its last state; what it left runs on."""
        self._state = shell.state or self._state
        self._shell = None
        self._former = [one for one in self._former if not hung_up(one)]
        if (control := shell.leave()) is not None:
            self._former.append(control)

    def _keep(self, shell: SessionShell, settling: asyncio.Task[None] | None) -> None:
        task = asyncio.create_task(self._save(shell, settling))
        self._saving.add(task)
        task.add_done_callback(self._saving.discard)

    async def _save(self, shell: SessionShell, settling: asyncio.Task[None] | None) -> None:
        if settling is not None:
            await asyncio.wait({settling})
            self._state = shell.state or self._state
            if shell.oversized:
                _log.warning(
                    "session %s: its state is larger than %d bytes, and was not kept",
                    self.name,
                    LARGEST_STATE,
                )
        data = None if self._state is None else self._state.pack()
        if data != self._row.state:
            self._row = replace(self._row, state=data)
            try:
                await self._record.write(update(self._row))
            except SmokeboxError as error:
                _log.warning("session %s: its state was not kept: %s", self.name, error)

    def _unreadable(self) -> SandboxGone:
        return SandboxGone(
            f"session {self.name} has no shell that takes a command.",
            hint="Delete the session and create another.",
            reason="no shell",
        )
