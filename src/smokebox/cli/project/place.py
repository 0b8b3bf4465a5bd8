"""The folder of a project, and the variables that it is run with."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

Folder = Annotated[str, typer.Argument(help="The folder of the project.")]
EnvFile = Annotated[
    str | None,
    typer.Option("--env", metavar="FILE", help="Variables to set, besides those of .env."),
]
Host = Annotated[str, typer.Option(metavar="ADDRESS", help="The address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on, 0 for any.")]


def enter(folder: str, env: str | None = None) -> Path:
    """Go into a project, as whoever has its models, secrets and state looked for there."""
    from smokebox.errors import InvalidOption

    variables = {} if env is None else read_env(env)
    root = Path(folder).absolute()
    if not root.is_dir():
        raise InvalidOption(
            f"there is no folder {folder!r}.",
            hint="Make a project with `smokebox init NAME`.",
            option=folder,
        )
    os.chdir(root)
    # What whoever starts it has set goes before what a file says.
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    return root


def read_env(file: str) -> dict[str, str]:
    """The variables of a file. Raises `InvalidOption` with its name."""
    from smokebox.egress.environment import parse_dotenv
    from smokebox.errors import InvalidOption

    try:
        text = Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise InvalidOption(
            f"{file} cannot be read: {reason}.", hint="Pass another with --env.", option="env"
        ) from None
    return parse_dotenv(text, file)


def project_store() -> str | None:
    """Where the project of this folder, or of one above it, keeps its conversations."""
    from smokebox.app.project import AGENTS, WORKFLOWS
    from smokebox.app.settings import load_settings
    from smokebox.client.bindings import FILE

    for folder in (here := Path.cwd(), *here.parents):
        if (folder / FILE).is_file():
            if any((folder / part).is_dir() for part in (AGENTS, WORKFLOWS)):
                return load_settings(folder).conversations(folder)
            return None
    return None
