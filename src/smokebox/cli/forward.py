"""`smokebox forward`: a port of a sandbox, on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from smokebox.cli.options import Id  # noqa: TC001

if TYPE_CHECKING:
    from smokebox.client.client import Client


def forward(
    id: Id,
    ports: Annotated[
        list[str],
        typer.Argument(metavar="[LOCAL:]PORT...", help="A port here, 0 for any, and one there."),
    ],
) -> int:
    """Reach ports of a sandbox on this machine, until Ctrl-C.

    `smokebox forward ID 8080:3000` has what listens on port 3000 there at 127.0.0.1:8080.
    Nobody else reaches it, unlike what `smokebox expose` shows.
    """
    from smokebox.cli.given import parse_forward
    from smokebox.cli.remote.finding import find
    from smokebox.cli.remote.forwarding import forwarding
    from smokebox.cli.remote.talking import talk

    wanted = [parse_forward(text) for text in ports]

    async def work(client: Client) -> None:
        await forwarding(await find(client, id), wanted)

    return talk(work)
