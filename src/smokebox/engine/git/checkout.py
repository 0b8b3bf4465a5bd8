"""A clone from its beginning to its end: all of it, or nothing in its target."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.engine.finishing import to_its_end
from smokebox.engine.git.clone import Clone
from smokebox.engine.git.forwarding import Door
from smokebox.engine.git.upstream import Upstream
from smokebox.errors import (
    Conflict,
    DeadlineExceeded,
    PathExists,
    PathNotFound,
    SmokeboxError,
)
from smokebox.types import GitCheckout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smokebox.engine.files.files import Files
    from smokebox.engine.git.repository import Repository
    from smokebox.engine.lifecycle import Lifecycle
    from smokebox.engine.run import Run

# What removing half a clone may take.
CLEAR_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkout:
    """What is asked for, checked, and the sandbox that it is for."""

    life: Lifecycle
    files: Files
    repository: Repository
    target: str
    branch: str | None
    depth: int | None
    allow_private: bool
    targets: set[str]

    async def make(self, timeout: float | None) -> GitCheckout:
        """Clone within `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout) as limit:
                async with self.life.use() as run:
                    target = self.files.resolve_path(self.target)
                    with self._claim(target):
                        return await self._whole(run, target, await self._is_free(target))
        except TimeoutError as error:
            if not limit.expired():
                raise
            url = str(self.repository.url)
            raise DeadlineExceeded(
                f"cloning {url} took longer than {timeout:g} s.",
                hint="Pass a longer timeout=, or depth=1 for the last commit only.",
                operation="git_checkout",
                timeout=timeout,
                url=url,
            ) from error

    @contextlib.contextmanager
    def _claim(self, target: str) -> Iterator[None]:
        """Keep others from cloning to the same place: who fails would take it from who does not."""
        if target in self.targets:
            raise Conflict(
                f"another checkout to {target} is under way.",
                hint="Wait for it, or pass another target=.",
                kind="target",
                name=target,
            )
        self.targets.add(target)
        try:
            yield
        finally:
            self.targets.discard(target)

    async def _is_free(self, target: str) -> bool:
        """Whether an empty directory is there; raises for anything else that is."""
        try:
            found = await self.files.stat(target, follow_symlinks=False)
        except PathNotFound:
            return False
        leads_on = found.is_symlink and not await self.files.exists(target)
        if not leads_on and (await self.files.stat(target)).is_directory:
            if not await self.files.readdir(target):
                return True
            raise PathExists(
                target,
                f"{target} is a directory with something in it.",
                hint="Pass another target=, or remove what is there.",
            )
        raise PathExists(target, hint="Pass another target=, or remove what is there.")

    async def _whole(self, run: Run, target: str, was_there: bool) -> GitCheckout:
        try:
            return await self._clone(run, target)
        except PathExists:
            # Of somebody who was quicker: it is theirs.
            raise
        except BaseException:
            await to_its_end(self._clear(target, was_there))
            raise

    async def _clone(self, run: Run, target: str) -> GitCheckout:
        upstream = Upstream(self.repository, allow_private=self.allow_private)
        door = Door(upstream)
        async with upstream, door.open(run.jail):
            clone = Clone(
                run=run,
                repository=self.repository,
                target=target,
                branch=self.branch,
                depth=self.depth,
                door=door.url,
            )
            try:
                await clone.make()
            except SmokeboxError as error:
                # Git knows only that it was not answered.
                if door.failure is not None:
                    raise door.failure from error
                raise
        return GitCheckout(
            url=str(self.repository.url),
            target=target,
            branch=await clone.head(),
            commit=await clone.commit(),
        )

    async def _clear(self, target: str, was_there: bool) -> None:
        """Remove what a clone has left; of a sandbox that was destroyed there is nothing."""
        with contextlib.suppress(SmokeboxError, TimeoutError):
            async with asyncio.timeout(CLEAR_SECONDS):
                if await self.life.row() is None:
                    return
                left = [target]
                if was_there:
                    left = [f"{target}/{name}" for name in await self.files.readdir(target)]
                for path in left:
                    await self.files.rm(path, recursive=True, force=True)
