"""Images unpacked by us and by umoci are the same tree, and so are those that we packed."""

from __future__ import annotations

import os
import random
import shutil
import stat
import subprocess
from typing import TYPE_CHECKING

import pytest

from engine.images.layer_tools import Member, archive, file, folder, hard_link, symlink, tree
from engine.images.oci_tools import Layout
from smokebox.engine.host import Host

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for owners"),
    pytest.mark.skipif(shutil.which("umoci") is None, reason="needs umoci"),
    pytest.mark.timeout(90),
]

# What every sandbox has of its own, and what only an image's maker cares for.
OURS = {"dev", "proc", "run", "sys", "tmp", "workspace", "opt"}


class Model:
    """Random layers, each a change of what the ones before it made."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.files: set[str] = set()
        self.folders: set[str] = set()

    def layer(self) -> list[Member]:
        members: dict[str, Member] = {}
        made: list[str] = []
        for _ in range(self.random.randrange(4, 25)):
            parents = sorted(self.folders) or [""]
            parent = self.random.choice(["", *parents])
            name = f"{parent}/{self.random.choice('abcdefgh')}".lstrip("/")
            kind = self.random.randrange(8)
            options = {
                "mode": self.random.choice([0o644, 0o755, 0o600, 0o4755]),
                "uid": self.random.choice([0, 1, 1000]),
                "gid": self.random.choice([0, 100]),
                "mtime": 1_500_000_000 + self.random.randrange(10**6),
            }
            if name in self.folders or name in members:
                if kind == 0 and name in self.folders and name not in members:
                    self.forget(name)
                    folder_name, _, last = name.rpartition("/")
                    hidden = f"{folder_name}/.wh.{last}".lstrip("/")
                    members[name] = file(hidden)
                continue
            if any(name.startswith(f"{one}/") for one in members if one not in self.folders):
                continue
            if name in self.files and kind < 2:
                self.forget(name)
                folder_name, _, last = name.rpartition("/")
                members[name] = file(f"{folder_name}/.wh.{last}".lstrip("/"))
            elif kind == 2:
                self.forget(name)
                self.folders.add(name)
                members[name] = folder(name, **options)
            elif kind == 3:
                self.files.add(name)
                options.pop("mode")
                members[name] = symlink(name, "anywhere/" + name, **options)
            elif kind == 4 and made:
                self.files.add(name)
                members[name] = hard_link(name, self.random.choice(made))
            else:
                self.files.add(name)
                data = self.random.randbytes(self.random.randrange(3000))
                members[name] = file(name, data, **options)
                made.append(name)
        return list(members.values())

    def forget(self, name: str) -> None:
        for names in (self.files, self.folders):
            for one in [n for n in names if n == name or n.startswith(f"{name}/")]:
                names.discard(one)


def by_umoci(layout: Path, name: str, bundle: Path) -> dict[str, tuple[object, ...]]:
    command = ["umoci", "unpack", "--image", f"{layout}:{name}", str(bundle)]
    subprocess.run(command, check=True, capture_output=True)
    return without_ours(tree(bundle / "rootfs", skip=OURS))


def without_ours(found: dict[str, tuple[object, ...]]) -> dict[str, tuple[object, ...]]:
    """Leave out what is ours, times of directories, and owners beyond those of the image."""
    kept: dict[str, tuple[object, ...]] = {}
    for name, (kind, mode, uid, gid, content, at) in found.items():
        if name.partition("/")[0] not in OURS and name != "etc":
            size = "" if stat.S_ISDIR(int(str(kind))) else at
            kept[name] = (kind, mode, uid, gid, content, size)
    for name in ("etc/hosts", "etc/hostname", "etc/resolv.conf"):
        kept.pop(name, None)
    return kept


async def by_us(host: Host, image: str) -> dict[str, tuple[object, ...]]:
    """Return the tree that a sandbox sees."""
    sandbox = host.sandbox(f"box-{image}", image=image)
    async with sandbox.lifecycle.use() as run:
        first = run.jail.owner.uid
        found = tree(f"/proc/self/fd/{run.jail.root}/.", skip=OURS)
    await sandbox.destroy()
    return without_ours(
        {
            name: (kind, mode, int(str(uid)) - first, int(str(gid)) - first, content, at)
            for name, (kind, mode, uid, gid, content, at) in found.items()
        }
    )


async def repacked(host: Host, name: str) -> list[bytes]:
    """Return the layers of an image as we pack them, the lowest first."""
    store = host.images.layer_store
    image = await host.images.catalog.find(name)
    assert image is not None
    archives = []
    for reference in reversed(image.layers):
        layer = store.get(reference.id)
        assert layer is not None
        archives.append(b"".join([chunk async for chunk in store.pack(layer)]))
    return archives


async def compare(tmp_path: Path, layers: Sequence[bytes]) -> None:
    layout = Layout(tmp_path / "layout")
    layout.add("original", layers)
    async with await Host.open(tmp_path / "home", pool=0) as host:
        await host.images.load_oci(layout.path, reference="original")
        expected = by_umoci(layout.path, "original", tmp_path / "original")
        assert await by_us(host, "original") == expected
        layout.add("packed", await repacked(host, "original"))
        assert by_umoci(layout.path, "packed", tmp_path / "packed") == expected


@pytest.mark.parametrize("seed", range(8))
async def test_random_images(tmp_path: Path, seed: int) -> None:
    model = Model(seed)
    await compare(tmp_path, [archive(model.layer()) for _ in range(6)])


@pytest.mark.timeout(300)
async def test_debian(tmp_path: Path, debian_base: Path) -> None:
    top = archive([file("usr/share/.wh.doc"), file("usr/bin/added", b"1", mode=0o755)])
    await compare(tmp_path, [debian_base.read_bytes(), top])
