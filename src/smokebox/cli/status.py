"""`smokebox status`: whether a server runs, and which."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import typer

from smokebox.cli.options import AsJson  # noqa: TC001

if TYPE_CHECKING:
    from smokebox.client.client import Client

NONE_RUNS = 3


def status(as_json: AsJson = False) -> int:
    """Say whether a server runs, and which.

    It is the one that other verbs talk to. Exits with 0 when it runs, and with 3 otherwise.
    """
    from smokebox.cli.remote.talking import talk
    from smokebox.cli.table import print_fields, print_json

    url = os.environ.get("SMOKEBOX_URL")
    found = _local() if not url else {"url": url}
    if found is None:
        if as_json:
            print_json({"running": False})
        else:
            typer.echo("No server runs. `smokebox up` starts one.", err=True)
        return NONE_RUNS

    async def work(client: Client) -> None:
        counted = await _counted(client)
        if as_json:
            print_json({"running": True, **found, **counted})
        else:
            print_fields((name, _shown(name, one)) for name, one in {**found, **counted}.items())

    return talk(work)


def _local() -> dict[str, object] | None:
    """What this machine knows of the server in the background."""
    from smokebox.client.background import find

    one = find()
    if one is None:
        return None
    return {
        "socket": one.socket,
        "log": one.log,
        "pid": one.pid,
        "uptime": one.uptime,
        "draining": one.draining,
    }


async def _counted(client: Client) -> dict[str, object]:
    version, boxes = (await client.health()).version, await client.list()
    active = sum(one.status == "active" for one in boxes)
    return {"version": version, "sandboxes": len(boxes), "active": active}


def _shown(name: str, value: object) -> str:
    from smokebox.cli.table import span

    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "uptime" and isinstance(value, float):
        return span(value)
    return "-" if value is None else str(value)
