"""Commands on files of a sandbox: cp, mount, unmount, mounts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from smokebox.cli.completion import complete_remote_paths
from smokebox.cli.options import AsJson, Id  # noqa: TC001
from smokebox.cli.output import print_json, print_table
from smokebox.cli.remote import find_sandbox, run_with_client
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from smokebox.client.client import Client

MountPath = Annotated[str, typer.Argument(metavar="PATH", help="Directory in the sandbox.")]
_SIDE = "ID:PATH, a local path, or -."


def cp(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help=_SIDE, autocompletion=complete_remote_paths),
    ],
    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", help=_SIDE, autocompletion=complete_remote_paths),
    ],
) -> int:
    """Copy files and directories between this machine and a sandbox.

    One side is ID:PATH; a relative PATH starts in the sandbox's working directory. The other
    is a local path, or - for standard input or output. As with cp -r, copying to an existing
    directory copies into it.
    """
    remote_source, remote_target = _parse_remote(source), _parse_remote(target)
    if remote_source is not None and remote_target is not None:
        raise InvalidOption(
            "cp copies between this machine and one sandbox, not between two.",
            hint=f"For a file: smokebox cp {source} - | smokebox cp - {target}",
            option="cp",
        )
    if remote_source is None and remote_target is None:
        raise InvalidOption(
            "neither side of cp is in a sandbox.",
            hint="Write that side as ID:PATH, for example mine:/workspace/notes.txt.",
            option="cp",
        )

    async def work(client: Client) -> None:
        from smokebox.cli.transfer import download, upload

        if remote_source is not None:
            id, path = remote_source
            await download(await find_sandbox(client, id), path, target)
        elif remote_target is not None:
            id, path = remote_target
            await upload(await find_sandbox(client, id), source, path)

    return run_with_client(work)


def _parse_remote(text: str) -> tuple[str, str] | None:
    """Return the id and the path of ID:PATH; None for a local path such as `./a:b`."""
    id, colon, path = text.partition(":")
    return (id, path or ".") if colon and id and os.sep not in id else None


def mount(
    id: Id,
    bucket: Annotated[
        str,
        typer.Argument(
            metavar="BUCKET", help="Bucket name, s3://name/folder, or a bucket of smokebox.toml."
        ),
    ],
    path: MountPath,
    prefix: Annotated[
        str, typer.Option(metavar="FOLDER", help="Mount only this folder of the bucket.")
    ] = "",
    read_only: Annotated[bool, typer.Option("--read-only", help="Mount read-only.")] = False,
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="S3 endpoint; AWS by default.")
    ] = None,
    region: Annotated[
        str | None, typer.Option(metavar="NAME", help="Region of the bucket.")
    ] = None,
    anonymous: Annotated[bool, typer.Option("--anonymous", help="Do not sign requests.")] = False,
) -> int:
    """Mount an S3 bucket as a directory of a sandbox.

    Credentials come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or from the project's
    .env for a bucket of smokebox.toml. They never enter the sandbox. Without credentials, the
    server must offer a bucket of that name.
    """

    async def work(client: Client) -> None:
        from smokebox.client.bindings import bucket_binding
        from smokebox.project import load_config

        config = load_config()
        target = bucket_binding(config, bucket) if bucket in config.buckets else bucket
        sandbox = await find_sandbox(client, id)
        mounted = await sandbox.mount_bucket(
            target,
            path,
            prefix=prefix,
            read_only=read_only,
            endpoint=endpoint,
            region=region,
            anonymous=anonymous,
        )
        typer.echo(mounted.path)

    return run_with_client(work)


def unmount(
    id: Id,
    path: MountPath,
    force: Annotated[
        bool, typer.Option("--force", help="Unmount even if files are in use.")
    ] = False,
) -> int:
    """Unmount a bucket after flushing pending writes."""

    async def work(client: Client) -> None:
        await (await find_sandbox(client, id)).unmount_bucket(path, force=force)

    return run_with_client(work)


def mounts(id: Id, as_json: AsJson = False) -> int:
    """List mounted buckets. A sleeping sandbox mounts them when it wakes."""

    async def work(client: Client) -> None:
        mounted = await (await find_sandbox(client, id)).list_mounts()
        if as_json:
            print_json(mounted)
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
                for one in mounted
            ],
        )

    return run_with_client(work)
