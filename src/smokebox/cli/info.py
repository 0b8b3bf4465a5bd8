"""`smokebox info`: what is known of one sandbox."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from smokebox.cli.options import AsJson, Id  # noqa: TC001

if TYPE_CHECKING:
    from smokebox.client.client import Client


def info(
    id: Id,
    as_json: AsJson = False,
) -> int:
    """Say what is known of a sandbox. Does not wake it."""
    from smokebox.cli.remote.finding import info_of
    from smokebox.cli.remote.talking import talk
    from smokebox.cli.table import print_fields, print_json

    async def work(client: Client) -> None:
        found = await info_of(client, id)
        if as_json:
            print_json(found)
        else:
            print_fields((name, _shown(name, value)) for name, value in asdict(found).items())

    return talk(work)


def _shown(name: str, value: object) -> str:
    from smokebox.cli.table import ago, pairs, span

    if isinstance(value, dict):
        if name == "limits":
            value = {one: _limit(one, limit) for one, limit in value.items()}
        return pairs(value) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)) and name.endswith("_at"):
        return ago(value)
    if isinstance(value, (int, float)) and name == "sleep_after":
        return span(value)
    return "-" if value is None else str(value)


def _limit(name: str, value: float | None) -> str:
    from smokebox.cli.table import size

    if value is None:
        return "none"
    return size(value) if name in ("memory", "disk", "output_rate") else f"{value:g}"
