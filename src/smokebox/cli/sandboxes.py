"""Commands on whole sandboxes: create, ls, info, stats, sleep, wake, rm."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from smokebox.cli.completion import complete_sandboxes
from smokebox.cli.image_build import prepare_image
from smokebox.cli.options import (
    AsJson,
    Cwd,
    Egress,
    Env,
    Id,
    Ids,
    Image,
    Label,
    Limits,
    Mirrors,
    Tier,
    User,
    parse_pairs,
    settings_of,
)
from smokebox.cli.output import (
    format_age,
    format_pairs,
    format_size,
    format_span,
    format_value,
    print_fields,
    print_json,
    print_table,
)
from smokebox.cli.remote import find_sandbox, run_with_client, sandbox_info
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from smokebox.client.client import Client
    from smokebox.types import SandboxStats

_WATCH_SECONDS = 1.0
_CLEAR_SCREEN = "\x1b[H\x1b[2J"


def create(
    id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="Sandbox ID; random by default.")
    ] = None,
    image: Image = None,
    limits: Limits = None,
    label: Label = None,
    env: Env = None,
    sleep_after: Annotated[
        str | None, typer.Option(metavar="TIME", help="Sleep after this time without use: 10m.")
    ] = None,
    ephemeral: Annotated[
        bool, typer.Option("--ephemeral", help="Delete its files when it goes to sleep.")
    ] = False,
    keep_alive: Annotated[bool, typer.Option("--keep-alive", help="Never sleep.")] = False,
    lifetime: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Destroy it this time after its creation: 2h, 7d."),
    ] = None,
    checkpoints: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Snapshot it this often, keep 10: 10m. Also 10m,keep_last=3; off."
        ),
    ] = None,
    cwd: Cwd = None,
    user: User = None,
    tier: Tier = None,
    egress: Egress = None,
    mirrors: Mirrors = False,
) -> int:
    """Create a sandbox and print its ID.

    If the sandbox exists, only the given settings are changed.
    """
    settings = settings_of(
        image=image,
        limits=limits,
        label=label,
        env=env,
        sleep_after=sleep_after,
        ephemeral=ephemeral,
        keep_alive=keep_alive,
        lifetime=lifetime,
        checkpoints=checkpoints,
        cwd=cwd,
        user=user,
        tier=tier,
        egress=egress,
        mirrors=mirrors,
    )

    async def work(client: Client) -> None:
        await prepare_image(client, settings)
        if id is None:
            typer.echo((await client.create(**settings)).id)
        else:
            typer.echo((await client.sandbox(id).update(**settings)).id)

    return run_with_client(work)


def ls(
    as_json: AsJson = False,
    label: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Only sandboxes with this label. Repeatable."),
    ] = None,
    prefix: Annotated[str, typer.Option(help="Only IDs with this prefix.")] = "",
    status: Annotated[
        Literal["idle", "active"] | None,
        typer.Option(help="Only sleeping (idle) or running (active) sandboxes."),
    ] = None,
) -> int:
    """List sandboxes without waking them."""
    labels = parse_pairs("--label", label)

    async def work(client: Client) -> None:
        sandboxes = await client.list(status=status, labels=labels, prefix=prefix)
        if as_json:
            print_json(sandboxes)
            return
        print_table(
            ("ID", "STATUS", "IMAGE", "TIER", "CREATED", "ACTIVE", "LABELS"),
            [
                (
                    one.id,
                    one.status,
                    one.image,
                    one.tier,
                    format_age(one.created_at),
                    format_age(one.last_active_at),
                    format_pairs(one.labels),
                )
                for one in sandboxes
            ],
        )

    return run_with_client(work)


def info(id: Id, as_json: AsJson = False) -> int:
    """Show the settings and state of a sandbox without waking it."""

    async def work(client: Client) -> None:
        facts = await sandbox_info(client, id)
        if as_json:
            print_json(facts)
        else:
            print_fields((name, _format(name, value)) for name, value in asdict(facts).items())

    return run_with_client(work)


def _format(name: str, value: object) -> str:
    if isinstance(value, dict):
        if name == "limits":
            value = {one: _format_limit(one, limit) for one, limit in value.items()}
        return format_pairs(value) or "-"
    if isinstance(value, (int, float)) and name.endswith("_at"):
        return format_age(value)
    if isinstance(value, (int, float)) and name == "sleep_after":
        return format_span(value)
    return format_value(value)


def _format_limit(name: str, value: float | None) -> str:
    if value is None:
        return "none"
    return format_size(value) if name in ("memory", "disk", "output_rate") else f"{value:g}"


def stats(
    ids: Ids,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second.")] = False,
) -> int:
    """Show the resource usage of sandboxes without waking them."""

    async def work(client: Client) -> None:
        import asyncio

        while True:
            usage = {id: await (await find_sandbox(client, id)).stats() for id in ids}
            if watch and not as_json and sys.stdout.isatty():
                typer.echo(_CLEAR_SCREEN, nl=False)
            _print_stats(usage, as_json=as_json)
            if not watch:
                return
            await asyncio.sleep(_WATCH_SECONDS)

    return run_with_client(work)


def _print_stats(usage: dict[str, SandboxStats], *, as_json: bool) -> None:
    if as_json:
        print_json(usage)
        return
    print_table(
        ("ID", "CPU", "MEMORY", "PEAK", "PROCESSES", "OOM KILLS", "DISK"),
        [
            (
                id,
                "-" if one.cpu_seconds is None else f"{one.cpu_seconds:.1f}s",
                format_size(one.memory),
                format_size(one.memory_peak),
                "-" if one.pids is None else str(one.pids),
                "-" if one.oom_kills is None else str(one.oom_kills),
                format_size(one.disk),
            )
            for id, one in usage.items()
        ],
    )


def sleep(ids: Ids) -> int:
    """Put sandboxes to sleep: stop their processes, keep their files."""

    async def work(client: Client) -> None:
        for id in ids:
            await (await find_sandbox(client, id)).sleep()

    return run_with_client(work)


def wake(ids: Ids) -> int:
    """Start sleeping sandboxes. Commands that need a sandbox also wake it."""

    async def work(client: Client) -> None:
        for id in ids:
            await (await find_sandbox(client, id)).wake()

    return run_with_client(work)


def rm(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="ID...", help="Sandbox IDs.", autocompletion=complete_sandboxes),
    ] = None,
    remove_all: Annotated[bool, typer.Option("--all", help="Remove all sandboxes.")] = False,
    force: Annotated[
        bool, typer.Option("--force", "-f", help="Do not ask, and ignore missing sandboxes.")
    ] = False,
) -> int:
    """Remove sandboxes and their files.

    Asks for confirmation in a terminal.
    """
    if bool(ids) == remove_all:
        raise InvalidOption(
            "rm takes IDs of sandboxes, or --all.",
            hint="`smokebox ls` lists them.",
            option="rm",
        )

    chosen: list[str] = []

    async def choose(client: Client) -> None:
        chosen.extend(ids or [info.id for info in await client.list()])
        if not force:
            for id in chosen:
                await find_sandbox(client, id)

    async def destroy(client: Client) -> None:
        for id in dict.fromkeys(chosen):
            await client.sandbox(id).destroy()
            typer.echo(id)

    run_with_client(choose)
    # Asked between two event loops: within one, Ctrl-C would not interrupt the question.
    if chosen and not force and sys.stdin.isatty() and not _confirm(chosen):
        return 1
    return run_with_client(destroy)


def _confirm(ids: list[str]) -> bool:
    target = ids[0] if len(ids) == 1 else f"{len(ids)} sandboxes"
    return typer.confirm(f"Remove {target} and all files?", err=True)
