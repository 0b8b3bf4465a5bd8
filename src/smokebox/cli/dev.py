"""`smokebox dev`: a project served while it is worked on."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import typer

from smokebox.cli.project.place import EnvFile, Folder, Host, Port  # noqa: TC001

if TYPE_CHECKING:
    from pathlib import Path

    from smokebox.app.app import App


def dev(
    folder: Folder = ".", host: Host = "127.0.0.1", port: Port = 8600, env: EnvFile = None
) -> int:
    """Serve a project on this machine, and show its agents at work.

    Files that change are taken in anew, without losing conversations; one that is wrong is
    told, and keeps none of the others from being served. Ctrl-C stops.
    """
    import sys

    import uvloop

    from smokebox import __version__
    from smokebox.app.app import App
    from smokebox.app.serving import serve
    from smokebox.cli.project.ending import end_soon
    from smokebox.cli.project.journal import Journal
    from smokebox.cli.project.place import enter
    from smokebox.cli.project.routes import print_lines_to_try, print_routes

    root = enter(folder, env)
    app = App(root, strict=False)

    async def ready(url: str) -> None:
        import asyncio

        typer.echo(f"smokebox {__version__} serves {root} on {url}\n")
        print_routes(app.project)
        print_lines_to_try(app.project, url, keys=bool(app.keys))
        sys.stdout.flush()
        async with asyncio.TaskGroup() as group:
            group.create_task(Journal(app).follow())
            group.create_task(_reload(app, root))

    async def work() -> None:
        await serve(app, host=host, port=port, grace=3.0, ready=ready)
        end_soon()

    uvloop.run(work())
    return 0


async def _reload(app: App, root: Path) -> None:
    import asyncio
    import importlib.util
    import os

    from smokebox.cli.failure import report
    from smokebox.cli.project.routes import print_routes
    from smokebox.cli.project.watching import changes
    from smokebox.errors import SmokeboxError

    async for changed in changes(root):
        typer.secho(f"{', '.join(changed)} changed", fg="blue")
        for file in changed:
            if file.endswith(".py"):
                # Its cache is told by seconds: what changes twice in one would be old.
                with contextlib.suppress(OSError):
                    os.unlink(importlib.util.cache_from_source(str(root / file)))
        try:
            # On a thread: what is served is served while a file is imported.
            print_routes(await asyncio.to_thread(app.reload))
        except SmokeboxError as error:
            # What was served goes on being served.
            report(error)
