"""The sessions of a sandbox: made, found, listed, deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.client.commands import Commands
from smokebox.client.handle import part, repeat_key
from smokebox.client.session import Session, session_id
from smokebox.options import check_env
from smokebox.types import SessionInfo
from smokebox.wire import answers
from smokebox.wire.requests import CreateSession

if TYPE_CHECKING:
    from collections.abc import Mapping


class Sessions(Commands):
    """Sessions, besides commands, which may run in one."""

    async def create_session(
        self,
        id: str | None = None,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> Session:
        """A shell that remembers from one command to the next, under a random id by default.

        Nothing is started before its first command. Raises `Conflict` for an id that is
        taken.
        """
        body = CreateSession(id=id, cwd=cwd, env=check_env(env) or None, user=user)
        info = await self._ask(SessionInfo, "POST", "/sessions", body=body, repeat_key=repeat_key())
        return Session(self, info)

    async def get_session(self, id: str) -> Session:
        """The session of that id. Raises `NotFound`."""
        path = f"/sessions/{part('session', id)}"
        return Session(self, await self._ask(SessionInfo, "GET", path))

    async def list_sessions(self) -> list[Session]:
        """All sessions, in the order in which they were made."""
        found = await self._ask(answers.Sessions, "GET", "/sessions")
        return [Session(self, info) for info in found.sessions]

    async def delete_session(self, session: Session | str) -> None:
        """Kill a session's shell and all that it left running, and forget it."""
        path = f"/sessions/{part('session', session_id(session))}"
        await self._ask(type(None), "DELETE", path, timeout=None)
