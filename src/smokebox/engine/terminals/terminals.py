"""The terminals of one sandbox: create, get, list, close."""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smokebox.engine.names import check_session_name, check_terminal_id
from smokebox.engine.record.rows import SessionRow
from smokebox.engine.sessions.driver import SessionState
from smokebox.engine.terminals.line import open_line, start_program
from smokebox.engine.terminals.terminal import Terminal, check_size
from smokebox.errors import Conflict, InvalidOption, LimitReached, NotFound
from smokebox.foundation.ids import new_id
from smokebox.foundation.paths import resolve
from smokebox.options import check_env

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    from smokebox.engine.record.record import Record
    from smokebox.engine.run import Command, Program, Run

TERM = "xterm-256color"

# As `declare -p` writes them; what is not one word in quotes is an array, and not exported.
_VARIABLE = re.compile(
    rb"""^declare -([-a-zA-Z]+) ([A-Za-z_][A-Za-z0-9_]*)"""
    rb"""=("(?:[^"\\]|\\.)*"|\$'(?:[^'\\]|\\.)*')$""",
    re.MULTILINE | re.DOTALL,
)
_IN_DOUBLE = re.compile(rb"\\([\\\"$`])")
_IN_ANSI = re.compile(rb"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{1,2})|(.))", re.DOTALL)
_NAMED = {
    b"a": b"\a",
    b"b": b"\b",
    b"e": b"\x1b",
    b"E": b"\x1b",
    b"f": b"\f",
    b"n": b"\n",
    b"r": b"\r",
    b"t": b"\t",
    b"v": b"\v",
}
# What each shell and each terminal has of its own.
_OWN = frozenset({"PWD", "OLDPWD", "SHLVL", "TERM", "COLUMNS", "LINES", "_"})
MOST_RUNNING = 64
MOST_ENDED = 32

# What programs may take to end by themselves when the sandbox is about to.
_PART_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """Where to begin, as whom, and with which variables; None for the sandbox's own."""

    cwd: str | None = None
    user: str | None = None
    env: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of_session(cls, row: SessionRow) -> StartOptions:
        """As a session is after its last command."""
        if row.state is None:
            return cls(cwd=row.cwd or None, user=row.user or None, env=dict(row.env))
        state = SessionState.unpack(row.state)
        return cls(cwd=state.cwd, user=row.user or None, env=exported(state.script))

    async def program(
        self,
        run: Run,
        command: Command | None,
        *,
        cwd: str | None,
        env: Mapping[str, str] | None,
        user: str | None,
    ) -> Program:
        """What to start, with what was asked for put over this."""
        return await run.program(
            words_of(command, run.shell),
            cwd=resolve(cwd, self.cwd or run.cwd) if cwd is not None else self.cwd,
            env={"TERM": run.env.get("TERM", TERM), **self.env, **check_env(env)},
            user=user if user is not None else self.user,
        )


def words_of(command: Command | None, shell: str) -> Command:
    """The words to start: the shell, one program by its name, or words as they are."""
    if command is None:
        return [shell]
    if isinstance(command, str):
        if not command or command.split() != [command]:
            raise InvalidOption(
                f"the command of a terminal is one word, or a list of words, not {command!r:.80}.",
                hint="Pass 'python3', or ['python3', '-q'], or ['bash', '-c', 'make; exec bash'].",
                option="command",
                value=command,
            )
        return [command]
    return command


def exported(script: bytes) -> dict[str, str]:
    """The exported variables in the state of a session."""
    found: dict[str, str] = {}
    for flags, name, value in _VARIABLE.findall(script):
        if b"x" in flags and name.decode() not in _OWN:
            found[name.decode()] = _unquote(value).decode("utf-8", "surrogateescape")
    return found


def _unquote(value: bytes) -> bytes:
    if value.startswith(b'"'):
        return _IN_DOUBLE.sub(rb"\1", value[1:-1])
    return _IN_ANSI.sub(_character, value[2:-1])


def _character(match: re.Match[bytes]) -> bytes:
    octal, hexadecimal, other = match.groups()
    if octal is not None:
        return bytes([int(octal, 8) & 0xFF])
    if hexadecimal is not None:
        return bytes([int(hexadecimal, 16)])
    return _NAMED.get(other, other)


