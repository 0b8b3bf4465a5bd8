"""Says on stderr what went wrong: one line, and a hint that says what to do next."""

from __future__ import annotations

from typing import Any

import typer

from smokebox.errors import InvalidOption, SmokeboxError


def report(error: Exception) -> int:
    """Print `error` for a person, and give the exit code that stands for it."""
    if isinstance(error, SmokeboxError):
        return _say(error.message, error.hint, 2 if isinstance(error, InvalidOption) else 1)
    # typer has had two roots for its usage errors; both know this method.
    if hasattr(error, "format_message"):
        usage: Any = error
        verb = usage.ctx.command_path if getattr(usage, "ctx", None) else "smokebox"
        return _say(usage.format_message(), f"See `{verb} --help`.", usage.exit_code)
    if isinstance(error, OSError):
        return _say(str(error), "`smokebox --debug ...` shows where.", 1)
    hint = "This is a defect in Smokebox: `smokebox --debug ...` shows where."
    return _say(f"{type(error).__name__}: {error}", hint, 1)


def _say(message: str, hint: str, code: int) -> int:
    typer.secho(f"smokebox: {message}", err=True, fg="red")
    if hint:
        typer.echo(f"  {hint}", err=True)
    return code
