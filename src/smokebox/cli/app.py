"""The `smokebox` command: its table of commands, help by intent, and the report of errors.

A command's module is imported when the command is called, so that the others cost nothing.
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from smokebox import __version__
from smokebox.cli.output import report

if TYPE_CHECKING:
    from io import TextIOWrapper

PROJECT = "Build and serve agents and workflows"
AGENTS = "Talk to agents"
WORK = "Work in a sandbox"
PROCESSES = "Run background processes"
PORTS = "Reach ports of a sandbox"
SANDBOXES = "Manage sandboxes"
SERVER = "Run a server"
SETUP = "Set up this machine"

# Set by the completion scripts; typer derives the name from that of the program.
_COMPLETE = "_SMOKEBOX_COMPLETE"


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """Location of a command: a function, or a `typer.Typer` with subcommands.

    With `trailing`, the last argument is a command line that is passed on unparsed.
    """

    module: str
    name: str
    panel: str
    trailing: bool = False


COMMANDS = {
    "init": CommandEntry("project.commands", "init", PROJECT),
    "import": CommandEntry("project.wrangler", "import_wrangler", PROJECT),
    "dev": CommandEntry("project.commands", "dev", PROJECT),
    "app": CommandEntry("project.commands", "app", PROJECT),
    "build": CommandEntry("deployment.commands", "build", PROJECT),
    "deploy": CommandEntry("deployment.commands", "deploy", PROJECT),
    "run": CommandEntry("agents.commands", "run", AGENTS),
    "chat": CommandEntry("agents.commands", "chat", AGENTS),
    "sessions": CommandEntry("agents.commands", "sessions", AGENTS),
    "exec": CommandEntry("execution", "exec_command", WORK, trailing=True),
    "code": CommandEntry("execution", "code", WORK),
    "sh": CommandEntry("shell.commands", "sh", WORK),
    "once": CommandEntry("execution", "once", WORK, trailing=True),
    "cp": CommandEntry("files", "cp", WORK),
    "demo": CommandEntry("shell.commands", "demo", WORK),
    "start": CommandEntry("processes", "start", PROCESSES, trailing=True),
    "ps": CommandEntry("processes", "ps", PROCESSES),
    "logs": CommandEntry("processes", "logs", PROCESSES),
    "kill": CommandEntry("processes", "kill", PROCESSES),
    "expose": CommandEntry("ports", "expose", PORTS),
    "ports": CommandEntry("ports", "ports", PORTS),
    "unexpose": CommandEntry("ports", "unexpose", PORTS),
    "forward": CommandEntry("ports", "forward", PORTS),
    "ls": CommandEntry("sandboxes", "ls", SANDBOXES),
    "create": CommandEntry("sandboxes", "create", SANDBOXES),
    "info": CommandEntry("sandboxes", "info", SANDBOXES),
    "stats": CommandEntry("sandboxes", "stats", SANDBOXES),
    "mount": CommandEntry("files", "mount", SANDBOXES),
    "mounts": CommandEntry("files", "mounts", SANDBOXES),
    "unmount": CommandEntry("files", "unmount", SANDBOXES),
    "net": CommandEntry("net", "net", SANDBOXES),
    "images": CommandEntry("images", "images", SANDBOXES),
    "backup": CommandEntry("backups", "backup", SANDBOXES),
    "snapshot": CommandEntry("snapshots", "snapshot", SANDBOXES),
    "fork": CommandEntry("snapshots", "fork", SANDBOXES),
    "sleep": CommandEntry("sandboxes", "sleep", SANDBOXES),
    "wake": CommandEntry("sandboxes", "wake", SANDBOXES),
    "rm": CommandEntry("sandboxes", "rm", SANDBOXES),
    "serve": CommandEntry("server", "serve", SERVER),
    "up": CommandEntry("server", "up", SERVER),
    "down": CommandEntry("server", "down", SERVER),
    "status": CommandEntry("server", "status", SERVER),
    "keys": CommandEntry("keys", "keys", SERVER),
    "doctor": CommandEntry("doctor", "doctor", SETUP),
    "completion": CommandEntry("completion", "completion", SETUP),
}


class LazyGroup(TyperGroup):
    """Group of all commands, which imports each on demand and lists them by intent."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import and return the command of that name; None if there is none."""
        if cmd_name not in self.commands and cmd_name in COMMANDS:
            self.commands[cmd_name] = _load(cmd_name)
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolve the called command; an unknown one is compared with the names of all."""
        if args[0] not in COMMANDS:
            for name in COMMANDS:
                self.get_command(ctx, name)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands in panels, as plain text: importing rich doubles the start time."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for name, entry in COMMANDS.items():
            command = self.get_command(ctx, name)
            panels.setdefault(entry.panel, []).append((name, command.get_short_help_str(70)))
        for title, rows in panels.items():
            with formatter.section(title):
                formatter.write_dl(rows)


class TrailingCommand(TyperCommand):
    """Command whose own options end where its last argument, a command line, begins.

    `smokebox exec box -w /tmp ls -la` passes `-la` to ls, with or without `--`.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert `--` before the first word of the command line."""
        return super().parse_args(ctx, self._mark(args))

    def _mark(self, args: list[str]) -> list[str]:
        own = sum(param.param_type_name == "argument" for param in self.params) - 1
        takes_value = {
            name
            for param in self.params
            if param.param_type_name == "option" and not getattr(param, "is_flag", False)
            for name in param.opts
        }
        at = 0
        while at < len(args):
            word = args[at]
            if word == "--":
                return args
            if word in takes_value:
                at += 2
            elif word.startswith("-") and len(word) > 1:
                at += 1
            elif own:
                own -= 1
                at += 1
            else:
                return [*args[:at], "--", *args[at:]]
        return args


app = typer.Typer(
    cls=LazyGroup,
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
    """Sandboxes and a harness for Python agents."""
    if version:
        typer.echo(f"smokebox {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run(arguments: list[str]) -> int:
    """Run a command line and return its exit code; an error is printed as a line and a hint."""
    _open_streams()
    if _COMPLETE in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]

        # Without rich, which typer would import for 200 ms to strip markup that we do not use.
        sys.modules["rich"] = None  # type: ignore[assignment]
        completion_init()
    try:
        code = app(args=arguments, prog_name="smokebox", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:
        if "--debug" in itertools.takewhile(lambda word: word.startswith("-"), arguments):
            raise
        return report(error)
    return code if isinstance(code, int) else 0


def _load(name: str) -> Any:
    entry = COMMANDS[name]
    target = getattr(importlib.import_module(f"smokebox.cli.{entry.module}"), entry.name)
    if not isinstance(target, typer.Typer):
        function, target = target, typer.Typer(rich_markup_mode=None, add_completion=False)
        target.command(name, cls=TrailingCommand if entry.trailing else None)(function)
    return typer.main.get_command(target)


def _open_streams() -> None:
    """Make the standard streams usable: a closed one is None, and a terminal may not be UTF-8."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream: TextIOWrapper | None = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
        else:
            stream.reconfigure(errors="backslashreplace")
