"""Objects that all sandboxes of one host share."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from smokebox.egress.handler import load_handler
from smokebox.engine.disk import measure
from smokebox.engine.egress.audit_log import TrafficTotals
from smokebox.engine.expirations import Expirations
from smokebox.engine.jail.cgroup import GROUP
from smokebox.engine.jail.cgroup_hierarchy import detect
from smokebox.engine.jail.spec import JailSpec
from smokebox.engine.names import random_id
from smokebox.errors import IsolationUnavailable
from smokebox.foundation.loop_shares import LoopShares

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    from smokebox.egress.handler import HandlerLoader, HandlerRegistry
    from smokebox.engine.backups.backups import Backups
    from smokebox.engine.guard import ResourceGuard
    from smokebox.engine.home import Home
    from smokebox.engine.images.catalog import ImageCatalog
    from smokebox.engine.images.image import Image
    from smokebox.engine.images.registry.pull import RegistryImages
    from smokebox.engine.images.store import ImageStore
    from smokebox.engine.jail.jail import Jailer
    from smokebox.engine.options import CheckedOptions
    from smokebox.engine.pool import JailPool
    from smokebox.engine.record.record import Record
    from smokebox.engine.record.rows import SandboxRow
    from smokebox.engine.sandbox_storage import SandboxStorage
    from smokebox.engine.snapshots.snapshots import Snapshots
    from smokebox.engine.workers import Workers
    from smokebox.isolation import Tier
    from smokebox.limits import Limits


Admission: TypeAlias = (
    "Callable[[str, CheckedOptions], AbstractAsyncContextManager[CheckedOptions]]"
)
"""Called with the id and the options of a sandbox that is about to be created.

Gives the options to create it with, or raises to refuse it. Its exit comes when the sandbox is in
the record, or was not created.
"""


SnapshotAdmission: TypeAlias = (
    "Callable[[SandboxRow, str, set[str]], AbstractAsyncContextManager[None]]"
)
"""Called with a sandbox, and the id of a snapshot that the engine is about to make of it by itself.

The third argument has the ids of those that are removed then. Raises to refuse it.
"""


@contextlib.asynccontextmanager
async def admit_snapshots(row: SandboxRow, id: str, freed: set[str]) -> AsyncIterator[None]:
    """Admit every snapshot."""
    yield


@contextlib.asynccontextmanager
async def admit_all(id: str, options: CheckedOptions) -> AsyncIterator[CheckedOptions]:
    """Admit every sandbox, with its options."""
    yield options


def no_group_limit(group: str) -> None:
    """Limit no group of sandboxes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """The state directory and the services that work in it. `tier` is the default tier.

    `cwds` maps sandbox ids to working directories that differ from the default, and `handlers`
    maps ids to the egress handlers of this process; `load_handler` imports named ones. `group_cpu`
    returns the cores that the sandboxes of a group may use together, None for any. `traffic`
    sums up all sandboxes, and `expirations` destroys those whose lifetime is over.
    """

    home: Home
    storage: SandboxStorage
    record: Record
    images: ImageStore
    catalog: ImageCatalog
    registries: RegistryImages
    jailers: Mapping[str, Jailer]
    tier: Tier
    workers: Workers
    guard: ResourceGuard
    pool: JailPool
    backups: Backups
    snapshots: Snapshots
    tag: str
    admit: Admission = admit_all
    admit_snapshot: SnapshotAdmission = admit_snapshots
    load_handler: HandlerLoader = load_handler
    group_cpu: Callable[[str], float | None] = no_group_limit
    cwds: dict[str, str] = field(default_factory=dict)
    handlers: dict[str, HandlerRegistry] = field(default_factory=dict)
    traffic: TrafficTotals = field(default_factory=TrafficTotals)
    expirations: Expirations = field(default_factory=Expirations)
    shares: LoopShares = field(default_factory=LoopShares)

    def jailer(self, tier: str) -> Jailer:
        """Return the jailer of a tier. Raises `IsolationUnavailable`."""
        found = self.jailers.get(tier)
        if found is None:
            raise IsolationUnavailable(
                f"this engine has no tier {tier!r}.",
                hint=f"It has: {', '.join(self.jailers)}. `smokebox doctor` shows what is missing.",
                tier=tier,
            )
        return found

    def key(self) -> str:
        """Return a random jail name, tagged so that leftovers of this host are recognised."""
        return f"{self.tag}-{random_id()}"

    def cgroup_of(self, group: str) -> str:
        """Return the name of the cgroup of a group of sandboxes of this host; "" for none."""
        digest = hashlib.sha256(group.encode()).hexdigest()[:32]
        return f"{GROUP}{self.tag}-{digest}" if group else ""

    def limit_group(self, group: str) -> None:
        """Limit the cores of a group, before a sandbox of it runs programs of its tenant."""
        detect().placement.limit_group(self.cgroup_of(group), self.group_cpu(group))

    def spec(self, key: str, image: Image | None, limits: Limits, *, group: str = "") -> JailSpec:
        """Return the spec of a jail. Adopting a running jail needs no image."""
        return JailSpec(
            key=key,
            directory=self.storage.directory(key),
            layers=image.layers if image is not None else (),
            limits=limits,
            group=self.cgroup_of(group),
        )

    async def remove(self, key: str) -> None:
        """Delete the files of a sandbox, including unreadable directories. Safe to repeat."""
        await asyncio.to_thread(self.storage.remove, key)

    async def measure(self, key: str) -> int:
        """Measure the bytes that a sandbox occupies on disk."""
        return await asyncio.to_thread(self._measure, key)

    def _measure(self, key: str) -> int:
        state = self.storage.quota(key)
        return state.quota.bytes if state else measure(self.storage.directory(key)).bytes


def tag_of(home: str) -> str:
    """Return the prefix of all jail names of a state directory."""
    return hashlib.sha256(home.encode()).hexdigest()[:8]
