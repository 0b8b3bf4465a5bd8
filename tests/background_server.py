"""Background server that a program under test may have started."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def stop_server(home: Path) -> None:
    """Stop the server of a state directory, if one is running."""
    if (home / "server.sock").exists():
        subprocess.run(
            [sys.executable, "-m", "smokebox", "down"],
            env={**os.environ, "SMOKEBOX_HOME": str(home)},
            capture_output=True,
            timeout=60,
            check=True,
        )
