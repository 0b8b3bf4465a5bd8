"""`ReadOnlyFilesystem`: all entries are visible, and changes are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from smokebox.errors import AccessDenied, PathNotFound
from smokebox.sandbox.filesystems import MemoryFilesystem, ReadOnlyFilesystem

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def inner() -> MemoryFilesystem:
    """Return a filesystem with a file, a directory and a symlink."""
    files = MemoryFilesystem()
    files.mkdir("/d")
    files.write("/d/a", b"x")
    files.symlink("d", "/link")
    return files


def test_all_entries_are_visible(inner: MemoryFilesystem) -> None:
    files = ReadOnlyFilesystem(inner)
    assert (files.read("/d/a"), files.readlink("/link")) == (b"x", "d")
    assert files.listdir("/") == inner.listdir("/")
    assert (files.lstat("/d"), files.peek("/no")) == (inner.lstat("/d"), None)
    with pytest.raises(PathNotFound):
        files.read("/no")


def test_every_change_is_refused(inner: MemoryFilesystem) -> None:
    files = ReadOnlyFilesystem(inner)
    changes: list[Callable[[], object]] = [
        lambda: files.write("/d/a", b"y"),
        lambda: files.append("/d/a", b"y"),
        lambda: files.mkdir("/e"),
        lambda: files.makedirs("/e/f"),
        lambda: files.remove("/d", recursive=True),
        lambda: files.rename("/d", "/e"),
        lambda: files.copy("/d", "/e"),
        lambda: files.symlink("x", "/l"),
        lambda: files.chmod("/d/a", 0o600),
        lambda: files.touch("/d/a", 1.0),
    ]
    for change in changes:
        with pytest.raises(AccessDenied, match="read-only"):
            change()
    assert (inner.read("/d/a"), sorted(inner.listdir("/"))) == (b"x", ["d", "link"])
