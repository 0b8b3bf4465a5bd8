"""Commands and tests run as the unprivileged user nobody."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import pytest

import smokebox
from short_directory import PREFIX

NOBODY = 65534
CHECKOUT = Path(__file__).parents[1]
# PYTHONPATH with Smokebox and its dependencies, for the system's Python.
LIBRARIES = f"{Path(smokebox.__file__).parents[1]}:{Path(pytest.__file__).parents[1]}"
# Mounts this checkout at its own path below directories that every user may enter, in a mount
# namespace of the command that follows.
REMOUNT_CHECKOUT = """
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
    """Return a command prefix that drops from root to nobody."""
    drop = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    closed = [folder for folder in CHECKOUT.parents if not folder.stat().st_mode & 0o001]
    if not closed:
        return drop
    namespace = ["unshare", "--mount", "--propagation", "private"]
    return [*namespace, "sh", "-c", REMOUNT_CHECKOUT, "sh", str(CHECKOUT), str(closed[-1]), *drop]


def rerun_as_nobody(tests: str | Path, selection: str, **variables: str) -> None:
    """Run the tests that `-k selection` selects as nobody, and assert that they pass.

    `variables` are added to their environment.
    """
    with tempfile.TemporaryDirectory(dir="/tmp", prefix=PREFIX) as folder:
        os.chown(folder, NOBODY, NOBODY)
        options = ["-p", "no:cacheprovider", f"--basetemp={folder}/t", "-k", selection]
        done = subprocess.run(
            [*as_nobody(), "/usr/bin/python3", "-m", "pytest", *options, tests],
            env={
                "PATH": f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}",
                "PYTHONPATH": LIBRARIES,
                "PYTHONDONTWRITEBYTECODE": "1",
                "HOME": folder,
                **variables,
            },
            cwd=CHECKOUT,
            capture_output=True,
            text=True,
        )
    if "No module named pytest" in done.stderr:
        pytest.skip("the system's Python cannot import pytest")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
