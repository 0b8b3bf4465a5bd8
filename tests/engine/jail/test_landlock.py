"""Confinement of a process to a directory by Landlock."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from smokebox.engine.jail import landlock

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(landlock.version() < 2, reason="this kernel lacks Landlock")

PRELUDE = """
import errno, json, os, sys
from smokebox.engine.jail import landlock, linux
root, other = sys.argv[1:]
other_fd = os.open(other, os.O_RDONLY)

def attempt(call, *args):
    try:
        call(*args)
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"

linux.set_no_new_privileges()
assert landlock.confine(root, f"{other}/allowed")
"""


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """A root, and a directory that is not below it."""
    for name in ("root/a", "root/b", "other"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("root/a/file", "other/file", "other/allowed"):
        (tmp_path / name).write_text("text")
    return [str(tmp_path / "root"), str(tmp_path / "other")]


def run_confined(folders: list[str], code: str) -> list[str]:
    """Run code in a confined process, and return its output."""
    argv = [sys.executable, "-c", PRELUDE + textwrap.dedent(code), *folders]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=15, check=True)
    results: list[str] = json.loads(done.stdout)
    return results


def test_files_outside_root_cannot_be_opened(folders: list[str]) -> None:
    assert set(
        run_confined(
            folders,
            """
            os.symlink(f"{other}/file", f"{root}/link")
            print(json.dumps([
                attempt(os.open, f"{other}/file", os.O_RDONLY),
                attempt(os.open, f"{other}/file", os.O_WRONLY),
                attempt(os.open, f"{root}/link", os.O_RDONLY),
                attempt(os.open, f"/proc/self/fd/{other_fd}/file", os.O_RDONLY),
                attempt(os.listdir, other),
                attempt(os.execv, "/proc/self/exe", ["python", "-c", ""]),
            ]))
            """,
        )
    ) == {"EACCES"}


def test_files_below_root_are_not_affected(folders: list[str]) -> None:
    assert set(
        run_confined(
            folders,
            """
            print(json.dumps([
                attempt(os.rename, f"{root}/a/file", f"{root}/b/file"),
                attempt(os.link, f"{root}/b/file", f"{root}/a/hard"),
                attempt(os.open, f"{root}/b/file", os.O_RDWR),
                attempt(os.open, f"{other}/allowed", os.O_RDWR),
                attempt(os.open, f"/proc/self/fd/{os.pipe()[0]}", os.O_RDONLY | os.O_NONBLOCK),
                attempt(os.open, f"/proc/self/fd/{os.memfd_create('x')}", os.O_RDWR),
            ]))
            """,
        )
    ) == {"done"}
