"""Removal of temporary files that a killed engine left in a sandbox.

They can only be in what the sandbox wrote, so no layer of an image is searched. The trees are
hostile, and change meanwhile if the sandbox runs.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import stat
import time
from typing import TYPE_CHECKING

from smokebox.engine.files.deep_walk import DeepWalk
from smokebox.engine.files.descriptors import LIST, SEARCH, closing, open_beneath
from smokebox.engine.files.executor import RootHandle
from smokebox.engine.files.replacement import TEMPORARY
from smokebox.engine.workers import Job, checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from smokebox.engine.files.rooted_files import RootedFiles
    from smokebox.engine.run import Run
    from smokebox.engine.workers import Workers

    # Removes a name, given its open directory and the path of that directory below the top.
    Remove: TypeAlias = Callable[[int, str, str], None]

# Time for the search of one sandbox, so that a huge one does not delay the engine.
SWEEP_SECONDS = 60.0

# Writable file systems in memory; they end with the jail.
_IN_MEMORY = ("dev", "dev/shm")

_log = logging.getLogger("smokebox.engine")


async def sweep_stopped(directory: str, workers: Workers) -> None:
    """Sweep a sandbox that does not run, by its directory on the host."""
    await workers.run(Job(), _sweep_stopped, _upper_layers(directory))


async def sweep_running(run: Run, workers: Workers) -> None:
    """Sweep a sandbox that runs.

    The upper layers of a mounted overlay may be read, but must be changed through its root.
    """
    targets = sorted({layer.target for layer in run.image.layers})
    work = functools.partial(_sweep_running, uppers=_upper_layers(run.directory), targets=targets)
    root = RootHandle(run.jail.root, run.jail.owner)
    try:
        await workers.run(Job(), root.run, work)
    finally:
        root.close()


def _upper_layers(directory: str) -> str:
    return f"{directory}/data/upper"


def _sweep_stopped(uppers: str) -> None:
    _sweep(lambda: _open(uppers), _remove, time.monotonic() + SWEEP_SECONDS, uppers)


def _sweep_running(files: RootedFiles, *, uppers: str, targets: list[str]) -> None:
    end = time.monotonic() + SWEEP_SECONDS
    for number, target in enumerate(targets):
        upper = f"{uppers}/{number}"
        remove = functools.partial(_remove_through, files.root, target.strip("/"))
        _sweep(functools.partial(_open, upper), remove, end, upper)
    for path in _IN_MEMORY:
        _sweep(functools.partial(open_beneath, files.root, path, LIST), _remove, end, path)


def _sweep(open_top: Callable[[], int], remove: Remove, end: float, shown: str) -> None:
    def visit(entry: os.DirEntry[str]) -> None:
        if TEMPORARY.fullmatch(entry.name):
            remove(walk.fd, walk.path, entry.name)

    def stop() -> bool:
        checkpoint()
        return time.monotonic() > end

    with contextlib.suppress(OSError):
        walk = DeepWalk(open_top(), visit, stop)
        walk.run()
        if walk.stopped:
            _log.warning("%s is too large to remove all temporary files of a killed engine", shown)


def _remove(folder: int, _: str, name: str) -> None:
    if stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=folder)


def _remove_through(root: int, target: str, _: int, path: str, name: str) -> None:
    with closing(open_beneath(root, f"{target}/{path}".strip("/"), SEARCH)) as folder:
        _remove(folder, path, name)


def _open(path: str) -> int:
    return os.open(path, LIST | os.O_NOFOLLOW | os.O_CLOEXEC)
