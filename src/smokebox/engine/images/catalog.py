"""The catalog of images that this host knows, in the durable record.

An image is recorded once all its layers are in the store. It stays until it is removed, or pruned
while no name, sandbox, snapshot or other image refers to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from smokebox.engine.images.frame import make_frame
from smokebox.engine.images.host_image import PATH
from smokebox.engine.images.image import Image, ImageConfig, Layer
from smokebox.engine.images.image_config import DIGEST
from smokebox.engine.images.layer_folder import missing
from smokebox.engine.record.rows import (
    BuildStepRow,
    ImageGrantRow,
    ImageNameRow,
    ImageRow,
    delete,
    put,
    touch_image,
)
from smokebox.errors import Conflict, ImageError, NotFound

if TYPE_CHECKING:
    from collections.abc import (
        AsyncIterator,
        Awaitable,
        Callable,
        Collection,
        Iterable,
        Iterator,
    )

    from smokebox.engine.images.layer_store import LayerStore, PruneResult
    from smokebox.engine.record.record import Record

MAX_LAYERS = 400
"""Layers of an image with its bases: the kernel takes 500 in a mount."""

KEEP_SECONDS = 86400.0
"""Time for which a start keeps the complete layers of a pull that did not end."""

SHARED = ""
"""The scope of images that every sandbox may start from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReference:
    """A layer of a catalogued image: its id in the store, and where it is seen."""

    id: str
    target: str = "/"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogImage:
    """An image in the catalog.

    Attributes:
        digest: The digest of the config blob, else `image_digest`.
        config: Its whole configuration.
        layers: Its own layers, the uppermost first.
        base: Name or digest of the image that its layers are stacked on; empty for a whole one.
            A snapshot has the image of its sandbox as its base, which may be `host`.
        source: Its origin in words, such as a reference or `oci`.
        manifest: The manifest that it was pulled by, as JSON; empty if there is none.
        created_at: Time when it was added.
        used_at: Time when a sandbox was last created from it.
        size: Bytes of its own layers on disk.
    """

    digest: str
    config: ImageConfig
    layers: tuple[LayerReference, ...]
    base: str = ""
    source: str = ""
    manifest: str = ""
    created_at: float = 0.0
    used_at: float = 0.0
    size: int = 0


