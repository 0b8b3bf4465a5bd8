"""`smokebox app`: a project served for good."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from smokebox.cli.project.place import EnvFile, Folder, Host, Port  # noqa: TC001


def app(
    folder: Folder = ".",
    host: Host = "127.0.0.1",
    port: Port = 8600,
    state: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Where its work is kept; else what smokebox.toml says."),
    ] = None,
    env: EnvFile = None,
    open: Annotated[
        bool,
        typer.Option("--open", help="Let other machines ask without a key: something else looks."),
    ] = False,
    grace: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0, help="How long work may go on after SIGTERM."),
    ] = None,
) -> int:
    """Serve the agents and workflows of a project, in production.

    Every file must be right. Other machines need a key of SMOKEBOX_APP_KEYS. SIGTERM lets
    what goes on come to its end; the rest goes on at the next start.
    """
    import logging

    import uvloop

    from smokebox import __version__
    from smokebox.app.app import App
    from smokebox.app.serving import serve
    from smokebox.app.settings import STATE
    from smokebox.cli.project.ending import end_soon
    from smokebox.cli.project.place import enter

    if state is not None:
        os.environ[STATE] = os.path.abspath(state)
    root = enter(folder, env)
    logging.basicConfig(level="WARNING", format="%(asctime)s %(levelname)s %(name)s %(message)s")
    served = App(root)

    async def ready(url: str) -> None:
        typer.echo(f"smokebox {__version__} serves {root} on {url}")

    async def work() -> None:
        await serve(served, host=host, port=port, open=open, grace=grace, ready=ready)
        end_soon()

    uvloop.run(work())
    return 0
