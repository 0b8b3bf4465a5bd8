"""The terminals of one sandbox: made, found by their ids, listed, closed."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import TYPE_CHECKING

from smokebox.engine.names import check_session_name, check_terminal_id
from smokebox.engine.record.rows import SessionRow
from smokebox.engine.terminals import opening
from smokebox.engine.terminals.beginning import Beginning
from smokebox.engine.terminals.terminal import Terminal, check_size
from smokebox.errors import Conflict, LimitReached, NotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    from smokebox.engine.record.record import Record
    from smokebox.engine.run import Command, Program, Run

MOST_RUNNING = 64
MOST_ENDED = 32

# What programs may take to end by themselves when the sandbox is about to.
_PART_SECONDS = 0.5


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
        name = check_terminal_id(id) if id is not None else f"t-{secrets.token_hex(6)}"
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

    async def _beginning(self, session: str | None) -> Beginning:
        if session is None:
            return Beginning()
        row = await self._record.get(SessionRow, self._id, check_session_name(session))
        if row is None:
            raise NotFound(
                f"sandbox {self._id} has no session {session!r}.",
                hint="List its sessions, or leave session out.",
                kind="session",
                name=session,
            )
        return Beginning.of_session(row)

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
        line = opening.open_line(run, program)
        try:
            control = await opening.start(run, program, line, cols=cols, rows=rows)
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
