"""Sessions: shells of a sandbox that keep what was done in them from command to command.

A session is its state: directory, variables, functions, aliases, options, traps, umask.
A bash holds it while the sandbox runs; after each command it is kept in the record, from
which another bash takes it over, in another run of the sandbox or of the engine.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from smokebox.engine.names import check_session_name, check_user, random_id
from smokebox.engine.record.rows import SessionRow, delete, put
from smokebox.engine.sessions.driver import sweep
from smokebox.engine.sessions.session import ShellSession
from smokebox.errors import Conflict, NotFound
from smokebox.foundation.paths import check_path
from smokebox.options import check_env
from smokebox.runtime.output import MAX_OUTPUT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    from smokebox.engine.record.record import Record
    from smokebox.engine.run import Run


class Sessions:
    """The sessions of one sandbox.

    `use` wakes the sandbox and gives its run for as long as a command takes.
    """

    def __init__(
        self,
        *,
        id: str,
        record: Record,
        use: Callable[[], AbstractAsyncContextManager[Run]],
        max_output: int = MAX_OUTPUT,
    ) -> None:
        self._id = id
        self._record = record
        self._use = use
        self._max_output = max_output
        self._known: dict[str, ShellSession] = {}
        self._changing = asyncio.Lock()
        self._swept = False

    async def create(
        self,
        name: str | None = None,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> ShellSession:
        """A session that begins in `cwd` (default: the sandbox's), with `env` besides its own.

        Nothing is started before the first command. Raises `Conflict` for a name that is
        taken.
        """
        name = check_session_name(name) if name is not None else f"session-{random_id()}"
        row = SessionRow(
            sandbox_id=self._id,
            name=name,
            cwd=check_path(cwd) if cwd is not None else "",
            user=check_user(user) if user is not None else "",
            created_at=time.time(),
            env=check_env(env),
        )
        async with self._changing:
            if await self._record.get(SessionRow, self._id, name) is not None:
                raise Conflict(
                    f"sandbox {self._id} has a session {name!r}.",
                    hint="Get that one, delete it, or leave the name out for one of its own.",
                    kind="session",
                    name=name,
                )
            await self._record.write(put(row))
            return self._know(row)

    async def get(self, name: str) -> ShellSession:
        """The session of that name. Raises `NotFound`."""
        check_session_name(name)
        if (known := self._known.get(name)) is not None:
            return known
        async with self._changing:
            row = await self._record.get(SessionRow, self._id, name)
            if row is None:
                raise self._missing(name)
            return self._know(row)

    async def list(self) -> list[ShellSession]:
        """All sessions, in the order in which they were made."""
        async with self._changing:
            rows = await self._record.rows(SessionRow, self._id)
            return [self._know(row) for row in rows]

    async def delete(self, name: str) -> None:
        """Kill a session's shell and all that it left running, and forget it."""
        check_session_name(name)
        async with self._changing:
            count = await self._record.write(delete(SessionRow, self._id, name))
            known = self._known.pop(name, None)
        if known is not None:
            await known.destroy()
        if not count:
            raise self._missing(name)

    @property
    def busy(self) -> bool:
        """Whether a command runs in any of them, or waits."""
        return any(session.busy for session in self._known.values())

    async def adopt(self, run: Run) -> None:
        """Nothing: the shells of another engine have ended with it."""

    async def ended(self, reason: str) -> None:
        """A run of the sandbox is over: its shells are gone, their states are not.

        Commands that run or wait raise `SandboxGone`; the next one begins another shell.
        """
        for session in self._known.values():
            session.ended(reason)

    async def saved(self) -> None:
        """Wait until the states after all finished commands are in the record."""
        for session in list(self._known.values()):
            await session.saved()

    def _sweep(self, run: Run) -> None:
        # Before the first shell of this engine, all folders are of another one's time.
        if not self._swept:
            sweep(f"{run.directory}/run/io")
            self._swept = True

    def _know(self, row: SessionRow) -> ShellSession:
        if row.name not in self._known:
            self._known[row.name] = ShellSession(
                row,
                record=self._record,
                use=self._use,
                prepare=self._sweep,
                max_output=self._max_output,
            )
        return self._known[row.name]

    def _missing(self, name: str) -> NotFound:
        return NotFound(
            f"sandbox {self._id} has no session {name!r}.",
            hint="List its sessions, or create one of that name.",
            kind="session",
            name=name,
        )
