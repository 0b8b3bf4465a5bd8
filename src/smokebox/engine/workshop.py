"""What all sandboxes of one host are made with, and share."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smokebox.engine.disk import usage
from smokebox.engine.egress.traffic import Traffic
from smokebox.engine.files.trees import remove_tree
from smokebox.engine.jail.api import JailSpec
from smokebox.engine.names import random_key
from smokebox.errors import IsolationUnavailable, PathNotFound

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smokebox.egress.clients import Clients
    from smokebox.engine.backups.backups import Backups
    from smokebox.engine.guard import Guard
    from smokebox.engine.home import Home
    from smokebox.engine.images.image import Image, ImageStore
    from smokebox.engine.jail.api import Jailer, Tier
    from smokebox.engine.limits import Limits
    from smokebox.engine.pool import Pool
    from smokebox.engine.record.record import Record
    from smokebox.engine.workers import Workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """The state directory and what works in it. `tier` is the one for who asks for none.

    `cwds` has the directory of each sandbox, by id, that does not begin in the usual one, and
    `clients` who runs handlers for it. `traffic` is that of all.
    """

    home: Home
    record: Record
    images: ImageStore
    jailers: Mapping[str, Jailer]
    tier: Tier
    workers: Workers
    guard: Guard
    pool: Pool
    backups: Backups
    tag: str
    cwds: dict[str, str] = field(default_factory=dict)
    clients: dict[str, Clients] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)

    def jailer(self, tier: str) -> Jailer:
        """Who makes jails of that tier here; raises `IsolationUnavailable`."""
        found = self.jailers.get(tier)
        if found is None:
            raise IsolationUnavailable(
                f"this engine has no tier {tier!r}.",
                hint=f"It has: {', '.join(self.jailers)}. `smokebox doctor` says what is missing.",
                tier=tier,
            )
        return found

    def key(self) -> str:
        """A name for another jail, by which its leftovers are known as ours."""
        return f"{self.tag}-{random_key()}"

    def spec(self, key: str, image: Image | None, limits: Limits) -> JailSpec:
        """How the jail of that name is made; to find one that is there takes no image."""
        layers = image.layers if image is not None else ()
        return JailSpec(key=key, directory=self.home.box(key), layers=layers, limits=limits)

    async def remove(self, key: str) -> None:
        """Delete what a sandbox has on disk, whatever it made of it. Absence is fine."""
        with contextlib.suppress(PathNotFound, FileNotFoundError):
            await asyncio.to_thread(_remove, self.home.boxes, key)

    async def measure(self, key: str) -> int:
        """The bytes that a sandbox has on disk, counted at this moment."""
        return await asyncio.to_thread(usage, self.home.box(key))


def _remove(boxes: str, key: str) -> None:
    parent = os.open(boxes, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        remove_tree(parent, key, os.path.join(boxes, key))
    finally:
        os.close(parent)


def tag_of(home: str) -> str:
    """What the names of jails in a state directory begin with, on this host."""
    return hashlib.sha256(home.encode()).hexdigest()[:8]
