"""Project quotas of sandboxes: the kernel's own limits on what the files of a sandbox take.

The project of a sandbox is an attribute of its directory, inherited by all that is created in it,
so it outlives every crash. Its pipes and sockets are in the project with the next number, with a
small limit of its own: commands can start, and remove files, in a sandbox that is full.
"""

from __future__ import annotations

import contextlib
import os
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.engine.quota import kernel
from smokebox.engine.quota.kernel import Quota
from smokebox.errors import ServiceUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

# As many files as mke2fs plans for: one for each 16 KiB.
BYTES_PER_INODE = 16 << 10
FEWEST_INODES = 16_384
# Room above its limit for a full sandbox to start, before any program runs.
STARTUP_BYTES, STARTUP_INODES = 4 << 20, 256
# They take no blocks, but the sources of code interpreters are beside them.
PIPES_BYTES, PIPES_INODES = 64 << 20, 65_536

# Even numbers from a range that tools which number from 1 do not reach.
_FIRST, _LAST = 1 << 29, 1 << 30
_TRIES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaState:
    """Project of a sandbox, its use, and its limits."""

    project: int
    quota: Quota


class ProjectQuotas:
    """Quotas on the file system of `directory`, which holds the directories of sandboxes."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    @classmethod
    def detect(cls, directory: str) -> ProjectQuotas | None:
        """Return the quotas of a file system, or None if this process cannot enforce any."""
        try:
            with _opened(directory) as fd:
                if not kernel.is_enforced(fd):
                    return None
                # Only root of the host may ask for another project than its own.
                kernel.get_quota(fd, _FIRST)
        except OSError:
            return None
        return cls(directory)

    def claim(self, directory: str) -> None:
        """Put an empty directory, and all that is created in it, into a project of its own."""
        with _opened(directory) as fd:
            kernel.set_project(fd, self._unused(fd))

    def separate(self, directory: str, *, apart: str, within: str) -> None:
        """Put the directory `apart` of a sandbox, but not `within`, into the next project."""
        with _opened(directory) as fd:
            project = kernel.get_project(fd)
            kernel.set_limits(fd, project + 1, bytes=PIPES_BYTES, inodes=PIPES_INODES)
        for path, number in ((apart, project + 1), (within, project)):
            with _opened(f"{directory}/{path}") as fd:
                kernel.set_project(fd, number)

    def state(self, directory: str) -> QuotaState | None:
        """Return the project of a sandbox directory and its use, or None if it has none."""
        try:
            with _opened(directory) as fd:
                project = kernel.get_project(fd)
                if not _FIRST <= project < _LAST:
                    return None
                # XFS frees deleted files a little later, unless it is asked for its free space.
                os.statvfs(fd)
                return QuotaState(project=project, quota=kernel.get_quota(fd, project))
        except FileNotFoundError:
            return None

    def set_limit(self, directory: str, disk: int | None, *, starting: bool = False) -> None:
        """Limit a sandbox that has a project, in bytes and in the files that go with them.

        A limit below the present use prevents growth. A sandbox that is `starting` can grow by
        some files, because one that is full must start for its files to be removed.
        """
        state = self.state(directory)
        if state is None:
            return
        size = count = 0
        if disk is not None:
            size, count = disk, max(FEWEST_INODES, disk // BYTES_PER_INODE)
            if starting:
                size = max(size, state.quota.bytes + STARTUP_BYTES)
                count = max(count, state.quota.inodes + STARTUP_INODES)
        with _opened(directory) as fd:
            kernel.set_limits(fd, state.project, bytes=size, inodes=count)

    def release(self, project: int) -> None:
        """Remove the limits of a sandbox whose directory is gone."""
        with _opened(self._directory) as fd:
            for number in (project, project + 1):
                kernel.set_limits(fd, number, bytes=0, inodes=0)

    def _unused(self, fd: int) -> int:
        for _ in range(_TRIES):
            project = random.randrange(_FIRST, _LAST, 2)
            if kernel.get_quota(fd, project) == kernel.get_quota(fd, project + 1) == Quota():
                return project
        raise ServiceUnavailable(
            f"{self._directory} has no unused project number for the quota of a sandbox.",
            hint="Look at its quotas with `xfs_quota -xc 'report -p'`.",
            service="quota",
        )


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
