"""Attempts of a sandbox to reach files of the host through the engine's file access."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import stat
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from smokebox.engine.files import operations
from smokebox.engine.files.rooted_files import RootedFiles
from smokebox.errors import (
    AccessDenied,
    DirectoryNotEmpty,
    PathError,
    PathNotDirectory,
    PathNotFound,
    SmokeboxError,
    SymlinkLoop,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECRET = "secret of the host"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The root of a sandbox, beside secrets of the host."""
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "host").mkdir()
    (tmp_path / "host" / "secret").write_text(SECRET)
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@contextlib.contextmanager
def meanwhile(act: Callable[[], None]) -> Iterator[None]:
    """Repeat a call in another thread during the block."""
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


def swapper(path: Path, target: Path) -> Callable[[], None]:
    """Return a function that makes `path` a directory and a symlink to `target` in turn."""
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


def host_is_unchanged(root: Path) -> bool:
    host = root.parent / "host"
    return (
        (root.parent / "secret").read_text() == SECRET
        and os.listdir(host) == ["secret"]
        and (host / "secret").read_text() == SECRET
        and stat.S_IMODE((host / "secret").stat().st_mode) == 0o644
    )


class TestEscapes:
    """Symlinks and special files in the sandbox."""

    @pytest.mark.parametrize(
        "target", ["{host}/secret", "../secret", "../../../../../{host}/secret"]
    )
    def test_symlink_to_a_file_of_the_host(
        self, files: RootedFiles, root: Path, target: str
    ) -> None:
        (root / "link").symlink_to(target.format(host=root.parent / "host"))
        with pytest.raises(PathNotFound):
            files.read("/link")
        with pytest.raises(PathNotFound):
            files.chmod("/link", 0o777)
        assert not files.exists("/link")

    def test_symlink_to_the_root_leads_to_the_sandbox_root(
        self, files: RootedFiles, root: Path
    ) -> None:
        (root / "a").write_text("inside")
        for name, target in (("up", "/"), ("out", "../" * 30), ("self", "/out")):
            (root / name).symlink_to(target)
            assert files.read(f"/{name}/a") == b"inside"
            assert "secret" not in files.names(f"/{name}")

    def test_writing_through_a_symlink_stays_inside(self, files: RootedFiles, root: Path) -> None:
        (root / "link").symlink_to("../../host/secret")
        files.write("/link", b"written")
        assert (root / "host/secret").read_bytes() == b"written"
        files.append("/link", b" more")
        assert (root / "host/secret").read_bytes() == b"written more"
        assert host_is_unchanged(root)

    def test_symlink_to_a_directory_of_the_host_is_not_entered(
        self, files: RootedFiles, root: Path
    ) -> None:
        (root / "folder").symlink_to(root.parent / "host")
        with pytest.raises(PathNotDirectory):
            files.write("/folder/more", b"x")
        with pytest.raises(PathNotFound):
            files.remove("/folder/secret")
        with pytest.raises(PathNotFound):
            files.make_directory("/folder/more")
        with pytest.raises(PathNotFound):
            operations.rename(files, "/folder/secret", "/stolen")
        assert host_is_unchanged(root)

    def test_dotdot_after_a_missing_parent_is_refused(self, files: RootedFiles, root: Path) -> None:
        (root / "link").symlink_to("missing/../../../escaped/file")
        with pytest.raises(PathNotFound):
            files.write("/link", b"x")
        assert os.listdir(root) == ["link"]
        assert not (root.parent / "escaped").exists()

    def test_magic_links_are_not_followed(self, files: RootedFiles) -> None:
        fd = os.open("/", os.O_PATH)
        host = RootedFiles(fd, files.owner)
        for path in ("/proc/self/root/etc/passwd", f"/proc/self/fd/{fd}", "/proc/self/exe"):
            with pytest.raises(SymlinkLoop):
                host.read(path)
        os.close(fd)

    def test_kernel_files_are_neither_read_nor_changed(self, files: RootedFiles) -> None:
        fd = os.open("/", os.O_PATH)
        host = RootedFiles(fd, files.owner)
        assert host.info("/proc/sys/kernel/core_pattern").is_file
        before = Path("/proc/sys/kernel/domainname").read_bytes()
        for attempt in (
            lambda: host.read("/proc/sys/kernel/core_pattern"),
            lambda: host.write("/proc/sys/kernel/domainname", before),
            lambda: host.append("/proc/sys/kernel/domainname", before),
            lambda: host.chmod("/proc/version", 0o444),
            lambda: host.remove("/proc/tty", recursive=True),
            lambda: host.make_directory("/proc/new"),
            lambda: operations.copy(host, "/proc/tty", "/tmp/tty", recursive=True),
        ):
            with pytest.raises(AccessDenied) as caught:
                attempt()
            assert "command" in caught.value.hint
        os.close(fd)

    def test_listing_does_not_follow_symlinks(self, files: RootedFiles, root: Path) -> None:
        (root / "out").symlink_to(root.parent / "host")
        assert [found.path for found in operations.list_files(files, "/", recursive=True)] == [
            "/out"
        ]
        assert operations.glob(files, "**", "/", hidden=True, files_only=False) == ["/out"]
        assert operations.glob(files, "/out/*", "/", hidden=True, files_only=False) == []
        assert next(iter(files.listing("/"))).kind == "symlink"

    def test_removing_does_not_follow_symlinks(self, files: RootedFiles, root: Path) -> None:
        (root / "d").mkdir()
        (root / "d" / "out").symlink_to(root.parent / "host")
        (root / "d" / "file").symlink_to(root.parent / "secret")
        files.remove("/d", recursive=True)
        assert os.listdir(root) == []
        assert host_is_unchanged(root)

    def test_leased_file_does_not_block(self, files: RootedFiles, root: Path) -> None:
        (root / "leased").write_text("held")
        before = signal.signal(signal.SIGIO, signal.SIG_IGN)
        fd = os.open(root / "leased", os.O_RDWR)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        with pytest.raises(PathError):
            files.read("/leased")
        os.close(fd)
        signal.signal(signal.SIGIO, before)
        assert files.read("/leased") == b"held"

    def test_hard_link_is_replaced_not_written_through(
        self, files: RootedFiles, root: Path
    ) -> None:
        (root / "one").write_text("old")
        os.link(root / "one", root / "two")
        files.write("/two", b"fresh")
        assert (root / "one").read_text() == "old"


