"""Directories of sandboxes on the host: where they are, and the limits of the kernel on them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from smokebox.engine.files.trees import remove_tree
from smokebox.engine.jail.jail import OUTPUT, PASSABLE, PIPES, make_directories
from smokebox.engine.quota.projects import ProjectQuotas, QuotaState
from smokebox.engine.quota.storage_pool import open_pool
from smokebox.errors import PathNotFound

if TYPE_CHECKING:
    from collections.abc import Collection

    from smokebox.engine.home import Home
    from smokebox.engine.quota.storage_pool import StoragePool

DiskEnforcement = Literal["quota", "pool", "measured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A directory that holds one directory per sandbox."""

    directory: str
    quotas: ProjectQuotas | None
    enforcement: DiskEnforcement

    def path(self, key: str) -> str:
        return os.path.join(self.directory, key)


class SandboxStorage:
    """The directories of all sandboxes of a host.

    A sandbox stays where it was created: in the state directory, or in the pool. It keeps its
    way of enforcement as well: only one that is created under quotas has a project.

    Args:
        sandboxes: Directory for sandboxes in the state directory.
        pool: The storage pool, if there is one.
        use_pool: Create sandboxes in the pool.
    """

    def __init__(
        self, sandboxes: str, pool: StoragePool | None = None, *, use_pool: bool = False
    ) -> None:
        self._plain = _Place(
            directory=sandboxes, quotas=ProjectQuotas.detect(sandboxes), enforcement="quota"
        )
        self._pool = pool
        self._places = [self._plain]
        if pool is not None:
            quotas = ProjectQuotas.detect(pool.sandboxes)
            place = _Place(directory=pool.sandboxes, quotas=quotas, enforcement="pool")
            self._places.insert(0 if use_pool else 1, place)

    @property
    def plain(self) -> str:
        """The directory for sandboxes in the state directory."""
        return self._plain.directory

    @property
    def pool(self) -> str | None:
        """The directory for sandboxes in the pool, if there is one."""
        return self._pool.sandboxes if self._pool is not None else None

    def directory(self, key: str) -> str:
        """Return the directory of a sandbox, existing or not."""
        return self._place(key).path(key)

    def keys(self) -> list[str]:
        """List the sandboxes that have a directory."""
        return [key for place in self._places for key in os.listdir(place.directory)]

    def prepare(self, key: str, disk: int | None) -> None:
        """Prepare the directory of a sandbox that is about to start, and limit it for that."""
        place = self._place(key)
        path = place.path(key)
        if os.path.exists(path):
            _remove_output(path)
        if place.quotas is None:
            make_directories(path, 0)
            return
        if not os.path.exists(path):
            os.mkdir(path)
            os.chmod(path, PASSABLE)
            place.quotas.claim(path)
            make_directories(path, 0)
            place.quotas.separate(path, apart=PIPES, within=OUTPUT)
        place.quotas.set_limit(path, disk, starting=True)

    def confine(self, key: str, disk: int | None) -> None:
        """Let the kernel enforce a limit, if the sandbox has a quota."""
        place = self._place(key)
        if place.quotas is not None:
            place.quotas.set_limit(place.path(key), disk)

    def quota(self, key: str) -> QuotaState | None:
        """Return the quota of a sandbox, or None if it has none."""
        place = self._place(key)
        return place.quotas.state(place.path(key)) if place.quotas is not None else None

    async def enforcements(self, keys: Collection[str]) -> dict[str, DiskEnforcement]:
        """Return how the disk limits of sandboxes are enforced."""
        if all(place.quotas is None for place in self._places):
            return dict.fromkeys(keys, "measured")
        return await asyncio.to_thread(lambda: {key: self._enforcement(key) for key in keys})

    def _enforcement(self, key: str) -> DiskEnforcement:
        return self._place(key).enforcement if self.quota(key) is not None else "measured"

    def remove(self, key: str) -> None:
        """Delete the files of a sandbox, including unreadable directories. Safe to repeat."""
        place, quota = self._place(key), self.quota(key)
        parent = os.open(place.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(PathNotFound, FileNotFoundError):
                remove_tree(parent, key, place.path(key))
        finally:
            os.close(parent)
        if quota is not None and place.quotas is not None:
            place.quotas.release(quota.project)

    def close(self) -> None:
        """Unmount the pool, unless sandboxes run in it."""
        if self._pool is not None:
            self._pool.close()

    def _place(self, key: str) -> _Place:
        for place in self._places:
            if os.path.exists(place.path(key)):
                return place
        return self._places[0]


def _remove_output(path: str) -> None:
    """Remove what a killed engine left: it counts for the sandbox, which cannot remove it."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(f"{path}/{OUTPUT}"):
            shutil.rmtree(f"{path}/{OUTPUT}/{name}", ignore_errors=True)


def open_storage(home: Home, pool_size: int | None) -> SandboxStorage:
    """Open the storage of a locked state directory, and mount its pool if it has one."""
    pool = open_pool(home.path, pool_size)
    return SandboxStorage(home.sandboxes, pool, use_pool=pool_size is not None)
