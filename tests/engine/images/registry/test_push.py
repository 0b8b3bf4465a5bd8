"""Pushed images are what other tools read, and layers that a registry has are not sent."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from engine.images.registry.access_to import LOOPBACK, plain
from oci_images import TestImage, sha256, tar
from smokebox.engine.images.registry.access import RegistryAccess
from smokebox.engine.images.registry.pull import RegistryImages
from smokebox.engine.images.registry.push import ImagePusher
from smokebox.errors import InvalidOption, RegistryError, Unsupported

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


def skopeo(*words: str) -> str:
    command = ["skopeo", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=15).stdout


async def test_a_pushed_image_is_the_same_to_skopeo_and_umoci(
    registry: RegistryServer, repository: str, stores: Stores, tmp_path: Path, proxy: RegistryProxy
) -> None:
    IMAGE.push(registry.url, repository, "1")
    images = RegistryImages(plain(registry.authority, proxy.authority), stores.catalog)
    pulled = await images.pull(f"{registry.authority}/{repository}:1", ACCESS)
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
    layout = tmp_path / "layout"
    skopeo("copy", "-q", "--src-tls-verify=false", f"docker://{name}", f"oci:{layout}:it")
    bundle = tmp_path / "bundle"
    unpack = ["umoci", "unpack", "--rootless", "--image", f"{layout}:it", str(bundle)]
    subprocess.run(unpack, check=True, capture_output=True, timeout=15)
    root = bundle / "rootfs"
    assert (root / "etc/os").read_bytes() == b"base"
    assert (root / "data").read_bytes() == b"x" * 100_000
    assert (root / "link").readlink().as_posix() == "bin/tool"
    assert (root / "bin/tool").stat().st_mode & 0o7777 == 0o755


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
