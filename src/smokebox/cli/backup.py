"""`smokebox backup`: directories of sandboxes, kept and restored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from smokebox.cli.options import AsJson, Id  # noqa: TC001

if TYPE_CHECKING:
    from smokebox.client.client import Client

backup = typer.Typer(
    help="Keep directories of sandboxes, and restore them.",
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument(metavar="BACKUP", help="The id of a backup.")]
Patience = Annotated[
    float | None,
    typer.Option("--timeout", "-t", metavar="SECONDS", min=0.001, help="Break it off after this."),
]


@backup.command()
def create(
    id: Id,
    path: Annotated[str, typer.Argument(metavar="[DIR]", help="What to keep.")] = "/workspace",
    name: Annotated[str | None, typer.Option(metavar="TEXT", help="What is in it.")] = None,
    ttl: Annotated[
        str | None, typer.Option(metavar="TIME", help="Remove it after this: 12h, 30d.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Leave this out. Repeatable.")
    ] = None,
    gitignore: Annotated[
        bool, typer.Option("--gitignore", help="Leave out what .gitignore files say.")
    ] = False,
    compression: Annotated[
        int | None, typer.Option(min=1, max=19, help="A level of zstd; 3 by default.")
    ] = None,
    freeze: Annotated[
        bool, typer.Option("--freeze", help="Have its processes stand still meanwhile.")
    ] = False,
    timeout: Patience = None,
    as_json: AsJson = False,
) -> int:
    """Keep a directory of a sandbox, and print the id of the backup."""
    from smokebox.cli.given import parse_duration
    from smokebox.cli.remote.backing_up import watched
    from smokebox.cli.remote.finding import find
    from smokebox.cli.remote.talking import talk
    from smokebox.cli.table import print_json

    seconds = None if ttl is None else parse_duration("--ttl", ttl)

    async def work(client: Client) -> None:
        sandbox = await find(client, id)
        making = sandbox.create_backup(
            path,
            name=name,
            ttl=seconds,
            excludes=exclude or (),
            gitignore=gitignore,
            compression=compression,
            freeze=freeze,
            timeout=timeout,
        )
        made = await watched(sandbox, f"{id}:{path}", making)
        if as_json:
            print_json(made)
        else:
            typer.echo(made.id)

    return talk(work)


@backup.command("list")
def list_all(
    id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="Only of that sandbox, be it gone.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """List backups, the oldest first, also of sandboxes that are gone."""
    from smokebox.cli.remote.talking import talk
    from smokebox.cli.table import ago, print_json, print_table, size

    async def work(client: Client) -> None:
        found = await client.backups.list(sandbox=id)
        if as_json:
            print_json(found)
            return
        print_table(
            ("ID", "SANDBOX", "PATH", "NAME", "FILES", "SIZE", "CREATED", "EXPIRES"),
            [
                (
                    one.id,
                    one.sandbox_id,
                    # A path may be whatever a sandbox made up.
                    one.path if one.path.isprintable() else ascii(one.path)[1:-1],
                    one.name or "-",
                    str(one.files),
                    size(one.size),
                    ago(one.created_at),
                    "never" if one.expires_at is None else ago(one.expires_at),
                )
                for one in found
            ],
        )

    return talk(work)


@backup.command()
def restore(
    id: Id,
    name: Name,
    path: Annotated[
        str | None, typer.Argument(metavar="[DIR]", help="Where; else where it was made.")
    ] = None,
    timeout: Patience = None,
    as_json: AsJson = False,
) -> int:
    """Have a directory of a sandbox be what a backup has of it.

    What the directory has besides is gone then. Where it fails, all is as it was.
    """
    from smokebox.cli.remote.backing_up import watched
    from smokebox.cli.remote.finding import find
    from smokebox.cli.remote.talking import talk
    from smokebox.cli.table import print_json

    async def work(client: Client) -> None:
        sandbox = await find(client, id, create=True)
        restoring = sandbox.restore_backup(name, path=path, timeout=timeout)
        done = await watched(sandbox, f"{id}:{path or ''}", restoring)
        if as_json:
            print_json(done)
        else:
            typer.echo(f"{done.path} has {done.files} files of {done.id}")

    return talk(work)


@backup.command()
def rm(
    names: Annotated[list[str], typer.Argument(metavar="BACKUP...", help="The ids of backups.")],
) -> int:
    """Remove backups."""
    from smokebox.cli.remote.talking import talk

    async def work(client: Client) -> None:
        for one in names:
            # A slip of the finger is told, though the API takes it.
            await client.backups.get(one)
            await client.backups.delete(one)

    return talk(work)
