"""`smokebox down`: the end of the server in the background."""

from __future__ import annotations

from typing import Annotated

import typer


def down(
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave sandboxes running for the next server.")
    ] = False,
) -> int:
    """Stop the server. Sandboxes sleep, and keep their files."""
    from smokebox.cli.notice import notice
    from smokebox.client.background import stop

    notice("Stopping the server ...")
    if not stop(keep=keep):
        typer.echo("No server runs.", err=True)
    return 0
