"""Random operations have the same results on all filesystems; the host's is the reference."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pytest

from smokebox.errors import SmokeboxError
from smokebox.sandbox.filesystems import (
    Filesystem,
    HostFilesystem,
    MemoryFilesystem,
    OverlayFilesystem,
)
from smokebox.sandbox.filesystems.native import NativeFilesystem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

Change = tuple[str, str, str, int]


def any_change(source: random.Random) -> Change:
    call = source.choice(
        (
            "write",
            "append",
            "mkdir",
            "remove",
            "prune",
            "rename",
            "copy",
            "symlink",
            "chmod",
            "makedirs",
        )
    )
    paths = ["/".join(["", *source.choices("abc", k=source.choice([1, 1, 2, 2, 3]))]) for _ in "12"]
    return call, paths[0], paths[1], source.randrange(256)


def outcome(files: Filesystem, change: Change) -> str:
    """Apply a change and return its outcome as the name of an error."""
    call, path, other, number = change
    calls: dict[str, Callable[[], None]] = {
        "write": lambda: files.write(path, bytes([number]) * 3),
        "append": lambda: files.append(path, bytes([number])),
        "mkdir": lambda: files.mkdir(path),
        "remove": lambda: files.remove(path),
        "prune": lambda: files.remove(path, recursive=True),
        "rename": lambda: files.rename(path, other),
        "copy": lambda: files.copy(path, other),
        "symlink": lambda: files.symlink(other, path),
        "chmod": lambda: files.chmod(path, 0o700 + number % 8),
        "makedirs": lambda: files.makedirs(path),
    }
    try:
        calls[call]()
    except SmokeboxError as error:
        return type(error).__name__
    return "done"


def all_entries(files: Filesystem) -> dict[str, object]:
    """Return all entries of a filesystem, except those the native one starts with."""
    found: dict[str, object] = {}
    pending = ["/a", "/b", "/c"]
    for path in pending:
        entry = files.peek(path)
        if entry is None:
            continue
        if entry.kind == "directory":
            found[path] = (entry.mode, sorted(files.listdir(path)))
            pending += [f"{path}/{name}" for name in files.listdir(path)]
        elif entry.kind == "file":
            found[path] = (entry.mode, files.read(path))
        else:
            found[path] = files.readlink(path)
    return found


@pytest.fixture(autouse=True)
def default_umask() -> Iterator[None]:
    """Make the host create files with the permissions that memory gives."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.parametrize("seed", range(20))
def test_random_operations_agree_across_filesystems(seed: int, tmp_path: Path) -> None:
    for name in ("host", "lower"):
        (tmp_path / name).mkdir()
    source = random.Random(seed)
    before = [any_change(source) for _ in range(25)]
    lower = HostFilesystem(tmp_path / "lower", read_only=False)
    plain = [
        HostFilesystem(tmp_path / "host", read_only=False),
        MemoryFilesystem(),
        NativeFilesystem(),
    ]
    for change in before:
        assert len({outcome(files, change) for files in (lower, *plain)}) == 1
    entries = all_entries(lower)
    every = [*plain, OverlayFilesystem(lower)]
    for change in [any_change(source) for _ in range(60)]:
        assert len({outcome(files, change) for files in every}) == 1, change
    assert [all_entries(files) for files in every] == [all_entries(every[0])] * 4
    assert all_entries(lower) == entries
