"""`smokebox expose`: the URL at which a port of a sandbox is seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from smokebox.cli.options import Id  # noqa: TC001

if TYPE_CHECKING:
    from smokebox.client.client import Client

Port = Annotated[int, typer.Argument(metavar="PORT", min=1, max=65535, help="The port in it.")]


def expose(
    id: Id,
    port: Port,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="What listens there.")] = None,
    token: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="A part of the URL; else a random one.")
    ] = None,
    private: Annotated[
        bool | None,
        typer.Option("--private/--public", help="Only for API keys.", show_default=False),
    ] = None,
    expires: Annotated[
        str | None, typer.Option(metavar="TIME", help="A URL that is good for 10m, 2h, 1d.")
    ] = None,
) -> int:
    """Have a port be seen by whoever has its URL, and print that.

    The URL stays when the sandbox sleeps, and works again once the port is exposed again.
    """
    from smokebox.cli.given import parse_duration
    from smokebox.cli.remote.finding import find
    from smokebox.cli.remote.talking import talk

    seconds = None if expires is None else parse_duration("--expires", expires)

    async def work(client: Client) -> None:
        sandbox = await find(client, id)
        exposed = await sandbox.expose_port(port, name=name, token=token, private=private)
        url = exposed.url
        if seconds is not None:
            url = await sandbox.get_preview_url(port, expires_in=seconds)
        typer.echo(url)

    return talk(work)


def unexpose(id: Id, port: Port) -> int:
    """Have a port not be seen any more, and end the connections to it."""
    from smokebox.cli.remote.finding import find
    from smokebox.cli.remote.talking import talk

    async def work(client: Client) -> None:
        await (await find(client, id)).unexpose_port(port)

    return talk(work)
