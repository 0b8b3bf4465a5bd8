"""The `smokebox` command. Each verb has a file of its own, and this one opens the door."""

from __future__ import annotations

import gc
import sys

from smokebox import __version__

_OBJECTS = 20_000


def main() -> int:
    """Run the command line in `sys.argv` and give its exit code."""
    if sys.argv[1:] == ["--version"]:
        # Answered here: the rest of the command line takes three times as long to import.
        sys.stdout.write(f"smokebox {__version__}\n")
        return 0
    # Modules are no garbage: to look for some during imports takes a tenth of a short command,
    # and to look through them all at its end another.
    gc.set_threshold(_OBJECTS)
    from smokebox.cli.app import run

    try:
        return run(sys.argv[1:])
    finally:
        gc.freeze()
