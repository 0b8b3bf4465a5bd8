"""Files in the making that an engine left in a sandbox when it was killed, and their removal.

They are looked for where they can be, which is in what the sandbox wrote: no layer of an
image is walked. The trees are hostile, and those of a sandbox that runs change meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import stat
import time
from typing import TYPE_CHECKING

from smokebox.engine.files.descriptors import LIST, SEARCH, closing, open_beneath, open_child
from smokebox.engine.files.executor import HeldRoot
from smokebox.engine.files.replacement import TEMPORARY
from smokebox.engine.workers import Job, checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from smokebox.engine.files.rooted import Rooted
    from smokebox.engine.run import Run
    from smokebox.engine.workers import Workers

    Remove: TypeAlias = Callable[[int, list[str], str], None]

# A sandbox with more than can be seen in this time keeps the engine waiting no longer.
PATIENCE_SECONDS = 60.0

_HELD_LEVELS = 64
# What is in memory and can be written to; it ends with the jail.
_IN_MEMORY = ("dev", "dev/shm")

_log = logging.getLogger("smokebox.engine")


async def sweep_dead(directory: str, workers: Workers) -> None:
    """Remove what was left in a sandbox that does not run, by its directory on the host."""
    await workers.run(Job(), _sweep_dead, _uppers(directory))


async def sweep_running(run: Run, workers: Workers) -> None:
    """Remove what was left in a sandbox that runs, by its own root.

    What an overlay lies on may be looked at, but not changed while it is mounted.
    """
    targets = sorted({layer.target for layer in run.image.layers})
    work = functools.partial(_sweep_running, uppers=_uppers(run.directory), targets=targets)
    held = HeldRoot(run.jail.root, run.jail.owner)
    try:
        await workers.run(Job(), held.once, work)
    finally:
        held.discard()


def _uppers(directory: str) -> str:
    return f"{directory}/data/upper"


def _sweep_dead(uppers: str) -> None:
    with contextlib.suppress(OSError):
        _Sweep(_open(uppers), _remove_there, _deadline()).run(uppers)


def _sweep_running(files: Rooted, *, uppers: str, targets: list[str]) -> None:
    end = _deadline()
    for number, target in enumerate(targets):
        upper = f"{uppers}/{number}"
        remove = functools.partial(_remove_inside, files.root, target)
        with contextlib.suppress(OSError):
            _Sweep(_open(upper), remove, end).run(upper)
    for path in _IN_MEMORY:
        with contextlib.suppress(OSError):
            _Sweep(open_beneath(files.root, path, LIST), _remove_there, end).run(path)


def _remove_there(folder: int, _: list[str], name: str) -> None:
    if stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=folder)


def _remove_inside(root: int, target: str, _: int, way: list[str], name: str) -> None:
    path = "/".join([target.strip("/"), *way]).lstrip("/")
    with closing(open_beneath(root, path, SEARCH)) as folder:
        _remove_there(folder, way, name)


def _deadline() -> float:
    return time.monotonic() + PATIENCE_SECONDS


def _open(path: str) -> int:
    return os.open(path, LIST | os.O_NOFOLLOW | os.O_CLOEXEC)


class _Level:
    """A directory on the way down: its descriptor while it is held, and what is left of it."""

    __slots__ = ("fd", "folders", "identity", "name")

    def __init__(self, fd: int, name: str) -> None:
        found = os.fstat(fd)
        self.fd = fd
        self.name = name
        self.identity = (found.st_dev, found.st_ino)
        self.folders: list[str] = []

    def close(self) -> None:
        """Hold it no longer."""
        if self.fd != -1:
            os.close(self.fd)
            self.fd = -1

    def reopen(self, below: int) -> None:
        """Hold it again, if that is still where `..` of a directory in it leads."""
        with contextlib.suppress(OSError):
            above = _Level(os.open("..", LIST | os.O_CLOEXEC, dir_fd=below), self.name)
            if above.identity == self.identity:
                self.fd = above.fd
            else:
                above.close()


class _Sweep:
    """Goes through a tree depth first, and has each name that an engine made up removed.

    No link is followed and no other file system entered. The upper levels are held open, of
    those below only the lowest two, and the way back up is `..`: where that leads elsewhere,
    as something was moved meanwhile, what is left of those levels is given up. `remove` gets
    the directory of a name, and the names of the directories on the way to it.
    """

    def __init__(self, top: int, remove: Remove, end: float) -> None:
        self._levels = [_Level(top, "")]
        self._remove = remove
        self._end = end

    def run(self, path: str) -> None:
        """Do it, and close the top. `path` is for the log."""
        try:
            self._look(self._levels[0])
            while self._levels and not self._late():
                self._step()
            if self._levels:
                _log.warning("%s is too large to find all that a killed engine left in it", path)
        finally:
            for level in self._levels:
                level.close()

    def _late(self) -> bool:
        checkpoint()
        return time.monotonic() > self._end

    def _step(self) -> None:
        """Enter the next directory of the lowest level, or leave that level."""
        level = self._levels[-1]
        if not level.folders:
            self._leave()
            return
        name = level.folders.pop()
        try:
            below = _Level(open_child(level.fd, name, LIST), name)
        except OSError:
            # Gone, not a directory any more, or closed to us.
            return
        self._levels.append(below)
        if len(self._levels) > _HELD_LEVELS:
            self._levels[-3].close()
        if below.identity[0] == self._levels[0].identity[0]:
            self._look(below)

    def _look(self, level: _Level) -> None:
        with contextlib.suppress(OSError), os.scandir(level.fd) as entries:
            for entry in entries:
                if self._late():
                    return
                self._see(level, entry)

    def _see(self, level: _Level, entry: os.DirEntry[str]) -> None:
        with contextlib.suppress(OSError):
            if entry.is_dir(follow_symlinks=False):
                level.folders.append(entry.name)
            elif TEMPORARY.fullmatch(entry.name):
                self._remove(level.fd, [one.name for one in self._levels[1:]], entry.name)

    def _leave(self) -> None:
        self._levels.pop().close()
        if len(self._levels) > 1 and self._levels[-2].fd == -1:
            # From the one above: that which was left may be closed to who is on the way up.
            self._levels[-2].reopen(self._levels[-1].fd)
        while self._levels and self._levels[-1].fd == -1:
            self._levels.pop()
