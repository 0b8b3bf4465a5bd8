"""The terminals of one sandbox: create, get, list, close."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from smokebox.engine.names import check_session_name, check_terminal_id
from smokebox.engine.record.rows import SessionRow
from smokebox.engine.run import STOPPED, RunPart
from smokebox.engine.sessions.bash_protocol import SessionState
from smokebox.engine.terminals.channel import open_channel
from smokebox.engine.terminals.terminal import Terminal, check_size
from smokebox.errors import Conflict, InvalidOption, LimitReached, NotFound
from smokebox.foundation.ids import new_id
from smokebox.foundation.paths import resolve
from smokebox.options import check_env

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smokebox.engine.record.record import Record
    from smokebox.engine.run import Command, Program, Run, RunOwner

TERM = "xterm-256color"
MAX_RUNNING = 64
MAX_ENDED = 32

# Time for programs to exit by themselves before the sandbox ends.
_EXIT_SECONDS = 0.5


class Terminals(RunPart):
    """The terminals of a sandbox that run or ended recently.

    They end with this engine, also when it is killed, and the next engine does not know them.
    """

    def __init__(self, owner: RunOwner, record: Record) -> None:
        self._id = owner.id
        self._record = record
        self._use = owner.use
        self._known: dict[str, Terminal] = {}
        self._starting: set[str] = set()
        self._serving: dict[asyncio.Task[None], Terminal] = {}

    async def create(
        self,
        id: str | None = None,
        *,
        command: Command | None = None,
        cols: int = 80,
        rows: int = 24,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        session: str | None = None,
    ) -> Terminal:
        """Create a terminal and start a program in it.

        Args:
            id: Id of the terminal; by default a random one.
            command: The name of a program, or a list of literal words; by default an interactive
                shell, which is bash if the image has it. It has the environment of a login, but
                does not read /etc/profile, which would undo the PATH of the image.
            cols: Width in characters.
            rows: Height in lines.
            cwd: Working directory; by default that of the session or the sandbox.
            env: Environment variables to add.
            user: User of the program; by default that of the session or the sandbox.
            session: Start with the directory, exported variables and user of this session. The
                program does not share the shell of the session.

        Raises:
            Conflict: The id is taken.
            NotFound: The session does not exist.
            LimitReached: The sandbox has too many terminals.
            PathNotFound: The program does not exist.
        """
        name = check_terminal_id(id) if id is not None else new_id("t")
        check_size(cols, rows)
        async with self._use() as run:
            self._reserve(name)
            try:
                program = await self._program(run, command, cwd, env, user, session)
                return await self._open(run, program, name, cols, rows)
            finally:
                self._starting.discard(name)

    async def get(self, id: str) -> Terminal:
        """Return a terminal by id. Raises `NotFound`."""
        found = self._known.get(check_terminal_id(id))
        if found is None:
            raise NotFound(
                f"sandbox {self._id} has no terminal {id!r}.",
                hint="See list() for its terminals. They end with the engine that made them.",
                kind="terminal",
                name=id,
            )
        return found

    async def list(self) -> list[Terminal]:
        """Return running terminals and recently ended ones, in order of creation."""
        return list(self._known.values())

    async def close(self, id: str) -> None:
        """Kill all processes in a terminal, and forget it."""
        terminal = await self.get(id)
        await terminal.kill()
        if self._known.get(terminal.id) is terminal:
            del self._known[terminal.id]

    async def before_end(self) -> None:
        """Hang up, and give programs a moment to exit."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_SECONDS), asyncio.TaskGroup() as group:
                for terminal in set(self._serving.values()):
                    group.create_task(terminal.prepare_end())

    async def ended(self, reason: str) -> None:
        """End all terminals with the run of the sandbox. Safe to repeat."""
        serving = dict(self._serving)
        for task, terminal in serving.items():
            terminal.run_ended(reason)
            task.cancel()
        if serving:
            await asyncio.wait(serving)

    async def aclose(self) -> None:
        """Close all terminals: they end with this engine."""
        await self.ended(STOPPED)

    async def _program(
        self,
        run: Run,
        command: Command | None,
        cwd: str | None,
        env: Mapping[str, str] | None,
        user: str | None,
        session: str | None,
    ) -> Program:
        start_cwd: str | None = None
        start_env: Mapping[str, str] = {}
        if session is not None:
            row = await self._get_session(session)
            user = user if user is not None else row.user or None
            start_cwd, start_env = row.cwd or None, row.env
            if row.state is not None:
                state = SessionState.unpack(row.state)
                start_cwd, start_env = state.cwd, state.exported()
        return await run.program(
            _check_command(command, run.shell),
            cwd=resolve(cwd, start_cwd or run.cwd) if cwd is not None else start_cwd,
            env={"TERM": run.env.get("TERM", TERM), **start_env, **check_env(env)},
            user=user,
        )

    async def _get_session(self, session: str) -> SessionRow:
        row = await self._record.get(SessionRow, self._id, check_session_name(session))
        if row is None:
            raise NotFound(
                f"sandbox {self._id} has no session {session!r}.",
                hint="List its sessions, or leave session out.",
                kind="session",
                name=session,
            )
        return row

    def _reserve(self, name: str) -> None:
        if name in self._known or name in self._starting:
            raise Conflict(
                f"sandbox {self._id} already has a terminal {name!r}.",
                hint="Use another id, or close() that terminal, even if it has ended.",
                kind="terminal",
                name=name,
            )
        running = sum(terminal.running for terminal in self._known.values())
        if running + len(self._starting) >= MAX_RUNNING:
            raise LimitReached(
                f"sandbox {self._id} has {MAX_RUNNING} terminals, which is the limit.",
                hint="Close some of them.",
                limit="terminals",
            )
        self._starting.add(name)

    async def _open(self, run: Run, program: Program, name: str, cols: int, rows: int) -> Terminal:
        channel = open_channel(run, program)
        try:
            control = await channel.start(run, program, cols, rows)
        except BaseException:
            channel.close()
            raise
        terminal = self._known[name] = Terminal(
            name,
            command=program.argv,
            cols=cols,
            rows=rows,
            run=run,
            control=control,
            channel=channel,
            use=self._use,
            on_exit=self._forget_surplus,
        )
        task = asyncio.create_task(terminal.serve())
        self._serving[task] = terminal
        task.add_done_callback(self._serving.pop)
        return terminal

    def _forget_surplus(self) -> None:
        ended = [one for one in self._known.values() if not one.running]
        ended.sort(key=lambda one: one.ended_at or 0.0)
        for terminal in ended[:-MAX_ENDED]:
            self._known.pop(terminal.id, None)


def _check_command(command: Command | None, shell: str) -> Command:
    """Return the words to start: a shell, one program by name, or literal words."""
    if command is None:
        return [shell]
    if not isinstance(command, str):
        return command
    if not command or command.split() != [command]:
        raise InvalidOption(
            f"the command of a terminal is one word, or a list of words, not {command!r:.80}.",
            hint="Pass 'python3', or ['python3', '-q'], or ['bash', '-c', 'make; exec bash'].",
            option="command",
            value=command,
        )
    return [command]
