"""Pulls onto a disk that becomes full: a typed error, nothing left, and the next pull works."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from engine.images.registry.access_to import LOOPBACK, plain
from oci_images import TestImage, tar
from small_disk import small_disk
from smokebox.engine.images.catalog import ImageCatalog
from smokebox.engine.images.layer_store import LayerStore
from smokebox.engine.images.registry.access import RegistryAccess
from smokebox.engine.images.registry.pull import RegistryImages
from smokebox.engine.record.record import Record
from smokebox.errors import StorageFull

if TYPE_CHECKING:
    from collections.abc import Iterator

    from registry_server import RegistryServer

ACCESS = RegistryAccess(private=LOOPBACK)
FILES = {str(number): random.Random(number).randbytes(100_000) for number in range(60)}


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 4 MiB and 500 inodes."""
    with small_disk(tmp_path, "size=4m,nr_inodes=500") as path:
        yield path


@pytest.mark.parametrize(
    "large", [tar(FILES), tar({str(number): b"" for number in range(600)})], ids=["bytes", "inodes"]
)
async def test_pull_onto_a_full_disk_leaves_nothing(
    registry: RegistryServer, repository: str, small: Path, tmp_path: Path, large: bytes
) -> None:
    first = tar({"first": b"1"})
    TestImage(layers=[first, large]).push(registry.url, repository, "large")
    TestImage(layers=[first, tar({"small": b"2"})]).push(registry.url, repository, "small")
    record = await Record.open(str(tmp_path / "record.db"))
    layers = LayerStore(str(small / "images"))
    images = RegistryImages(plain(registry.authority), ImageCatalog(record, layers))
    name = f"{registry.authority}/{repository}"
    try:
        with pytest.raises(StorageFull) as caught:
            await images.pull(f"{name}:large", ACCESS)
        assert caught.value.hint
        assert len([one for one in os.listdir(layers.directory + "/layers") if one[0] != "."]) <= 1
        assert await images.find(f"{name}:large", None) is None
        found = (await images.pull(f"{name}:small", ACCESS)).image
        assert [os.listdir(Path(layers.get(one.id).path)) for one in found.layers] == [  # type: ignore[union-attr]
            ["small"],
            ["first"],
        ]
    finally:
        layers.close()
        await record.aclose()
