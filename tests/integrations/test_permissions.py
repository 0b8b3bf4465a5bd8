"""Permission cases of the suites, run without root, which bypasses permissions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
AS_USER = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]
CASES = "local and (not_allowed or without_permissions or permission_denied)"


@pytest.mark.timeout(60)
def test_permission_cases_pass_without_root(tmp_path: Path) -> None:
    prefix = [] if os.geteuid() else AS_USER
    if prefix and subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this root may not create a user namespace, so it cannot run as another user")
    suites = [str(HERE / "test_inspect.py"), str(HERE / "test_pydantic_ai.py")]
    options = ["-p", "no:cacheprovider", f"--basetemp={tmp_path / 'base'}", "-k", CASES]
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "pytest", *options, *suites],
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert "\n4 passed" in done.stdout, done.stdout
