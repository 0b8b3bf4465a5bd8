"""`smokebox up`: a server in the background."""

from __future__ import annotations

import typer


def up() -> int:
    """Have a server run in the background, and print its socket.

    Verbs that need a server start one too, which ends when there is nothing to do for a
    while; this one stays until `smokebox down`.
    """
    from smokebox.cli.notice import notice
    from smokebox.client.background import find, start

    if find() is None:
        notice("Starting a server in the background ...")
    typer.echo(start(idle_exit=None).socket)
    return 0
