"""Handle of a shell session: a bash in a sandbox that keeps its state between commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.client.sandbox_connection import path_segment
from smokebox.wire.requests import SetEnv

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from smokebox.client.sandbox_commands import SandboxCommands
    from smokebox.runtime.stream import ExecStream
    from smokebox.types import ExecResult, SessionInfo


class ShellSession:
    """A bash that keeps its directory, variables, functions, aliases, options and traps.

    Commands run one at a time, in the order of the calls. `info` is from when the handle was
    created; `refresh` updates it.
    """

    def __init__(self, sandbox: SandboxCommands, info: SessionInfo) -> None:
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
        """Run a command in the session and wait for it; see `Sandbox.exec`.

        Args:
            command: A string for bash, or a list of words.
            cwd: Directory for this command only, relative to the session's.
            env: Variables for this command only.
            timeout: Seconds after which it is killed, with exit code 124.
            stdin: Input of the command.

        Raises:
            NotFound: The session was deleted.
            SandboxGone: The sandbox or its server stopped during the command.
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
        """Run a command in the session and yield its output; options are those of `exec`."""
        return self._sandbox.exec_stream(
            command, cwd=cwd, env=env, timeout=timeout, stdin=stdin, session=self.id
        )

    async def set_env(self, env: Mapping[str, str | None]) -> None:
        """Export variables for all later commands.

        Args:
            env: Values by name; None unsets a variable.

        Raises:
            NotFound: The session was deleted.
        """
        path = f"/sessions/{path_segment('session', self.id)}/env"
        body = SetEnv(env=dict(env))
        await self._sandbox._connection.request(type(None), "POST", path, body=body)

    async def refresh(self) -> SessionInfo:
        """Update `info` from the server and return it.

        Raises:
            NotFound: The session was deleted.
        """
        self.info = (await self._sandbox.get_session(self.id)).info
        return self.info

    async def delete(self) -> None:
        """Delete the session: kill its shell and everything that it left running."""
        await self._sandbox.delete_session(self)

    def __repr__(self) -> str:
        return f"<ShellSession {self.id!r} of sandbox {self._sandbox._connection.id!r}>"
