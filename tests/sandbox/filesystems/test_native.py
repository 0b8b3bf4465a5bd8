"""Limits of the shell's own filesystem, as Smokebox errors."""

from __future__ import annotations

import bashkit
import pytest

from smokebox.errors import FileTooLarge, InvalidPath, PathExists, StorageFull
from smokebox.sandbox.filesystems.native import MAX_FILE_SIZE, MAX_FILES, NativeFilesystem


def test_shell_sees_the_same_files() -> None:
    files = NativeFilesystem()
    shell = bashkit.Bash()
    shell.mount("/mnt", files.native)
    files.write("/a", b"from outside\n")
    assert shell.execute_sync("cat /mnt/a; echo inside > /mnt/b").stdout == "from outside\n"
    assert files.read("/b") == b"inside\n"


def test_file_over_the_limit_is_refused() -> None:
    files = NativeFilesystem()
    files.write("/a", b"kept")
    with pytest.raises(FileTooLarge, match=str(MAX_FILE_SIZE)):
        files.write("/a", bytes(MAX_FILE_SIZE + 1))
    assert files.read("/a") == b"kept"


def test_full_filesystem_refuses_writes() -> None:
    files = NativeFilesystem()
    data = bytes(MAX_FILE_SIZE)
    with pytest.raises(StorageFull, match=str(MAX_FILES)):
        for number in range(11):
            files.write(f"/{number}", data)


@pytest.mark.parametrize("name", ["new\nline", "\x01", "n" * 256])
def test_names_that_the_shell_refuses_are_invalid(name: str) -> None:
    files = NativeFilesystem()
    for call in (files.mkdir, files.lstat, lambda p: files.write(p, b"")):
        with pytest.raises(InvalidPath):
            call(f"/{name}")


def test_symlink_does_not_replace_an_existing_entry() -> None:
    files = NativeFilesystem()
    files.write("/a", b"kept")
    with pytest.raises(PathExists):
        files.symlink("x", "/a")
    assert files.read("/a") == b"kept"