class Terminals:
    """What terminals a sandbox has, and had lately.

    They are this engine's alone: they end with it, also when it is killed, and the next
    engine knows nothing of them. `use` gives the sandbox's run, woken if need be.
    """

    def __init__(
        self,
        *,
        id: str,
        record: Record,
        use: Callable[[], AbstractAsyncContextManager[Run]],
    ) -> None:
        self._id = id
        self._record = record
        self._use = use
        self._known: dict[str, Terminal] = {}
        self._starting: set[str] = set()
        self._following: dict[asyncio.Task[None], Terminal] = {}

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
        """A terminal in which a program runs: the shell, one named, or words as they are.

        The shell is bash where the image has it, and interactive. It is given what a login
        gives, but reads no /etc/profile, which would undo the PATH of the image. With
        `session` it begins in that session's directory, with what that exports, as its
        user; it is another shell, and what it does is not seen in the session.

        Raises `Conflict` for an id that is taken, `NotFound` for an unknown session,
        `LimitReached` for one too many, `PathNotFound` for a program that is not there.
        """
        name = check_terminal_id(id) if id is not None else new_id("t")
        check_size(cols, rows)
        async with self._use() as run:
            self._reserve(name)
            try:
                beginning = await self._beginning(session)
                program = await beginning.program(run, command, cwd=cwd, env=env, user=user)
                terminal = await self._open(run, program, name, cols, rows)
            finally:
                self._starting.discard(name)
        return terminal

    async def get(self, id: str) -> Terminal:
        """The terminal of that id; raises `NotFound`."""
        found = self._known.get(check_terminal_id(id))
        if found is None:
            raise NotFound(
                f"sandbox {self._id} has no terminal {id!r}.",
                hint="See list() for those it has. They end with the engine that made them.",
                kind="terminal",
                name=id,
            )
        return found

    async def list(self) -> list[Terminal]:
        """All that run, and those kept of the ended, in the order of their making."""
        return list(self._known.values())

    async def close(self, id: str) -> None:
        """End a terminal with everything in it, and forget it."""
        terminal = await self.get(id)
        await terminal.kill()
        if self._known.get(terminal.id) is terminal:
            del self._known[terminal.id]

    async def part(self) -> None:
        """The sandbox is about to end: hang up, and give programs a moment to end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PART_SECONDS), asyncio.TaskGroup() as group:
                for terminal in set(self._following.values()):
                    group.create_task(terminal.part())

    async def ended(self, reason: str) -> None:
        """The run of the sandbox is over: viewers hear why. Safe to repeat."""
        following = dict(self._following)
        for task, terminal in following.items():
            terminal.cut_off(reason)
            task.cancel()
        if following:
            await asyncio.wait(following)

    async def _beginning(self, session: str | None) -> StartOptions:
        if session is None:
            return StartOptions()
        row = await self._record.get(SessionRow, self._id, check_session_name(session))
        if row is None:
            raise NotFound(
                f"sandbox {self._id} has no session {session!r}.",
                hint="List its sessions, or leave session out.",
                kind="session",
                name=session,
            )
        return StartOptions.of_session(row)

    def _reserve(self, name: str) -> None:
        if name in self._known or name in self._starting:
            raise Conflict(
                f"sandbox {self._id} has a terminal {name!r} already.",
                hint="Use another id, or close() that one, also when it has ended.",
                kind="terminal",
                name=name,
            )
        running = sum(terminal.running for terminal in self._known.values())
        if running + len(self._starting) >= MOST_RUNNING:
            raise LimitReached(
                f"sandbox {self._id} has {MOST_RUNNING} terminals, and may not have more.",
                hint="Close some of them.",
                limit="terminals",
            )
        self._starting.add(name)

    async def _open(self, run: Run, program: Program, name: str, cols: int, rows: int) -> Terminal:
        line = open_line(run, program)
        try:
            control = await start_program(run, program, line, cols=cols, rows=rows)
        except BaseException:
            line.close()
            raise
        terminal = Terminal(
            name,
            command=program.argv,
            cols=cols,
            rows=rows,
            run=run,
            control=control,
            line=line,
            use=self._use,
            on_exit=self._make_room,
        )
        self._known[name] = terminal
        task = asyncio.create_task(terminal.follow())
        self._following[task] = terminal
        task.add_done_callback(self._following.pop)
        return terminal

    def _make_room(self) -> None:
        ended = [one for one in self._known.values() if not one.running]
        ended.sort(key=lambda one: one.ended_at or 0.0)
        for terminal in ended[:-MOST_ENDED]:
            self._known.pop(terminal.id, None)
