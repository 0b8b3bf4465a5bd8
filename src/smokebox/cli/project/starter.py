"""Files of a new project."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from smokebox import __version__
from smokebox.cli.templates import render
from smokebox.errors import Conflict

if TYPE_CHECKING:
    from pathlib import Path


def write_starter(folder: Path) -> list[str]:
    """Write a new project and return the names of its files.

    Raises:
        Conflict: One of the files exists. Nothing is written then.
    """
    name = re.sub(r"[^a-z0-9]+", "-", folder.absolute().name.lower()).strip("-") or "app"
    files = render("starter", name=name, version=__version__)
    existing = [file for file in files if (folder / file).exists()]
    if existing:
        raise Conflict(
            f"{folder} already has {', '.join(existing)}.",
            hint="Pass the name of a new folder: smokebox init NAME.",
            kind="file",
            name=existing[0],
        )
    for file, text in files.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        # "x": a file that appeared in the meantime is not overwritten either.
        with path.open("x") as to:
            to.write(text)
    return list(files)
