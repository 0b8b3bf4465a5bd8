"""Directories in /tmp, whose paths are short and accessible to every user."""

from __future__ import annotations

import os
import tempfile

# Names of such directories start with it; it identifies the test process that created them.
PREFIX = f"smokebox-{os.getpid()}-"


def short_directory(name: str) -> str:
    """Create an empty directory and return its path. The caller removes it."""
    return tempfile.mkdtemp(dir="/tmp", prefix=f"{PREFIX}{name}-")
