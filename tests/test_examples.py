"""Every example runs unchanged in an empty directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from background_server import stop_server
from debian_base import make_debian_base
from oci_images import TestImage
from registry_server import run_registry

FOLDER = Path(__file__).parent.parent / "examples"
# That pulls its base, here from a mirror on this host.
ON_DEBIAN = FOLDER / "web_app.py"
EXAMPLES = [*sorted(FOLDER.glob("*.py")), *sorted(FOLDER.glob("apps/*/main.py"))]


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    "example",
    [one for one in EXAMPLES if one != ON_DEBIAN],
    ids=lambda example: str(example.relative_to(FOLDER)),
)
def test_example_runs(example: Path, tmp_path: Path) -> None:
    assert run_example(example, tmp_path)


@pytest.mark.timeout(300)
def test_example_with_a_base_of_a_registry_runs(tmp_path: Path) -> None:
    base = TestImage(layers=[make_debian_base().read_bytes()])
    with run_registry(tmp_path / "registry") as registry:
        base.push(registry.url, "library/python", "3.12-slim")
        (tmp_path / "home").mkdir(mode=0o700)
        (tmp_path / "home" / "server.toml").write_text(
            f'[registries."docker.io"]\nmirror = "{registry.authority}"\n'
            f'[registries."{registry.authority}"]\nplain_http = true\n'
        )
        output = run_example(ON_DEBIAN, tmp_path)
    assert "<li>Buy &lt;milk&gt;</li>" in output
    assert "unittest discover" in output


def run_example(example: Path, tmp_path: Path) -> str:
    """Run a program in an empty directory, and return its output."""
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
    assert "Traceback" not in done.stderr
    return done.stdout
