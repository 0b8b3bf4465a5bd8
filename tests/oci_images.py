"""Small container images made in code, and their upload to a registry without our client."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import platform
import tarfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import ClientSession

from registry_server import put_blob, put_manifest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from smokebox.engine.images.registry.access import Credentials

OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
OCI_LAYER = "application/vnd.oci.image.layer.v1.tar"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_INDEX = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_CONFIG = "application/vnd.docker.container.image.v1+json"
DOCKER_LAYER = "application/vnd.docker.image.rootfs.diff.tar"
MACHINE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


def sha256(data: bytes) -> str:
    """Return a digest as registries write it."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def tar(files: Mapping[str, bytes | str | None]) -> bytes:
    """Return a tar archive: bytes are files, text is a link's target, None is a directory."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.mode = 0o755
            if content is None:
                member.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
            else:
                member.size = len(content)
            archive.addfile(member, io.BytesIO(content if isinstance(content, bytes) else b""))
    return buffer.getvalue()


@dataclass(frozen=True, kw_only=True)
class TestImage:
    """An image of layers, each an uncompressed tar archive, the lowest first."""

    __test__ = False

    layers: Sequence[bytes]
    config: dict[str, Any] = field(default_factory=dict)
    docker: bool = False
    compressed: bool = True
    architecture: str = MACHINE
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def blobs(self) -> list[bytes]:
        """The layers as a registry stores them."""
        if not self.compressed:
            return list(self.layers)
        return [gzip.compress(one, compresslevel=1, mtime=0) for one in self.layers]

    @property
    def config_blob(self) -> bytes:
        """The configuration."""
        document = {
            "architecture": self.architecture,
            "os": "linux",
            "config": self.config,
            "rootfs": {"type": "layers", "diff_ids": [sha256(one) for one in self.layers]},
        }
        return json.dumps(document).encode()

    @property
    def media_type(self) -> str:
        """Media type of the manifest."""
        return DOCKER_MANIFEST if self.docker else OCI_MANIFEST

    @property
    def manifest(self) -> bytes:
        """The manifest."""
        suffix = "" if not self.compressed else (".gzip" if self.docker else "+gzip")
        layer = (DOCKER_LAYER if self.docker else OCI_LAYER) + suffix
        document = {
            "schemaVersion": 2,
            "mediaType": self.media_type,
            "config": _descriptor(DOCKER_CONFIG if self.docker else OCI_CONFIG, self.config_blob),
            "layers": [_descriptor(layer, one) for one in self.blobs],
            **self.extra,
        }
        return json.dumps(document).encode()

    def push(self, registry: str, repository: str, tag: str) -> str:
        """Upload it to a registry, and return the digest of its manifest."""
        for blob in (*self.blobs, self.config_blob):
            put_blob(registry, repository, blob)
        return put_manifest(registry, repository, tag, self.manifest, self.media_type)


def push_index(
    registry: str, repository: str, tag: str, images: Sequence[TestImage], *, docker: bool = False
) -> str:
    """Upload images of several architectures under one tag, and return the index's digest."""
    manifests = []
    for image in images:
        digest = image.push(registry, repository, f"{tag}-{image.architecture}")
        manifests.append(
            {
                "mediaType": image.media_type,
                "digest": digest,
                "size": len(image.manifest),
                "platform": {"os": "linux", "architecture": image.architecture},
            }
        )
    media_type = DOCKER_INDEX if docker else OCI_INDEX
    document = {"schemaVersion": 2, "mediaType": media_type, "manifests": manifests}
    return put_manifest(registry, repository, tag, json.dumps(document).encode(), media_type)


def _descriptor(media_type: str, data: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": sha256(data), "size": len(data)}


def busybox() -> TestImage:
    """Return an image with a static shell."""
    with open("/bin/busybox", "rb") as file:
        program = file.read()
    names = ("sh", "cat", "echo", "ls", "env", "pwd", "mkdir", "sleep")
    files: dict[str, bytes | str | None] = {"bin": None, "bin/busybox": program, "etc": None}
    files |= {f"bin/{name}": "busybox" for name in names}
    passwd = tar({"etc/passwd": b"root:x:0:0:root:/root:/bin/sh\n", "motd": b"hello"})
    return TestImage(layers=[tar(files), passwd], config={"Env": ["GREETING=hi"]})


async def push_with_password(
    image: TestImage, authority: str, repository: str, credentials: Credentials
) -> None:
    """Upload an image to a registry that needs a password, under the tag 1."""
    pair = base64.b64encode(f"{credentials.username}:{credentials.password}".encode()).decode()
    base = f"http://{authority}/v2/{repository}"
    async with ClientSession(headers={"Authorization": f"Basic {pair}"}) as session:
        for blob in (*image.blobs, image.config_blob):
            async with session.post(f"{base}/blobs/uploads/") as started:
                location = started.headers["Location"]
            async with session.put(
                f"{location}&digest={sha256(blob)}", data=io.BytesIO(blob)
            ) as response:
                assert response.status == 201
        headers = {"Content-Type": image.media_type}
        for tag in ("1", "12"):
            url = f"{base}/manifests/{tag}"
            async with session.put(url, data=image.manifest, headers=headers) as response:
                assert response.status == 201
