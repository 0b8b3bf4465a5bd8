"""File systems with project quotas, made for a test, and a small image for sandboxes on them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from smokebox.engine.host import Host

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

Kind = Literal["xfs", "ext4", "plain"]

NO_KERNEL_QUOTAS = "this kernel has no project quotas: run in user-mode Linux instead"
_MAKE = {
    "xfs": ["mkfs.xfs", "-q"],
    "ext4": ["mkfs.ext4", "-q", "-O", "project,quota", "-E", "quotatype=prjquota"],
    "plain": ["mkfs.ext4", "-q"],
}
_COMMANDS = ("sh", "dd", "ls", "cat", "rm", "mkdir", "ln", "sleep", "mv", "df", "head", "tail")


def make_file_system(directory: Path, kind: Kind, *, size: int = 1 << 30) -> Path:
    """Create and mount a file system with project quotas, or skip the test."""
    if os.geteuid() != 0 or shutil.which(_MAKE[kind][0]) is None:
        pytest.skip(f"mounting a file system needs root and {_MAKE[kind][0]}")
    image, target = directory / f"{kind}.img", directory / kind
    target.mkdir()
    with image.open("wb") as file:
        file.truncate(size)
    subprocess.run([*_MAKE[kind], str(image)], check=True, capture_output=True)
    options = "loop" if kind == "plain" else "loop,prjquota"
    mount = ["mount", "-o", options, str(image), str(target)]
    done = subprocess.run(mount, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{NO_KERNEL_QUOTAS} ({done.stderr.strip()[:80]})")
    return target


def unmount(path: Path) -> None:
    """Unmount a file system of a test, also if a sandbox is just about to end."""
    subprocess.run(["umount", "-l", path], check=True)
    # The directories of tests stay for a while.
    path.with_suffix(".img").unlink()


def make_image(directory: Path) -> Path:
    """Create the root directory of an image with a static shell and little else."""
    shell = shutil.which("busybox")
    if shell is None:
        pytest.skip("needs busybox (package busybox-static)")
    for name in ("bin", "usr", "etc", "lib", "tmp"):
        (directory / name).mkdir(parents=True)
    shutil.copy(shell, directory / "bin" / "busybox")
    for name in _COMMANDS:
        (directory / "bin" / name).symlink_to("busybox")
    return directory


@contextlib.asynccontextmanager
async def open_host(
    home: Path, image: Path, *, storage_pool: int | str | None = None
) -> AsyncIterator[Host]:
    """Open an engine whose sandboxes can use that image, as `dir:small`."""
    layers = image.parent / "layers"
    images = {"small": str(image)}
    async with await Host.open(
        home, pool=0, images=layers, directories=images, storage_pool=storage_pool
    ) as host:
        yield host


def add_python(image: Path) -> None:
    """Add an interpreter and the modules that attacks need to an image."""
    program = Path(sys.executable).resolve()
    home = Path(sys.base_prefix)
    library = f"lib/python3.{sys.version_info.minor}"
    linked = [program, *(home / library).glob("lib-dynload/_ctypes.*")]
    listed = subprocess.run(["ldd", *linked], check=True, capture_output=True, text=True).stdout
    for path in {str(program), *re.findall(r"(/\S+) \(0x", listed)}:
        _copy(Path(path), image)
    (image / "bin" / "python3").symlink_to(program)
    (image / str(home / library).lstrip("/")).mkdir(parents=True)
    for source in (home / library).glob("*.py"):
        shutil.copy(source, image / str(source).lstrip("/"))
    for folder in ("encodings", "collections", "ctypes", "json", "re", "lib-dynload"):
        source = home / library / folder
        shutil.copytree(source, image / str(source).lstrip("/"), ignore=_IGNORE)


_IGNORE = shutil.ignore_patterns("__pycache__", "test*", "_test*")


def _copy(source: Path, image: Path) -> None:
    target = image / str(source).lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


def kernel_has_quotas(directory: Path) -> bool:
    """Return whether this kernel can mount a file system of each kind."""
    for kind in ("xfs", "ext4"):
        try:
            unmount(make_file_system(directory, kind, size=512 << 20))
        except pytest.skip.Exception:
            return False
    return True
