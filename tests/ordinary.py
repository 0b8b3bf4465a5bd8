"""Becoming an ordinary user, to whom this checkout must be open."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import pytest

import smokebox
from places import PREFIX

NOBODY = 65534
CHECKOUT = Path(__file__).parents[1]
# Our code and what it needs, for a Python that has nothing.
LIBRARIES = f"{Path(smokebox.__file__).parents[1]}:{Path(pytest.__file__).parents[1]}"
# Shows this checkout where it is, but below directories that everybody may pass, to the
# program that follows and to nobody else.
OPEN = """
set -e
here=$(pwd)
hold=$(mktemp -d)
mount --bind "$1" "$hold"
mount -t tmpfs -o mode=755 tmpfs "$2"
mkdir -p "$1"
mount --move "$hold" "$1"
rmdir "$hold"
cd "$here"
shift 2
exec "$@"
"""


def as_nobody() -> list[str]:
    """What to put before a command, for root."""
    drop = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    closed = [folder for folder in CHECKOUT.parents if not folder.stat().st_mode & 0o001]
    if not closed:
        return drop
    apart = ["unshare", "--mount", "--propagation", "private"]
    return [*apart, "sh", "-c", OPEN, "sh", str(CHECKOUT), str(closed[-1]), *drop]


def passes_for_nobody(tests: str | Path, chosen: str) -> None:
    """Run tests again as an ordinary user, those that `-k chosen` names, and see that they pass."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix=PREFIX) as folder:
        os.chown(folder, NOBODY, NOBODY)
        options = ["-p", "no:cacheprovider", f"--basetemp={folder}/t", "-k", chosen]
        done = subprocess.run(
            [*as_nobody(), "/usr/bin/python3", "-m", "pytest", *options, tests],
            env={
                "PATH": f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}",
                "PYTHONPATH": LIBRARIES,
                "PYTHONDONTWRITEBYTECODE": "1",
                "HOME": folder,
            },
            cwd=CHECKOUT,
            capture_output=True,
            text=True,
        )
    if "No module named pytest" in done.stderr:
        pytest.skip("the python that an ordinary user can run here has no pytest")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
