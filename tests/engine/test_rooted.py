"""Files below a root: what works, and what somebody inside tries in order to reach the host."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from smokebox.engine import listing, transfers
from smokebox.engine.jail.api import Owner
from smokebox.engine.rooted import Rooted
from smokebox.errors import (
    AccessDenied,
    DirectoryNotEmpty,
    FileTooLarge,
    PathError,
    PathExists,
    PathIsDirectory,
    PathNotDirectory,
    PathNotFound,
    SmokeboxError,
    SymlinkLoop,
    Unsupported,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECRET = "the host's own"
FIRST = 0x50000000

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has ids to give away")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The root, beside a secret of the host."""
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "host").mkdir()
    (tmp_path / "host" / "secret").write_text(SECRET)
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.fixture
def files(root: Path) -> Iterator[Rooted]:
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
    yield Rooted(fd, Owner(uid=os.geteuid(), gid=os.getegid(), count=1))
    os.close(fd)


@contextlib.contextmanager
def meanwhile(act: Callable[[], None]) -> Iterator[None]:
    """Do something over and over in another thread."""
    stop = threading.Event()

    def loop() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                act()

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def for_a_second() -> Iterator[None]:
    end = time.monotonic() + 1
    while time.monotonic() < end:
        yield


def swapping(path: Path, target: Path) -> Callable[[], None]:
    """What makes `path` a directory and a symlink to `target` by turns, whatever befalls it."""
    directory, link = path.with_name("as-directory"), path.with_name("as-link")
    directory.mkdir()
    (directory / "secret").write_text("inside")
    steps: list[Callable[[], object]] = [
        lambda: directory.mkdir(),
        lambda: link.symlink_to(target),
        lambda: directory.rename(path),
        lambda: time.sleep(0.0001),
        lambda: path.rename(directory),
        lambda: link.rename(path),
        lambda: time.sleep(0.0001),
        lambda: path.rename(link),
    ]

    def swap() -> None:
        for step in steps:
            with contextlib.suppress(OSError):
                step()

    return swap


def untouched(root: Path) -> bool:
    host = root.parent / "host"
    return (
        (root.parent / "secret").read_text() == SECRET
        and os.listdir(host) == ["secret"]
        and (host / "secret").read_text() == SECRET
        and stat.S_IMODE((host / "secret").stat().st_mode) == 0o644
    )


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


