"""The verbs gathered under one command, and what happens to an error nobody caught."""

from __future__ import annotations

import itertools
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from smokebox import __version__
from smokebox.cli.failure import report
from smokebox.cli.verbs import Verbs

if TYPE_CHECKING:
    from io import TextIOWrapper

app = typer.Typer(
    cls=Verbs,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@app.callback(invoke_without_command=True)
def smokebox(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """A place for Python agents to work: files, a shell, a sandbox of their own."""
    if version:
        typer.echo(f"smokebox {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run(arguments: list[str]) -> int:
    """Run one command line and give its exit code; an error becomes a line and a hint."""
    _open_streams()
    try:
        code = app(args=arguments, prog_name="smokebox", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:
        if "--debug" in itertools.takewhile(lambda word: word.startswith("-"), arguments):
            raise
        return report(error)
    return code if isinstance(code, int) else 0


def _open_streams() -> None:
    """Make the three streams usable: a closed one is None, and a terminal may not be UTF-8."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream: TextIOWrapper | None = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
        else:
            stream.reconfigure(errors="backslashreplace")
