"""`smokebox keys`: create, list and revoke the API keys of a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from smokebox.cli.options import AsJson, parse_duration, subcommands
from smokebox.cli.output import format_age, print_json, print_table
from smokebox.cli.remote import run_with_client

if TYPE_CHECKING:
    from smokebox.client.client import Client

keys = subcommands("Create, list and revoke API keys.")


@keys.command()
def create(
    name: Annotated[
        str, typer.Option(metavar="NAME", help="Name of the user or program that uses the key.")
    ],
    prefix: Annotated[
        str, typer.Option(metavar="TEXT", help="Limit the key to sandbox IDs with this prefix.")
    ] = "",
    admin: Annotated[
        bool, typer.Option("--admin", help="Allow managing keys and stopping the server.")
    ] = False,
    expires: Annotated[
        str | None, typer.Option(metavar="TIME", help="Expire after this time: 12h, 30d.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Create a key and print it. It cannot be shown again."""
    seconds = None if expires is None else parse_duration("--expires", expires)

    async def work(client: Client) -> None:
        created = await client.keys.create(name, prefix=prefix, admin=admin, expires_in=seconds)
        if as_json:
            print_json(created)
        else:
            typer.echo(created.key)

    return run_with_client(work)


@keys.command("list")
def list_all(as_json: AsJson = False) -> int:
    """List keys, without their secrets."""

    async def work(client: Client) -> None:
        infos = await client.keys.list()
        if as_json:
            print_json(infos)
            return
        print_table(
            ("ID", "NAME", "PREFIX", "ADMIN", "CREATED", "EXPIRES", "USED"),
            [
                (
                    key.id,
                    key.name,
                    key.prefix or "-",
                    "yes" if key.admin else "no",
                    format_age(key.created_at),
                    "never" if key.expires_at is None else format_age(key.expires_at),
                    "never" if key.last_used_at is None else format_age(key.last_used_at),
                )
                for key in infos
            ],
        )

    return run_with_client(work)


@keys.command()
def revoke(
    keys: Annotated[list[str], typer.Argument(metavar="ID...", help="Key IDs.")],
) -> int:
    """Revoke keys."""

    async def work(client: Client) -> None:
        for id in keys:
            await client.keys.revoke(id)

    return run_with_client(work)
