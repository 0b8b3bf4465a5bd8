"""`smokebox ls`: the sandboxes that there are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from smokebox.cli.options import AsJson  # noqa: TC001

if TYPE_CHECKING:
    from smokebox.client.client import Client


def ls(
    as_json: AsJson = False,
    label: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Only those with that label. Repeatable."),
    ] = None,
    prefix: Annotated[str, typer.Option(help="Only those whose ids begin so.")] = "",
    status: Annotated[
        Literal["idle", "active"] | None, typer.Option(help="Only those that sleep, or run.")
    ] = None,
) -> int:
    """List sandboxes. Wakes none."""
    from smokebox.cli.given import parse_pairs
    from smokebox.cli.remote.talking import talk
    from smokebox.cli.table import ago, pairs, print_json, print_table

    labels = parse_pairs("--label", label)

    async def work(client: Client) -> None:
        found = await client.list(status=status, labels=labels, prefix=prefix)
        if as_json:
            print_json(found)
            return
        print_table(
            ("ID", "STATUS", "IMAGE", "TIER", "CREATED", "ACTIVE", "LABELS"),
            [
                (
                    info.id,
                    info.status,
                    info.image,
                    info.tier,
                    ago(info.created_at),
                    ago(info.last_active_at),
                    pairs(info.labels),
                )
                for info in found
            ],
        )

    return talk(work)
