"""Runs a command in an image by unshare, overlay and chroot, without the engine."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from smokebox.engine.images.store import ImageStore, open_store

if TYPE_CHECKING:
    from smokebox.engine.images.image import Image


@dataclass
class Guest:
    """An image store, and images entered by unshare and chroot."""

    home: Path

    def get(self, name: str, store: ImageStore | None = None) -> Image:
        return asyncio.run((store or open_store(str(self.home / "images"))).get(name))

    def run(self, image: Image, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run a program in the image as root of a user namespace, with a separate upper layer."""
        root = Path(tempfile.mkdtemp(dir=self.home))
        targets = sorted({layer.target for layer in image.layers})
        mounts = [self._mount(image, target, f"{root}{target}") for target in targets]
        env = [f"{name}={value}" for name, value in image.env.items()]
        return self._unshare(
            *mounts,
            f"mount --rbind /dev {root}/dev; mount --rbind /proc {root}/proc",
            shlex.join(["exec", "chroot", str(root), "/usr/bin/env", "-i", *env, *argv]),
        )

    def run_outside(
        self, image: Image, target: str, *argv: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of the host in the directory of the image at `target`."""
        root = tempfile.mkdtemp(dir=self.home)
        mount = self._mount(image, target, root)
        return self._unshare(mount, f"cd {root}", shlex.join(["exec", *argv]))

    def _mount(self, image: Image, target: str, at: str) -> str:
        upper, work = (tempfile.mkdtemp(dir=self.home) for _ in range(2))
        os.chmod(upper, 0o755)
        lower = ":".join(layer.path for layer in image.layers if layer.target == target)
        options = f"userxattr,lowerdir={lower},upperdir={upper},workdir={work}"
        return shlex.join(["mount", "-t", "overlay", "box", "-o", options, at])

    def _unshare(self, *lines: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["unshare", "-Urm", "sh", "-euc", "\n".join(lines)],
            capture_output=True,
            text=True,
            env={"PATH": os.defpath + ":/usr/sbin:/sbin"},
            cwd="/",
            timeout=15,
        )


def can_unshare() -> bool:
    """Return True if this user may create user namespaces."""
    return subprocess.run(["unshare", "-Urm", "true"], capture_output=True, cwd="/").returncode == 0
