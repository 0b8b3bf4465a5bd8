"""Pushed images are what other tools read, and layers that a registry has are not sent."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import tarfile
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from engine.images.layer_tools import Member, archive, file, folder, symlink, tree
from engine.images.registry.access_to import LOOPBACK, plain
from oci_images import TestImage, sha256, tar
from smokebox.engine.images.registry.access import RegistryAccess
from smokebox.engine.images.registry.pull import RegistryImages
from smokebox.engine.images.registry.push import ImagePusher
from smokebox.errors import InvalidOption, RegistryError, Unsupported
from unprivileged import rerun_as_nobody

if TYPE_CHECKING:
    from pathlib import Path

    from engine.images.registry.conftest import Stores
    from registry_server import RegistryProxy, RegistryServer
    from smokebox.types import LayerProgress

ACCESS = RegistryAccess(private=LOOPBACK)
FILES = {
    "etc": None,
    "etc/os": b"base",
    "bin": None,
    "bin/tool": b"#!/bin/sh\n",
    "link": "bin/tool",
}
IMAGE = TestImage(
    layers=[tar(FILES), tar({"data": b"x" * 100_000})],
    config={"Env": ["A=1"], "Cmd": ["/bin/tool"], "WorkingDir": "/srv"},
)


OWNED = TestImage(
    layers=[
        archive(
            [
                folder("srv", 0o750, uid=1000, gid=100),
                file("srv/own", b"1", mode=0o600, uid=1000, gid=100),
                file("srv/program", b"#!/bin/sh\n", mode=0o4755),
                symlink("srv/link", "../gone", uid=12, gid=13),
                Member("srv/same", kind=tarfile.LNKTYPE, mode=0o4755, link="srv/program"),
                folder("tmp", 0o1777),
                file("gone", b"x"),
                file("private", b"y", mode=0o400, uid=7),
            ]
        ),
        archive(
            [
                file(".wh.gone", mode=0),
                folder("srv", 0o750, uid=1000, gid=100),
                file("srv/own", b"2", mode=0o640, uid=1001, gid=5),
            ]
        ),
    ],
    config={"Env": ["A=1"]},
)
Members = dict[str, tuple[object, ...]]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for other users")


def skopeo(*words: str) -> str:
    command = ["skopeo", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=15).stdout


def copy_to_layout(name: str, layout: Path) -> list[Members]:
    """Copy an image into an OCI layout by skopeo, and return the members of its layers."""
    skopeo("copy", "-q", "--src-tls-verify=false", f"docker://{name}", f"oci:{layout}:it")
    index = json.loads((layout / "index.json").read_bytes())
    manifest = json.loads(blob(layout, index["manifests"][0]["digest"]))
    return [listed(gzip.decompress(blob(layout, one["digest"]))) for one in manifest["layers"]]


def blob(layout: Path, digest: str) -> bytes:
    return (layout / "blobs" / digest.replace(":", "/")).read_bytes()


def listed(data: bytes) -> Members:
    """Return type, mode, owner, link target and content of the members of a layer."""
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {
            one.name: (
                one.type,
                0o777 if one.issym() else one.mode,
                (one.uid, one.gid),
                one.linkname,
                content.read() if (content := archive.extractfile(one)) and one.isreg() else None,
            )
            for one in archive
        }


def unpack(layout: Path, bundle: Path) -> dict[str, tuple[object, ...]]:
    """Unpack an image by umoci, and return the tree."""
    options = [] if os.geteuid() == 0 else ["--rootless"]
    command = ["umoci", "unpack", *options, "--image", f"{layout}:it", str(bundle)]
    subprocess.run(command, check=True, capture_output=True, timeout=15)
    return tree(bundle / "rootfs", times=False)


async def test_a_pushed_image_is_the_same_to_skopeo_and_umoci(
    registry: RegistryServer, repository: str, stores: Stores, tmp_path: Path
) -> None:
    OWNED.push(registry.url, repository, "1")
    images = RegistryImages(plain(registry.authority), stores.catalog)
    original = f"{registry.authority}/{repository}:1"
    pulled = await images.pull(original, ACCESS)
    pusher = ImagePusher(images, stores.catalog)
    # Without the manifest it is packed again, as an image that was built here.
    built = replace(pulled.image, manifest="")
    states: list[LayerProgress] = []
    name = f"{registry.authority}/{repository}-copy:2"
    pushed = await pusher.push(built, name, ACCESS, progress=states.append)
    assert pushed.reference == name
    assert {"packing", "uploading", "done"} <= {one.state for one in states}
    shown = json.loads(skopeo("inspect", "--tls-verify=false", f"docker://{name}"))
    assert (shown["Digest"], shown["Env"]) == (pushed.digest, ["A=1"])
    before = copy_to_layout(original, tmp_path / "original")
    after = copy_to_layout(name, tmp_path / "copy")
    for members in after:
        # The root, which not every layer names.
        members.pop(".", None)
    assert after == before
    trees = [unpack(tmp_path / one, tmp_path / f"{one}-tree") for one in ("original", "copy")]
    assert trees[0] == trees[1]
    assert trees[0]["srv/own"][4] == b"2"
    assert "gone" not in trees[0]


@as_root
@pytest.mark.timeout(60)
def test_an_ordinary_user_pushes_the_recorded_owners() -> None:
    rerun_as_nobody(__file__, "skopeo_and_umoci")


async def test_layers_that_the_registry_has_are_not_sent(
    registry: RegistryServer, repository: str, stores: Stores, proxy: RegistryProxy
) -> None:
    IMAGE.push(registry.url, repository, "1")
    images = RegistryImages(plain(proxy.authority), stores.catalog)
    pulled = await images.pull(f"{proxy.authority}/{repository}:1", ACCESS)
    pusher = ImagePusher(images, stores.catalog)
    states: list[LayerProgress] = []
    for name in (f"{repository}:again", f"{repository}-other:1"):
        target = f"{proxy.authority}/{name}"
        pushed = await pusher.push(pulled.image, target, ACCESS, progress=states.append)
        assert (await images.pull(f"{target.rpartition(':')[0]}@{pushed.digest}", ACCESS)).image
    assert {one.state for one in states} == {"present"}
    assert [one.digest for one in states[:2]] == [sha256(one) for one in IMAGE.layers]


async def test_what_cannot_be_pushed_is_refused_before_anything_is_sent(
    registry: RegistryServer, repository: str, stores: Stores, proxy: RegistryProxy
) -> None:
    IMAGE.push(registry.url, repository, "1")
    images = RegistryImages(plain(registry.authority, proxy.authority), stores.catalog)
    image = (await images.pull(f"{registry.authority}/{repository}:1", ACCESS)).image
    pusher = ImagePusher(images, stores.catalog)
    with pytest.raises(InvalidOption, match="digest"):
        await pusher.push(image, f"{proxy.authority}/x@{sha256(b'')}", ACCESS)
    with pytest.raises(Unsupported, match="host"):
        await pusher.push(replace(image, base="host"), f"{proxy.authority}/x:1", ACCESS)
    assert not proxy.seen
    with pytest.raises(RegistryError, match="refuses connections"):
        await pusher.push(image, "127.0.0.1:1/x:1", replace(ACCESS))
