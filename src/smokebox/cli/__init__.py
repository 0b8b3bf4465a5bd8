"""The `smokebox` command. `app` lists the commands and the modules that hold them."""

from __future__ import annotations

import gc
import sys

from smokebox import __version__

_OBJECTS = 20_000


def main() -> int:
    """Run the command line in `sys.argv` and return its exit code."""
    if sys.argv[1:] == ["--version"]:
        # Handled here: importing the rest of the command line takes three times as long.
        sys.stdout.write(f"smokebox {__version__}\n")
        return 0
    # Modules are never garbage: collecting during imports takes a tenth of a short command,
    # and one last collection at the end another.
    gc.set_threshold(_OBJECTS)
    from smokebox.cli.app import run

    try:
        return run(sys.argv[1:])
    finally:
        gc.freeze()
