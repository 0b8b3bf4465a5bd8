"""Commands on ports of a sandbox: expose, unexpose, ports, forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from smokebox.cli.options import AsJson, Id, parse_duration, parse_forward
from smokebox.cli.output import print_json, print_table
from smokebox.cli.remote import find_sandbox, run_with_client

if TYPE_CHECKING:
    from smokebox.client.client import Client

Port = Annotated[int, typer.Argument(metavar="PORT", min=1, max=65535, help="Port in the sandbox.")]


def expose(
    id: Id,
    port: Port,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Name for listings.")] = None,
    token: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="Token in the URL; random by default.")
    ] = None,
    private: Annotated[
        bool | None,
        typer.Option("--private/--public", help="Require an API key.", show_default=False),
    ] = None,
    expires: Annotated[
        str | None, typer.Option(metavar="TIME", help="Print a URL that expires: 10m, 2h, 1d.")
    ] = None,
) -> int:
    """Expose a port and print its URL.

    The URL stays the same when the sandbox sleeps; expose the port again after it wakes.
    """
    seconds = None if expires is None else parse_duration("--expires", expires)

    async def work(client: Client) -> None:
        sandbox = await find_sandbox(client, id)
        exposed = await sandbox.expose_port(port, name=name, token=token, private=private)
        url = exposed.url
        if seconds is not None:
            url = await sandbox.get_preview_url(port, expires_in=seconds)
        typer.echo(url)

    return run_with_client(work)


def unexpose(id: Id, port: Port) -> int:
    """Stop exposing a port, and close its connections."""

    async def work(client: Client) -> None:
        await (await find_sandbox(client, id)).unexpose_port(port)

    return run_with_client(work)


def ports(id: Id, as_json: AsJson = False) -> int:
    """List exposed ports. Expose a stale one again to use it."""

    async def work(client: Client) -> None:
        exposed = await (await find_sandbox(client, id)).get_exposed_ports()
        if as_json:
            print_json(exposed)
            return
        print_table(
            ("PORT", "STATUS", "NAME", "URL"),
            [
                (
                    str(one.port),
                    f"{one.status}, private" if one.private else one.status,
                    one.name or "-",
                    one.url,
                )
                for one in exposed
            ],
        )

    return run_with_client(work)


def forward(
    id: Id,
    ports: Annotated[
        list[str],
        typer.Argument(
            metavar="[LOCAL:]PORT...", help="Local port (0 for any free one) and sandbox port."
        ),
    ],
) -> int:
    """Forward local ports to a sandbox until Ctrl-C.

    `smokebox forward ID 8080:3000` forwards 127.0.0.1:8080 to port 3000 of the sandbox. Unlike
    with `smokebox expose`, only this machine can connect.
    """
    pairs = [parse_forward(text) for text in ports]

    async def work(client: Client) -> None:
        from smokebox.cli.port_forward import forward_ports

        await forward_ports(await find_sandbox(client, id), pairs)

    return run_with_client(work)
