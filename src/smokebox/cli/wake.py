"""`smokebox wake`: a sandbox that sleeps starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.cli.options import Ids  # noqa: TC001

if TYPE_CHECKING:
    from smokebox.client.client import Client


def wake(ids: Ids) -> int:
    """Start sandboxes that sleep. Any call that needs one does that too."""
    from smokebox.cli.remote.finding import find
    from smokebox.cli.remote.talking import talk

    async def work(client: Client) -> None:
        for id in ids:
            await (await find(client, id)).wake()

    return talk(work)
