"""`smokebox sleep`: the processes of a sandbox end, and its files stay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.cli.options import Ids  # noqa: TC001

if TYPE_CHECKING:
    from smokebox.client.client import Client


def sleep(ids: Ids) -> int:
    """Put sandboxes to sleep: processes end, files stay."""
    from smokebox.cli.remote.finding import find
    from smokebox.cli.remote.talking import talk

    async def work(client: Client) -> None:
        for id in ids:
            await (await find(client, id)).sleep()

    return talk(work)
