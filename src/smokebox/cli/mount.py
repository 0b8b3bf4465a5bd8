"""`smokebox mount`, `unmount` and `mounts`: buckets as directories of a sandbox."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from smokebox.cli.options import AsJson, Id  # noqa: TC001

if TYPE_CHECKING:
    from smokebox.client.client import Client

Path = Annotated[str, typer.Argument(metavar="PATH", help="The directory in it.")]


def mount(
    id: Id,
    bucket: Annotated[
        str,
        typer.Argument(
            metavar="BUCKET",
            help="A name, s3://name/folder, or a bucket of smokebox.toml.",
        ),
    ],
    path: Path,
    prefix: Annotated[
        str, typer.Option(metavar="FOLDER", help="The folder of the bucket, else all of it.")
    ] = "",
    read_only: Annotated[bool, typer.Option("--read-only", help="Change nothing in it.")] = False,
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Where it is, if not at Amazon's.")
    ] = None,
    region: Annotated[str | None, typer.Option(metavar="NAME", help="The region it is in.")] = None,
    anonymous: Annotated[
        bool, typer.Option("--anonymous", help="Ask without credentials.")
    ] = False,
) -> int:
    """Have a bucket that speaks S3 be a directory of a sandbox.

    Credentials are those of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or of the project's
    .env for one of its buckets; they do not get into the sandbox. Without any, the bucket is
    one that the server offers by that name.
    """
    from smokebox.cli.remote.finding import find
    from smokebox.cli.remote.talking import talk
    from smokebox.client.bindings import load

    async def work(client: Client) -> None:
        project = load()
        known = project.bucket(bucket) if bucket in project.buckets else bucket
        sandbox = await find(client, id)
        made = await sandbox.mount_bucket(
            known,
            path,
            prefix=prefix,
            read_only=read_only,
            endpoint=endpoint,
            region=region,
            anonymous=anonymous,
        )
        typer.echo(made.path)

    return talk(work)


def unmount(
    id: Id,
    path: Path,
    force: Annotated[bool, typer.Option("--force", help="Although somebody uses it.")] = False,
) -> int:
    """Have a bucket be a directory no more; all that was written is in it then."""
    from smokebox.cli.remote.finding import find
    from smokebox.cli.remote.talking import talk

    async def work(client: Client) -> None:
        await (await find(client, id)).unmount_bucket(path, force=force)

    return talk(work)


def mounts(id: Id, as_json: AsJson = False) -> int:
    """List the buckets that are mounted, or will be when the sandbox wakes."""
    from smokebox.cli.remote.finding import find
    from smokebox.cli.remote.talking import talk
    from smokebox.cli.table import print_json, print_table

    async def work(client: Client) -> None:
        found = await (await find(client, id)).list_mounts()
        if as_json:
            print_json(found)
            return
        print_table(
            ("PATH", "BUCKET", "FOLDER", "ENDPOINT", "STATUS"),
            [
                (
                    one.path,
                    one.bucket,
                    one.prefix or "-",
                    one.endpoint or "-",
                    ("active" if one.active else "asleep")
                    + (", read-only" if one.read_only else ""),
                )
                for one in found
            ],
        )

    return talk(work)