class ImageCatalog:
    """The images of one host, by digest and by name.

    A scope is a prefix of sandbox ids. A name or grant of a scope is valid for the sandboxes whose
    ids start with it, and one of `SHARED` for all. Where a parameter `scope` asks for permission,
    the id of a sandbox works as well; None is the operator, who may use everything.

    `live` returns the images of this host (`host`, `dir:NAME`), which may be a base.
    """

    def __init__(self, record: Record, layer_store: LayerStore) -> None:
        self.live: Callable[[str], Awaitable[Image]] = _no_live_image
        self._record = record
        self.layer_store = layer_store
        # Held while it is decided what to remove, and while that could change.
        self._lock = asyncio.Lock()
        self._leases = 0
        self._leased: set[str] = set()

    @contextlib.contextmanager
    def lease(self) -> Iterator[None]:
        """Keep from removal the images that are found or loaded in the block."""
        self._leases += 1
        try:
            with self.layer_store.lease():
                yield
        finally:
            self._leases -= 1
            if not self._leases:
                self._leased.clear()

    @contextlib.asynccontextmanager
    async def recording(self) -> AsyncIterator[None]:
        """Remove nothing in the block, which puts leased layers into the record."""
        async with self._lock:
            yield

    async def put(
        self, image: CatalogImage, *, names: Iterable[str] = (), scope: str = SHARED
    ) -> None:
        """Record an image whose layers are stored, name it, and grant it to a scope.

        An image that is known keeps its other names and grants. A name of the same scope moves to
        this image.

        Raises:
            ImageError: A layer is not in the store.
        """
        async with self._lock:
            for layer in image.layers:
                if self.layer_store.get(layer.id) is None:
                    raise missing(layer.id)
            known = await self._record.get(ImageRow, image.digest)
            if known is not None:
                image = replace(image, created_at=known.created_at, used_at=known.used_at)
            await self._record.write(
                put(_row(replace(image, created_at=image.created_at or time.time()))),
                put(ImageGrantRow(digest=image.digest, scope=scope)),
                *(put(ImageNameRow(name=one, scope=scope, digest=image.digest)) for one in names),
            )

    async def find(self, name: str, *, scope: str | None = None) -> CatalogImage | None:
        """Return the image of a name or digest that the scope may use, or None.

        A name of the longest matching scope wins.
        """
        if DIGEST.fullmatch(name):
            found = await self.get(name)
            if found is None or (scope is not None and not await self.is_granted(name, scope)):
                return None
            return found
        rows = await self._record.rows(ImageNameRow, name)
        valid = [row for row in rows if _matches(row.scope, scope)]
        if not valid:
            return None
        # The operator means the shared name, if there is one.
        best = (min if scope is None else max)(valid, key=lambda row: len(row.scope))
        return await self.get(best.digest)

    async def get(self, digest: str) -> CatalogImage | None:
        """Return the image of a digest, or None. The caller checks the permission."""
        if self._leases:
            self._leased.add(digest)
        row = await self._record.get(ImageRow, digest)
        return None if row is None else _image(row)

    async def load(self, image: CatalogImage, name: str) -> Image:
        """Return the image as the layers on disk that a sandbox starts from.

        Files of ours in /etc are above its layers, and mount points below.

        Raises:
            ImageError: A layer is gone from the store, or there are too many.
        """
        layers: list[Layer] = []
        part = image
        while True:
            own = [self._load_layer(one) for one in part.layers]
            if not part.base:
                frame = await make_frame(self.layer_store)
                layers += [frame.over, *own, frame.under]
                break
            layers += own
            if not DIGEST.fullmatch(part.base):
                layers += (await self.live(part.base)).layers
                break
            base = await self.get(part.base)
            if base is None:
                raise missing(part.base)
            part = base
        if len(layers) > MAX_LAYERS:
            raise ImageError(
                f"the image {name!r} has {len(layers)} layers, and {MAX_LAYERS} is the limit.",
                hint="Build it with fewer instructions, or merge its layers.",
                reason="unsupported",
                image=image.digest,
            )
        config = replace(image.config, env={"PATH": PATH, **image.config.env})
        return Image(name=name, digest=image.digest, layers=tuple(layers), config=config)

    async def names(self, digest: str, *, scope: str | None = None) -> list[str]:
        """Return the names of an image that are valid in the scope, sorted."""
        rows = await self._record.image_names()
        return sorted(
            {row.name for row in rows if row.digest == digest and _matches(row.scope, scope)}
        )

    async def named(self, name: str, scope: str) -> str | None:
        """Return the digest that a name has in exactly this scope, or None."""
        rows = await self._record.rows(ImageNameRow, name)
        return next((row.digest for row in rows if row.scope == scope), None)

    async def name(self, name: str, digest: str, *, scope: str = SHARED) -> None:
        """Name an image, and move the name if it has another. Raises `NotFound`."""
        async with self._lock:
            await self._check_known(digest)
            await self._record.write(put(ImageNameRow(name=name, scope=scope, digest=digest)))

    async def unname(self, name: str, *, scope: str | None = SHARED) -> bool:
        """Remove a name of a scope, or of all with None, and return False if there was none.

        The image stays until it is pruned.
        """
        key = (name,) if scope is None else (name, scope)
        return await self._record.write(delete(ImageNameRow, *key)) > 0

    async def grant(self, digest: str, scope: str) -> None:
        """Let the sandboxes of a scope start from an image. Raises `NotFound`."""
        async with self._lock:
            await self._check_known(digest)
            await self._record.write(put(ImageGrantRow(digest=digest, scope=scope)))

    async def withdraw(self, name: str, digest: str, scope: str | None) -> bool:
        """Remove a name of an image, or by its digest all names, from a scope or from all.

        A name with a digest goes with the last tag of its repository, and the permission with
        the last name. Returns False if the scope had none. The image stays until it is pruned.
        """
        async with self._lock:
            rows = [row for row in await self._record.image_names() if row.digest == digest]
            rows = [row for row in rows if scope in (None, row.scope)]
            dropped = rows if name == digest else _dropped(rows, name)
            grants = [
                row
                for row in await self._record.image_grants()
                if row.digest == digest and scope in (None, row.scope)
            ]
            left = {row.scope for row in rows} - {row.scope for row in dropped}
            left |= {row.scope for row in rows if row not in dropped}
            removed = [row for row in grants if row.scope not in left]
            if not dropped and not (name == digest and removed):
                return False
            await self._record.write(
                *(delete(ImageNameRow, row.name, row.scope) for row in dropped),
                *(delete(ImageGrantRow, row.digest, row.scope) for row in removed),
            )
            return True

    async def is_granted(self, digest: str, scope: str) -> bool:
        """Return whether the sandboxes of a scope may start from an image."""
        rows = await self._record.rows(ImageGrantRow, digest)
        return any(_matches(row.scope, scope) for row in rows)

    async def is_owned(self, digest: str, scope: str) -> bool:
        """Return whether an image was granted to exactly this scope."""
        rows = await self._record.rows(ImageGrantRow, digest)
        return any(row.scope == scope for row in rows)

    async def touch(self, digest: str) -> None:
        """Record that a sandbox was created from an image at this moment."""
        if DIGEST.fullmatch(digest):
            await self._record.write(touch_image(digest, time.time()))

    async def remove(self, digest: str) -> None:
        """Remove an image with its names and grants; its layers go with the next `prune`.

        Raises:
            NotFound: There is no such image.
            Conflict: A sandbox, a snapshot or another image refers to it.
        """
        async with self._lock:
            await self._check_known(digest)
            user = await self._user_of(digest)
            if user:
                raise Conflict(
                    f"the image {digest} is in use by {user}.",
                    hint="Destroy what uses it first.",
                    kind="image",
                    name=digest,
                )
            await self._record.write(delete(ImageRow, digest))

    async def prune(self, *, unused_for: float = 0.0) -> PruneResult:
        """Remove images without a name that nothing refers to, and layers of no image.

        Cached steps of builds go too.

        Args:
            unused_for: Keep images and steps that were added or used within so many seconds.
        """
        async with self._lock:
            before = time.time() - unused_for
            while unused := await self._unused(before):
                # An image that was the base of one of these may be unused next.
                await self._record.write(*(delete(ImageRow, digest) for digest in unused))
            steps = [row for row in await self._record.build_steps() if row.used_at <= before]
            await self._record.write(*(delete(BuildStepRow, one.scope, one.key) for one in steps))
            discarded = self.layer_store.discard(await self._used_layers())
        return await self.layer_store.remove(discarded)

    async def sweep(self, *, unused_for: float = 0.0) -> PruneResult:
        """Remove layers that nothing refers to, such as those of interrupted pulls.

        Args:
            unused_for: Keep what was unpacked within so many seconds.
        """
        async with self._lock:
            used = await self._used_layers()
            discarded = self.layer_store.discard(used, unused_for=unused_for)
        return await self.layer_store.remove(discarded)

    async def remove_ungranted(self) -> None:
        """Remove images that no scope may use and nothing refers to.

        Their last name was removed while a sandbox needed them.
        """
        async with self._lock:
            granted = {row.digest for row in await self._record.image_grants()}
            rows = [row.digest for row in await self._record.images() if row.digest not in granted]
            unused = [digest for digest in rows if not await self._user_of(digest)]
            await self._record.write(*(delete(ImageRow, digest) for digest in unused))
        if unused:
            await self.sweep()

    async def list(self, *, scope: str | None = None) -> list[CatalogImage]:
        """Return the images that the scope may use, the oldest first."""
        grants = await self._record.image_grants()
        granted = {row.digest for row in grants if _matches(row.scope, scope)}
        rows = await self._record.images()
        return [_image(row) for row in rows if scope is None or row.digest in granted]

    async def owned_layers(self, scopes: Collection[str]) -> set[str]:
        """Return the ids of the layers that exactly these scopes have, and that are not shared.

        Those of their cached build steps are among them, and of images that their sandboxes and
        snapshots keep although the permission is gone.
        """
        grants = await self._record.image_grants()
        shared = {row.digest for row in grants if row.scope == SHARED}
        granted = {row.digest for row in grants if row.scope in scopes}
        snapshots = await self._record.snapshots()
        for scope in set(scopes) - {SHARED}:
            granted |= {row.digest for row in await self._record.sandboxes(prefix=scope)}
            granted |= {row.digest for row in snapshots if row.sandbox_id.startswith(scope)}
        granted -= shared
        owned: set[str] = set()
        free: set[str] = set()
        for row in await self._record.images():
            ids = {id for id, _ in row.layers}
            if row.digest in granted:
                owned |= ids
            elif row.digest in shared:
                free |= ids
        for step in await self._record.build_steps():
            if step.scope in scopes:
                owned.update(id for id, _ in json.loads(step.stored))
        return owned - free

    async def _used_layers(self) -> set[str]:
        images = [_image(row) for row in await self._record.images()]
        used = {layer.id for image in images for layer in image.layers}
        for step in await self._record.build_steps():
            used.update(id for id, _ in json.loads(step.stored))
        used.update(row.id for row in await self._record.snapshot_layers())
        return used

    async def _unused(self, before: float) -> set[str]:
        images = await self._record.images()
        named = {row.digest for row in await self._record.image_names()}
        old = {row.digest for row in images if max(row.created_at, row.used_at) <= before}
        return {one for one in old - named if not await self._user_of(one)}

    async def _user_of(self, digest: str) -> str:
        """Return what refers to an image, in words; empty if nothing does."""
        if digest in self._leased:
            return "a sandbox that starts"
        sandboxes = await self._record.sandboxes_of(digest)
        if sandboxes:
            others = f" and {len(sandboxes) - 1} others" if len(sandboxes) > 1 else ""
            return f"the sandbox {sandboxes[0].id}{others}"
        snapshots = [row for row in await self._record.snapshots() if row.digest == digest]
        if snapshots:
            return f"the snapshot {snapshots[0].name or snapshots[0].id}"
        images = await self._record.images()
        above = next((row.digest for row in images if row.base == digest), "")
        return f"the image {above}" if above else ""

    async def _check_known(self, digest: str) -> None:
        if await self._record.get(ImageRow, digest) is None:
            raise unknown(digest)

    def _load_layer(self, reference: LayerReference) -> Layer:
        found = self.layer_store.get(reference.id)
        if found is None:
            raise missing(reference.id)
        return found.at(reference.target)


