"""Commands on a project: init, dev, app."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from smokebox import __version__
from smokebox.cli.project.folder import EnvFile, Folder, Host, Port, enter
from smokebox.errors import Conflict, InvalidOption


def init(
    folder: Annotated[str, typer.Argument(help="Folder to create the project in.")] = ".",
) -> int:
    """Create a project with an agent, a workflow and tests.

    It runs without an API key. Existing files are not overwritten.
    """
    from smokebox.cli.templates import render

    root = Path(folder)
    name = re.sub(r"[^a-z0-9]+", "-", root.absolute().name.lower()).strip("-") or "app"
    files = render("starter", name=name, version=__version__)
    if existing := [file for file in files if (root / file).exists()]:
        raise Conflict(
            f"{root} already has {', '.join(existing)}.",
            hint="Pass the name of a new folder: smokebox init NAME.",
            kind="file",
            name=existing[0],
        )
    for file, text in files.items():
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        # "x": a file that appeared in the meantime is not overwritten either.
        with path.open("x") as to:
            to.write(text)
        typer.echo(f"  {file}")
    cd = "" if root.absolute() == Path.cwd() else f"cd {shlex.quote(folder)} && "
    typer.echo(f"\nNext: {cd}smokebox dev")
    return 0


def dev(
    folder: Folder = ".", host: Host = "127.0.0.1", port: Port = 8600, env: EnvFile = None
) -> int:
    """Serve a project for development, and show what its agents do.

    Changed files are reloaded, and conversations are kept. A file with an error is reported;
    the others are served. Images of the sandboxes in smokebox.toml are built, and again when
    their files change. Ctrl-C stops.
    """
    import asyncio

    import uvloop

    from smokebox.app.app import App
    from smokebox.app.server import serve
    from smokebox.cli.project.activity import ActivityView
    from smokebox.cli.project.binding_images import build_images
    from smokebox.cli.project.development import (
        exit_soon,
        print_examples,
        print_routes,
        reload_changes,
    )

    root = enter(folder, env)
    app = App(root, strict=False)

    async def ready(url: str) -> None:
        typer.echo(f"smokebox {__version__} serves {root} on {url}\n")
        print_routes(app.project)
        print_examples(app.project, url, keys=app.keys.required)
        sys.stdout.flush()
        async with asyncio.TaskGroup() as group:
            group.create_task(ActivityView(app).follow())
            group.create_task(reload_changes(app, root))
            group.create_task(build_images(root))

    async def work() -> None:
        await serve(app, host=host, port=port, grace=3.0, ready=ready)
        exit_soon()

    uvloop.run(work())
    return 0


def app(
    folder: Folder = ".",
    host: Host = "127.0.0.1",
    port: Port = 8600,
    state: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="State directory; else that of smokebox.toml."),
    ] = None,
    env: EnvFile = None,
    keys: Annotated[
        bool | None,
        typer.Option(
            "--keys/--no-keys",
            help="Require API keys; by default only if other machines can connect.",
        ),
    ] = None,
    open: Annotated[bool, typer.Option("--open", hidden=True)] = False,
    grace: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0, help="Time for work to finish after SIGTERM."),
    ] = None,
) -> int:
    """Serve the agents and workflows of a project in production.

    Fails to start if a file has an error. Requests from other machines and users need a key: see
    `smokebox keys create`. After SIGTERM, work in progress may finish; the next start resumes the
    rest.
    """
    if open:
        raise InvalidOption(
            "there is no option --open.",
            hint="Use --no-keys behind a proxy that authenticates requests.",
            option="--open",
        )
    import logging

    import uvloop

    from smokebox.app.app import App
    from smokebox.app.server import serve
    from smokebox.app.settings import STATE
    from smokebox.cli.project.development import exit_soon

    if state is not None:
        os.environ[STATE] = os.path.abspath(state)
    root = enter(folder, env)
    logging.basicConfig(level="WARNING", format="%(asctime)s %(levelname)s %(name)s %(message)s")
    served = App(root)

    async def ready(url: str) -> None:
        typer.echo(f"smokebox {__version__} serves {root} on {url}")
        if served.keys.required and not served.has_operator_keys and not served.keys.all():
            typer.echo("No API key exists yet: smokebox keys create --name NAME")

    async def work() -> None:
        await serve(served, host=host, port=port, keys=keys, grace=grace, ready=ready)
        exit_soon()

    uvloop.run(work())
    return 0
