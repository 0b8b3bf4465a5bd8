"""Files below a root: what each call does, and what it answers where it cannot."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from typing import TYPE_CHECKING

import pytest

from smokebox.engine.files import operations
from smokebox.engine.files.rooted import Rooted
from smokebox.engine.jail.api import Owner
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

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has ids to give away")


def nested(top: Path, depth: int) -> None:
    """Directories in each other, deeper than any path can say."""
    fd = os.open(top, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d" * 100, dir_fd=fd)
        below = os.open("d" * 100, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(os.open("deepest", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    os.close(fd)


class TestReading:
    def test_a_file(self, files: Rooted, root: Path) -> None:
        (root / "a").write_bytes(b"\x00content\xff")
        assert files.read("/a") == b"\x00content\xff"

    def test_an_empty_file(self, files: Rooted, root: Path) -> None:
        (root / "a").touch()
        assert files.read("/a") == b""

    def test_more_than_the_limit_is_refused_by_its_size(self, files: Rooted, root: Path) -> None:
        with open(root / "big", "wb") as file:
            file.truncate(1 << 40)
        with pytest.raises(FileTooLarge) as caught:
            files.read("/big")
        assert "read_stream" in caught.value.hint

    def test_ranges_of_a_gigabyte(self, files: Rooted, root: Path) -> None:
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

    def test_chunks(self, files: Rooted, root: Path) -> None:
        content = os.urandom(1_000_000)
        (root / "a").write_bytes(content)
        assert b"".join(files.chunks("/a")) == content
        assert b"".join(files.chunks("/a", 500_000, 300_000)) == content[500_000:800_000]

    def test_a_directory_and_what_is_missing(self, files: Rooted, root: Path) -> None:
        (root / "file").touch()
        with pytest.raises(PathIsDirectory):
            files.read("/")
        with pytest.raises(PathNotFound) as caught:
            files.read("/nope")
        assert caught.value.path == "/nope"
        with pytest.raises(PathNotDirectory):
            files.read("/file/below")

    def test_a_pipe_does_not_block(self, files: Rooted, root: Path) -> None:
        os.mkfifo(root / "pipe")
        with pytest.raises(PathError, match="not a regular file"):
            files.read("/pipe")
        with pytest.raises(PathError):
            files.write("/pipe", b"x")
        with pytest.raises(PathError):
            files.append("/pipe", b"x")

    def test_a_socket_is_refused(self, files: Rooted, root: Path) -> None:
        with socket.socket(socket.AF_UNIX) as server:
            fd = os.open(root, os.O_PATH)
            server.bind(f"/proc/self/fd/{fd}/s")
            os.close(fd)
            with pytest.raises(PathError):
                files.read("/s")

    def test_a_name_that_is_too_long(self, files: Rooted) -> None:
        with pytest.raises(PathError):
            files.read("/" + "x" * 300)
        assert not files.exists("/" + "x" * 300)
        assert not files.exists("/x" * 5000)


class TestWriting:
    @pytest.fixture(autouse=True, params=["file without a name", "temporary name"])
    def _way(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also as on kernels and filesystems that see no more of O_TMPFILE than O_DIRECTORY."""
        if request.param == "temporary name":
            monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)

    def test_makes_parents_and_takes_them_back_on_failure(self, files: Rooted, root: Path) -> None:
        files.write("/a/b/c", b"deep")
        assert (root / "a/b/c").read_bytes() == b"deep"
        with pytest.raises(RuntimeError), files.writing("/x/y/z"):
            raise RuntimeError
        with pytest.raises(PathError):
            files.write(f"/n/{'m' * 300}/o", b"")
        assert os.listdir(root) == ["a"]

    def test_all_or_nothing(self, files: Rooted, root: Path) -> None:
        (root / "a").write_text("before")
        with pytest.raises(RuntimeError), files.writing("/a") as sink:
            sink.write(b"half")
            raise RuntimeError
        assert (root / "a").read_text() == "before"
        assert os.listdir(root) == ["a"]

    def test_a_name_that_is_taken_meanwhile(self, files: Rooted, root: Path) -> None:
        with files.writing("/a") as sink:
            sink.write(b"ours")
            (root / "a").write_text("theirs")
        assert (root / "a").read_text() == "ours"
        assert os.listdir(root) == ["a"]

    def test_a_parent_that_goes_meanwhile(self, files: Rooted, root: Path) -> None:
        with pytest.raises(PathNotFound), files.writing("/d/a") as sink:
            sink.write(b"ours")
            shutil.rmtree(root / "d")
        assert os.listdir(root) == []

    def test_keeps_the_mode_and_the_link(self, files: Rooted, root: Path) -> None:
        (root / "real").write_text("old")
        (root / "real").chmod(0o4751)
        (root / "link").symlink_to("real")
        files.write("/link", b"fresh")
        assert (root / "link").is_symlink()
        assert (root / "real").read_text() == "fresh"
        assert stat.S_IMODE((root / "real").stat().st_mode) == 0o4751

    def test_makes_what_a_dangling_link_leads_to(self, files: Rooted, root: Path) -> None:
        (root / "link").symlink_to("/sub/../later/file")
        (root / "sub").mkdir()
        files.write("/link", b"made")
        assert (root / "later/file").read_bytes() == b"made"

    def test_links_in_a_circle(self, files: Rooted, root: Path) -> None:
        (root / "one").symlink_to("two")
        (root / "two").symlink_to("one")
        with pytest.raises(SymlinkLoop):
            files.write("/one", b"")
        with pytest.raises(SymlinkLoop):
            files.read("/one")

    @pytest.mark.parametrize("path", ["/", "/d", "/to-d", "/to-slash", "/to-parent"])
    def test_a_directory_is_not_replaced(self, files: Rooted, root: Path, path: str) -> None:
        (root / "d").mkdir()
        (root / "to-d").symlink_to("d")
        (root / "to-slash").symlink_to("d/")
        (root / "to-parent").symlink_to("d/..")
        with pytest.raises(PathIsDirectory):
            files.write(path, b"x")

    def test_append_makes_and_adds(self, files: Rooted, root: Path) -> None:
        files.append("/logs/a", b"one\n")
        files.append("/logs/a", b"two\n")
        assert (root / "logs/a").read_bytes() == b"one\ntwo\n"

    @as_root
    def test_dev_null_is_written_to_and_stays(self, files: Rooted, root: Path) -> None:
        os.mknod(root / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        files.write("/null", b"gone")
        files.append("/null", b"gone")
        assert stat.S_ISCHR((root / "null").stat().st_mode)

    @as_root
    def test_other_devices_are_not_touched(self, files: Rooted, root: Path) -> None:
        os.mknod(root / "tty", 0o666 | stat.S_IFCHR, os.makedev(5, 0))
        with pytest.raises(PathError, match="not a regular file"):
            files.write("/tty", b"x")
        with pytest.raises(PathError):
            files.append("/tty", b"x")

    @as_root
    def test_keeps_the_owner(self, files: Rooted, root: Path) -> None:
        (root / "a").touch()
        os.chown(root / "a", 1234, 2345)
        files.write("/a", b"x")
        assert ((root / "a").stat().st_uid, (root / "a").stat().st_gid) == (1234, 2345)


def test_a_file_has_no_name_until_it_is_whole(files: Rooted, root: Path) -> None:
    """So that a process that dies while it writes leaves nothing behind."""
    with files.writing("/a") as sink:
        sink.write(b"half")
        assert os.listdir(root) == []
    assert os.listdir(root) == ["a"]


class TestDirectories:
    def test_mkdir(self, files: Rooted, root: Path) -> None:
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

    def test_remove(self, files: Rooted, root: Path) -> None:
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

    def test_remove_what_may_not_be_changed(self, files: Rooted, root: Path) -> None:
        """As root inside does, also where outside it is an ordinary user."""
        (root / "d/closed/sub").mkdir(parents=True)
        (root / "d/closed/f").touch()
        (root / "d/closed/sub").chmod(0)
        (root / "d/closed").chmod(0o500)
        files.remove("/d", recursive=True)
        assert os.listdir(root) == []

    def test_remove_many(self, files: Rooted, root: Path) -> None:
        for n in range(300):
            (root / f"d/{n}/x").mkdir(parents=True)
            (root / f"d/{n}/f").touch()
        files.remove("/d", recursive=True)
        assert os.listdir(root) == []

    def test_deeper_than_any_path(self, files: Rooted, root: Path) -> None:
        (root / "deep").mkdir()
        nested(root / "deep", 200)
        assert len(operations.list_files(files, "/deep", recursive=True)) == 201
        operations.copy(files, "/deep", "/copy", recursive=True)
        assert operations.disk_usage(files, "/copy").directories == 201
        before = len(os.listdir("/proc/self/fd"))
        files.remove("/copy", recursive=True)
        files.remove("/deep", recursive=True)
        assert os.listdir(root) == []
        assert len(os.listdir("/proc/self/fd")) == before

    def test_names_that_are_not_utf8(self, files: Rooted, root: Path) -> None:
        (root / os.fsdecode(b"\xff")).touch()
        assert files.names("/") == ["\\xff"]
        assert operations.list_files(files, "/")[0].path == "/\\xff"

    def test_list_files(self, files: Rooted, root: Path) -> None:
        (root / "d/.hidden").mkdir(parents=True)
        (root / "d/.hidden/x").touch()
        (root / "d/f").write_text("12345")
        assert [found.path for found in operations.list_files(files, "/d")] == ["/d/f"]
        found = operations.list_files(files, "/", recursive=True, hidden=True)
        assert [info.path for info in found] == ["/d", "/d/.hidden", "/d/.hidden/x", "/d/f"]
        assert (found[3].size, found[3].type) == (5, "file")

    def test_usage_counts_a_hard_link_once(self, files: Rooted, root: Path) -> None:
        (root / "a").write_bytes(b"x" * 100_000)
        os.link(root / "a", root / "b")
        usage = operations.disk_usage(files, "/")
        assert usage.files == 1
        assert 100_000 <= usage.bytes < 200_000


class TestLooking:
    def test_info(self, files: Rooted, root: Path) -> None:
        (root / "f").write_text("12345")
        (root / "link").symlink_to("f")
        info = files.info("/link")
        assert (info.type, info.is_symlink, info.size) == ("file", True, 5)
        assert files.info("/link", follow_symlinks=False).type == "symlink"
        assert files.info("/").is_directory

    def test_exists(self, files: Rooted, root: Path) -> None:
        (root / "f").touch()
        (root / "dangling").symlink_to("nowhere")
        answers = [files.exists(path) for path in ("/f", "/", "/nope", "/f/x", "/dangling")]
        assert answers == [True, True, False, False, False]

    def test_links(self, files: Rooted, root: Path) -> None:
        files.symlink("../anything", "/link")
        assert files.readlink("/link") == "../anything"
        (root / "f").touch()
        with pytest.raises(PathError, match="not a symlink"):
            files.readlink("/f")
        with pytest.raises(PathExists):
            files.symlink("x", "/f")

    def test_modes_and_times(self, files: Rooted, root: Path) -> None:
        (root / "f").touch()
        files.chmod("/f", 0o640)
        files.touch("/f", 1_000_000.5)
        files.touch("/made/too")
        assert (files.info("/f").mode, files.info("/f").mtime) == (0o640, 1_000_000.5)
        assert (root / "made/too").exists()

    def test_chown_needs_ids(self, files: Rooted, root: Path) -> None:
        (root / "f").touch()
        files.chown("/f", 0, 0)
        with pytest.raises(Unsupported):
            files.chown("/f", 1000, 1000)

    @as_root
    def test_chown_counts_from_the_owner(self, files: Rooted, root: Path) -> None:
        (root / "f").touch()
        os.chown(root / "f", FIRST, FIRST)
        Rooted(files.root, Owner(uid=FIRST, gid=FIRST, count=65536)).chown("/f", 1000, 1001)
        assert ((root / "f").stat().st_uid, (root / "f").stat().st_gid) == (
            FIRST + 1000,
            FIRST + 1001,
        )

    @as_root
    def test_what_is_not_of_the_sandbox_is_not_changed(self, files: Rooted, root: Path) -> None:
        (root / "f").touch(0o644)
        theirs = Rooted(files.root, Owner(uid=FIRST, gid=FIRST, count=65536))
        with pytest.raises(AccessDenied):
            theirs.chown("/f", 0, 0)
        with pytest.raises(AccessDenied):
            theirs.chmod("/f", 0o777)
        with pytest.raises(AccessDenied):
            theirs.touch("/f", 0)
        found = (root / "f").stat()
        assert (found.st_uid, found.st_mode & 0o777, found.st_mtime > 0) == (0, 0o644, True)