class TestRaces:
    """A sandbox that swaps a directory for a symlink to the host during an operation."""

    def test_read(self, files: RootedFiles, root: Path) -> None:
        seen = set()
        with meanwhile(swapper(root / "d", root.parent / "host")):
            for _ in for_a_second():
                with contextlib.suppress(SmokeboxError):
                    seen.add(files.read("/d/secret"))
        assert seen == {b"inside"}

    def test_write(self, files: RootedFiles, root: Path) -> None:
        with meanwhile(swapper(root / "d", root.parent / "host")):
            for _ in for_a_second():
                with contextlib.suppress(SmokeboxError):
                    files.write("/d/secret", b"inside")
                    files.append("/d/more/below", b"x")
                    files.chmod("/d/secret", 0o600)
        assert host_is_unchanged(root)

    def test_remove(self, files: RootedFiles, root: Path) -> None:
        (root / "tree").mkdir()
        with meanwhile(swapper(root / "tree" / "d", root.parent / "host")):
            for _ in for_a_second():
                # Removed between the listing of the directory and the entering of `d`.
                for n in range(50):
                    (root / "tree" / str(n)).touch()
                with contextlib.suppress(SmokeboxError):
                    files.remove("/tree", recursive=True)
                (root / "tree").mkdir(exist_ok=True)
        assert host_is_unchanged(root)

    def test_copy_and_list(self, files: RootedFiles, root: Path) -> None:
        (root / "tree").mkdir()
        with meanwhile(swapper(root / "tree" / "d", root.parent / "host")):
            for _ in for_a_second():
                with contextlib.suppress(SmokeboxError):
                    operations.copy(files, "/tree", "/copy", recursive=True)
                operations.list_files(files, "/tree", recursive=True)
                for folder, _, names in os.walk(root / "copy"):
                    for name in names:
                        assert (Path(folder) / name).read_text() == "inside"
                files.remove("/copy", recursive=True, force=True)
        assert host_is_unchanged(root)

    def test_parent_renamed_during_a_write(self, files: RootedFiles, root: Path) -> None:
        (root / "here").mkdir()
        with files.writing("/here/file") as sink:
            sink.write(b"one ")
            (root / "here").rename(root / "there")
            (root / "here").symlink_to(root.parent / "host")
            sink.write(b"two")
        assert (root / "there" / "file").read_bytes() == b"one two"
        assert host_is_unchanged(root)

    def test_directory_filled_during_its_removal(self, files: RootedFiles, root: Path) -> None:
        (root / "d").mkdir()
        count = iter(range(10**9))
        with meanwhile(lambda: (root / "d" / str(next(count))).touch()):
            for _ in for_a_second():
                with contextlib.suppress(DirectoryNotEmpty):
                    files.remove("/d", recursive=True, force=True)
                (root / "d").mkdir(exist_ok=True)
