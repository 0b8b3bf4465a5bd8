"""Limits of the memory filesystem: a refused call changes nothing."""

from __future__ import annotations

import pytest

from smokebox.errors import FileTooLarge, InvalidOption, PathError, StorageFull
from smokebox.sandbox.filesystems import MemoryFilesystem


def test_write_over_the_quota_is_refused_and_changes_nothing() -> None:
    files = MemoryFilesystem(quota=10)
    files.write("/a", b"123456")
    with pytest.raises(StorageFull, match="4 of 10 are free"):
        files.write("/b", b"12345")
    with pytest.raises(StorageFull):
        files.append("/a", b"12345")
    with pytest.raises(StorageFull):
        files.symlink("12345", "/l")
    assert (files.read("/a"), list(files.listdir("/"))) == (b"123456", ["a"])


def test_replacing_a_file_counts_only_the_difference() -> None:
    files = MemoryFilesystem(quota=10)
    files.write("/a", b"12345678")
    files.write("/a", b"1234567890")
    assert files.used == 10


def test_removing_frees_the_quota() -> None:
    files = MemoryFilesystem(quota=10, max_files=3)
    files.makedirs("/d/e")
    files.write("/d/e/f", b"1234567890")
    files.remove("/d", recursive=True)
    assert (files.used, files.files) == (0, 0)
    files.write("/a", b"1234567890")


def test_replacing_by_rename_frees_the_quota() -> None:
    files = MemoryFilesystem(quota=10)
    files.write("/a", b"12345")
    files.write("/b", b"12345")
    files.rename("/a", "/b")
    assert (files.used, files.files) == (5, 1)


def test_file_over_the_limit_is_refused() -> None:
    files = MemoryFilesystem(max_file_size=4)
    files.write("/a", b"1234")
    with pytest.raises(FileTooLarge, match="max_file_size="):
        files.append("/a", b"5")
    with pytest.raises(FileTooLarge):
        files.write("/b", b"12345")
    assert (files.read("/a"), files.peek("/b")) == (b"1234", None)


def test_directories_and_symlinks_count_as_files() -> None:
    files = MemoryFilesystem(max_files=2)
    files.mkdir("/d")
    files.symlink("x", "/l")
    with pytest.raises(StorageFull, match="max_files="):
        files.write("/a", b"")
    with pytest.raises(StorageFull, match="max_files="):
        files.mkdir("/e")
    assert sorted(files.listdir("/")) == ["d", "l"]


def test_name_has_at_most_255_bytes() -> None:
    files = MemoryFilesystem()
    files.write("/" + "n" * 255, b"")
    with pytest.raises(PathError, match="255 bytes"):
        files.write("/" + "é" * 128, b"")
    with pytest.raises(PathError):
        files.rename("/" + "n" * 255, "/" + "n" * 256)


def test_none_means_no_limit() -> None:
    files = MemoryFilesystem(quota=None, max_file_size=None, max_files=None)
    files.write("/a", b"x")
    assert files.read("/a") == b"x"


@pytest.mark.parametrize("value", [-1, True, "5", 1.5])
def test_limit_must_be_a_number(value: object) -> None:
    with pytest.raises(InvalidOption, match="quota"):
        MemoryFilesystem(quota=value)  # type: ignore[arg-type]


def test_read_data_does_not_change_with_the_file() -> None:
    files = MemoryFilesystem()
    files.append("/a", b"1")
    files.append("/a", b"2")
    read = files.read("/a")
    files.append("/a", b"3")
    assert (read, files.read("/a")) == (b"12", b"123")


def test_written_content_is_independent_of_the_buffer() -> None:
    files = MemoryFilesystem()
    buffer = bytearray(b"abc")
    files.write("/a", bytes(buffer))
    buffer[0] = 0
    assert files.read("/a") == b"abc"


def test_directory_records_its_modification_time() -> None:
    files = MemoryFilesystem()
    files.mkdir("/d")
    files.touch("/d", 1.0)
    files.write("/d/a", b"")
    assert files.lstat("/d").mtime > 1.0


def test_very_deep_directories_work() -> None:
    files = MemoryFilesystem()
    path = ""
    for _ in range(3000):
        path += "/d"
        files.mkdir(path)
    files.rename("/d", "/e")
    files.remove("/e", recursive=True)
    assert files.files == 0
