"""Depth-first walk of a hostile directory tree of any depth, with a bounded number of descriptors.

Follows no links and lists no directory of another file system. Opens one name at a time, so that
paths never grow too long.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from smokebox.engine.files.descriptors import LIST, REPLACED, open_child

if TYPE_CHECKING:
    from collections.abc import Callable

_HELD_LEVELS = 64
_ENTRIES_PER_CHECK = 256


class _Level:
    """A directory on the current path: its descriptor while held, and the names left to enter."""

    __slots__ = ("fd", "identity", "name", "pending")

    def __init__(self, fd: int, name: str) -> None:
        status = os.fstat(fd)
        self.fd = fd
        self.name = name
        self.identity = (status.st_dev, status.st_ino)
        self.pending: list[str] = []

    def close(self) -> None:
        if self.fd != -1:
            os.close(self.fd)
            self.fd = -1


class DeepWalk:
    """One walk, until `stop` returns true. `visit` is called for each entry of each directory.

    The upper levels are held open. Below them only the lowest two are open, and the way back up is
    `..`: if a rename changed where that leads, the rest of those levels is skipped. After `run`,
    `stopped` says that `stop` ended the walk, and `complete` is False if a part was skipped. An
    entry that vanishes during its visit is ignored.
    """

    def __init__(
        self, top: int, visit: Callable[[os.DirEntry[str]], None], stop: Callable[[], bool]
    ) -> None:
        self.complete = True
        self.stopped = False
        self._visit = visit
        self._stop = stop
        self._levels = [_Level(top, "")]

    @property
    def fd(self) -> int:
        """Descriptor of the directory that is being visited."""
        return self._levels[-1].fd

    @property
    def path(self) -> str:
        """Path of the directory that is being visited, relative to the top."""
        return "/".join(level.name for level in self._levels[1:])

    def run(self) -> None:
        """Walk the tree, then close every descriptor including `top`."""
        try:
            self._list(self._levels[0])
            while self._levels and not self._stop():
                self._step()
            self.stopped = bool(self._levels)
        finally:
            for level in self._levels:
                level.close()

    def _step(self) -> None:
        """Enter the next directory of the lowest level, or leave that level."""
        level = self._levels[-1]
        if not level.pending:
            self._ascend()
            return
        name = level.pending.pop()
        try:
            below = _Level(open_child(level.fd, name, LIST), name)
        except OSError as error:
            if error.errno not in REPLACED:
                self.complete = False
            return
        self._levels.append(below)
        if len(self._levels) > _HELD_LEVELS:
            self._levels[-3].close()
        if below.identity[0] == self._levels[0].identity[0]:
            self._list(below)

    def _list(self, level: _Level) -> None:
        try:
            with os.scandir(level.fd) as entries:
                for number, entry in enumerate(entries, 1):
                    if number % _ENTRIES_PER_CHECK == 0 and self._stop():
                        self.complete = False
                        return
                    self._visit_entry(level, entry)
        except FileNotFoundError:
            pass
        except OSError:
            self.complete = False

    def _visit_entry(self, level: _Level, entry: os.DirEntry[str]) -> None:
        try:
            if entry.is_dir(follow_symlinks=False):
                level.pending.append(entry.name)
            self._visit(entry)
        except FileNotFoundError:
            pass
        except OSError:
            self.complete = False

    def _ascend(self) -> None:
        self._levels.pop().close()
        while self._levels and self._levels[-1].fd == -1:
            self._levels.pop()
        # Reopened from its child: we may lack the permission to search the level just left.
        if len(self._levels) > 1 and self._levels[-2].fd == -1:
            self._reopen(self._levels[-2], self._levels[-1].fd)

    def _reopen(self, level: _Level, child: int) -> None:
        with contextlib.suppress(OSError):
            above = _Level(os.open("..", LIST | os.O_CLOEXEC, dir_fd=child), level.name)
            if above.identity == level.identity:
                level.fd = above.fd
                return
            above.close()
        self.complete = False
