"""Directories below /tmp, where paths are short and open to every user."""

from __future__ import annotations

import os
import tempfile

# Begins the name of each, and tells which test process made it.
PREFIX = f"smokebox-{os.getpid()}-"


def short_directory(name: str) -> str:
    """Make an empty directory and return its path. The caller removes it."""
    return tempfile.mkdtemp(dir="/tmp", prefix=f"{PREFIX}{name}-")