class TestEscapes:
    """What a sandbox lays out for whoever reads its files from outside."""

    @pytest.mark.parametrize(
        "target", ["{host}/secret", "../secret", "../../../../../{host}/secret"]
    )
    def test_a_link_to_a_file_of_the_host(self, files: Rooted, root: Path, target: str) -> None:
        (root / "link").symlink_to(target.format(host=root.parent / "host"))
        with pytest.raises(PathNotFound):
            files.read("/link")
        with pytest.raises(PathNotFound):
            files.chmod("/link", 0o777)
        assert not files.exists("/link")

    def test_a_link_to_the_root_of_the_host_leads_to_its_own(
        self, files: Rooted, root: Path
    ) -> None:
        (root / "a").write_text("inside")
        for name, target in (("up", "/"), ("out", "../" * 30), ("self", "/out")):
            (root / name).symlink_to(target)
            assert files.read(f"/{name}/a") == b"inside"
            assert "secret" not in files.names(f"/{name}")

    def test_writing_through_a_link_stays_inside(self, files: Rooted, root: Path) -> None:
        (root / "link").symlink_to("../../host/secret")
        files.write("/link", b"written")
        assert (root / "host/secret").read_bytes() == b"written"
        files.append("/link", b" more")
        assert (root / "host/secret").read_bytes() == b"written more"
        assert untouched(root)

    def test_a_link_to_a_directory_of_the_host_is_no_directory(
        self, files: Rooted, root: Path
    ) -> None:
        (root / "folder").symlink_to(root.parent / "host")
        with pytest.raises(PathNotDirectory):
            files.write("/folder/more", b"x")
        with pytest.raises(PathNotFound):
            files.remove("/folder/secret")
        with pytest.raises(PathNotFound):
            files.make_directory("/folder/more")
        with pytest.raises(PathNotFound):
            transfers.rename(files, "/folder/secret", "/stolen")
        assert untouched(root)

    def test_missing_parents_are_never_climbed_as_text(self, files: Rooted, root: Path) -> None:
        (root / "link").symlink_to("missing/../../../escaped/file")
        with pytest.raises(PathNotFound):
            files.write("/link", b"x")
        assert os.listdir(root) == ["link"]
        assert not (root.parent / "escaped").exists()

    def test_magic_links_of_proc(self, files: Rooted) -> None:
        fd = os.open("/", os.O_PATH)
        host = Rooted(fd, files.owner)
        for path in ("/proc/self/root/etc/passwd", f"/proc/self/fd/{fd}", "/proc/self/exe"):
            with pytest.raises(SymlinkLoop):
                host.read(path)
        os.close(fd)

    def test_what_the_kernel_makes_up_is_looked_at_and_no_more(self, files: Rooted) -> None:
        fd = os.open("/", os.O_PATH)
        host = Rooted(fd, files.owner)
        assert host.info("/proc/sys/kernel/core_pattern").is_file
        before = Path("/proc/sys/kernel/domainname").read_bytes()
        for attempt in (
            lambda: host.read("/proc/sys/kernel/core_pattern"),
            lambda: host.write("/proc/sys/kernel/domainname", before),
            lambda: host.append("/proc/sys/kernel/domainname", before),
            lambda: host.chmod("/proc/version", 0o444),
            lambda: host.remove("/proc/tty", recursive=True),
            lambda: host.make_directory("/proc/made"),
            lambda: transfers.copy(host, "/proc/tty", "/tmp/tty", recursive=True),
        ):
            with pytest.raises(AccessDenied) as caught:
                attempt()
            assert "command" in caught.value.hint
        os.close(fd)

    def test_a_link_is_a_link_in_a_listing(self, files: Rooted, root: Path) -> None:
        (root / "out").symlink_to(root.parent / "host")
        assert [found.path for found in listing.list_files(files, "/", recursive=True)] == ["/out"]
        assert listing.glob(files, "**", "/", hidden=True, files_only=False) == ["/out"]
        assert listing.glob(files, "/out/*", "/", hidden=True, files_only=False) == []
        assert next(iter(files.listing("/"))).kind == "symlink"

    def test_removing_goes_around_links(self, files: Rooted, root: Path) -> None:
        (root / "d").mkdir()
        (root / "d" / "out").symlink_to(root.parent / "host")
        (root / "d" / "file").symlink_to(root.parent / "secret")
        files.remove("/d", recursive=True)
        assert os.listdir(root) == []
        assert untouched(root)

    def test_a_hard_link_is_replaced_and_not_written_through(
        self, files: Rooted, root: Path
    ) -> None:
        (root / "one").write_text("old")
        os.link(root / "one", root / "two")
        files.write("/two", b"fresh")
        assert (root / "one").read_text() == "old"


class TestRaces:
    """A sandbox that swaps a directory for a link to the host while we work in it."""

    def test_reading(self, files: Rooted, root: Path) -> None:
        seen = set()
        with meanwhile(swapping(root / "d", root.parent / "host")):
            for _ in for_a_second():
                with contextlib.suppress(SmokeboxError):
                    seen.add(files.read("/d/secret"))
        assert seen == {b"inside"}

    def test_writing(self, files: Rooted, root: Path) -> None:
        with meanwhile(swapping(root / "d", root.parent / "host")):
            for _ in for_a_second():
                with contextlib.suppress(SmokeboxError):
                    files.write("/d/secret", b"inside")
                    files.append("/d/more/below", b"x")
                    files.chmod("/d/secret", 0o600)
        assert untouched(root)

    def test_removing(self, files: Rooted, root: Path) -> None:
        (root / "tree").mkdir()
        with meanwhile(swapping(root / "tree" / "d", root.parent / "host")):
            for _ in for_a_second():
                # They are removed between the look at the directory and the step into it.
                for n in range(50):
                    (root / "tree" / str(n)).touch()
                with contextlib.suppress(SmokeboxError):
                    files.remove("/tree", recursive=True)
                (root / "tree").mkdir(exist_ok=True)
        assert untouched(root)

    def test_copying_and_listing(self, files: Rooted, root: Path) -> None:
        (root / "tree").mkdir()
        with meanwhile(swapping(root / "tree" / "d", root.parent / "host")):
            for _ in for_a_second():
                with contextlib.suppress(SmokeboxError):
                    transfers.copy(files, "/tree", "/copy", recursive=True)
                listing.list_files(files, "/tree", recursive=True)
                for folder, _, names in os.walk(root / "copy"):
                    for name in names:
                        assert (Path(folder) / name).read_text() == "inside"
                files.remove("/copy", recursive=True, force=True)
        assert untouched(root)

    def test_a_parent_that_moves_while_it_is_written_into(self, files: Rooted, root: Path) -> None:
        (root / "here").mkdir()
        with files.writing("/here/file") as sink:
            sink.write(b"one ")
            (root / "here").rename(root / "there")
            (root / "here").symlink_to(root.parent / "host")
            sink.write(b"two")
        assert (root / "there" / "file").read_bytes() == b"one two"
        assert untouched(root)

    def test_a_directory_that_is_filled_while_it_is_removed(
        self, files: Rooted, root: Path
    ) -> None:
        (root / "d").mkdir()
        count = iter(range(10**9))
        with meanwhile(lambda: (root / "d" / str(next(count))).touch()):
            for _ in for_a_second():
                with contextlib.suppress(DirectoryNotEmpty):
                    files.remove("/d", recursive=True, force=True)
                (root / "d").mkdir(exist_ok=True)


