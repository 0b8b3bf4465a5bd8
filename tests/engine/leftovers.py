"""Directories, processes and cgroups of sandboxes that an engine left on this host."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from smokebox.engine.context import tag_of
from smokebox.engine.jail.cgroup import GROUP
from smokebox.engine.jail.cgroup_hierarchy import detect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Killed processes disappear after a moment.
TIMEOUT = 5.0


def find_leftovers(home: str) -> list[str]:
    """Describe the directories, processes and cgroups of the sandboxes of a state directory."""
    return wait_until_empty(lambda: list(_find_leftovers(home)))


def wait_until_empty(find: Callable[[], list[str]]) -> list[str]:
    """Wait until `find` returns nothing, and return what it finds at the time limit."""
    deadline = time.monotonic() + TIMEOUT
    while (found := find()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def sandbox_pids(home: str) -> Iterator[int]:
    """Yield the processes of all sandboxes, recognised by the mount of their pipes."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if f"{home}/boxes/" in Path(f"/proc/{pid}/mountinfo").read_text():
                yield int(pid)


def stop_processes(home: str) -> None:
    """Stop all processes of all sandboxes, including those that are just being forked."""
    while running := [pid for pid in sandbox_pids(home) if not _is_stopped(pid)]:
        for pid in running:
            os.kill(pid, signal.SIGSTOP)


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] in "TZX"
    return True


def _find_leftovers(home: str) -> Iterator[str]:
    yield from (f"directory {name}" for name in os.listdir(f"{home}/boxes"))
    for pid in sandbox_pids(home):
        with contextlib.suppress(OSError):
            yield f"process {pid} ({Path(f'/proc/{pid}/comm').read_text().strip()})"
    for directory in detect().placement.directories:
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(directory):
                if name.removeprefix(GROUP).startswith(f"{tag_of(home)}-"):
                    yield f"cgroup {directory}/{name}"
