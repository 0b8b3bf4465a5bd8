"""Images of files here, `oci:DIR` and `archive:FILE`: read by the SDK, loaded by a server."""

from __future__ import annotations

import gzip
import json
import os
from typing import TYPE_CHECKING

import pytest
import zstandard

from engine.images.layer_tools import archive, file
from engine.images.oci_tools import Layout, config_of, docker_archive, small_base, tar_directory
from smokebox.client.bindings import Environment
from smokebox.client.local_image import open_image, split_image
from smokebox.errors import ImageError, NotFound, PathNotFound

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from smokebox.client.client import Client
    from smokebox.types import LayerProgress


# Other tests of the same server have the base with other names.
RUN = os.urandom(8).hex().encode()


def layers(name: str) -> list[bytes]:
    """Return a base that runs, and a layer of a text."""
    return [small_base(), archive([file("srv/name", name.encode()), file("srv/run", RUN)])]


def layout(path: Path, *names: str) -> Layout:
    """Write an OCI layout with images of those names."""
    found = Layout(path)
    for name in names:
        found.add(name, layers(name), config_of(layers(name), Env=[f"NAME={name}"]))
    return found


async def test_a_sandbox_starts_from_an_oci_layout(client: Client, tmp_path: Path) -> None:
    layout(tmp_path / "image", "one")
    async with client, await client.create(image=f"oci:{tmp_path / 'image'}") as sandbox:
        assert (await sandbox.exec("cat /srv/name; echo $NAME")).stdout == "oneone\n"


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress])
async def test_a_sandbox_starts_from_an_archive(
    client: Client, tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "app.tar"
    path.write_bytes(pack(docker_archive({"app:1": layers("saved")}, linked=True)))
    async with client, await client.create(image=f"archive:{path}") as sandbox:
        assert (await sandbox.exec("cat /srv/name")).stdout == "saved"


async def test_an_archive_of_a_layout_is_an_image(client: Client, tmp_path: Path) -> None:
    layout(tmp_path / "image", "packed")
    (tmp_path / "image.tar").write_bytes(tar_directory(tmp_path / "image"))
    async with client:
        loaded = await client.images.load(f"archive:{tmp_path / 'image.tar'}", names=["p:1"])
        assert (loaded.names, loaded.source, loaded.layers) == (["p:1"], "oci", 2)
        async with await client.create(image="p:1") as sandbox:
            assert (await sandbox.exec("cat /srv/name")).stdout == "packed"


async def test_one_of_several_images_is_named_behind_the_path(
    client: Client, tmp_path: Path
) -> None:
    layout(tmp_path / "image", "one", "two:2")
    path = tmp_path / "saved.tar"
    path.write_bytes(docker_archive({"one:1": layers("one"), "two:1": layers("two")}))
    async with client:
        for image, known in ((f"oci:{tmp_path / 'image'}", "two:2"), (f"archive:{path}", "two:1")):
            with pytest.raises(NotFound, match="several images") as several:
                await client.images.load(image)
            assert known in several.value.hint
            loaded = await client.images.load(f"{image}:{known}")
            assert loaded.names == [known]
            with pytest.raises(NotFound, match="no image 'three'"):
                await client.images.load(f"{image}:three")


async def test_only_layers_that_the_server_lacks_are_uploaded(
    client: Client, tmp_path: Path
) -> None:
    base = archive([file("base", os.urandom(99))])
    for name in ("one", "two"):
        saved = docker_archive({f"{name}:1": [base, *layers(f"count {name}")[1:]]})
        (tmp_path / f"{name}.tar").write_bytes(saved)
    sent: list[LayerProgress] = []

    def report(progress: LayerProgress) -> None:
        if progress.state == "uploading" and progress.done == progress.total:
            sent.append(progress)

    async with client:
        for name, count in (("one", 2), ("one", 0), ("two", 1)):
            await client.images.load(f"archive:{tmp_path / name}.tar", progress=report)
            assert len(sent) == count
            sent.clear()


async def test_a_changed_byte_in_a_layer_is_refused(client: Client, tmp_path: Path) -> None:
    found = Layout(tmp_path / "image")
    digest = found.add("one", layers("changed"))
    [manifest] = found.manifests
    blobs = found.path / "blobs/sha256"
    document = json.loads((blobs / manifest["digest"][7:]).read_bytes())
    layer = blobs / document["layers"][1]["digest"][7:]
    data = layer.read_bytes()
    layer.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    async with client:
        with pytest.raises(ImageError, match="is damaged"):
            await client.images.load(f"oci:{found.path}")
        with pytest.raises(NotFound):
            await client.images.inspect(digest)


async def test_what_is_no_image_is_named(client: Client, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"no tar at all" * 100)
    (tmp_path / "folder").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/index.json").write_text('{"manifests": 3}')
    foreign = Layout(tmp_path / "foreign")
    foreign.add("x", [], {**config_of([]), "architecture": "s390x"})
    async with client:
        for image, error, text in (
            ("oci:nowhere", PathNotFound, "there is no directory"),
            (f"oci:{tmp_path / 'file'}", PathNotFound, "there is no directory"),
            (f"oci:{tmp_path / 'folder'}", PathNotFound, "no index.json"),
            (f"archive:{tmp_path / 'folder'}", PathNotFound, "there is no file"),
            (f"archive:{tmp_path / 'file'}", ImageError, "not an image"),
            (f"oci:{tmp_path / 'broken'}", ImageError, "not an image"),
            (f"oci:{foreign.path}", NotFound, "s390x"),
        ):
            with pytest.raises(error, match=text):
                await client.images.load(image)


def test_the_path_of_an_image_may_have_colons(tmp_path: Path) -> None:
    (tmp_path / "a:b").mkdir()
    assert split_image(f"oci:{tmp_path}/a:b") == ("oci:", f"{tmp_path}/a:b", None)
    assert split_image(f"oci:{tmp_path}/a:b:c:1") == ("oci:", f"{tmp_path}/a:b", "c:1")
    assert split_image(f"oci:{tmp_path}/no:c") == ("oci:", f"{tmp_path}/no:c", None)


def test_a_digest_names_nothing_outside_of_the_layout(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("{}")
    found = Layout(tmp_path / "image")
    found.manifests = [{"digest": "../../../secret"}, {"digest": "sha256:../../secret"}]
    found.write_index()
    with open_image(f"oci:{found.path}") as image:
        assert list(image.documents) == ["index.json"]


async def test_a_project_names_an_image_relative_to_its_file(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout(tmp_path / "docker/image", "bound")
    (tmp_path / "smokebox.toml").write_text('[sandboxes.Box]\nimage = "oci:docker/image"\n')
    monkeypatch.chdir(os.path.dirname(tmp_path))
    binding = Environment(tmp_path).Box
    async with client, await client.create(binding) as sandbox:
        assert (await sandbox.exec("cat /srv/name")).stdout == "bound"
