"""`smokebox keys`: create, list, show and revoke the API keys of a server and its user's apps."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smokebox.cli.options import AsJson, parse_duration, subcommands
from smokebox.cli.output import (
    format_age,
    format_size,
    format_value,
    print_fields,
    print_json,
    print_table,
)
from smokebox.cli.remote import run_with_client

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from smokebox.client.client import Client
    from smokebox.client.server_resources import Keys as ServerKeys
    from smokebox.tenancy.keys import Keys
    from smokebox.wire.responses import KeyInfo, NewKey

keys = subcommands("Create, list, show and revoke API keys.")


@keys.command()
def create(
    name: Annotated[
        str, typer.Option(metavar="NAME", help="Name of the user or program that uses the key.")
    ],
    prefix: Annotated[
        str, typer.Option(metavar="TEXT", help="Limit the key to IDs with this prefix.")
    ] = "",
    admin: Annotated[
        bool, typer.Option("--admin", help="Allow managing keys and stopping the server.")
    ] = False,
    expires: Annotated[
        str | None, typer.Option(metavar="TIME", help="Expire after this time: 12h, 30d.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(metavar="NAME", help="Ceilings of the key, from server.toml.")
    ] = None,
    scopes: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Limit it to scopes: sandboxes:read,runs:write."),
    ] = None,
    overlap: Annotated[
        bool, typer.Option("--overlap", help="Allow a prefix that overlaps with another key's.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Create a key and print it. It cannot be shown again."""
    seconds = None if expires is None else parse_duration("--expires", expires)

    async def work(keys: ServerKeys | _StoredKeys) -> None:
        created = await keys.create(
            name,
            prefix=prefix,
            admin=admin,
            expires_in=seconds,
            profile=profile,
            scopes=None if scopes is None else [one.strip() for one in scopes.split(",")],
            overlap=overlap,
        )
        if as_json:
            print_json(created)
        else:
            typer.echo(created.key)

    return _run(work)


@keys.command("ls")
def list_all(as_json: AsJson = False) -> int:
    """List keys, without their secrets."""

    async def work(keys: ServerKeys | _StoredKeys) -> None:
        infos = await keys.list()
        if as_json:
            print_json(infos)
            return
        print_table(
            ("ID", "NAME", "PREFIX", "ADMIN", "PROFILE", "CREATED", "EXPIRES", "USED"),
            [
                (
                    key.id,
                    key.name,
                    key.prefix or "-",
                    "yes" if key.admin else "no",
                    key.profile or "-",
                    format_age(key.created_at),
                    "never" if key.expires_at is None else format_age(key.expires_at),
                    "never" if key.last_used_at is None else format_age(key.last_used_at),
                )
                for key in infos
            ],
        )

    return _run(work)


@keys.command()
def show(
    id: Annotated[str, typer.Argument(metavar="ID", help="Key ID.")], as_json: AsJson = False
) -> int:
    """Show a key, its ceilings, and what it uses of its quotas."""

    async def work(client: Client) -> None:
        key = await client.keys.get(id)
        if as_json:
            print_json(key)
            return
        print_fields(
            (
                ("id", key.id),
                ("name", key.name),
                ("prefix", key.prefix or "-"),
                ("admin", format_value(key.admin)),
                ("profile", key.profile or "-"),
                ("scopes", ", ".join(key.scopes)),
                ("created", format_age(key.created_at)),
                ("expires", "never" if key.expires_at is None else format_age(key.expires_at)),
                *((name, _amount(name, value)) for name, value in key.ceilings.items()),
            )
        )
        typer.echo()
        print_table(
            ("QUOTA", "USED", "OF"),
            [
                (one.name, _amount(one.name, one.used), _amount(one.name, one.ceiling))
                for one in key.quotas
            ],
        )

    return run_with_client(work)


@keys.command()
def revoke(
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Key IDs.")],
) -> int:
    """Revoke keys. Their running requests, streams and terminals end."""

    async def work(keys: ServerKeys | _StoredKeys) -> None:
        for id in ids:
            await keys.revoke(id)

    return _run(work)


class _StoredKeys:
    """The keys of a state directory, without a server."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    async def create(self, name: str, **options: Any) -> NewKey:
        """Create a key."""
        from smokebox.wire.requests import CreateKey

        return await self._keys.create(CreateKey(name=name, **options))

    async def list(self) -> list[KeyInfo]:
        """Return all keys, oldest first."""
        return self._keys.all()

    async def revoke(self, id: str) -> None:
        """Revoke a key."""
        await self._keys.revoke(id)


def _run(work: Callable[[ServerKeys | _StoredKeys], Awaitable[None]]) -> int:
    """Run `work` with the keys of the server; without one, with those of the state directory.

    So creating a key starts no server, which would keep `smokebox serve` from starting.
    """
    import asyncio  # Slow to import, and not needed for --help.

    from smokebox.client.address import is_listening
    from smokebox.client.client import URL
    from smokebox.foundation.endpoint import default_home, socket_path
    from smokebox.tenancy.config import open_config
    from smokebox.tenancy.keys import Keys

    home = default_home()
    if URL in os.environ or is_listening(socket_path(home)):

        async def work_with_server(client: Client) -> None:
            await work(client.keys)

        return run_with_client(work_with_server)

    async def main() -> None:
        async with Keys(home, open_config(home).profiles()) as keys:
            await work(_StoredKeys(keys))

    asyncio.run(main())
    return 0


def _amount(name: str, value: object) -> str:
    if value is None:
        return "server's" if name in ("tier", "rate", "concurrency") else "unlimited"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if name.endswith(("memory", "disk", "images", "output_rate")) and isinstance(
        value, (int, float)
    ):
        return format_size(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
