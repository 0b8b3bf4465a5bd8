"""`smokebox exec`: a command in a sandbox, as if it ran here."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from smokebox.cli.options import Command, Cwd, Env, Id, Stdin, Timeout, User  # noqa: TC001
from smokebox.cli.trailing import Trailing

if TYPE_CHECKING:
    from smokebox.client.client import Client


def exec_command(
    id: Id,
    command: Command,
    env: Env = None,
    cwd: Cwd = None,
    user: User = None,
    timeout: Timeout = None,
    session: Annotated[
        str | None,
        typer.Option("--session", "-s", metavar="ID", help="In this shell that remembers."),
    ] = None,
    stdin: Stdin = False,
    create: Annotated[
        bool, typer.Option("--create", help="Make the sandbox if it is not there.")
    ] = False,
) -> int:
    """Run a command in a sandbox.

    Its output is shown as it comes, and its exit code is passed on. Ctrl-C kills it. Output
    is text; for the bytes of a file, see `smokebox cp`.
    """
    from smokebox.cli.given import parse_command, parse_pairs
    from smokebox.cli.remote.finding import find
    from smokebox.cli.remote.running import show
    from smokebox.cli.remote.talking import talk

    variables = parse_pairs("--env", env)
    given = sys.stdin.buffer.read() if stdin else None

    async def work(client: Client) -> int:
        sandbox = await find(client, id, create=create)
        return await show(
            sandbox.exec_stream(
                parse_command(command),
                cwd=cwd,
                env=variables,
                timeout=timeout,
                stdin=given,
                user=user,
                session=session,
            )
        )

    return talk(work)


exec_command.command_class = Trailing  # type: ignore[attr-defined]
