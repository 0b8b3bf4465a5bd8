"""`smokebox deploy`: what a platform needs in order to run a project."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from smokebox.cli.project.place import Folder  # noqa: TC001


def deploy(
    platform: Annotated[
        Literal[
            "systemd", "docker", "compose", "kubernetes", "github-actions", "gitlab-ci", "render"
        ],
        typer.Argument(help="Where it is to run, or be tested."),
    ],
    folder: Folder = ".",
    write: Annotated[
        bool, typer.Option("--write", help="Write the files into the project.")
    ] = False,
) -> int:
    """Print the files with which a platform runs a project, or write them.

    Nothing is sent anywhere, and nothing that is there is written over.
    """
    import importlib

    from smokebox.cli.deployment.facts import read_facts
    from smokebox.errors import Conflict

    root = Path(folder).absolute()
    module = importlib.import_module(f"smokebox.cli.deployment.{platform.replace('-', '_')}")
    facts = read_facts(root)
    files: dict[str, str] = module.files(facts)
    following = module.NEXT.format(name=facts.name)
    if not write:
        for name, text in files.items():
            typer.echo(f"# {name}\n{text}")
        typer.echo(following, err=True)
        return 0
    for name, text in files.items():
        if (root / name).exists() and (root / name).read_text() != text:
            raise Conflict(
                f"{name} is there already.", hint="Remove it first.", kind="file", name=name
            )
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
        typer.echo(f"  {name}")
    typer.echo(f"\n{following}")
    return 0
