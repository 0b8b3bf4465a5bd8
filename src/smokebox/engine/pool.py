"""A pool of jails that are created ahead of need, so that sandboxes start faster."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.errors import SmokeboxError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from smokebox.engine.images.image import Image
    from smokebox.engine.jail.jail import Jail, Jailer
    from smokebox.engine.jail.spec import JailSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledJail:
    """A ready jail."""

    spec: JailSpec
    jail: Jail


class JailPool:
    """Keeps `size` jails of the most recently used image, starting with the first request."""

    def __init__(
        self,
        size: int,
        *,
        new_spec: Callable[[Image], JailSpec],
        prepare: Callable[[JailSpec], Awaitable[None]],
        remove: Callable[[JailSpec], Awaitable[None]],
    ) -> None:
        self._size = size
        self._new_spec = new_spec
        self._prepare = prepare
        self._remove = remove
        self._ready: list[PooledJail] = []
        self._dead: list[PooledJail] = []
        self._image: Image | None = None
        self._jailer: Jailer | None = None
        self._filling: asyncio.Task[None] | None = None

    @property
    def size(self) -> int:
        """The number of jails to keep."""
        return self._size

    @property
    def ready(self) -> int:
        """The number of jails that are ready."""
        return len(self._ready)

    def take(self, jailer: Jailer, image: Image) -> PooledJail | None:
        """Return a ready jail of that kind, or None, and start to refill the pool."""
        if not self._size:
            return None
        taken = None
        same_image = self._image is not None and self._image.layers == image.layers
        if self._jailer is jailer and same_image:
            while self._ready and taken is None:
                ready = self._ready.pop()
                if ready.jail.alive:
                    taken = ready
                else:
                    self._dead.append(ready)
        self._jailer, self._image = jailer, image
        self._start_filling()
        return taken

    async def fill(self, jailer: Jailer, image: Image) -> None:
        """Fill the pool with jails of that kind, as far as they can be created."""
        self._jailer, self._image = jailer, image
        if self._filling is not None:
            # The current fill may be creating jails of another kind.
            await asyncio.wait([self._filling])
        await asyncio.wait([self._start_filling()])

    async def empty(self) -> None:
        """Remove all jails; the next `take` starts to refill."""
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.wait([self._filling])
        # A jail that is being removed must not be taken.
        unwanted, self._ready = self._ready, []
        try:
            await self._destroy(unwanted)
        finally:
            self._dead += unwanted

    async def aclose(self) -> None:
        """Remove all jails and keep none."""
        self._size = 0
        await self.empty()
        await self._destroy(self._dead)

    def _start_filling(self) -> asyncio.Task[None]:
        if self._filling is None or self._filling.done():
            # Not as work of the tenant whose request took a jail: others wait for it too.
            self._filling = asyncio.create_task(self._fill(), context=contextvars.Context())
        return self._filling

    async def _fill(self) -> None:
        # Let the sandbox that triggered this start first.
        await asyncio.sleep(0.05)
        assert self._jailer is not None
        assert self._image is not None
        jailer, image = self._jailer, self._image
        self._dead += [ready for ready in self._ready if ready.spec.layers != image.layers]
        self._ready = [ready for ready in self._ready if ready not in self._dead]
        # The next sandbox to start without a pooled jail reports the error.
        with contextlib.suppress(SmokeboxError, OSError):
            await self._destroy(self._dead)
            while len(self._ready) < self._size:
                self._ready.append(await self._create(jailer, image))

    async def _create(self, jailer: Jailer, image: Image) -> PooledJail:
        spec = self._new_spec(image)
        try:
            await self._prepare(spec)
            return PooledJail(spec=spec, jail=await jailer.make(spec))
        except BaseException:
            await self._remove(spec)
            raise

    async def _destroy(self, unwanted: list[PooledJail]) -> None:
        while unwanted:
            await unwanted[-1].jail.kill()
            await self._remove(unwanted[-1].spec)
            unwanted.pop()
