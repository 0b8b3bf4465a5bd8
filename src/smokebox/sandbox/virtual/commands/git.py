"""`git`: report that there is none."""

from __future__ import annotations

from smokebox.sandbox.virtual.command import CommandCall, CommandOutput


def git(call: CommandCall) -> CommandOutput:
    """Fail as a missing command does, and name the alternative."""
    message = "git: command not found: this sandbox has no git. `diff -ru` compares folders.\n"
    return CommandOutput(stderr=message, exit_code=127)
