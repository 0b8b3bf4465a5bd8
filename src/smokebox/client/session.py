"""The handle of a session: a shell in a sandbox that remembers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.client.handle import part
from smokebox.wire.requests import SetEnv

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from smokebox.client.sessions import Sessions
    from smokebox.sandbox.api import ExecStream
    from smokebox.types import ExecResult, SessionInfo


class Session:
    """A bash that remembers: `cd`, variables, functions, aliases, options, traps.

    Commands run one at a time, in the order in which they were asked for. What is told by
    `info` is from when the handle was made; `refresh` asks again.
    """

    def __init__(self, sandbox: Sessions, info: SessionInfo) -> None:
        self.id = info.id
        self.info = info
        self._sandbox = sandbox

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: str | bytes | None = None,
    ) -> ExecResult:
        """Run a command in the session and wait for it.

        `cwd`, relative to where the session is, and `env` hold for this command only.
        """
        return await self._sandbox.exec(
            command, cwd=cwd, env=env, timeout=timeout, stdin=stdin, session=self.id
        )

    def exec_stream(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: str | bytes | None = None,
    ) -> ExecStream:
        """Run a command in the session and give its output as it is written."""
        return self._sandbox.exec_stream(
            command, cwd=cwd, env=env, timeout=timeout, stdin=stdin, session=self.id
        )

    async def set_env(self, env: Mapping[str, str | None]) -> None:
        """Export variables for all later commands; None unsets one."""
        path = f"/sessions/{part('session', self.id)}/env"
        await self._sandbox._ask(type(None), "POST", path, body=SetEnv(env=dict(env)))

    async def refresh(self) -> SessionInfo:
        """What is known of it at this moment, which is in `info` from then on."""
        self.info = (await self._sandbox.get_session(self.id)).info
        return self.info

    async def delete(self) -> None:
        """Kill its shell and all that it left running, and forget it."""
        await self._sandbox.delete_session(self)

    def __repr__(self) -> str:
        return f"<Session {self.id!r} of sandbox {self._sandbox.id!r}>"


def session_id(session: Session | str) -> str:
    """The id of a session that is given by its handle or by its id."""
    return session.id if isinstance(session, Session) else session
