"""`smokebox stats`: what sandboxes use."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from smokebox.cli.options import AsJson, Ids  # noqa: TC001

if TYPE_CHECKING:
    from smokebox.client.client import Client
    from smokebox.types import SandboxStats

_SECONDS = 1.0
_CLEAR = "\x1b[H\x1b[2J"


def stats(
    ids: Ids,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Again every second.")] = False,
) -> int:
    """Say what sandboxes use at this moment. Does not wake them."""
    import asyncio

    from smokebox.cli.remote.talking import talk

    async def work(client: Client) -> None:
        while True:
            found = await _all(client, ids)
            if watch and not as_json and sys.stdout.isatty():
                typer.echo(_CLEAR, nl=False)
            _show(found, as_json=as_json)
            if not watch:
                return
            await asyncio.sleep(_SECONDS)

    return talk(work)


async def _all(client: Client, ids: list[str]) -> dict[str, SandboxStats]:
    from smokebox.cli.remote.finding import find

    return {id: await (await find(client, id)).stats() for id in ids}


def _show(found: dict[str, SandboxStats], *, as_json: bool) -> None:
    from smokebox.cli.table import print_json, print_table, size

    if as_json:
        print_json(found)
        return
    print_table(
        ("ID", "CPU", "MEMORY", "PEAK", "PROCESSES", "OOM KILLS", "DISK"),
        [
            (
                id,
                "-" if one.cpu_seconds is None else f"{one.cpu_seconds:.1f}s",
                size(one.memory),
                size(one.memory_peak),
                "-" if one.pids is None else str(one.pids),
                "-" if one.oom_kills is None else str(one.oom_kills),
                size(one.disk),
            )
            for id, one in found.items()
        ],
    )
