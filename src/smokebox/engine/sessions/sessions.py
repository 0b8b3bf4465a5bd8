"""Sessions of a sandbox: shells that keep their state from command to command.

A session is its state: directory, variables, functions, aliases, options, traps, umask. A bash
holds it while the sandbox runs. After each command it is saved in the record, from which another
bash restores it, in another run of the sandbox or of the engine.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, TypedDict

from smokebox.engine.names import check_session_name, check_user, random_id
from smokebox.engine.record.rows import SessionRow, delete, put
from smokebox.engine.run import STOPPED, RunPart
from smokebox.engine.sessions.bash_protocol import remove_leftovers
from smokebox.engine.sessions.session import ShellSession
from smokebox.errors import Conflict, NotFound
from smokebox.foundation.paths import check_path
from smokebox.options import check_env

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smokebox.engine.record.record import Record
    from smokebox.engine.run import Run, RunOwner


class SessionOptions(TypedDict, total=False):
    """The options of `Sessions.create`."""

    cwd: str | None
    env: Mapping[str, str] | None
    user: str | None


class Sessions(RunPart):
    """The sessions of one sandbox."""

    def __init__(self, owner: RunOwner, record: Record) -> None:
        self._id = owner.id
        self._record = record
        self._use = owner.use
        self._known: dict[str, ShellSession] = {}
        self._changing = asyncio.Lock()
        self._leftovers_removed = False

    async def create(
        self,
        name: str | None = None,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> ShellSession:
        """Create a session. Its shell starts with the first command.

        Args:
            name: Name of the session; by default a random one.
            cwd: Initial directory; by default that of the sandbox.
            env: Environment variables to add.
            user: User of its commands; by default that of the sandbox.

        Raises:
            Conflict: A session with that name exists.
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
                    f"sandbox {self._id} already has a session {name!r}.",
                    hint="Get that session, delete it, or leave the name out for a random one.",
                    kind="session",
                    name=name,
                )
            await self._record.write(put(row))
            return self._open(row)

    async def get(self, name: str) -> ShellSession:
        """Return a session by name. Raises `NotFound`."""
        check_session_name(name)
        if (known := self._known.get(name)) is not None:
            return known
        async with self._changing:
            row = await self._record.get(SessionRow, self._id, name)
            if row is None:
                raise self._missing(name)
            return self._open(row)

    async def list(self) -> list[ShellSession]:
        """Return all sessions, in order of creation."""
        async with self._changing:
            rows = await self._record.rows(SessionRow, self._id)
            return [self._open(row) for row in rows]

    async def delete(self, name: str) -> None:
        """Kill the shell of a session with its background processes, and forget the session."""
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
        """True if a command runs in any session or waits to run."""
        return any(session.busy for session in self._known.values())

    async def before_end(self) -> None:
        """Wait until the states after all finished commands are in the record."""
        for session in list(self._known.values()):
            await session.flush()

    async def ended(self, reason: str) -> None:
        """Release the shells of a run that ended. The states stay.

        Current and waiting commands raise `SandboxGone`; the next one starts another shell.
        """
        for session in self._known.values():
            session.run_ended(reason)

    async def aclose(self) -> None:
        """Close all shells: they end with this engine."""
        await self.ended(STOPPED)

    def _prepare(self, run: Run) -> None:
        # Before the first shell of this engine, all directories are those of another engine.
        if not self._leftovers_removed:
            remove_leftovers(f"{run.directory}/run/io")
            self._leftovers_removed = True

    def _open(self, row: SessionRow) -> ShellSession:
        if row.name not in self._known:
            self._known[row.name] = ShellSession(
                row, record=self._record, use=self._use, prepare=self._prepare
            )
        return self._known[row.name]

    def _missing(self, name: str) -> NotFound:
        return NotFound(
            f"sandbox {self._id} has no session {name!r}.",
            hint="List its sessions, or create one with that name.",
            kind="session",
            name=name,
        )
