"""`smokebox create`: a sandbox, by an id of one's own or a random one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from smokebox.cli.options import Cwd, Env, Image, Label, Limits, Tier, User  # noqa: TC001

if TYPE_CHECKING:
    from smokebox.client.client import Client


def create(
    id: Annotated[str | None, typer.Argument(metavar="[ID]", help="Else a random one.")] = None,
    image: Image = None,
    limits: Limits = None,
    label: Label = None,
    env: Env = None,
    sleep_after: Annotated[
        str | None, typer.Option(metavar="TIME", help="Sleep after so long without a call: 10m.")
    ] = None,
    ephemeral: Annotated[
        bool, typer.Option("--ephemeral", help="Forget its files when it sleeps.")
    ] = False,
    keep_alive: Annotated[bool, typer.Option("--keep-alive", help="Never sleep.")] = False,
    cwd: Cwd = None,
    user: User = None,
    tier: Tier = None,
) -> int:
    """Make a sandbox and print its id.

    One that is there is changed: what is not given stays as it is.
    """
    from smokebox.cli.options import settings_of
    from smokebox.cli.remote.talking import talk

    settings = settings_of(
        image=image,
        limits=limits,
        label=label,
        env=env,
        sleep_after=sleep_after,
        ephemeral=ephemeral,
        keep_alive=keep_alive,
        cwd=cwd,
        user=user,
        tier=tier,
    )

    async def work(client: Client) -> None:
        if id is None:
            typer.echo((await client.create(**settings)).id)
        else:
            typer.echo((await client.sandbox(id).update(**settings)).id)

    return talk(work)
