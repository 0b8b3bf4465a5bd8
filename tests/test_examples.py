"""Every example runs unchanged in an empty directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from background_server import stop_server

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = [*sorted(FOLDER.glob("*.py")), *sorted(FOLDER.glob("apps/*/main.py"))]


@pytest.mark.timeout(90)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: str(example.relative_to(FOLDER)))
def test_example_runs(example: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    try:
        done = subprocess.run(
            [sys.executable, "-W", "error", str(example)],
            cwd=tmp_path,
            env={**os.environ, "SMOKEBOX_HOME": str(home)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        stop_server(home)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert "Traceback" not in done.stderr
