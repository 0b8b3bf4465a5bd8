"""`smokebox init`: a project that runs at once."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer


def init(
    folder: Annotated[str, typer.Argument(help="Where it is to be.")] = ".",
) -> int:
    """Make a project: an agent, a workflow and their tests, which need no key.

    Nothing that is there is written over.
    """
    from smokebox.cli.project.starter import write_starter

    root = Path(folder)
    for file in write_starter(root):
        typer.echo(f"  {file}")
    go = "" if root.absolute() == Path.cwd() else f"cd {shlex.quote(folder)} && "
    typer.echo(f"\nNext: {go}smokebox dev")
    return 0
