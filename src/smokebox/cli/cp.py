"""`smokebox cp`: files and directories between this machine and a sandbox."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from smokebox.client.client import Client


def cp(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="ID:PATH, a path here, or -.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="ID:PATH, a path here, or -.")],
) -> int:
    """Copy files and directories into a sandbox, or out of it.

    One side is ID:PATH, where a relative path begins in the directory of the sandbox. The
    other is a path here, or - for standard input or output. As with cp -r, what is copied to
    a directory that is there goes into it.
    """
    from smokebox.cli.remote.copying import download, upload
    from smokebox.cli.remote.finding import find
    from smokebox.cli.remote.talking import talk

    there, other = _remote(source), _remote(target)
    if there is not None and other is not None:
        raise InvalidOption(
            "cp copies between this machine and one sandbox, not between two.",
            hint=f"For a file: smokebox cp {source} - | smokebox cp - {target}",
            option="cp",
        )

    async def work(client: Client) -> None:
        if there is not None:
            await download(await find(client, there[0]), there[1], target)
        elif other is not None:
            await upload(await find(client, other[0]), source, other[1])

    if there is None and other is None:
        raise InvalidOption(
            "neither side of cp is in a sandbox.",
            hint="Write that side as ID:PATH, for example mine:/workspace/notes.txt.",
            option="cp",
        )
    return talk(work)


def _remote(text: str) -> tuple[str, str] | None:
    """The id and the path of ID:PATH; None for a path here, such as `./a:b`."""
    id, colon, path = text.partition(":")
    return (id, path or ".") if colon and id and os.sep not in id else None
