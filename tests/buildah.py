"""Debian's buildah as an oracle: builds of the same Dockerfile, and the tree that results."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

from building import BASE, Entry, Files, Tree, base_tar, read_tree

if TYPE_CHECKING:
    from pathlib import Path

ULIMITS = ["--ulimit", "nofile=10000:10000", "--ulimit", "nproc=4096:4096"]


class Buildah:
    """A storage of buildah in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._storage = ["--root", f"{directory}/root", "--runroot", f"{directory}/run"]
        self.build("FROM scratch\nADD base.tar /\n", {"base.tar": base_tar()}, BASE)

    def build(self, text: str, files: Files, name: str, *, cache: bool = False) -> None:
        """Build a Dockerfile with a context; with `cache`, steps are cached as layers."""
        context = self._directory / "context"
        shutil.rmtree(context, ignore_errors=True)
        write_files(context, files)
        (context / "Dockerfile.built").write_text(text)
        self._run(
            "build", "--isolation", "chroot", *ULIMITS, f"--layers={'true' if cache else 'false'}",
            "-f", str(context / "Dockerfile.built"), "-t", name, str(context),
        )  # fmt: skip

    def tree(self, name: str) -> Tree:
        """Return the files of an image."""
        container = self._run("from", "--pull-never", name)
        try:
            top = os.open(self._run("mount", container), os.O_RDONLY | os.O_DIRECTORY)
            try:
                return read_tree(top, 0, skip=True)
            finally:
                os.close(top)
        finally:
            self._run("umount", container)
            self._run("rm", container)

    def close(self) -> None:
        """Unmount everything."""
        self._run("umount", "--all")

    def _run(self, command: str, *arguments: str) -> str:
        done = subprocess.run(
            ["buildah", *self._storage, "--storage-driver", "overlay", command, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"buildah {command}: {done.stderr[-2000:]}"
        return done.stdout.strip()


def write_files(directory: Path, files: Files) -> None:
    """Write the files of a context to a directory."""
    directory.mkdir(parents=True)
    folders: list[tuple[Path, int]] = []
    for path, value in files.items():
        plain = isinstance(value, (str, bytes))
        entry = Entry(value.encode() if isinstance(value, str) else value) if plain else value  # type: ignore[arg-type]
        assert isinstance(entry, Entry)
        place = directory / path
        place.parent.mkdir(parents=True, exist_ok=True)
        if entry.directory:
            place.mkdir(exist_ok=True)
            folders.append((place, entry.mode))
        elif entry.target:
            place.symlink_to(entry.target)
        else:
            place.write_bytes(entry.data)
            place.chmod(entry.mode)
            os.utime(place, (entry.mtime, entry.mtime))
    for place, mode in folders:
        place.chmod(mode)
