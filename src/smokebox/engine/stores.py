"""Everything that an engine keeps on disk, opened together: record, sandboxes, images, backups."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.engine.backups.backups import Backups
from smokebox.engine.home import open_home
from smokebox.engine.images.catalog import ImageCatalog
from smokebox.engine.images.layer_store import LayerStore
from smokebox.engine.images.registry.access import RegistrySettings
from smokebox.engine.images.registry.pull import RegistryImages
from smokebox.engine.images.store import open_store
from smokebox.engine.quota.storage_pool import parse_pool_size
from smokebox.engine.record.record import Record
from smokebox.engine.sandbox_storage import open_storage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smokebox.engine.home import Home
    from smokebox.engine.images.registry.pull import AccessOf
    from smokebox.engine.images.store import ImageStore
    from smokebox.engine.sandbox_storage import SandboxStorage


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """The open stores of one engine. `layers` is the directory of image layers."""

    home: Home
    storage: SandboxStorage
    record: Record
    layers: str
    catalog: ImageCatalog
    registries: RegistryImages
    images: ImageStore
    backups: Backups


async def open_stores(
    home: str | os.PathLike[str] | None,
    *,
    images: str | os.PathLike[str] | None,
    backups: str | None,
    directories: Mapping[str, str] | None,
    storage_pool: int | str | None,
    registries: RegistrySettings | None,
    pull_access: AccessOf,
) -> Stores:
    """Lock a state directory and open its stores: all of them, or none. See `Host.open`."""
    size = parse_pool_size(storage_pool) if storage_pool is not None else None
    directory = await asyncio.to_thread(open_home, home)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(directory.close)
        storage = await asyncio.to_thread(open_storage, directory, size)
        stack.callback(storage.close)
        record = await Record.open(directory.record)
        stack.push_async_callback(record.aclose)
        layers = os.fspath(images or os.path.join(directory.path, "images"))
        catalog = ImageCatalog(record, LayerStore(layers, home=directory.path))
        pulls = RegistryImages(registries or RegistrySettings(), catalog, pull_access)
        store = await asyncio.to_thread(
            open_store,
            layers,
            catalog=catalog,
            registries=pulls,
            directories=directories,
            private=(directory.path,),
        )
        archives = Backups(record, os.path.join(directory.path, "backups"), backups)
        stack.pop_all()
    return Stores(
        home=directory,
        storage=storage,
        record=record,
        layers=layers,
        catalog=catalog,
        registries=pulls,
        images=store,
        backups=archives,
    )
