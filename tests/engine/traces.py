"""What engines on a state directory have left on this host, outside of their record."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from smokebox.engine.context import tag_of
from smokebox.engine.jail.cgroup_hierarchy import detect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# What was killed takes the kernel a moment.
PATIENCE = 5.0


def traces(home: str) -> list[str]:
    """The directories, processes, mounts and cgroups of its sandboxes, in words."""
    return settled(lambda: list(_traces(home)))


def settled(look: Callable[[], list[str]]) -> list[str]:
    """What a look finds, once it finds nothing, or after a moment."""
    deadline = time.monotonic() + PATIENCE
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def processes(home: str) -> Iterator[int]:
    """Every process in a sandbox: the mount of its pipes tells where it came from."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if f"{home}/boxes/" in Path(f"/proc/{pid}/mountinfo").read_text():
                yield int(pid)


def stop_all(home: str) -> None:
    """Stop every process in every sandbox, also those that are just being forked."""
    while awake := [pid for pid in processes(home) if not _is_stopped(pid)]:
        for pid in awake:
            os.kill(pid, signal.SIGSTOP)


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] in "TZX"
    return True


def _traces(home: str) -> Iterator[str]:
    yield from (f"directory {name}" for name in os.listdir(f"{home}/boxes"))
    for pid in processes(home):
        with contextlib.suppress(OSError):
            yield f"process {pid} ({Path(f'/proc/{pid}/comm').read_text().strip()})"
    for directory in detect().placement.directories:
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(directory):
                if name.startswith(f"{tag_of(home)}-"):
                    yield f"cgroup {directory}/{name}"