class TestWriting:
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

    def test_remove_many(self, files: Rooted, root: Path) -> None:
        for n in range(300):
            (root / f"d/{n}/x").mkdir(parents=True)
            (root / f"d/{n}/f").touch()
        files.remove("/d", recursive=True)
        assert os.listdir(root) == []

    def test_deeper_than_any_path(self, files: Rooted, root: Path) -> None:
        (root / "deep").mkdir()
        nested(root / "deep", 200)
        assert len(listing.list_files(files, "/deep", recursive=True)) == 201
        transfers.copy(files, "/deep", "/copy", recursive=True)
        assert listing.disk_usage(files, "/copy").directories == 201
        before = len(os.listdir("/proc/self/fd"))
        files.remove("/copy", recursive=True)
        files.remove("/deep", recursive=True)
        assert os.listdir(root) == []
        assert len(os.listdir("/proc/self/fd")) == before

    def test_names_that_are_not_utf8(self, files: Rooted, root: Path) -> None:
        (root / os.fsdecode(b"\xff")).touch()
        assert files.names("/") == ["\\xff"]
        assert listing.list_files(files, "/")[0].path == "/\\xff"

    def test_list_files(self, files: Rooted, root: Path) -> None:
        (root / "d/.hidden").mkdir(parents=True)
        (root / "d/.hidden/x").touch()
        (root / "d/f").write_text("12345")
        assert [found.path for found in listing.list_files(files, "/d")] == ["/d/f"]
        found = listing.list_files(files, "/", recursive=True, hidden=True)
        assert [info.path for info in found] == ["/d", "/d/.hidden", "/d/.hidden/x", "/d/f"]
        assert (found[3].size, found[3].type) == (5, "file")

    def test_usage_counts_a_hard_link_once(self, files: Rooted, root: Path) -> None:
        (root / "a").write_bytes(b"x" * 100_000)
        os.link(root / "a", root / "b")
        usage = listing.disk_usage(files, "/")
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
        Rooted(files.root, Owner(uid=FIRST, gid=FIRST, count=65536)).chown("/f", 1000, 1001)
        assert ((root / "f").stat().st_uid, (root / "f").stat().st_gid) == (
            FIRST + 1000,
            FIRST + 1001,
        )


