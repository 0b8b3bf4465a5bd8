"""All of these attacks once more, on an engine that runs as an ordinary user."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import smokebox
from ordinary import NOBODY, as_nobody
from places import PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterator

INSIDE = "SMOKEBOX_ATTACKED_AS_A_USER"
AS_NOBODY = as_nobody()


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory of that user's, where its own interpreter is too."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix=PREFIX) as folder:
        os.chown(folder, NOBODY, NOBODY)
        yield Path(folder)


def interpreter(home: Path) -> str:
    """An interpreter that belongs to the user, as those do that users install themselves."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for found in (os.path.realpath(sys.executable), shutil.which(f"/usr/bin/python{version}")):
        if found is None:
            continue
        own = home / "python3"
        shutil.copy(found, own)
        os.chown(own, NOBODY, NOBODY)
        probe = subprocess.run(
            [*AS_NOBODY, own, "-c", "import asyncio"], capture_output=True, cwd="/"
        )
        if probe.returncode == 0:
            return str(own)
    pytest.skip(f"no Python {version} that an ordinary user could run")


@pytest.mark.timeout(250)
@pytest.mark.skipif(os.geteuid() != 0, reason="this is an ordinary user")
@pytest.mark.skipif(INSIDE in os.environ, reason="this is the second run")
def test_everything_is_refused_by_an_engine_without_root(home: Path) -> None:
    tests = Path(__file__).parent
    paths = [Path(pytest.__file__).parents[1], Path(smokebox.__file__).parents[1]]
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={home}/t"]
    result = subprocess.run(
        [
            *AS_NOBODY,
            interpreter(home),
            *command,
            "-k",
            "not gvisor and not in_memory",
            "--tb=short",
            tests,
        ],
        cwd=tests.parents[1],
        env={
            "PATH": f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HOME": str(home),
            INSIDE: "1",
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-1000:]
