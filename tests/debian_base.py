"""A root file system of Debian that is made once per machine, for tests without a registry."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

DEBIAN = "bookworm"


def make_debian_base() -> Path:
    """Return a root file system of Debian with Python, as a tar archive.

    Making it takes one to two minutes.
    """
    program = shutil.which("mmdebstrap")
    if program is None or os.geteuid() != 0:
        pytest.skip("needs root and mmdebstrap")
    path = Path("/var/tmp", f"smokebox-{DEBIAN}-minbase-2.tar")
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(lock, "rb"):
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Others may write there.
        if not path.exists() or path.lstat().st_uid != 0:
            unfinished = path.with_suffix(".new.tar")
            unfinished.unlink(missing_ok=True)
            packages = "--include=python3,ca-certificates"
            command = [program, "--quiet", "--variant=minbase", packages, DEBIAN, str(unfinished)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"mmdebstrap failed: {done.stderr[-500:]}")
            unfinished.rename(path)
    return path
