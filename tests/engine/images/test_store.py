"""The image store, directories as images, and the layer store."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest

from smokebox.engine.images.image import Image
from smokebox.engine.images.layer_store import LayerStore
from smokebox.engine.images.store import ImageStore, open_store
from smokebox.errors import InvalidOption, NotFound, PathError


class Registry:
    """A source that has every image."""

    async def get(self, name: str, *, scope: str | None = None) -> Image:
        return Image(name=name, digest="1", layers=())


async def test_store_selects_the_source_by_name_and_prefix() -> None:
    store: ImageStore = ImageStore({"host": Registry(), "oci:": Registry(), "": Registry()})
    for name in ("host", "oci:/srv/layout", "python:3.12", "registry/library/python"):
        assert (await store.get(name)).name == name


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("hots", "Did you mean 'host'"),
        ("dri:srv", "Did you mean 'dir:NAME'"),
        ("host:latest", "Did you mean 'host'"),
        ("python:3.12", "It has: dir:NAME, host"),
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


def open_named(tmp_path: Path, **directories: Path) -> ImageStore:
    named = {name: str(path) for name, path in directories.items()}
    return open_store(str(tmp_path / "images"), directories=named)


async def test_directory_is_an_image(tmp_path: Path) -> None:
    root = root_file_system(tmp_path / "rootfs")
    image = await open_named(tmp_path, base=root).get("dir:base")
    assert image.name == "dir:base"
    assert str(root) in [layer.path for layer in image.layers]
    assert {layer.target for layer in image.layers} == {"/"}
    assert (image.cwd, image.user, image.env["LANG"]) == ("/workspace", "root", "C.UTF-8")
    assert "DEBIAN_FRONTEND" not in image.env


async def test_missing_directories_are_in_a_layer_below(tmp_path: Path) -> None:
    store = open_named(tmp_path, base=root_file_system(tmp_path / "rootfs"))
    over, _, under, *_ = (Path(layer.path) for layer in (await store.get("dir:base")).layers)
    assert "localhost" in (over / "etc/hosts").read_text()
    assert all((under / name).is_dir() for name in ("proc", "dev", "run/smokebox", "workspace"))
    assert (under / "tmp").stat().st_mode & 0o7777 == 0o1777


async def test_changed_directory_has_another_digest(tmp_path: Path) -> None:
    root = root_file_system(tmp_path / "rootfs")
    store = open_named(tmp_path, base=root)
    before = await store.get("dir:base")
    assert (await store.get("dir:base")).digest == before.digest
    (root / "etc/passwd").touch()
    assert (await store.get("dir:base")).digest != before.digest


@pytest.mark.parametrize(
    "name", ["", "relative/path", "~/x", "a\0b", "/", "/.", "..", "../x", "base/../..", "a" * 64]
)
async def test_path_instead_of_a_name_is_refused(tmp_path: Path, name: str) -> None:
    store = open_named(tmp_path, base=root_file_system(tmp_path / "rootfs"))
    with pytest.raises(InvalidOption, match=r"\[images\] of server.toml") as caught:
        await store.get(f"dir:{name}")
    assert caught.value.fields == {"option": "image", "value": f"dir:{name}"}


async def test_refusal_of_a_path_does_not_tell_whether_it_exists(
    store: ImageStore, tmp_path: Path
) -> None:
    texts = set()
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(InvalidOption) as caught:
            await store.get(f"dir:{path}")
        texts.add(str(caught.value).replace(str(path), ""))
    assert len(texts) == 1


async def test_unknown_directory_says_who_can_add_it(store: ImageStore) -> None:
    with pytest.raises(NotFound, match=r"operator adds it in \[images\] of server.toml"):
        await store.get("dir:unknown")


@pytest.mark.parametrize("name", ["", "a/b", "..", ".", "a b", "a" * 64])
def test_invalid_name_in_the_configuration_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidOption, match="has no valid name"):
        open_named(tmp_path, **{name: tmp_path / "rootfs"})


@pytest.mark.parametrize("path", ["", "relative", "~/x", "/a\0b"])
def test_invalid_path_in_the_configuration_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(InvalidOption, match="is not an absolute path"):
        open_store(str(tmp_path / "images"), directories={"base": path})


@pytest.mark.parametrize("path", ["/", "{}", "{}/home", "{}/home/boxes/x/data", "{}/link", "{}/l"])
@pytest.mark.parametrize("layers", ["elsewhere", "home/images"])
def test_directory_that_overlaps_the_state_directory_is_refused(
    tmp_path: Path, path: str, layers: str
) -> None:
    home = tmp_path / "srv" / "home"
    home.mkdir(parents=True)
    (tmp_path / "srv" / "link").symlink_to(home)
    (tmp_path / "srv" / "l").symlink_to(tmp_path)
    with pytest.raises(InvalidOption, match="state directory") as caught:
        open_store(
            str(tmp_path / "srv" / layers),
            directories={"base": path.format(tmp_path / "srv")},
            private=(str(home),),
        )
    assert caught.value.fields["option"] == "directories"


@pytest.mark.parametrize("path", ["{}", "{}/images", "{}/images/x"])
def test_directory_that_overlaps_the_layers_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(InvalidOption, match="layers of Smokebox"):
        open_named(tmp_path, base=Path(path.format(tmp_path)))


def test_directory_beside_the_state_directory_is_accepted(tmp_path: Path) -> None:
    store = open_store(
        str(tmp_path / "home/images"),
        directories={"base": str(tmp_path / "home2")},
        private=(str(tmp_path / "home"),),
    )
    assert store is not None


async def test_directory_without_a_root_file_system_is_refused(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "home").mkdir()
    root_file_system(tmp_path / "images" / "layer")
    swapped = tmp_path / "swapped"
    store = open_named(
        tmp_path,
        photos=tmp_path / "photos",
        file=tmp_path / "file",
        missing=tmp_path / "missing",
        swapped=swapped,
    )
    swapped.symlink_to(tmp_path / "images" / "layer")
    for name in ("photos", "file", "missing", "swapped"):
        with pytest.raises(NotFound, match="is not a root file system") as caught:
            await store.get(f"dir:{name}")
        assert str(tmp_path) not in str(caught.value)


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
