"""The terminals of a sandbox: opened, found, listed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.client.handle import Handle, part, repeat_key
from smokebox.client.session import Session, session_id
from smokebox.client.terminal import Terminal
from smokebox.options import check_command, check_env
from smokebox.types import TerminalInfo
from smokebox.wire import answers
from smokebox.wire.requests import CreateTerminal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Terminals(Handle):
    """Terminals, which end with their programs, or with the server."""

    async def create_terminal(
        self,
        command: str | Sequence[str] | None = None,
        *,
        id: str | None = None,
        cols: int = 80,
        rows: int = 24,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        session: Session | str | None = None,
    ) -> Terminal:
        """A terminal in which a program runs: by default an interactive shell.

        With `session` it begins in that session's directory, with what that exports, as its
        user; it is another shell, and what it does is not seen in the session.
        """
        body = CreateTerminal(
            id=id,
            command=None if command is None else check_command(command),
            cols=cols,
            rows=rows,
            cwd=cwd,
            env=check_env(env) or None,
            user=user,
            session=None if session is None else session_id(session),
        )
        info = await self._ask(
            TerminalInfo, "POST", "/terminals", body=body, timeout=None, repeat_key=repeat_key()
        )
        return Terminal(self, info)

    async def open_terminal(self, id: str) -> Terminal:
        """The terminal of that id. Several may look at one. Raises `NotFound`."""
        path = f"/terminals/{part('terminal', id)}"
        return Terminal(self, await self._ask(TerminalInfo, "GET", path))

    async def list_terminals(self) -> list[Terminal]:
        """All that run, and those kept of the ended, in the order of their making."""
        found = await self._ask(answers.Terminals, "GET", "/terminals")
        return [Terminal(self, info) for info in found.terminals]
