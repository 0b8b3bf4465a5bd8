"""`smokebox snapshot` and `fork`: states of whole sandboxes, to return to and to go on from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from smokebox.cli.options import AsJson, Id, subcommands
from smokebox.cli.output import format_age, format_size, print_json, print_table
from smokebox.cli.remote import find_sandbox, run_with_client

if TYPE_CHECKING:
    from smokebox.client.client import Client
    from smokebox.types import Snapshot

snapshot = subcommands("Keep states of whole sandboxes, and return to them.")

KeepLast = Annotated[
    int | None,
    typer.Option("--keep-last", metavar="N", help="Remove earlier ones without a name but N."),
]
KeepFor = Annotated[
    str | None,
    typer.Option("--keep-for", metavar="TIME", help="Remove none that is younger, such as 7d."),
]
Name = Annotated[str, typer.Argument(metavar="SNAPSHOT", help="Snapshot ID or name.")]


@snapshot.command()
def create(
    id: Id,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Name to find it by.")
    ] = None,
    description: Annotated[
        str | None, typer.Option("--description", "-m", metavar="TEXT", help="Text for people.")
    ] = None,
    keep_last: KeepLast = None,
    keep_for: KeepFor = None,
    as_json: AsJson = False,
) -> int:
    """Make a snapshot of all files of a sandbox and print its ID.

    Programs keep running, but for some milliseconds in which they are frozen.
    """

    async def work(client: Client) -> None:
        sandbox = await find_sandbox(client, id)
        created = await sandbox.snapshot(
            name, description=description, keep_last=keep_last, keep_for=keep_for
        )
        _show(created, as_json=as_json)

    return run_with_client(work)


@snapshot.command()
def prune(
    id: Id, keep_last: KeepLast = None, keep_for: KeepFor = None, as_json: AsJson = False
) -> int:
    """Remove the snapshots of a sandbox without a name that are not kept, and list them."""

    async def work(client: Client) -> None:
        sandbox = await find_sandbox(client, id)
        removed = await sandbox.prune_snapshots(keep_last=keep_last, keep_for=keep_for)
        if as_json:
            print_json(removed)
            return
        for one in removed:
            typer.echo(one.id)

    return run_with_client(work)


@snapshot.command("ls")
def list_all(
    id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="Only snapshots of this sandbox.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """List snapshots, oldest first, including those of removed sandboxes."""

    async def work(client: Client) -> None:
        snapshots = await client.snapshots.list(sandbox=id)
        if as_json:
            print_json(snapshots)
            return
        print_table(
            ("ID", "NAME", "SANDBOX", "IMAGE", "FILES", "SIZE", "CREATED", "ORIGIN", "DESCRIPTION"),
            [
                (
                    one.id,
                    one.name or "-",
                    one.sandbox_id,
                    one.image,
                    str(one.files),
                    format_size(one.size),
                    format_age(one.created_at),
                    one.origin,
                    _plain(one.description) or "-",
                )
                for one in snapshots
            ],
        )

    return run_with_client(work)


@snapshot.command()
def restore(
    id: Id,
    name: Name,
    save_as: Annotated[
        str | None,
        typer.Option("--save-as", metavar="NAME", help="Keep the present state as a snapshot."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Replace all files of a sandbox by those of a snapshot.

    Its processes end. If the restore fails, nothing is changed.
    """

    async def work(client: Client) -> None:
        sandbox = await find_sandbox(client, id)
        restored = await sandbox.restore(name, save_as=save_as)
        if as_json:
            print_json(restored)
        else:
            typer.echo(f"Restored {id} to {restored.name or restored.id}")

    return run_with_client(work)


@snapshot.command()
def diff(
    before: Name,
    after: Annotated[
        str | None,
        typer.Argument(metavar="[SNAPSHOT]", help="A later one; by default the present state."),
    ] = None,
    sandbox: Annotated[
        str | None,
        typer.Option("--sandbox", metavar="ID", help="The sandbox whose present state is meant."),
    ] = None,
    texts: Annotated[
        bool, typer.Option("--text", "-u", help="Show changed lines of text files.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """List the paths that differ: A added, M changed, D removed."""

    async def work(client: Client) -> None:
        if after is not None:
            found = await client.snapshots.diff(before, after, texts=texts)
        else:
            first = await client.snapshots.get(before)
            current = await find_sandbox(client, sandbox or first.sandbox_id)
            found = await current.diff(first, texts=texts)
        if as_json:
            print_json(found)
            return
        marked = [("A", path) for path in found.added]
        marked += [("M", path) for path in found.changed]
        marked += [("D", path) for path in found.removed]
        for mark, path in sorted(marked, key=lambda one: one[1]):
            typer.echo(f"{mark} {_plain(path)}")
            for line in found.texts.get(path, "").splitlines():
                typer.echo(f"    {_plain(line)}")
        if not found.complete:
            typer.echo("There are more: the list is not complete.", err=True)

    return run_with_client(work)


@snapshot.command()
def export(name: Name, as_json: AsJson = False) -> int:
    """Put a snapshot into the bucket of the server's backups and print its ID."""

    async def work(client: Client) -> None:
        _show(await client.snapshots.export(name), as_json=as_json)

    return run_with_client(work)


@snapshot.command("import")
def import_(
    id: Annotated[str, typer.Argument(metavar="SNAPSHOT", help="Snapshot ID.")],
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name to find it by here.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Take a snapshot from the bucket and print its ID."""

    async def work(client: Client) -> None:
        _show(await client.snapshots.load(id, name=name), as_json=as_json)

    return run_with_client(work)


@snapshot.command()
def rm(
    names: Annotated[list[str], typer.Argument(metavar="SNAPSHOT...", help="IDs or names.")],
) -> int:
    """Remove snapshots. Sandboxes that were created from them keep their files."""

    async def work(client: Client) -> None:
        for name in names:
            # The API accepts unknown names; a mistyped one is an error here.
            found = await client.snapshots.get(name)
            await client.snapshots.delete(found)

    return run_with_client(work)


def fork(
    id: Id,
    count: Annotated[
        int, typer.Option("--count", "-n", min=1, metavar="N", help="Number of forks.")
    ] = 1,
    ids: Annotated[
        list[str] | None,
        typer.Option("--id", metavar="ID", help="ID of a fork. Repeatable."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Create sandboxes that go on from the present state of one, and print their IDs."""

    async def work(client: Client) -> None:
        sandbox = await find_sandbox(client, id)
        forks = await sandbox.fork(count, ids=ids or None)
        if as_json:
            print_json([await one.info() for one in forks])
            return
        for one in forks:
            typer.echo(one.id)

    return run_with_client(work)


def _show(found: Snapshot, *, as_json: bool) -> None:
    if as_json:
        print_json(found)
    else:
        typer.echo(found.id)


def _plain(text: str) -> str:
    """Return a text of a sandbox without characters that could control the terminal."""
    shown = text.replace("\t", "    ")
    return shown if shown.isprintable() else ascii(shown)[1:-1]
