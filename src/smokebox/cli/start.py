"""`smokebox start`: a process that runs on by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from smokebox.cli.options import Command, Cwd, Env, Id, User  # noqa: TC001
from smokebox.cli.trailing import Trailing

if TYPE_CHECKING:
    from smokebox.client.client import Client


def start(
    id: Id,
    command: Command,
    name: Annotated[
        str | None, typer.Option(metavar="ID", help="The id of the process; else a random one.")
    ] = None,
    env: Env = None,
    cwd: Cwd = None,
    user: User = None,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", "-t", metavar="SECONDS", help="How long it may live."),
    ] = None,
) -> int:
    """Start a process that runs on by itself, and print its id."""
    from smokebox.cli.given import parse_command, parse_pairs
    from smokebox.cli.remote.finding import find
    from smokebox.cli.remote.talking import talk

    variables = parse_pairs("--env", env)

    async def work(client: Client) -> None:
        sandbox = await find(client, id)
        process = await sandbox.start_process(
            parse_command(command),
            process_id=name,
            cwd=cwd,
            env=variables,
            user=user,
            timeout=timeout,
        )
        typer.echo(process.id)

    return talk(work)


start.command_class = Trailing  # type: ignore[attr-defined]
