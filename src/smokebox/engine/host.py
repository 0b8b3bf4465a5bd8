"""The engine of one state directory: its sandboxes by id, found again after a crash."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
from typing import TYPE_CHECKING, Self, Unpack
from weakref import WeakValueDictionary

from smokebox.engine.backups.backups import Backups
from smokebox.engine.guard import Guard
from smokebox.engine.home import Home, open_home
from smokebox.engine.images.store import open_store
from smokebox.engine.jail.cgroups import detect
from smokebox.engine.jail.gvisor import GvisorJailer
from smokebox.engine.jail.namespaces import NamespaceJailer
from smokebox.engine.limits import Limits
from smokebox.engine.names import check_id, check_labels, random_id
from smokebox.engine.options import DEFAULT_IMAGE, SandboxOptions, parse_options
from smokebox.engine.pool import Pool
from smokebox.engine.record.record import Record
from smokebox.engine.record.rows import DEFAULT_CWD
from smokebox.engine.sandbox import Sandbox, info_of
from smokebox.engine.workers import Workers
from smokebox.engine.workshop import Workshop, tag_of
from smokebox.errors import SandboxGone, SmokeboxError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smokebox.engine.egress.traffic import Traffic
    from smokebox.engine.jail.api import Jailer, Tier
    from smokebox.types import SandboxInfo, SandboxStatus

POOL_SIZE = 2
_ADOPT_AT_ONCE = 32

_log = logging.getLogger("smokebox.engine")


class Host:
    """Every sandbox of one state directory, and the only one who touches it.

    `async with await Host.open(path) as host`, or `aclose` at the end. Used on the event
    loop that opened it.
    """

    def __init__(self, shop: Workshop, guard: Guard) -> None:
        self._shop = shop
        self._guard = guard
        # Those that run are held by the guard, the rest by whoever has a handle.
        self._sandboxes: WeakValueDictionary[str, Sandbox] = WeakValueDictionary()
        self._asked: set[Sandbox] = set()
        self._closed = False

    @classmethod
    async def open(
        cls,
        home: str | os.PathLike[str] | None = None,
        *,
        tier: Tier = "namespaces",
        pool: int = POOL_SIZE,
        images: str | os.PathLike[str] | None = None,
        backups: str | None = None,
    ) -> Self:
        """Take a state directory, and take over what still runs of its sandboxes.

        `home` is by default SMOKEBOX_HOME, or the user's data directory. `tier` is what
        isolates a sandbox that asks for nothing else, `pool` how many are made ahead, `images`
        where layers are kept and `backups` the URL of a bucket for backups; by default both are
        in the state directory.
        """
        raise_open_files()
        place = await asyncio.to_thread(open_home, home)
        try:
            record = await Record.open(place.record)
        except BaseException:
            place.close()
            raise
        guard = Guard(place.boxes)
        layers = os.fspath(images) if images is not None else os.path.join(place.path, "images")
        try:
            kept = Backups(record, os.path.join(place.path, "backups"), backups)
        except BaseException:
            await record.aclose()
            place.close()
            raise
        host = cls(_workshop(place, record, guard, tier, pool, layers, kept), guard)
        try:
            await host._take_over()
        except BaseException:
            await host.aclose(detach=True)
            raise
        guard.start()
        return host

    @property
    def home(self) -> str:
        """The state directory."""
        return self._shop.home.path

    @property
    def backups(self) -> Backups:
        """The backups of all its sandboxes, also of those that are gone."""
        return self._shop.backups

    @property
    def traffic(self) -> Traffic:
        """How much the sandboxes asked of the network."""
        return self._shop.traffic

    @property
    def pool(self) -> Pool:
        """What is made ahead."""
        return self._shop.pool

    async def prime(self) -> None:
        """Make ahead what is missing, for sandboxes that ask for no image and no tier."""
        self._check_open()
        image = await self._shop.images.get(DEFAULT_IMAGE)
        await self._shop.pool.fill(self._shop.jailer(self._shop.tier), image)

    def sandbox(self, id: str, **options: Unpack[SandboxOptions]) -> Sandbox:
        """The sandbox of that id, whether it runs, sleeps, or was never made.

        Nothing starts until the first call to it. Options that are given hold from that
        call on, also for one that is there; its image and tier cannot change.
        """
        self._check_open()
        asked = parse_options("Host.sandbox()", options)
        sandbox = self._owner(check_id(id))
        if not asked.empty:
            sandbox.ask(asked)
            self._asked = {one for one in self._asked if one.life.asked} | {sandbox}
        return sandbox

    async def create(self, id: str | None = None, **options: Unpack[SandboxOptions]) -> Sandbox:
        """A sandbox that runs when this returns, by default under a random id."""
        sandbox = self.sandbox(id if id is not None else random_id(), **options)
        await sandbox.wake()
        return sandbox

    async def list(
        self,
        *,
        status: SandboxStatus | None = None,
        labels: Mapping[str, str] | None = None,
        prefix: str = "",
    ) -> list[SandboxInfo]:
        """What is known of the sandboxes that there are, by id. Wakes none."""
        self._check_open()
        rows = await self._shop.record.sandboxes(
            status=status, labels=check_labels(labels or {}), prefix=prefix
        )
        used_at = {sandbox.id: sandbox.life.used_at for sandbox in self._sandboxes.values()}
        return [info_of(row, used_at.get(row.id, 0.0)) for row in rows]

    async def aclose(self, *, detach: bool = False) -> None:
        """Put every sandbox to sleep and give the state directory back. Safe to repeat.

        With `detach` they run on, for the next engine that opens it.
        """
        if self._closed:
            return
        self._closed = True
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self._shop.home.close)
            stack.callback(self._shop.workers.close)
            stack.push_async_callback(self._shop.record.aclose)
            stack.push_async_callback(self._shop.backups.aclose)
            for jailer in self._shop.jailers.values():
                stack.push_async_callback(jailer.aclose)
            stack.push_async_callback(self._shop.pool.aclose)
            stack.push_async_callback(self._close_all, detach=detach)
            stack.push_async_callback(self._guard.aclose)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _close_all(self, *, detach: bool) -> None:
        lives = [sandbox.life for sandbox in self._sandboxes.values()]
        closing = [asyncio.create_task(life.close(detach=detach)) for life in lives]
        if closing:
            await asyncio.wait(closing)
        for task in closing:
            task.result()

    def _owner(self, id: str) -> Sandbox:
        sandbox = self._sandboxes.get(id)
        if sandbox is None:
            sandbox = self._sandboxes[id] = Sandbox(id, self._shop)
        return sandbox

    async def _take_over(self) -> None:
        """Adopt what runs, finish what was being destroyed, and sweep up what nobody knows."""
        await self._shop.backups.take_over()
        rows = await self._shop.record.sandboxes()
        cwds = {row.id: row.settings.cwd for row in rows}
        self._shop.cwds.update({id: cwd for id, cwd in cwds.items() if cwd != DEFAULT_CWD})
        active = await self._shop.record.all_active()
        turns = asyncio.Semaphore(_ADOPT_AT_ONCE)
        adopting = [asyncio.create_task(self._adopt(row.id, turns)) for row in active]
        if adopting:
            await asyncio.wait(adopting)
        for task in adopting:
            task.result()
        running = {row.key for row in await self._shop.record.all_active()}
        await asyncio.to_thread(detect().sweep, running, prefix=f"{self._shop.tag}-")
        # And what engines left empty whose state directory is no more.
        await asyncio.to_thread(detect().sweep, running)
        known = {row.key for row in await self._shop.record.sandboxes()}
        for key in await asyncio.to_thread(os.listdir, self._shop.home.boxes):
            if key not in known:
                await self._shop.remove(key)

    async def _adopt(self, id: str, turns: asyncio.Semaphore) -> None:
        async with turns:
            try:
                await self._owner(id).life.adopt()
            except (SmokeboxError, OSError) as error:
                # Such as one of a tier that is not installed any more: the others go on.
                _log.warning("sandbox %s was not taken over: %s", id, error)

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxGone(
                f"the engine of {self.home} was closed.",
                hint="Open another with Host.open().",
                reason="closed",
            )


def _workshop(
    place: Home,
    record: Record,
    guard: Guard,
    tier: Tier,
    pool: int,
    layers: str,
    backups: Backups,
) -> Workshop:
    tag = tag_of(place.path)
    jailers: dict[str, Jailer] = {
        "namespaces": NamespaceJailer(),
        "gvisor": GvisorJailer(os.path.join(layers, "interpreter")),
    }
    shop = Workshop(
        home=place,
        record=record,
        images=open_store(layers),
        jailers=jailers,
        tier=tier,
        workers=Workers(),
        guard=guard,
        pool=Pool(
            pool,
            make=lambda image: shop.spec(shop.key(), image, Limits()),
            remove=lambda spec: shop.remove(spec.key),
        ),
        backups=backups,
        tag=tag,
    )
    return shop


def raise_open_files() -> None:
    """Let this process have as many descriptors as it may: a sandbox that runs takes a few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
