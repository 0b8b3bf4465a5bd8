"""The verbs by name: where each is, and under which heading help lists it.

A verb is imported when it is called, so that the others cost nothing.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperGroup

PROJECT = "Serve agents and workflows"
AGENTS = "Have agents work"
WORK = "Work in a sandbox"
PROCESSES = "Run processes in the background"
PORTS = "Reach what listens in a sandbox"
SANDBOXES = "Manage sandboxes"
SERVER = "Run a server"
LOOK = "Look at this machine"


@dataclass(frozen=True, slots=True)
class Verb:
    """A function, or a `typer.Typer` with verbs of its own, by module and name."""

    module: str
    name: str
    panel: str
    hidden: bool = False


VERBS = {
    "init": Verb("init", "init", PROJECT),
    "dev": Verb("dev", "dev", PROJECT),
    "app": Verb("production", "app", PROJECT),
    "build": Verb("build", "build", PROJECT),
    "deploy": Verb("deploy", "deploy", PROJECT),
    "run": Verb("run", "run", AGENTS),
    "chat": Verb("chat", "chat", AGENTS),
    "sessions": Verb("sessions", "sessions", AGENTS),
    "exec": Verb("exec", "exec_command", WORK),
    "code": Verb("code", "code", WORK),
    "sh": Verb("sh", "sh", WORK),
    "once": Verb("once", "once", WORK),
    "cp": Verb("cp", "cp", WORK),
    "demo": Verb("demo", "demo", WORK),
    "start": Verb("start", "start", PROCESSES),
    "ps": Verb("ps", "ps", PROCESSES),
    "logs": Verb("logs", "logs", PROCESSES),
    "kill": Verb("kill", "kill", PROCESSES),
    "expose": Verb("expose", "expose", PORTS),
    "ports": Verb("ports", "ports", PORTS),
    "unexpose": Verb("expose", "unexpose", PORTS),
    "forward": Verb("forward", "forward", PORTS),
    "ls": Verb("ls", "ls", SANDBOXES),
    "create": Verb("create", "create", SANDBOXES),
    "info": Verb("info", "info", SANDBOXES),
    "stats": Verb("stats", "stats", SANDBOXES),
    "mount": Verb("mount", "mount", SANDBOXES),
    "mounts": Verb("mount", "mounts", SANDBOXES),
    "unmount": Verb("mount", "unmount", SANDBOXES),
    "net": Verb("net", "net", SANDBOXES),
    "backup": Verb("backup", "backup", SANDBOXES),
    "sleep": Verb("sleep", "sleep", SANDBOXES),
    "wake": Verb("wake", "wake", SANDBOXES),
    "rm": Verb("rm", "rm", SANDBOXES),
    "serve": Verb("serve", "serve", SERVER),
    "up": Verb("up", "up", SERVER),
    "down": Verb("down", "down", SERVER),
    "status": Verb("status", "status", SERVER),
    "keys": Verb("keys", "keys", SERVER),
    "doctor": Verb("doctor", "doctor", LOOK),
    "completion": Verb("completion.completion", "completion", LOOK),
    "complete": Verb("completion.complete", "complete", LOOK, hidden=True),
}


class Verbs(TyperGroup):
    """The top of the command line, whose help lists verbs by what one wants to do."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names, in the order of the help."""
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The verb of that name, imported now; None for one that is not there."""
        if cmd_name not in self.commands and cmd_name in VERBS:
            self.commands[cmd_name] = load(cmd_name)
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb that is called. One that nobody knows brings up the nearest of all."""
        if args[0] not in VERBS:
            for name in VERBS:
                self.get_command(ctx, name)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the verbs in their panels, in plain text: importing rich doubles the start."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for name, verb in VERBS.items():
            if not verb.hidden:
                command = self.get_command(ctx, name)
                panels.setdefault(verb.panel, []).append((name, command.get_short_help_str(70)))
        for title, rows in panels.items():
            with formatter.section(title):
                formatter.write_dl(rows)


def load(name: str) -> Any:
    """The command of one verb."""
    verb = VERBS[name]
    found = getattr(importlib.import_module(f"smokebox.cli.{verb.module}"), verb.name)
    if not isinstance(found, typer.Typer):
        found, function = typer.Typer(rich_markup_mode=None, add_completion=False), found
        # A function that takes a command line after its own says how it is to be parsed.
        found.command(name, cls=getattr(function, "command_class", None))(function)
    return typer.main.get_command(found)
