"""What is going on, for somebody who looks at a terminal and waits."""

from __future__ import annotations

import sys

import typer


def notice(text: str) -> None:
    """Say so on stderr where that is a terminal, and nothing to programs."""
    if sys.stderr.isatty():
        typer.secho(text, err=True, dim=True)
