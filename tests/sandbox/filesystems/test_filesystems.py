"""Behaviour shared by all writable filesystems."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from smokebox.errors import (
    AccessDenied,
    DirectoryNotEmpty,
    InvalidPath,
    PathError,
    PathExists,
    PathIsDirectory,
    PathNotDirectory,
    PathNotFound,
    SymlinkLoop,
)
from smokebox.sandbox.filesystems import (
    Entry,
    Filesystem,
    HostFilesystem,
    MemoryFilesystem,
    OverlayFilesystem,
)
from smokebox.sandbox.filesystems.native import NativeFilesystem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path


class MinimalFilesystem(Filesystem):
    """Filesystem with only the required methods, and those for symlinks and permissions."""

    def __init__(self) -> None:
        self._inner = MemoryFilesystem()

    def read(self, path: str) -> bytes:
        return self._inner.read(path)

    def write(self, path: str, data: bytes) -> None:
        self._inner.write(path, data)

    def lstat(self, path: str) -> Entry:
        return self._inner.lstat(path)

    def listdir(self, path: str) -> Mapping[str, Entry]:
        return self._inner.listdir(path)

    def mkdir(self, path: str) -> None:
        self._inner.mkdir(path)

    def remove(self, path: str, *, recursive: bool = False) -> None:
        self._inner.remove(path, recursive=recursive)

    def symlink(self, target: str, path: str) -> None:
        self._inner.symlink(target, path)

    def readlink(self, path: str) -> str:
        return self._inner.readlink(path)

    def chmod(self, path: str, mode: int) -> None:
        self._inner.chmod(path, mode)


FACTORIES: dict[str, Callable[[Path], Filesystem]] = {
    "memory": lambda _: MemoryFilesystem(),
    "host": lambda folder: HostFilesystem(folder, read_only=False),
    "overlay": lambda folder: OverlayFilesystem(HostFilesystem(folder)),
    "native": lambda _: NativeFilesystem(),
    "minimal": lambda _: MinimalFilesystem(),
}


@pytest.fixture(params=FACTORIES)
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Filesystem]:
    """Return an empty filesystem of each kind."""
    filesystem = FACTORIES[request.param](tmp_path)
    yield filesystem
    filesystem.close()


class TestFiles:
    def test_written_files_are_read_back(self, files: Filesystem) -> None:
        files.write("/a", b"\x00\xff\n")
        assert files.read("/a") == b"\x00\xff\n"

    def test_empty_file(self, files: Filesystem) -> None:
        files.write("/a", b"")
        assert files.read("/a") == b""
        assert files.lstat("/a").kind == "file"

    def test_writing_replaces(self, files: Filesystem) -> None:
        files.write("/a", b"long before")
        files.write("/a", b"after")
        assert (files.read("/a"), files.lstat("/a").size) == (b"after", 5)

    def test_replacing_keeps_permissions(self, files: Filesystem) -> None:
        files.write("/a", b"1")
        files.chmod("/a", 0o750)
        files.write("/a", b"2")
        assert files.lstat("/a").mode == 0o750

    def test_append_creates_and_extends(self, files: Filesystem) -> None:
        files.append("/a", b"1")
        files.append("/a", b"23")
        assert files.read("/a") == b"123"

    def test_large_file_round_trips(self, files: Filesystem) -> None:
        data = bytes(range(256)) * 20_000
        files.write("/a", data)
        assert files.read("/a") == data

    @pytest.mark.parametrize("name", ["a b", "quo'te\"", "é", "日本語", "-rf", "a\\b", "*"])
    def test_special_names_round_trip(self, files: Filesystem, name: str) -> None:
        files.write(f"/{name}", b"x")
        assert files.read(f"/{name}") == b"x"
        assert name in files.listdir("/")

    def test_stat_reports_the_modification_time(self, files: Filesystem) -> None:
        before = time.time() - 2
        files.write("/a", b"")
        assert before < files.lstat("/a").mtime < time.time() + 2

    def test_missing_paths_raise_not_found(self, files: Filesystem) -> None:
        for call in (files.read, files.lstat, files.listdir, files.remove, files.readlink):
            with pytest.raises(PathNotFound) as caught:
                call("/nothing")
            assert caught.value.path == "/nothing"
        assert files.peek("/nothing") is None

    def test_missing_parent_is_not_created(self, files: Filesystem) -> None:
        with pytest.raises(PathNotFound):
            files.write("/no/a", b"")
        with pytest.raises(PathNotFound):
            files.append("/no/a", b"")
        with pytest.raises(PathNotFound):
            files.mkdir("/no/a")
        with pytest.raises(PathNotFound):
            files.symlink("x", "/no/a")
        assert "no" not in files.listdir("/")

    def test_file_is_not_a_directory(self, files: Filesystem) -> None:
        files.write("/a", b"x")
        for call in (
            files.listdir,
            lambda _: files.write("/a/b", b""),
            lambda _: files.mkdir("/a/b"),
        ):
            with pytest.raises(PathNotDirectory):
                call("/a")
        with pytest.raises(PathNotDirectory):
            files.lstat("/a/b")

    def test_directory_is_not_a_file(self, files: Filesystem) -> None:
        files.mkdir("/d")
        for path in ("/d", "/"):
            with pytest.raises(PathIsDirectory):
                files.read(path)
            with pytest.raises(PathIsDirectory):
                files.write(path, b"")
            with pytest.raises(PathIsDirectory):
                files.append(path, b"")

    def test_surrogate_in_a_path_is_refused(self, files: Filesystem) -> None:
        with pytest.raises(InvalidPath):
            files.write("/\ud800", b"")
        assert "\ud800" not in files.listdir("/")

    def test_permissions_are_kept(self, files: Filesystem) -> None:
        files.write("/a", b"")
        files.mkdir("/d")
        files.chmod("/a", 0o640)
        files.chmod("/d", 0o700)
        assert (files.lstat("/a").mode, files.lstat("/d").mode) == (0o640, 0o700)
        with pytest.raises(PathNotFound):
            files.chmod("/nothing", 0o600)


class TestDirectories:
    def test_listing_reports_each_kind(self, files: Filesystem) -> None:
        files.mkdir("/d")
        files.mkdir("/d/inner")
        files.write("/d/.hidden", b"abc")
        files.symlink("nowhere", "/d/link")
        kinds = {name: entry.kind for name, entry in files.listdir("/d").items()}
        assert kinds == {"inner": "directory", ".hidden": "file", "link": "symlink"}
        assert files.listdir("/d")[".hidden"].size == 3

    def test_root_is_a_directory(self, files: Filesystem) -> None:
        assert files.lstat("/").kind == "directory"
        with pytest.raises(PathExists):
            files.mkdir("/")
        with pytest.raises(AccessDenied):
            files.remove("/", recursive=True)
        with pytest.raises(PathError):
            files.rename("/", "/x")
        assert files.lstat("/").kind == "directory"

    def test_creating_an_existing_path_is_refused(self, files: Filesystem) -> None:
        files.mkdir("/d")
        files.write("/a", b"x")
        for path in ("/d", "/a"):
            with pytest.raises(PathExists):
                files.mkdir(path)
            with pytest.raises(PathExists):
                files.symlink("t", path)
        assert files.read("/a") == b"x"

    def test_makedirs_creates_missing_parents(self, files: Filesystem) -> None:
        files.makedirs("/x/y/z")
        files.makedirs("/x/y/z")
        assert files.lstat("/x/y/z").kind == "directory"
        files.write("/x/f", b"")
        with pytest.raises(PathExists):
            files.makedirs("/x/f")
        with pytest.raises(PathNotDirectory):
            files.makedirs("/x/f/g")

    def test_remove_accepts_files_and_empty_directories(self, files: Filesystem) -> None:
        files.write("/a", b"")
        files.mkdir("/d")
        files.remove("/a")
        files.remove("/d")
        assert files.peek("/a") is files.peek("/d") is None

    def test_remove_of_a_full_directory_needs_recursive(self, files: Filesystem) -> None:
        files.makedirs("/d/e")
        files.write("/d/e/f", b"")
        with pytest.raises(DirectoryNotEmpty):
            files.remove("/d")
        files.remove("/d", recursive=True)
        assert files.peek("/d") is None

    def test_directory_created_again_is_empty(self, files: Filesystem) -> None:
        files.makedirs("/d/e")
        files.remove("/d", recursive=True)
        files.mkdir("/d")
        assert dict(files.listdir("/d")) == {}

    def test_thousands_of_names_in_a_directory(self, files: Filesystem) -> None:
        files.mkdir("/d")
        for number in range(1500):
            files.write(f"/d/{number}", b"")
        assert len(files.listdir("/d")) == 1500


class TestSymlinks:
    def test_readlink_returns_the_target_unchanged(self, files: Filesystem) -> None:
        files.symlink("../up/there", "/link")
        assert files.lstat("/link").kind == "symlink"
        assert files.readlink("/link") == "../up/there"

    def test_readlink_refuses_other_kinds(self, files: Filesystem) -> None:
        files.write("/a", b"")
        with pytest.raises(PathError, match="not a symlink"):
            files.readlink("/a")

    def test_last_name_is_not_followed(self, files: Filesystem) -> None:
        files.write("/a", b"kept")
        files.symlink("a", "/link")
        for call in (files.read, lambda p: files.write(p, b""), lambda p: files.append(p, b"")):
            with pytest.raises(SymlinkLoop):
                call("/link")
        assert (files.read("/a"), files.lstat("/link").kind) == (b"kept", "symlink")

    def test_names_before_the_last_are_not_followed(self, files: Filesystem) -> None:
        files.mkdir("/d")
        files.write("/d/a", b"")
        files.symlink("d", "/link")
        for call in (files.read, files.lstat, lambda p: files.write(p, b""), files.mkdir):
            with pytest.raises(PathNotDirectory):
                call("/link/a")
        with pytest.raises(PathNotDirectory):
            files.listdir("/link")

    def test_removing_a_symlink_keeps_its_target(self, files: Filesystem) -> None:
        files.mkdir("/d")
        files.write("/d/a", b"kept")
        files.symlink("d", "/link")
        files.remove("/link", recursive=True)
        assert files.read("/d/a") == b"kept"


class TestRenameAndCopy:
    def test_file_moves_and_replaces(self, files: Filesystem) -> None:
        files.write("/a", b"new")
        files.write("/b", b"old")
        files.rename("/a", "/b")
        assert (files.read("/b"), files.peek("/a")) == (b"new", None)

    def test_directory_moves_with_its_content(self, files: Filesystem) -> None:
        files.makedirs("/d/e")
        files.write("/d/e/f", b"1")
        files.chmod("/d/e/f", 0o755)
        files.symlink("f", "/d/e/l")
        files.rename("/d", "/x")
        assert (files.read("/x/e/f"), files.readlink("/x/e/l")) == (b"1", "f")
        assert (files.lstat("/x/e/f").mode, files.peek("/d")) == (0o755, None)

    def test_directory_replaces_an_empty_one(self, files: Filesystem) -> None:
        files.makedirs("/d/e")
        files.mkdir("/x")
        files.rename("/d", "/x")
        assert list(files.listdir("/x")) == ["e"]

    def test_symlink_moves_unchanged(self, files: Filesystem) -> None:
        files.symlink("there", "/a")
        files.write("/b", b"")
        files.rename("/a", "/b")
        assert files.readlink("/b") == "there"

    def test_file_replaces_a_symlink(self, files: Filesystem) -> None:
        files.write("/a", b"1")
        files.symlink("elsewhere", "/b")
        files.rename("/a", "/b")
        assert files.read("/b") == b"1"

    def test_refused_move_changes_nothing(self, files: Filesystem) -> None:
        files.makedirs("/d/e")
        files.write("/d/f", b"")
        files.write("/a", b"x")
        for source, target, error in (
            ("/nothing", "/y", PathNotFound),
            ("/a", "/d", PathIsDirectory),
            ("/d", "/a", PathNotDirectory),
            ("/d/e", "/d", DirectoryNotEmpty),
            ("/d", "/d/e/d", PathError),
            ("/a", "/no/a", PathNotFound),
            ("/a", "/d/f/a", PathNotDirectory),
        ):
            with pytest.raises(error):
                files.rename(source, target)
        assert files.read("/a") == b"x"
        assert sorted(files.listdir("/d")) == ["e", "f"]

    def test_move_onto_itself_changes_nothing(self, files: Filesystem) -> None:
        files.write("/a", b"x")
        files.rename("/a", "/a")
        assert files.read("/a") == b"x"

    def test_directory_is_copied_with_its_content(self, files: Filesystem) -> None:
        files.makedirs("/d/e")
        files.write("/d/e/f", b"1")
        files.chmod("/d/e/f", 0o755)
        files.symlink("f", "/d/e/l")
        files.copy("/d", "/x")
        assert (files.read("/x/e/f"), files.readlink("/x/e/l")) == (b"1", "f")
        assert (files.lstat("/x/e/f").mode, files.read("/d/e/f")) == (0o755, b"1")

    def test_copying_a_symlink_does_not_follow_it(self, files: Filesystem) -> None:
        files.symlink("x", "/l")
        with pytest.raises(SymlinkLoop):
            files.copy("/l", "/m")


def test_concurrent_threads_lose_nothing(files: Filesystem) -> None:
    files.mkdir("/d")

    def work(thread: int) -> None:
        for number in range(30):
            files.write(f"/d/{thread}-{number}", b"x" * number)
            files.append(f"/d/{thread}-{number}", b"!")
            files.rename(f"/d/{thread}-{number}", f"/d/{thread}.{number}")
            files.listdir("/d")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(files.listdir("/d")) == 180
    assert files.read("/d/5.29") == b"x" * 29 + b"!"
