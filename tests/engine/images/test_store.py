"""The image store, directories as images, and the layer store."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest

from smokebox.engine.images.image import Image, LayerStore
from smokebox.engine.images.store import ImageStore, open_store
from smokebox.errors import InvalidOption, NotFound, PathError


class Registry:
    """A source that has every image."""

    async def get(self, name: str) -> Image:
        return Image(name=name, digest="1", layers=())


async def test_store_selects_the_source_by_name_and_prefix() -> None:
    store: ImageStore = ImageStore({"host": Registry(), "oci:": Registry(), "": Registry()})
    for name in ("host", "oci:/srv/layout", "python:3.12", "registry/library/python"):
        assert (await store.get(name)).name == name


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("hots", "Did you mean 'host'"),
        ("dri:/srv", "Did you mean 'dir:<path>'"),
        ("host:latest", "Did you mean 'host'"),
        ("python:3.12", "It has: dir:<path>, host"),
        ("", "It has"),
    ],
)
async def test_unknown_name_suggests_the_nearest(store: ImageStore, name: str, hint: str) -> None:
    with pytest.raises(NotFound) as caught:
        await store.get(name)
    assert hint in str(caught.value)
    assert caught.value.fields == {"kind": "image", "name": name}


def root_file_system(path: Path) -> Path:
    for name in ("usr/bin", "etc"):
        (path / name).mkdir(parents=True)
    (path / "etc/hosts").touch()
    return path


async def test_directory_is_an_image(store: ImageStore, tmp_path: Path) -> None:
    root = root_file_system(tmp_path / "rootfs")
    image = await store.get(f"dir:{root}")
    assert str(root) in [layer.path for layer in image.layers]
    assert {layer.target for layer in image.layers} == {"/"}
    assert (image.cwd, image.user, image.env["LANG"]) == ("/workspace", "root", "C.UTF-8")
    assert "DEBIAN_FRONTEND" not in image.env


async def test_missing_directories_are_in_a_layer_below(store: ImageStore, tmp_path: Path) -> None:
    image = await store.get(f"dir:{root_file_system(tmp_path / 'rootfs')}")
    over, _, under, *_ = (Path(layer.path) for layer in image.layers)
    assert "localhost" in (over / "etc/hosts").read_text()
    assert all((under / name).is_dir() for name in ("proc", "dev", "run/smokebox", "workspace"))
    assert (under / "tmp").stat().st_mode & 0o7777 == 0o1777


async def test_changed_directory_has_another_digest(store: ImageStore, tmp_path: Path) -> None:
    root = root_file_system(tmp_path / "rootfs")
    before = await store.get(f"dir:{root}")
    assert (await store.get(f"dir:{root}")).digest == before.digest
    (root / "etc/passwd").touch()
    assert (await store.get(f"dir:{root}")).digest != before.digest


@pytest.mark.parametrize(
    "name", ["dir:", "dir:relative", "dir:~/x", "dir:/a\0b", "dir:/", "dir:/."]
)
async def test_invalid_directory_is_refused(store: ImageStore, name: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        await store.get(name)
    assert caught.value.fields == {"option": "image", "value": name}


async def test_symlink_to_the_host_root_is_refused(store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/")
    with pytest.raises(InvalidOption, match="is the host itself"):
        await store.get(f"dir:{tmp_path}/link")


async def test_directory_that_contains_the_store_is_refused(tmp_path: Path) -> None:
    root = root_file_system(tmp_path / "rootfs")
    with pytest.raises(InvalidOption, match="state directory"):
        await open_store(str(root / "var/smokebox/images")).get(f"dir:{root}")


async def test_directory_without_a_root_file_system_is_refused(
    store: ImageStore, tmp_path: Path
) -> None:
    (tmp_path / "photos").mkdir()
    with pytest.raises(InvalidOption, match="none of usr, bin"):
        await store.get(f"dir:{tmp_path}/photos")
    (tmp_path / "file").touch()
    for name in ("missing", "file"):
        with pytest.raises(NotFound, match="is not a directory"):
            await store.get(f"dir:{tmp_path}/{name}")


async def test_concurrent_engines_share_the_layers(tmp_path: Path) -> None:
    stores = [open_store(str(tmp_path / "images")) for _ in range(4)]
    images = await asyncio.gather(*(store.get("host") for store in stores))
    assert len({image.layers for image in images}) == 1
    directory = tmp_path / "images"
    used = [Path(layer.path) for layer in images[0].layers]
    assert set(os.listdir(directory)) == {
        path.relative_to(directory).parts[0] for path in used if path.is_relative_to(directory)
    }


def test_first_of_two_concurrent_layers_stays(tmp_path: Path) -> None:
    layer_store = LayerStore(str(tmp_path))
    both = threading.Barrier(2)

    def make(into: str) -> None:
        (Path(into) / "file").write_text(into)
        both.wait(10)

    threads = [threading.Thread(target=layer_store.ensure, args=("digest", make)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert os.listdir(tmp_path) == ["digest"]
    assert (tmp_path / "digest/file").read_text() not in ("", str(tmp_path / "digest"))


def test_failed_layer_leaves_nothing(tmp_path: Path) -> None:
    def make(into: str) -> None:
        (Path(into) / "half").touch()
        raise ValueError

    with pytest.raises(ValueError):
        LayerStore(str(tmp_path)).ensure("digest", make)
    assert os.listdir(tmp_path) == []


def test_unfinished_layers_of_killed_engines_are_removed(tmp_path: Path) -> None:
    for name in (".making-old", ".making-young"):
        (tmp_path / name / "deep").mkdir(parents=True)
    os.utime(tmp_path / ".making-old", (time.time() - 7200,) * 2)
    LayerStore(str(tmp_path)).ensure("digest", lambda into: None)
    assert sorted(os.listdir(tmp_path)) == [".making-young", "digest"]


def test_unwritable_store_names_the_path(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PathError, match=str(tmp_path / "file")):
        LayerStore(str(tmp_path / "file/images")).ensure("digest", lambda into: None)
