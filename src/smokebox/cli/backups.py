"""`smokebox backup`: create, list, restore and remove backups of directories."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from smokebox.cli.options import AsJson, Id, parse_duration, subcommands
from smokebox.cli.output import format_age, format_size, print_json, print_table
from smokebox.cli.remote import find_sandbox, run_with_client

if TYPE_CHECKING:
    from smokebox.client.client import Client

backup = subcommands("Back up directories of sandboxes, and restore them.")

Name = Annotated[str, typer.Argument(metavar="BACKUP", help="Backup ID.")]
Timeout = Annotated[
    float | None,
    typer.Option("--timeout", "-t", metavar="SECONDS", min=0.001, help="Cancel after this time."),
]


@backup.command()
def create(
    id: Id,
    path: Annotated[
        str, typer.Argument(metavar="[DIR]", help="Directory to back up.")
    ] = "/workspace",
    name: Annotated[str | None, typer.Option(metavar="TEXT", help="Name for listings.")] = None,
    ttl: Annotated[
        str | None, typer.Option(metavar="TIME", help="Remove it after this time: 12h, 30d.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Exclude these files. Repeatable.")
    ] = None,
    gitignore: Annotated[
        bool, typer.Option("--gitignore", help="Exclude files that .gitignore lists.")
    ] = False,
    compression: Annotated[
        int | None, typer.Option(min=1, max=19, help="zstd compression level; 3 by default.")
    ] = None,
    freeze: Annotated[
        bool, typer.Option("--freeze", help="Pause the sandbox's processes meanwhile.")
    ] = False,
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> int:
    """Back up a directory and print the backup's ID."""
    seconds = None if ttl is None else parse_duration("--ttl", ttl)

    async def work(client: Client) -> None:
        from smokebox.cli.transfer import show_backup_progress

        sandbox = await find_sandbox(client, id)
        creation = sandbox.create_backup(
            path,
            name=name,
            ttl=seconds,
            excludes=exclude or (),
            gitignore=gitignore,
            compression=compression,
            freeze=freeze,
            timeout=timeout,
        )
        created = await show_backup_progress(sandbox, f"{id}:{path}", creation)
        if as_json:
            print_json(created)
        else:
            typer.echo(created.id)

    return run_with_client(work)


@backup.command("ls")
def list_all(
    id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="Only backups of this sandbox.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """List backups, oldest first, including those of removed sandboxes."""

    async def work(client: Client) -> None:
        backups = await client.backups.list(sandbox=id)
        if as_json:
            print_json(backups)
            return
        print_table(
            ("ID", "SANDBOX", "PATH", "NAME", "FILES", "SIZE", "CREATED", "EXPIRES"),
            [
                (
                    one.id,
                    one.sandbox_id,
                    # A sandbox chooses its paths: escape what could control the terminal.
                    one.path if one.path.isprintable() else ascii(one.path)[1:-1],
                    one.name or "-",
                    str(one.files),
                    format_size(one.size),
                    format_age(one.created_at),
                    "never" if one.expires_at is None else format_age(one.expires_at),
                )
                for one in backups
            ],
        )

    return run_with_client(work)


@backup.command()
def restore(
    id: Id,
    name: Name,
    path: Annotated[
        str | None,
        typer.Argument(metavar="[DIR]", help="Target directory; by default the original one."),
    ] = None,
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> int:
    """Replace a directory with the contents of a backup.

    Other files in the directory are removed. If the restore fails, nothing is changed.
    """

    async def work(client: Client) -> None:
        from smokebox.cli.transfer import show_backup_progress

        sandbox = await find_sandbox(client, id, create=True)
        restore = sandbox.restore_backup(name, path=path, timeout=timeout)
        restored = await show_backup_progress(sandbox, f"{id}:{path or ''}", restore)
        if as_json:
            print_json(restored)
        else:
            typer.echo(f"Restored {restored.files} files of {restored.id} to {restored.path}")

    return run_with_client(work)


@backup.command()
def rm(
    names: Annotated[list[str], typer.Argument(metavar="BACKUP...", help="Backup IDs.")],
) -> int:
    """Remove backups."""

    async def work(client: Client) -> None:
        for name in names:
            # The API accepts unknown ids; a mistyped one is an error here.
            await client.backups.get(name)
            await client.backups.delete(name)

    return run_with_client(work)
