"""What several verbs take, and what `create` and `run` make of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from smokebox.client.settings import SandboxSettings

Id = Annotated[str, typer.Argument(metavar="ID", help="The sandbox.")]
Ids = Annotated[list[str], typer.Argument(metavar="ID...", help="The sandboxes.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Command = Annotated[
    list[str], typer.Argument(metavar="COMMAND...", help="One word is a line for bash.")
]
Timeout = Annotated[
    float | None,
    typer.Option("--timeout", "-t", metavar="SECONDS", help="Kill it after this: 124."),
]
Stdin = Annotated[bool, typer.Option("--stdin", "-i", help="Give it standard input, whole.")]
Image = Annotated[str | None, typer.Option(metavar="NAME", help="What it is made from.")]
Limits = Annotated[
    str | None,
    typer.Option(metavar="LIMITS", help="lite, basic, ..., or memory=512MiB,cpu=0.5,pids=64."),
]
Label = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="What it is found by. Repeatable."),
]
Env = Annotated[
    list[str] | None,
    typer.Option("--env", "-e", metavar="NAME=VALUE", help="Set a variable. Repeatable."),
]
Cwd = Annotated[str | None, typer.Option("--cwd", "-w", metavar="DIR", help="Where to work.")]
User = Annotated[str | None, typer.Option("--user", "-u", metavar="NAME", help="As whom.")]
Tier = Annotated[Literal["namespaces", "gvisor"] | None, typer.Option(help="What isolates it.")]


def settings_of(
    *,
    image: str | None = None,
    tier: str | None = None,
    limits: str | None = None,
    label: list[str] | None = None,
    env: list[str] | None = None,
    sleep_after: str | None = None,
    ephemeral: bool = False,
    keep_alive: bool = False,
    cwd: str | None = None,
    user: str | None = None,
) -> SandboxSettings:
    """What the SDK takes, from what was written on the command line."""
    from smokebox.cli.given import parse_duration, parse_limits, parse_pairs
    from smokebox.client.settings import SandboxSettings

    return SandboxSettings(
        image=image,
        tier=tier,
        limits=parse_limits(limits),
        env=parse_pairs("--env", env),
        labels=parse_pairs("--label", label),
        sleep_after=None if sleep_after is None else parse_duration("--sleep-after", sleep_after),
        keep_alive=keep_alive or None,
        ephemeral=ephemeral or None,
        cwd=cwd,
        user=user,
    )
