"""File operations below a root, and their errors."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from typing import TYPE_CHECKING

import pytest

from smokebox.engine.files import operations
from smokebox.engine.files.rooted_files import RootedFiles
from smokebox.engine.jail.spec import Owner
from smokebox.errors import (
    AccessDenied,
    FileTooLarge,
    PathError,
    PathExists,
    PathIsDirectory,
    PathNotDirectory,
    PathNotFound,
    SymlinkLoop,
    Unsupported,
)

if TYPE_CHECKING:
    from pathlib import Path

FIRST = 0x50000000

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="changing owners needs root")


def nested(top: Path, depth: int) -> None:
    """Create nested directories deeper than the longest path."""
    fd = os.open(top, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d" * 100, dir_fd=fd)
        below = os.open("d" * 100, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(os.open("deepest", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    os.close(fd)


class TestRead:
    def test_file(self, files: RootedFiles, root: Path) -> None:
        (root / "a").write_bytes(b"\x00content\xff")
        assert files.read("/a") == b"\x00content\xff"

    def test_empty_file(self, files: RootedFiles, root: Path) -> None:
        (root / "a").touch()
        assert files.read("/a") == b""

    def test_file_above_the_limit_is_refused_by_its_size(
        self, files: RootedFiles, root: Path
    ) -> None:
        with open(root / "big", "wb") as file:
            file.truncate(1 << 40)
        with pytest.raises(FileTooLarge) as caught:
            files.read("/big")
        assert "read_stream" in caught.value.hint

    def test_ranges_of_a_sparse_gigabyte(self, files: RootedFiles, root: Path) -> None:
        with open(root / "sparse", "wb") as file:
            file.truncate(1 << 30)
            file.seek((1 << 29) - 2)
            file.write(b"middle")
        assert files.read_range("/sparse", (1 << 29) - 3, 8) == b"\0middle\0"
        assert files.read_range("/sparse", (1 << 30) - 4) == bytes(4)
        assert files.read_range("/sparse", (1 << 30) - 2, 100) == bytes(2)
        assert files.read_range("/sparse", 1 << 40, 100) == b""
        with pytest.raises(FileTooLarge):
            files.read_range("/sparse", 0)

    def test_chunks(self, files: RootedFiles, root: Path) -> None:
        content = os.urandom(1_000_000)
        (root / "a").write_bytes(content)
        assert b"".join(files.chunks("/a")) == content
        assert b"".join(files.chunks("/a", 500_000, 300_000)) == content[500_000:800_000]

    def test_directory_and_missing_file(self, files: RootedFiles, root: Path) -> None:
        (root / "file").touch()
        with pytest.raises(PathIsDirectory):
            files.read("/")
        with pytest.raises(PathNotFound) as caught:
            files.read("/nope")
        assert caught.value.path == "/nope"
        with pytest.raises(PathNotDirectory):
            files.read("/file/below")

    def test_pipe_does_not_block(self, files: RootedFiles, root: Path) -> None:
        os.mkfifo(root / "pipe")
        with pytest.raises(PathError, match="not a regular file"):
            files.read("/pipe")
        with pytest.raises(PathError):
            files.write("/pipe", b"x")
        with pytest.raises(PathError):
            files.append("/pipe", b"x")

    def test_socket_is_refused(self, files: RootedFiles, root: Path) -> None:
        with socket.socket(socket.AF_UNIX) as server:
            fd = os.open(root, os.O_PATH)
            server.bind(f"/proc/self/fd/{fd}/s")
            os.close(fd)
            with pytest.raises(PathError):
                files.read("/s")

    def test_too_long_name(self, files: RootedFiles) -> None:
        with pytest.raises(PathError):
            files.read("/" + "x" * 300)
        assert not files.exists("/" + "x" * 300)
        assert not files.exists("/x" * 5000)


class TestWrite:
    @pytest.fixture(autouse=True, params=["O_TMPFILE", "temporary name"])
    def _method(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        """Run with O_TMPFILE, and as on kernels and filesystems that ignore it."""
        if request.param == "temporary name":
            monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)

    def test_parents_are_created_and_removed_again_on_failure(
        self, files: RootedFiles, root: Path
    ) -> None:
        files.write("/a/b/c", b"deep")
        assert (root / "a/b/c").read_bytes() == b"deep"
        with pytest.raises(RuntimeError), files.writing("/x/y/z"):
            raise RuntimeError
        with pytest.raises(PathError):
            files.write(f"/n/{'m' * 300}/o", b"")
        assert os.listdir(root) == ["a"]

    def test_write_is_atomic(self, files: RootedFiles, root: Path) -> None:
        (root / "a").write_text("before")
        with pytest.raises(RuntimeError), files.writing("/a") as sink:
            sink.write(b"half")
            raise RuntimeError
        assert (root / "a").read_text() == "before"
        assert os.listdir(root) == ["a"]

    def test_name_taken_meanwhile_is_replaced(self, files: RootedFiles, root: Path) -> None:
        with files.writing("/a") as sink:
            sink.write(b"ours")
            (root / "a").write_text("theirs")
        assert (root / "a").read_text() == "ours"
        assert os.listdir(root) == ["a"]

    def test_parent_removed_meanwhile_fails(self, files: RootedFiles, root: Path) -> None:
        with pytest.raises(PathNotFound), files.writing("/d/a") as sink:
            sink.write(b"ours")
            shutil.rmtree(root / "d")
        assert os.listdir(root) == []

    def test_mode_and_symlink_are_kept(self, files: RootedFiles, root: Path) -> None:
        (root / "real").write_text("old")
        (root / "real").chmod(0o4751)
        (root / "link").symlink_to("real")
        files.write("/link", b"fresh")
        assert (root / "link").is_symlink()
        assert (root / "real").read_text() == "fresh"
        assert stat.S_IMODE((root / "real").stat().st_mode) == 0o4751

    def test_write_creates_the_target_of_a_dangling_symlink(
        self, files: RootedFiles, root: Path
    ) -> None:
        (root / "link").symlink_to("/sub/../later/file")
        (root / "sub").mkdir()
        files.write("/link", b"new")
        assert (root / "later/file").read_bytes() == b"new"

    def test_symlink_loop(self, files: RootedFiles, root: Path) -> None:
        (root / "one").symlink_to("two")
        (root / "two").symlink_to("one")
        with pytest.raises(SymlinkLoop):
            files.write("/one", b"")
        with pytest.raises(SymlinkLoop):
            files.read("/one")

    @pytest.mark.parametrize("path", ["/", "/d", "/to-d", "/to-slash", "/to-parent"])
    def test_directory_is_not_replaced(self, files: RootedFiles, root: Path, path: str) -> None:
        (root / "d").mkdir()
        (root / "to-d").symlink_to("d")
        (root / "to-slash").symlink_to("d/")
        (root / "to-parent").symlink_to("d/..")
        with pytest.raises(PathIsDirectory):
            files.write(path, b"x")

    def test_append_creates_and_extends(self, files: RootedFiles, root: Path) -> None:
        files.append("/logs/a", b"one\n")
        files.append("/logs/a", b"two\n")
        assert (root / "logs/a").read_bytes() == b"one\ntwo\n"

    @as_root
    def test_dev_null_is_not_replaced(self, files: RootedFiles, root: Path) -> None:
        os.mknod(root / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        files.write("/null", b"gone")
        files.append("/null", b"gone")
        assert stat.S_ISCHR((root / "null").stat().st_mode)

    @as_root
    def test_other_devices_are_refused(self, files: RootedFiles, root: Path) -> None:
        os.mknod(root / "tty", 0o666 | stat.S_IFCHR, os.makedev(5, 0))
        with pytest.raises(PathError, match="not a regular file"):
            files.write("/tty", b"x")
        with pytest.raises(PathError):
            files.append("/tty", b"x")

    @as_root
    def test_owner_is_kept(self, files: RootedFiles, root: Path) -> None:
        (root / "a").touch()
        os.chown(root / "a", 1234, 2345)
        files.write("/a", b"x")
        assert ((root / "a").stat().st_uid, (root / "a").stat().st_gid) == (1234, 2345)


def test_file_has_no_name_until_it_is_complete(files: RootedFiles, root: Path) -> None:
    """A process that is killed while it writes leaves nothing behind."""
    with files.writing("/a") as sink:
        sink.write(b"half")
        assert os.listdir(root) == []
    assert os.listdir(root) == ["a"]


class TestDirectories:
    def test_mkdir(self, files: RootedFiles, root: Path) -> None:
        files.make_directory("/a")
        files.make_directory("/a/b/c", recursive=True)
        files.make_directory("/a/b/c", recursive=True)
        files.make_directory("/", recursive=True)
        (root / "file").touch()
        (root / "dangling").symlink_to("nowhere")
        for path in ("/a", "/", "/file"):
            with pytest.raises(PathExists):
                files.make_directory(path)
        for path in ("/file", "/dangling"):
            with pytest.raises(PathExists):
                files.make_directory(path, recursive=True)
        with pytest.raises(PathNotDirectory):
            files.make_directory("/file/below", recursive=True)
        with pytest.raises(PathNotFound):
            files.make_directory("/x/y")

    def test_remove(self, files: RootedFiles, root: Path) -> None:
        (root / "d/e").mkdir(parents=True)
        with pytest.raises(PathIsDirectory):
            files.remove("/d")
        with pytest.raises(PathNotFound):
            files.remove("/nope")
        files.remove("/nope", force=True)
        files.remove("/d", recursive=True)
        with pytest.raises(AccessDenied):
            files.remove("/", recursive=True)
        assert os.listdir(root) == []

    @pytest.mark.parametrize("mode", [0o500, 0o400, 0o200, 0o100, 0o600, 0])
    def test_remove_tree_without_permissions(
        self, files: RootedFiles, root: Path, mode: int
    ) -> None:
        """Root inside may do it, even if it is an ordinary user outside."""
        (root / "d/closed/sub").mkdir(parents=True)
        (root / "d/closed/f").touch()
        (root / "d/closed/sub").chmod(0)
        (root / "d/closed").chmod(mode)
        (root / "d/without_files/sub").mkdir(parents=True)
        (root / "d/without_files").chmod(mode)
        files.remove("/d", recursive=True)
        assert os.listdir(root) == []

    def test_remove_many_directories(self, files: RootedFiles, root: Path) -> None:
        for n in range(300):
            (root / f"d/{n}/x").mkdir(parents=True)
            (root / f"d/{n}/f").touch()
        files.remove("/d", recursive=True)
        assert os.listdir(root) == []

    def test_tree_deeper_than_the_longest_path(self, files: RootedFiles, root: Path) -> None:
        (root / "deep").mkdir()
        nested(root / "deep", 200)
        assert len(operations.list_files(files, "/deep", recursive=True)) == 201
        operations.copy(files, "/deep", "/copy", recursive=True)
        assert operations.disk_usage(files, "/copy").directories == 201
        before = len(os.listdir("/proc/self/fd"))
        files.remove("/copy", recursive=True)
        files.remove("/deep", recursive=True)
        assert os.listdir(root) == []
        assert len(os.listdir("/proc/self/fd")) <= before

    def test_names_with_invalid_utf8(self, files: RootedFiles, root: Path) -> None:
        (root / os.fsdecode(b"\xff")).touch()
        assert files.names("/") == ["\\xff"]
        assert operations.list_files(files, "/")[0].path == "/\\xff"

    def test_list_files(self, files: RootedFiles, root: Path) -> None:
        (root / "d/.hidden").mkdir(parents=True)
        (root / "d/.hidden/x").touch()
        (root / "d/f").write_text("12345")
        assert [found.path for found in operations.list_files(files, "/d")] == ["/d/f"]
        found = operations.list_files(files, "/", recursive=True, hidden=True)
        assert [info.path for info in found] == ["/d", "/d/.hidden", "/d/.hidden/x", "/d/f"]
        assert (found[3].size, found[3].type) == (5, "file")

    def test_disk_usage_counts_a_hard_link_once(self, files: RootedFiles, root: Path) -> None:
        (root / "a").write_bytes(b"x" * 100_000)
        os.link(root / "a", root / "b")
        usage = operations.disk_usage(files, "/")
        assert usage.files == 1
        assert 100_000 <= usage.bytes < 200_000


class TestMetadata:
    def test_info(self, files: RootedFiles, root: Path) -> None:
        (root / "f").write_text("12345")
        (root / "link").symlink_to("f")
        info = files.info("/link")
        assert (info.type, info.is_symlink, info.size) == ("file", True, 5)
        assert files.info("/link", follow_symlinks=False).type == "symlink"
        assert files.info("/").is_directory

    def test_exists(self, files: RootedFiles, root: Path) -> None:
        (root / "f").touch()
        (root / "dangling").symlink_to("nowhere")
        results = [files.exists(path) for path in ("/f", "/", "/nope", "/f/x", "/dangling")]
        assert results == [True, True, False, False, False]

    def test_symlinks(self, files: RootedFiles, root: Path) -> None:
        files.symlink("../anything", "/link")
        assert files.readlink("/link") == "../anything"
        (root / "f").touch()
        with pytest.raises(PathError, match="not a symlink"):
            files.readlink("/f")
        with pytest.raises(PathExists):
            files.symlink("x", "/f")

    def test_modes_and_times(self, files: RootedFiles, root: Path) -> None:
        (root / "f").touch()
        files.chmod("/f", 0o640)
        files.touch("/f", 1_000_000.5)
        files.touch("/new/file")
        assert (files.info("/f").mode, files.info("/f").mtime) == (0o640, 1_000_000.5)
        assert (root / "new/file").exists()

    def test_chown_refuses_ids_that_the_sandbox_lacks(self, files: RootedFiles, root: Path) -> None:
        (root / "f").touch()
        files.chown("/f", 0, 0)
        with pytest.raises(Unsupported):
            files.chown("/f", 1000, 1000)

    @as_root
    def test_chown_maps_ids_from_the_owner(self, files: RootedFiles, root: Path) -> None:
        (root / "f").touch()
        os.chown(root / "f", FIRST, FIRST)
        RootedFiles(files.root, Owner(uid=FIRST, gid=FIRST, count=65536)).chown("/f", 1000, 1001)
        assert ((root / "f").stat().st_uid, (root / "f").stat().st_gid) == (
            FIRST + 1000,
            FIRST + 1001,
        )

    @as_root
    def test_files_of_the_host_are_not_changed(self, files: RootedFiles, root: Path) -> None:
        (root / "f").touch(0o644)
        mapped = RootedFiles(files.root, Owner(uid=FIRST, gid=FIRST, count=65536))
        with pytest.raises(AccessDenied):
            mapped.chown("/f", 0, 0)
        with pytest.raises(AccessDenied):
            mapped.chmod("/f", 0o777)
        with pytest.raises(AccessDenied):
            mapped.touch("/f", 0)
        found = (root / "f").stat()
        assert (found.st_uid, found.st_mode & 0o777, found.st_mtime > 0) == (0, 0o644, True)
