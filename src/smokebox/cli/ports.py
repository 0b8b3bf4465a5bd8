"""`smokebox ports`: what of a sandbox is seen from outside, and where."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.cli.options import AsJson, Id  # noqa: TC001

if TYPE_CHECKING:
    from smokebox.client.client import Client


def ports(id: Id, as_json: AsJson = False) -> int:
    """List the ports that were exposed. A stale one has to be exposed again."""
    from smokebox.cli.remote.finding import find
    from smokebox.cli.remote.talking import talk
    from smokebox.cli.table import print_json, print_table

    async def work(client: Client) -> None:
        found = await (await find(client, id)).get_exposed_ports()
        if as_json:
            print_json(found)
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
                for one in found
            ],
        )

    return talk(work)
