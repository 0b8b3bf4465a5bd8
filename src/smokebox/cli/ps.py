"""`smokebox ps`: the processes that were started in a sandbox."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.cli.options import AsJson, Id  # noqa: TC001

if TYPE_CHECKING:
    from smokebox.client.client import Client


def ps(id: Id, as_json: AsJson = False) -> int:
    """List the processes of a sandbox, and those kept of the ended."""
    from smokebox.cli.remote.finding import find
    from smokebox.cli.remote.talking import talk
    from smokebox.cli.table import ago, print_json, print_table

    async def work(client: Client) -> None:
        sandbox = await find(client, id)
        found = [process.info for process in await sandbox.list_processes()]
        if as_json:
            print_json(found)
            return
        print_table(
            ("ID", "STATUS", "PID", "CODE", "STARTED", "COMMAND"),
            [
                (
                    one.id,
                    one.status,
                    "-" if one.pid is None else str(one.pid),
                    "-" if one.exit_code is None else str(one.exit_code),
                    ago(one.started_at),
                    " ".join(one.command.split()),
                )
                for one in found
            ],
        )

    return talk(work)