def unknown(name: str) -> NotFound:
    """Return the error for an image that the catalog does not have."""
    return NotFound(
        f"this host has no image {name!r}.",
        hint="List those it has: `smokebox images ls`, or `Host.images.list()`.",
        kind="image",
        name=name,
    )


async def _no_live_image(name: str) -> Image:
    raise unknown(name)


def _dropped(rows: Iterable[ImageNameRow], name: str) -> list[ImageNameRow]:
    """Return the rows that go with a name: its own, and those with a digest after the last tag."""
    rows = list(rows)
    dropped = [row for row in rows if row.name == name]
    for scope in {row.scope for row in dropped}:
        kept = [row for row in rows if row.scope == scope and row.name != name]
        repositories = {_repository(row.name) for row in kept if "@" not in row.name}
        dropped += [row for row in kept if _repository(row.name) not in repositories]
    return dropped


def _repository(name: str) -> str:
    head, at, _ = name.partition("@")
    if at:
        return head
    parent, slash, last = name.rpartition("/")
    return parent + slash + last.partition(":")[0]


def _matches(scope: str, wanted: str | None) -> bool:
    return wanted is None or wanted.startswith(scope)


def _row(image: CatalogImage) -> ImageRow:
    return ImageRow(
        digest=image.digest,
        config=json.dumps(image.config.to_oci()),
        layers=tuple((layer.id, layer.target) for layer in image.layers),
        base=image.base,
        source=image.source,
        manifest=image.manifest,
        size=image.size,
        created_at=image.created_at,
        used_at=image.used_at,
    )


def _image(row: ImageRow) -> CatalogImage:
    layers = tuple(LayerReference(id=id, target=at) for id, at in row.layers)
    return CatalogImage(
        digest=row.digest,
        config=ImageConfig.from_oci(json.loads(row.config)),
        layers=layers,
        base=row.base,
        source=row.source,
        manifest=row.manifest,
        created_at=row.created_at,
        used_at=row.used_at,
        size=row.size,
    )
