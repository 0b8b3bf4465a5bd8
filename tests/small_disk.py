"""Small file systems for tests of full disks."""

from __future__ import annotations

import contextlib
import os
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def small_disk(tmp_path: Path, options: str) -> Iterator[Path]:
    """Mount a file system of the size that the options of tmpfs name."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False).returncode:
        pytest.skip("mounting a file system needs root")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)
