"""Moving and copying files below a root."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING

import pytest

from smokebox.engine.files import operations
from smokebox.errors import (
    PathError,
    PathIsDirectory,
    PathNotDirectory,
    PathNotFound,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from smokebox.engine.files.rooted_files import RootedFiles

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="changing owners needs root")


class TestMoveAndCopy:
    def test_rename_replaces_files_only(self, files: RootedFiles, root: Path) -> None:
        (root / "a").write_text("a")
        (root / "b").write_text("b")
        (root / "d").mkdir()
        operations.rename(files, "/a", "/b")
        assert (root / "b").read_text() == "a"
        with pytest.raises(PathIsDirectory) as caught:
            operations.rename(files, "/b", "/d")
        assert caught.value.path == "/d"
        with pytest.raises(PathNotDirectory):
            operations.rename(files, "/d", "/b")
        with pytest.raises(PathError, match="into itself"):
            operations.rename(files, "/d", "/d/e")
        with pytest.raises(PathNotFound) as missing:
            operations.rename(files, "/nope", "/x")
        assert missing.value.path == "/nope"

    def test_move_into_an_existing_directory(self, files: RootedFiles, root: Path) -> None:
        (root / "a").write_text("a")
        (root / "d").mkdir()
        assert operations.move(files, "/a", "/d") == "/d/a"
        assert operations.move(files, "/d/a", "/b") == "/b"
        assert (root / "b").read_text() == "a"

    def test_rename_moves_a_symlink_itself(self, files: RootedFiles, root: Path) -> None:
        (root / "link").symlink_to("nowhere")
        operations.rename(files, "/link", "/moved")
        assert os.readlink(root / "moved") == "nowhere"

    def test_copy_file(self, files: RootedFiles, root: Path) -> None:
        (root / "a").write_bytes(os.urandom(100_000))
        (root / "a").chmod(0o751)
        (root / "link").symlink_to("a")
        operations.copy(files, "/link", "/x/y")
        assert (root / "x/y").read_bytes() == (root / "a").read_bytes()
        assert (root / "x/y").stat().st_mode & 0o777 == 0o751

    def test_copy_tree(self, files: RootedFiles, root: Path) -> None:
        (root / "d/e").mkdir(parents=True)
        (root / "d/e/f").write_text("f")
        (root / "d/link").symlink_to("e/f")
        (root / "d/e").chmod(0o500)
        os.mkfifo(root / "d/pipe")
        operations.copy(files, "/d", "/copy", recursive=True)
        assert (root / "copy/e/f").read_text() == "f"
        assert os.readlink(root / "copy/link") == "e/f"
        assert (root / "copy/e").stat().st_mode & 0o777 == 0o500
        assert sorted(os.listdir(root)) == ["copy", "d"]
        with pytest.raises(PathIsDirectory):
            operations.copy(files, "/d", "/other")
        with pytest.raises(PathError, match="into itself"):
            operations.copy(files, "/d", "/d/x", recursive=True)

    def test_copy_merges_into_an_existing_directory(self, files: RootedFiles, root: Path) -> None:
        (root / "d").mkdir()
        (root / "d/a").write_text("fresh")
        (root / "to").mkdir()
        (root / "to/a").write_text("old")
        (root / "to/b").write_text("kept")
        operations.copy(files, "/d", "/to", recursive=True)
        assert ((root / "to/a").read_text(), (root / "to/b").read_text()) == ("fresh", "kept")

    def test_failed_copy_leaves_nothing(self, files: RootedFiles, root: Path) -> None:
        (root / "d").mkdir()
        (root / "d/a").touch()
        with socket.socket(socket.AF_UNIX) as server:
            fd = os.open(root / "d", os.O_PATH)
            server.bind(f"/proc/self/fd/{fd}/s")
            os.close(fd)
        with pytest.raises(PathError):
            operations.copy(files, "/d", "/copy", recursive=True)
        assert os.listdir(root) == ["d"]

    def test_copy_keeps_holes(self, files: RootedFiles, root: Path) -> None:
        with open(root / "sparse", "wb") as file:
            file.truncate(1 << 30)
            file.seek(1 << 29)
            file.write(b"middle")
        operations.copy(files, "/sparse", "/copy")
        found = (root / "copy").stat()
        assert (found.st_size, found.st_blocks * 512 < 1 << 20) == (1 << 30, True)
        assert files.read_range("/copy", 1 << 29, 6) == b"middle"

    @as_root
    def test_rename_to_another_file_system_copies_owner_and_time(
        self, files: RootedFiles, root: Path
    ) -> None:
        with other_filesystem(root / "other"):
            (root / "d").mkdir()
            (root / "d/f").write_text("f")
            os.chown(root / "d/f", 1234, 1234)
            os.utime(root / "d/f", (1, 1))
            operations.rename(files, "/d", "/other/d")
            found = (root / "other/d/f").stat()
            assert (found.st_uid, found.st_mtime) == (1234, 1)
            operations.rename(files, "/other/d/f", "/f")
            assert (root / "f").read_text() == "f"
            assert sorted(os.listdir(root)) == ["f", "other"]
            with pytest.raises(PathIsDirectory):
                operations.rename(files, "/f", "/other/d")


@contextlib.contextmanager
def other_filesystem(path: Path) -> Iterator[None]:
    path.mkdir()
    if os.system(f"mount -t tmpfs none '{path}'") != 0:
        pytest.skip("mounting is not permitted here")
    try:
        yield
    finally:
        os.system(f"umount '{path}'")
