"""`smokebox build`: a project as a wheel, and as the definition of an image."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from smokebox.cli.project.place import Folder  # noqa: TC001


def build(
    folder: Folder = ".",
    check: Annotated[
        bool, typer.Option("--check", help="Install the wheel, start it, and ask it.")
    ] = False,
) -> int:
    """Pack a project: dist/NAME.whl with a command that serves it, and a Dockerfile around it.

    Secrets (.env), state and tests stay out. A Dockerfile that is there is left as it is.
    """
    from smokebox.app.project import load_project
    from smokebox.cli.deployment import docker
    from smokebox.cli.deployment.facts import read_facts
    from smokebox.cli.deployment.trial import try_wheel
    from smokebox.cli.deployment.wheel import build_wheel

    root = Path(folder).absolute()
    load_project(root)
    facts = read_facts(root)
    wheel = build_wheel(facts, root / "dist")
    typer.echo(f"  {wheel.relative_to(root)}")
    for name, text in docker.files(facts).items():
        if not (root / name).exists():
            (root / name).write_text(text)
            typer.echo(f"  {name}")
    if check:
        try_wheel(facts, wheel, lambda line: typer.echo(f"  ok: {line}"))
    return 0
