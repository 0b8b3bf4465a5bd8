"""The devices that a shell expects in /dev."""

from __future__ import annotations

import pytest

from smokebox.errors import AccessDenied, PathIsDirectory, PathNotDirectory, PathNotFound
from smokebox.sandbox.filesystems.memory import DeviceFilesystem


def test_null_discards_writes_and_reads_empty() -> None:
    files = DeviceFilesystem()
    files.write("/null", b"gone")
    files.append("/null", b"gone")
    assert files.read("/null") == b""


def test_zero_and_random_return_bytes() -> None:
    files = DeviceFilesystem()
    assert set(files.read("/zero")) == {0}
    assert files.read("/urandom") != files.read("/random")


def test_there_are_no_other_devices() -> None:
    files = DeviceFilesystem()
    assert sorted(files.listdir("/")) == ["null", "random", "urandom", "zero"]
    with pytest.raises(PathNotFound):
        files.write("/disk", b"")
    with pytest.raises(PathIsDirectory):
        files.read("/")
    with pytest.raises(PathNotDirectory):
        files.lstat("/null/x")
    with pytest.raises(PathNotDirectory):
        files.listdir("/null")


def test_devices_cannot_be_removed() -> None:
    files = DeviceFilesystem()
    with pytest.raises(AccessDenied):
        files.remove("/null")
    with pytest.raises(AccessDenied):
        files.mkdir("/d")