class TestTransfers:
    def test_rename_replaces(self, files: Rooted, root: Path) -> None:
        (root / "a").write_text("a")
        (root / "b").write_text("b")
        (root / "d").mkdir()
        transfers.rename(files, "/a", "/b")
        assert (root / "b").read_text() == "a"
        with pytest.raises(PathIsDirectory) as caught:
            transfers.rename(files, "/b", "/d")
        assert caught.value.path == "/d"
        with pytest.raises(PathNotDirectory):
            transfers.rename(files, "/d", "/b")
        with pytest.raises(PathError, match="into itself"):
            transfers.rename(files, "/d", "/d/e")
        with pytest.raises(PathNotFound) as missing:
            transfers.rename(files, "/nope", "/x")
        assert missing.value.path == "/nope"

    def test_move_goes_into_a_directory(self, files: Rooted, root: Path) -> None:
        (root / "a").write_text("a")
        (root / "d").mkdir()
        assert transfers.move(files, "/a", "/d") == "/d/a"
        assert transfers.move(files, "/d/a", "/b") == "/b"
        assert (root / "b").read_text() == "a"

    def test_a_move_of_a_link_moves_the_link(self, files: Rooted, root: Path) -> None:
        (root / "link").symlink_to("nowhere")
        transfers.rename(files, "/link", "/moved")
        assert os.readlink(root / "moved") == "nowhere"

    def test_copy_of_a_file(self, files: Rooted, root: Path) -> None:
        (root / "a").write_bytes(os.urandom(100_000))
        (root / "a").chmod(0o751)
        (root / "link").symlink_to("a")
        transfers.copy(files, "/link", "/x/y")
        assert (root / "x/y").read_bytes() == (root / "a").read_bytes()
        assert (root / "x/y").stat().st_mode & 0o777 == 0o751

    def test_copy_of_a_tree(self, files: Rooted, root: Path) -> None:
        (root / "d/e").mkdir(parents=True)
        (root / "d/e/f").write_text("f")
        (root / "d/link").symlink_to("e/f")
        (root / "d/e").chmod(0o500)
        os.mkfifo(root / "d/pipe")
        transfers.copy(files, "/d", "/copy", recursive=True)
        assert (root / "copy/e/f").read_text() == "f"
        assert os.readlink(root / "copy/link") == "e/f"
        assert (root / "copy/e").stat().st_mode & 0o777 == 0o500
        assert sorted(os.listdir(root)) == ["copy", "d"]
        with pytest.raises(PathIsDirectory):
            transfers.copy(files, "/d", "/other")
        with pytest.raises(PathError, match="into itself"):
            transfers.copy(files, "/d", "/d/x", recursive=True)

    def test_a_tree_is_merged_into_one_that_is_there(self, files: Rooted, root: Path) -> None:
        (root / "d").mkdir()
        (root / "d/a").write_text("fresh")
        (root / "to").mkdir()
        (root / "to/a").write_text("old")
        (root / "to/b").write_text("kept")
        transfers.copy(files, "/d", "/to", recursive=True)
        assert ((root / "to/a").read_text(), (root / "to/b").read_text()) == ("fresh", "kept")

    def test_a_copy_that_fails_leaves_nothing(self, files: Rooted, root: Path) -> None:
        (root / "d").mkdir()
        (root / "d/a").touch()
        with socket.socket(socket.AF_UNIX) as server:
            fd = os.open(root / "d", os.O_PATH)
            server.bind(f"/proc/self/fd/{fd}/s")
            os.close(fd)
        with pytest.raises(PathError):
            transfers.copy(files, "/d", "/copy", recursive=True)
        assert os.listdir(root) == ["d"]

    def test_holes_stay_holes(self, files: Rooted, root: Path) -> None:
        with open(root / "sparse", "wb") as file:
            file.truncate(1 << 30)
            file.seek(1 << 29)
            file.write(b"middle")
        transfers.copy(files, "/sparse", "/copy")
        found = (root / "copy").stat()
        assert (found.st_size, found.st_blocks * 512 < 1 << 20) == (1 << 30, True)
        assert files.read_range("/copy", 1 << 29, 6) == b"middle"

    @as_root
    def test_rename_to_another_filesystem(self, files: Rooted, root: Path) -> None:
        with other_filesystem(root / "other"):
            (root / "d").mkdir()
            (root / "d/f").write_text("f")
            os.chown(root / "d/f", 1234, 1234)
            os.utime(root / "d/f", (1, 1))
            transfers.rename(files, "/d", "/other/d")
            found = (root / "other/d/f").stat()
            assert (found.st_uid, found.st_mtime) == (1234, 1)
            transfers.rename(files, "/other/d/f", "/f")
            assert (root / "f").read_text() == "f"
            assert sorted(os.listdir(root)) == ["f", "other"]
            with pytest.raises(PathIsDirectory):
                transfers.rename(files, "/f", "/other/d")


@contextlib.contextmanager
def other_filesystem(path: Path) -> Iterator[None]:
    path.mkdir()
    if os.system(f"mount -t tmpfs none '{path}'") != 0:
        pytest.skip("this root may not mount")
    try:
        yield
    finally:
        os.system(f"umount '{path}'")
