"""The `smokebox` command. Each verb has a file of its own, and this one opens the door."""

from __future__ import annotations

import sys

from smokebox import __version__


def main() -> int:
    """Run the command line in `sys.argv` and give its exit code."""
    if sys.argv[1:] == ["--version"]:
        # Answered here: the rest of the command line takes three times as long to import.
        sys.stdout.write(f"smokebox {__version__}\n")
        return 0
    from smokebox.cli.app import run

    return run(sys.argv[1:])
