"""All attacks again, on an engine that runs as an unprivileged user."""

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
from short_directory import PREFIX
from unprivileged import NOBODY, as_nobody

if TYPE_CHECKING:
    from collections.abc import Iterator

SECOND_RUN = "SMOKEBOX_ATTACK_UNPRIVILEGED"
AS_NOBODY = as_nobody()


@pytest.fixture
def home() -> Iterator[Path]:
    """Create a directory of the user, which also holds its interpreter."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix=PREFIX) as folder:
        os.chown(folder, NOBODY, NOBODY)
        yield Path(folder)


def interpreter(home: Path) -> str:
    """Return an interpreter that belongs to the user, like one that the user has installed."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for found in (os.path.realpath(sys.executable), shutil.which(f"/usr/bin/python{version}")):
        if found is None:
            continue
        copy = home / "python3"
        shutil.copy(found, copy)
        os.chown(copy, NOBODY, NOBODY)
        probe = subprocess.run(
            [*AS_NOBODY, copy, "-c", "import asyncio"], capture_output=True, cwd="/"
        )
        if probe.returncode == 0:
            return str(copy)
    pytest.skip(f"no Python {version} that an unprivileged user can run")


@pytest.mark.timeout(500)
@pytest.mark.skipif(os.geteuid() != 0, reason="this is an unprivileged user")
@pytest.mark.skipif(SECOND_RUN in os.environ, reason="this is the second run")
def test_attacks_on_unprivileged_engine_are_refused(home: Path) -> None:
    tests = Path(__file__).parent
    paths = [Path(pytest.__file__).parents[1], Path(smokebox.__file__).parents[1]]
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={home}/t"]
    result = subprocess.run(
        [
            *AS_NOBODY,
            interpreter(home),
            *command,
            "-k",
            "not gvisor and not memory_of_mount_daemon",
            "--tb=short",
            tests,
        ],
        cwd=tests.parents[1],
        env={
            "PATH": f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HOME": str(home),
            SECOND_RUN: "1",
        },
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-1000:]
