"""`smokebox rm`: sandboxes that are no more wanted."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from smokebox.client.client import Client


def rm(
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID...", help="The sandboxes.")] = None,
    all_of_them: Annotated[bool, typer.Option("--all", help="All that there are.")] = False,
    force: Annotated[
        bool, typer.Option("--force", "-f", help="Do not ask, and let one be missing.")
    ] = False,
) -> int:
    """Destroy sandboxes with all that is in them.

    In a terminal it asks first.
    """
    from smokebox.cli.remote.finding import find
    from smokebox.cli.remote.talking import talk

    if bool(ids) == all_of_them:
        raise InvalidOption(
            "rm takes the ids of sandboxes, or --all.",
            hint="`smokebox ls` lists them.",
            option="rm",
        )

    chosen: list[str] = []

    async def choose(client: Client) -> None:
        chosen.extend(ids or [info.id for info in await client.list()])
        if not force:
            for id in chosen:
                await find(client, id)

    async def destroy(client: Client) -> None:
        for id in dict.fromkeys(chosen):
            await client.sandbox(id).destroy()
            typer.echo(id)

    talk(choose)
    # Asked between two conversations: Ctrl-C would not end a question within one.
    if chosen and not force and sys.stdin.isatty() and not _confirmed(chosen):
        return 1
    return talk(destroy)


def _confirmed(ids: list[str]) -> bool:
    what = ids[0] if len(ids) == 1 else f"{len(ids)} sandboxes"
    return typer.confirm(f"Destroy {what} with all files?", err=True)
