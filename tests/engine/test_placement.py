"""Hints to the file system about the place of new directories."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from smokebox.engine.files.placement import spread_directories

if TYPE_CHECKING:
    from pathlib import Path


def flags(path: Path) -> str:
    """Return the flags of a directory, as `lsattr` shows them."""
    if shutil.which("lsattr") is None:
        pytest.skip("lsattr is not installed")
    shown = subprocess.run(["lsattr", "-d", path], capture_output=True, text=True, check=False)
    if shown.returncode:
        pytest.skip("this file system has no flags")
    return shown.stdout.split()[0]


def test_directory_gets_the_flag_and_keeps_others(tmp_path: Path) -> None:
    before = flags(tmp_path)
    spread_directories(str(tmp_path))
    after = flags(tmp_path)
    if after == before:
        pytest.skip("this file system has no such flag")
    assert set(after) - set(before) == {"T"}
    (tmp_path / "below").mkdir()
    assert "T" not in flags(tmp_path / "below")


def test_where_there_is_no_such_flag_nothing_happens(tmp_path: Path) -> None:
    spread_directories("/proc/self")
    spread_directories(str(tmp_path / "missing"))
