"""Images made in code as OCI layouts and as archives of `docker save`, and a base that runs."""

from __future__ import annotations

import functools
import gzip
import io
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.images.layer_tools import Member, archive, file, folder, sha256, symlink
from smokebox.engine.images.platforms import host_platform

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
PROGRAMS = ("sh", "cat", "echo", "id", "ls", "stat", "env", "pwd", "sleep", "rm", "mkdir", "chmod")


@functools.cache
def small_base() -> bytes:
    """Return a layer with a shell and a few programs of this host."""
    libraries: set[str] = set()
    members = [folder("bin"), folder("etc"), folder("root", 0o700), symlink("sbin", "bin")]
    for name in PROGRAMS:
        path = shutil.which(name)
        if path is None:
            continue
        members.append(file(f"bin/{name}", Path(path).read_bytes(), mode=0o755))
        listed = subprocess.run(["ldd", path], capture_output=True, text=True).stdout
        words = {word for word in listed.split() if word.startswith("/")}
        libraries |= words
    members += [file(one[1:], Path(one).read_bytes(), mode=0o755) for one in sorted(libraries)]
    passwd = b"root:x:0:0::/root:/bin/sh\nworker:x:1000:1000::/srv:/bin/sh\n"
    members.append(file("etc/passwd", passwd))
    members.append(file("etc/group", b"root:x:0:\nworker:x:1000:\n"))
    return archive(members)


def config_of(layers: Sequence[bytes], **settings: object) -> dict[str, Any]:
    return {
        "architecture": host_platform().architecture,
        "os": "linux",
        "config": settings,
        "rootfs": {"type": "layers", "diff_ids": [sha256(layer) for layer in layers]},
    }


class Layout:
    """An OCI layout in a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "blobs/sha256").mkdir(parents=True)
        (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        self.manifests: list[dict[str, Any]] = []

    def blob(self, data: bytes, media_type: str) -> dict[str, Any]:
        (self.path / "blobs" / sha256(data).replace(":", "/")).write_bytes(data)
        return {"mediaType": media_type, "digest": sha256(data), "size": len(data)}

    def document(self, value: Mapping[str, object], media_type: str) -> dict[str, Any]:
        return self.blob(json.dumps(value).encode(), media_type)

    def add(
        self, name: str, layers: Sequence[bytes], config: Mapping[str, object] | None = None
    ) -> str:
        """Add an image, and return the digest of its config."""
        blobs = [self.blob(gzip.compress(layer, 1, mtime=0), LAYER) for layer in layers]
        document = config if config is not None else config_of(layers)
        described = self.document(document, "application/vnd.oci.image.config.v1+json")
        manifest = {"schemaVersion": 2, "config": described, "layers": blobs}
        entry = self.document(manifest, MANIFEST)
        if name:
            entry["annotations"] = {"org.opencontainers.image.ref.name": name}
        self.manifests.append(entry)
        self.write_index()
        digest: str = described["digest"]
        return digest

    def write_index(self) -> None:
        index = {"schemaVersion": 2, "manifests": self.manifests}
        (self.path / "index.json").write_text(json.dumps(index))


def docker_archive(images: Mapping[str, Sequence[bytes]], *, linked: bool = False) -> bytes:
    """Return an archive like those of `docker save`; `linked` layers occur as symlinks."""
    members: list[Member] = []
    documents = []
    for name, layers in images.items():
        config = json.dumps(config_of(layers)).encode()
        paths = []
        for number, layer in enumerate(layers):
            first, path = f"store/{number}.tar", f"{name.replace(':', '-')}/{number}/layer.tar"
            if linked:
                members += [file(first, layer), symlink(path, f"../../{first}")]
            else:
                members.append(file(path, layer))
            paths.append(path)
        members.append(file(f"{sha256(config)[7:]}.json", config))
        documents.append(
            {"Config": f"{sha256(config)[7:]}.json", "RepoTags": [name], "Layers": paths}
        )
    members.append(file("manifest.json", json.dumps(documents).encode()))
    return archive(members)


def tar_directory(path: Path) -> bytes:
    """Return a directory as an archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in sorted(os.listdir(path)):
            tar.add(path / name, arcname=name)
    return buffer.getvalue()
