"""Folder of a project: options that name it, its variables, and its session store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from smokebox.errors import InvalidOption

Folder = Annotated[str, typer.Argument(help="Folder of the project.")]
EnvFile = Annotated[
    str | None,
    typer.Option("--env", metavar="FILE", help="File with environment variables, besides .env."),
]
Host = Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on, 0 for any.")]


def enter(folder: str, env: str | None = None) -> Path:
    """Change to a project's folder, where its models, secrets and state are looked up."""
    variables = {} if env is None else read_env(env)
    root = Path(folder).absolute()
    if not root.is_dir():
        raise InvalidOption(
            f"there is no folder {folder!r}.",
            hint="Create a project with `smokebox init NAME`.",
            option=folder,
        )
    os.chdir(root)
    # Variables of the process take precedence over those of the file.
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    return root


def read_env(file: str) -> dict[str, str]:
    """Read the variables of a file. Raises `InvalidOption`."""
    from smokebox.project import parse_dotenv

    try:
        text = Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise InvalidOption(
            f"{file} cannot be read: {reason}.",
            hint="Pass another file with --env.",
            option="env",
        ) from None
    return parse_dotenv(text, file)


def project_store() -> str | None:
    """Return the session store of the project in this folder or one above it."""
    from smokebox.app.project import AGENTS, WORKFLOWS
    from smokebox.app.settings import load_settings
    from smokebox.project import CONFIG_FILE

    for folder in (here := Path.cwd(), *here.parents):
        if (folder / CONFIG_FILE).is_file():
            if any((folder / part).is_dir() for part in (AGENTS, WORKFLOWS)):
                return load_settings(folder).conversations(folder)
            return None
    return None
