"""The suites of the frameworks over Linux sandboxes of an engine without root."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from short_directory import short_directory
from unprivileged import NOBODY, as_nobody

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
AS_NOBODY = as_nobody()
VERSION = "import sys; print(sys.version_info[:2])"
PATHS = os.pathsep.join([sysconfig.get_path("purelib"), str(ROOT / "src")])
SUITES = ["test_deepagents.py", "test_inspect.py", "test_pydantic_ai.py"]
# All cases but two that sleep for 7 seconds to check that a timeout kills; another one covers that.
CASES = "linux and not test_exec_timeout_kills"


def output_as_nobody(*command: str) -> str:
    """Return the output of a command run by nobody, even if it fails."""
    # Through a shell, because setpriv itself can still enter directories of root.
    words = [*AS_NOBODY, "sh", "-c", 'exec "$@"', "sh", *command]
    return subprocess.run(words, cwd="/", capture_output=True, text=True, check=False).stdout


@pytest.fixture
def interpreter() -> str:
    """Return a Python of the version of our packages that every user may run."""
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("dropping to another user needs root and setpriv")
    if output_as_nobody("unshare", "--user", "--map-root-user", "id", "-u") != "0\n":
        pytest.skip("this host forbids user namespaces to unprivileged users")
    expected = f"{sys.version_info[:2]}\n"
    for program in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        if output_as_nobody(program, "-c", VERSION) == expected:
            return program
    pytest.skip("no interpreter of this version can be run by an unprivileged user")


@pytest.fixture
def home() -> Iterator[Path]:
    """Yield a directory that nobody owns, as root's temporary directory is closed to it."""
    folder = Path(short_directory("nobody"))
    os.chown(folder, NOBODY, NOBODY)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif("SMOKEBOX_SOAK" not in os.environ, reason="takes long: see `make soak`")
@pytest.mark.timeout(240)
def test_suites_pass_without_root(interpreter: str, home: Path) -> None:
    options = ["-p", "no:cacheprovider", f"--basetemp={home / 'base'}", "-k", CASES]
    done = subprocess.run(
        [*AS_NOBODY, interpreter, "-m", "pytest", *options, *(str(HERE / name) for name in SUITES)],
        cwd=ROOT,
        env={
            "HOME": str(home),
            "PATH": os.environ["PATH"],
            "PYTHONPATH": PATHS,
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    passed = re.search(r"^(\d+) passed", done.stdout, re.MULTILINE)
    assert done.returncode == 0, done.stdout[-4000:]
    assert passed
    assert int(passed[1]) > 200
