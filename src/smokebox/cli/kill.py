"""`smokebox kill`: the end of processes, or a signal for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from smokebox.cli.options import Id  # noqa: TC001
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from smokebox.client.client import Client


def kill(
    id: Id,
    processes: Annotated[
        list[str] | None, typer.Argument(metavar="PROCESS...", help="Their ids.")
    ] = None,
    signal: Annotated[
        str | None,
        typer.Option("--signal", "-s", metavar="NAME", help="Only send this one, and go on."),
    ] = None,
    all_of_them: Annotated[bool, typer.Option("--all", help="All that run.")] = False,
) -> int:
    """End processes with all that they started.

    They get SIGTERM, and after a while SIGKILL.
    """
    from smokebox.cli.remote.finding import find, process_of
    from smokebox.cli.remote.talking import talk

    if bool(processes) == all_of_them:
        raise InvalidOption(
            "kill takes the ids of processes, or --all.",
            hint=f"`smokebox ps {id}` lists them.",
            option="kill",
        )
    number = int(signal) if signal is not None and signal.isdecimal() else signal

    async def work(client: Client) -> None:
        sandbox = await find(client, id)
        if all_of_them:
            await sandbox.kill_all_processes(number)
        for process in processes or ():
            await (await process_of(sandbox, process)).kill(number)

    return talk(work)
