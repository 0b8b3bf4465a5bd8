"""`smokebox keys`: what opens a server for other machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from smokebox.cli.options import AsJson  # noqa: TC001

if TYPE_CHECKING:
    from smokebox.client.client import Client

keys = typer.Typer(
    help="Make, list and revoke API keys.",
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
)


@keys.command()
def create(
    name: Annotated[str, typer.Option(metavar="NAME", help="Who or what uses it.")],
    prefix: Annotated[
        str, typer.Option(metavar="TEXT", help="Only for sandboxes whose ids begin so.")
    ] = "",
    admin: Annotated[
        bool, typer.Option("--admin", help="Also for keys, and to stop the server.")
    ] = False,
    expires: Annotated[
        str | None, typer.Option(metavar="TIME", help="Opens nothing after this: 12h, 30d.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Make a key and print it. Nobody can read it again."""
    from smokebox.cli.given import parse_duration
    from smokebox.cli.remote.talking import talk
    from smokebox.cli.table import print_json

    seconds = None if expires is None else parse_duration("--expires", expires)

    async def work(client: Client) -> None:
        made = await client.keys.create(name, prefix=prefix, admin=admin, expires_in=seconds)
        if as_json:
            print_json(made)
        else:
            typer.echo(made.key)

    return talk(work)


@keys.command("list")
def list_all(as_json: AsJson = False) -> int:
    """List keys, without their secrets."""
    from smokebox.cli.remote.talking import talk
    from smokebox.cli.table import ago, print_json, print_table

    async def work(client: Client) -> None:
        found = await client.keys.list()
        if as_json:
            print_json(found)
            return
        print_table(
            ("ID", "NAME", "PREFIX", "ADMIN", "CREATED", "EXPIRES", "USED"),
            [
                (
                    key.id,
                    key.name,
                    key.prefix or "-",
                    "yes" if key.admin else "no",
                    ago(key.created_at),
                    "never" if key.expires_at is None else ago(key.expires_at),
                    "never" if key.last_used_at is None else ago(key.last_used_at),
                )
                for key in found
            ],
        )

    return talk(work)


@keys.command()
def revoke(
    keys: Annotated[list[str], typer.Argument(metavar="ID...", help="The ids of keys.")],
) -> int:
    """Have keys open nothing any more."""
    from smokebox.cli.remote.talking import talk

    async def work(client: Client) -> None:
        for id in keys:
            await client.keys.revoke(id)

    return talk(work)
