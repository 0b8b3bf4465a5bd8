"""The engine of one state directory: all its sandboxes by id, including after a crash."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
from typing import TYPE_CHECKING, Self, Unpack
from weakref import WeakValueDictionary

from smokebox.egress.handler import load_handler
from smokebox.engine.context import (
    EngineContext,
    admit_all,
    admit_snapshots,
    no_group_limit,
    tag_of,
)
from smokebox.engine.guard import ResourceGuard
from smokebox.engine.images.build.builds import Builds
from smokebox.engine.images.catalog import KEEP_SECONDS
from smokebox.engine.images.images import Images
from smokebox.engine.images.recipe_images import PREFIX, RecipeImages
from smokebox.engine.images.registry.pull import RegistryImages, full_access
from smokebox.engine.images.registry.push import ImagePusher
from smokebox.engine.images.uploaded_images import UploadedImages
from smokebox.engine.jail.cgroup_hierarchy import detect
from smokebox.engine.jail.gvisor import GvisorJailer
from smokebox.engine.jail.namespaces import NamespaceJailer
from smokebox.engine.names import check_id, check_labels, random_id
from smokebox.engine.options import (
    DEFAULT_IMAGE,
    CheckedOptions,
    SandboxOptions,
    parse_options,
)
from smokebox.engine.pool import JailPool
from smokebox.engine.record.rows import DEFAULT_CWD
from smokebox.engine.sandbox import Sandbox, info_of
from smokebox.engine.snapshots.forks import fork_ids, no_memory
from smokebox.engine.snapshots.snapshot_archives import SnapshotArchives
from smokebox.engine.snapshots.snapshots import Snapshots
from smokebox.engine.stores import open_stores
from smokebox.engine.workers import Workers
from smokebox.errors import SandboxGone, SmokeboxError
from smokebox.isolation import check_tier
from smokebox.limits import Limits

if TYPE_CHECKING:
    import builtins
    from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence

    from smokebox.egress.handler import HandlerLoader
    from smokebox.engine.backups.backups import Backups
    from smokebox.engine.context import Admission, SnapshotAdmission
    from smokebox.engine.egress.audit_log import TrafficTotals
    from smokebox.engine.images.registry.access import RegistrySettings
    from smokebox.engine.images.registry.pull import AccessOf
    from smokebox.engine.jail.jail import Jailer
    from smokebox.engine.record.rows import SandboxRow
    from smokebox.engine.stores import Stores
    from smokebox.foundation.loop_shares import LoopShares
    from smokebox.isolation import Tier
    from smokebox.types import SandboxInfo, SandboxStatus

POOL_SIZE = 2
_ADOPT_AT_ONCE = 32

_log = logging.getLogger("smokebox.engine")


class Host:
    """All sandboxes of one state directory, which this process owns exclusively.

    Use `async with await Host.open(path) as host`, or call `aclose` at the end. Use it only on
    the event loop that opened it.
    """

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._images = Images(context.catalog, on_removed=context.pool.empty)
        self._builds = Builds(context, self._create_from)
        self._recipes = RecipeImages(self._builds, context.registries)
        context.images.add_source(PREFIX, self._recipes)
        self._uploads = UploadedImages(context.catalog, self._builds.content)
        # The guard holds running sandboxes, callers' handles hold the rest.
        self._sandboxes: WeakValueDictionary[str, Sandbox] = WeakValueDictionary()
        # Holds sandboxes with options that the next call applies.
        self._changed: set[Sandbox] = set()
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
        admit: Admission = admit_all,
        admit_snapshot: SnapshotAdmission = admit_snapshots,
        directories: Mapping[str, str] | None = None,
        load_handler: HandlerLoader = load_handler,
        group_cpu: Callable[[str], float | None] = no_group_limit,
        storage_pool: int | str | None = None,
        registries: RegistrySettings | None = None,
        pull_access: AccessOf = full_access,
    ) -> Self:
        """Lock a state directory and adopt its sandboxes that still run.

        Args:
            home: State directory; by default SMOKEBOX_HOME, or the user's data directory.
            tier: Isolation tier of sandboxes that name none.
            pool: Number of jails to create ahead of need.
            images: Directory of image layers; by default inside the state directory.
            backups: URL of a bucket for backups; by default they stay in the state directory.
            admit: Decides about sandboxes that are created; see `Admission`.
            admit_snapshot: Decides about automatic checkpoints; see `SnapshotAdmission`.
            directories: Absolute paths of root file systems by name, for `image="dir:NAME"`.
            load_handler: Imports the egress handlers that policies name.
            group_cpu: Returns the cores that the sandboxes of a group may use together, None for
                any. Admission sets the group of a sandbox.
            storage_pool: Size of the file in the state directory that holds the sandboxes, so
                that the kernel enforces their disk limits; by default there is none.
            registries: Mirrors and credentials of container registries, and the one of short names.
            pull_access: Decides about images that a sandbox needs and that are to be pulled.

        Raises:
            IsolationUnavailable: This host cannot mount a storage pool.
            InvalidOption: A directory is not valid, or overlaps with those of Smokebox.
            Conflict: Another process holds the state directory.
            AccessDenied: The state directory belongs to another user, or is writable by others.
        """
        raise_open_files()
        stores = await open_stores(
            home,
            images=images,
            backups=backups,
            directories=directories,
            storage_pool=storage_pool,
            registries=registries,
            pull_access=pull_access,
        )
        context = _build_context(
            stores,
            tier=tier,
            pool=pool,
            admit=admit,
            admit_snapshot=admit_snapshot,
            load_handler=load_handler,
            group_cpu=group_cpu,
        )
        host = cls(context)
        try:
            await host._take_over()
        except BaseException:
            await host.aclose(detach=True)
            raise
        host._context.guard.start()
        host._context.expirations.start(host._expire)
        return host

    @property
    def home(self) -> str:
        """The state directory."""
        return self._context.home.path

    @property
    def images(self) -> Images:
        """The images that sandboxes can start from, besides `host` and `dir:NAME`."""
        return self._images

    @property
    def shares(self) -> LoopShares:
        """The shares of the event loop that tenants use."""
        return self._context.shares

    @property
    def registries(self) -> RegistryImages:
        """Pulls of images from registries, by callers with different rights."""
        return self._context.registries

    @property
    def pusher(self) -> ImagePusher:
        """Pushes of images to registries."""
        return ImagePusher(self._context.registries, self._context.catalog)

    @property
    def backups(self) -> Backups:
        """The backups of all sandboxes, including destroyed ones."""
        return self._context.backups

    @property
    def snapshots(self) -> Snapshots:
        """The snapshots of all sandboxes, including destroyed ones."""
        return self._context.snapshots

    @property
    def snapshot_archives(self) -> SnapshotArchives:
        """Exports of snapshots to the bucket of backups, and imports."""
        return SnapshotArchives(self._context)

    @property
    def traffic(self) -> TrafficTotals:
        """Network traffic totals of all sandboxes."""
        return self._context.traffic

    @property
    def pool(self) -> JailPool:
        """The pool of ready jails."""
        return self._context.pool

    @property
    def uploads(self) -> UploadedImages:
        """Images that clients upload from their own files."""
        return self._uploads

    @property
    def builds(self) -> Builds:
        """Builds of images from Dockerfiles."""
        return self._builds

    @property
    def recipes(self) -> RecipeImages:
        """The images `recipe:NAME`."""
        return self._recipes

    async def prime(self) -> None:
        """Fill the pool with jails of the default image and tier."""
        self._check_open()
        image = await self._context.images.get(DEFAULT_IMAGE)
        await self._context.pool.fill(self._context.jailer(self._context.tier), image)

    def sandbox(self, id: str, **options: Unpack[SandboxOptions]) -> Sandbox:
        """Return the sandbox with an id, whether it runs, sleeps or does not exist yet.

        Nothing starts until the first call to it. Options take effect from that call on, also
        for an existing sandbox, except image and tier, which cannot change.

        Args:
            id: A DNS label of at most 63 characters.
            options: See `SandboxOptions`.

        Raises:
            InvalidOption: The id or an option is not valid.
            SandboxGone: The host is closed.
        """
        self._check_open()
        sandbox = self._sandboxes.get(id) if isinstance(id, str) else None
        if sandbox is None:
            sandbox = self._sandboxes[id] = Sandbox(check_id(id), self._context)
        if options and not (checked := parse_options("Host.sandbox()", options)).empty:
            sandbox.set_options(checked)
            pending = {one for one in self._changed if one.lifecycle.has_pending_options}
            self._changed = pending | {sandbox}
        return sandbox

    async def create(self, id: str | None = None, **options: Unpack[SandboxOptions]) -> Sandbox:
        """Return a running sandbox.

        Args:
            id: Id of the sandbox; by default a random one.
            options: See `SandboxOptions`.

        Raises:
            InvalidOption: The id or an option is not valid.
            Conflict: The sandbox exists with another image or tier.
            IsolationUnavailable: The tier is not available on this host.
        """
        sandbox = self.sandbox(id if id is not None else random_id(), **options)
        await sandbox.wake()
        return sandbox

    async def fork(
        self,
        id: str,
        count: int = 1,
        *,
        ids: Sequence[str] | None = None,
        memory: bool = False,
    ) -> builtins.list[Sandbox]:
        """Create sandboxes that go on from the present state of one: all of them, or none.

        They start with their first call. See `SandboxSnapshots.fork`.

        Args:
            id: Id of the sandbox.
            count: Number of forks.
            ids: Their ids; by default that of the sandbox with random suffixes.
            memory: Copy running processes too, which no tier can do.

        Raises:
            NotFound: The sandbox does not exist.
            Conflict: An id is taken.
            Unsupported: `memory` is set.
        """
        if memory:
            raise no_memory(id)
        chosen = fork_ids(id, count, ids)
        source = self.sandbox(id)
        row = await source.snapshots.row()
        options = CheckedOptions(
            image=row.image, digest=row.digest, tier=check_tier(row.tier), limits=row.limits
        )
        async with contextlib.AsyncExitStack() as stack:
            limits, group = {}, None
            for one in chosen:
                admitted = await stack.enter_async_context(self._context.admit(one, options))
                limits[one] = admitted.limits or row.limits
                group = admitted.group
            for fork in await source.snapshots.fork(limits, group=group):
                self._context.expirations.set(fork.id, fork.expires_at)
                if fork.settings.cwd != DEFAULT_CWD:
                    self._context.cwds[fork.id] = fork.settings.cwd
        return [self.sandbox(one) for one in chosen]

    async def list(
        self,
        *,
        status: SandboxStatus | None = None,
        labels: Mapping[str, str] | None = None,
        prefix: str = "",
    ) -> list[SandboxInfo]:
        """List sandboxes by id. Wakes none.

        Args:
            status: Return only sandboxes with this status.
            labels: Return only sandboxes with all these labels.
            prefix: Return only sandboxes with ids that start with this.
        """
        self._check_open()
        rows = await self._context.record.sandboxes(
            status=status, labels=check_labels(labels or {}), prefix=prefix
        )
        used_at = {sandbox.id: sandbox.lifecycle.used_at for sandbox in self._sandboxes.values()}
        disk = await self._context.storage.enforcements([row.key for row in rows])
        return [info_of(row, used_at.get(row.id, 0.0), disk[row.key]) for row in rows]

    async def aclose(self, *, detach: bool = False) -> None:
        """Put every sandbox to sleep and release the state directory. Safe to repeat.

        Args:
            detach: Leave the sandboxes running, for the next engine that opens the directory.
        """
        if self._closed:
            return
        self._closed = True
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self._context.home.close)
            if not detach:
                stack.push_async_callback(asyncio.to_thread, self._context.storage.close)
            stack.callback(self._context.workers.close)
            stack.callback(self._context.catalog.layer_store.close)
            stack.push_async_callback(self._context.record.aclose)
            stack.push_async_callback(self._context.backups.aclose)
            stack.push_async_callback(self._context.snapshots.aclose)
            for jailer in self._context.jailers.values():
                stack.push_async_callback(jailer.aclose)
            stack.push_async_callback(self._context.pool.aclose)
            stack.push_async_callback(self._close_all, detach=detach)
            stack.push_async_callback(self._context.registries.aclose)
            stack.push_async_callback(self._recipes.aclose)
            stack.push_async_callback(self._context.guard.aclose)
            stack.push_async_callback(self._context.expirations.aclose)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _create_from(self, id: str, image: str) -> None:
        """Create a sandbox from an image, for a build that failed."""
        await self.create(id, image=image)

    async def _close_all(self, *, detach: bool) -> None:
        sandboxes = list(self._sandboxes.values())
        await _run_all(sandbox.lifecycle.close(detach=detach) for sandbox in sandboxes)

    async def _take_over(self) -> None:
        """Adopt running sandboxes, finish interrupted destroys, and remove unknown leftovers.

        Sandboxes whose lifetime is over are destroyed.
        """
        await self._context.backups.take_over()
        await self._context.catalog.sweep(unused_for=KEEP_SECONDS)
        await self._context.snapshots.take_over()
        await asyncio.to_thread(self._builds.content.prune)
        rows = await self._context.record.sandboxes()
        cwds = {row.id: row.settings.cwd for row in rows}
        self._context.cwds.update({id: cwd for id, cwd in cwds.items() if cwd != DEFAULT_CWD})
        await self._take_over_lifetimes(rows)
        active = await self._context.record.all_active()
        turns = asyncio.Semaphore(_ADOPT_AT_ONCE)
        await _run_all(self._adopt(row.id, turns) for row in active)
        running = {row.key for row in await self._context.record.all_active()}
        await asyncio.to_thread(detect().sweep, running, prefix=f"{self._context.tag}-")
        # Also empty cgroups of engines whose state directory was deleted.
        await asyncio.to_thread(detect().sweep, running)
        known = {row.key for row in await self._context.record.sandboxes()}
        for key in await asyncio.to_thread(self._context.storage.keys):
            if key not in known:
                await self._context.remove(key)

    async def _take_over_lifetimes(self, rows: Iterable[SandboxRow]) -> None:
        """Destroy sandboxes that expired while there was no engine, and time the others."""
        for row in rows:
            try:
                if row.expired:
                    await self._expire(row.id)
            except (SmokeboxError, OSError) as error:
                _log.warning("sandbox %s expired and was not destroyed: %s", row.id, error)
                self._context.expirations.set(row.id, row.expires_at)
            else:
                self._context.expirations.set(row.id, None if row.expired else row.expires_at)

    async def _expire(self, id: str) -> None:
        await self.sandbox(id).lifecycle.expire()

    async def _adopt(self, id: str, turns: asyncio.Semaphore) -> None:
        async with turns:
            try:
                sandbox = self._sandboxes[id] = Sandbox(id, self._context)
                await sandbox.lifecycle.adopt()
            except (SmokeboxError, OSError) as error:
                # For example, its tier is no longer installed. The others continue.
                _log.warning("sandbox %s was not adopted: %s", id, error)

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxGone(
                f"the engine of {self.home} was closed.",
                hint="Open it again with Host.open().",
                reason="closed",
            )


async def _run_all(work: Iterable[Coroutine[None, None, None]]) -> None:
    """Run coroutines concurrently to their end, and then raise the first error."""
    tasks = [asyncio.create_task(one) for one in work]
    if tasks:
        await asyncio.wait(tasks)
    for task in tasks:
        task.result()


def _build_context(
    stores: Stores,
    *,
    tier: Tier,
    pool: int,
    admit: Admission,
    admit_snapshot: SnapshotAdmission,
    load_handler: HandlerLoader,
    group_cpu: Callable[[str], float | None],
) -> EngineContext:
    home, storage = stores.home, stores.storage
    jailers: dict[str, Jailer] = {
        "namespaces": NamespaceJailer(),
        "gvisor": GvisorJailer(os.path.join(stores.layers, "interpreter")),
    }
    guard = ResourceGuard(storage)
    context = EngineContext(
        home=home,
        storage=storage,
        record=stores.record,
        images=stores.images,
        catalog=stores.catalog,
        registries=stores.registries,
        jailers=jailers,
        tier=tier,
        workers=Workers(),
        guard=guard,
        pool=JailPool(
            pool,
            new_spec=lambda image: context.spec(context.key(), image, Limits()),
            prepare=lambda spec: asyncio.to_thread(storage.prepare, spec.key, spec.limits.disk),
            remove=lambda spec: context.remove(spec.key),
        ),
        backups=stores.backups,
        snapshots=Snapshots(stores.record, home, storage, stores.images, stores.catalog, guard),
        tag=tag_of(home.path),
        admit=admit,
        admit_snapshot=admit_snapshot,
        load_handler=load_handler,
        group_cpu=group_cpu,
    )
    return context


def raise_open_files() -> None:
    """Raise the soft limit of open files to the hard one: a running sandbox needs several."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
