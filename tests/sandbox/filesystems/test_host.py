"""Attempts to escape from a host folder, and features that memory lacks."""

from __future__ import annotations

import os
import resource
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from smokebox.errors import (
    AccessDenied,
    FileTooLarge,
    InvalidPath,
    PathError,
    PathNotDirectory,
    PathNotFound,
    SymlinkLoop,
)
from smokebox.sandbox.filesystems import HostFilesystem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder to mount, beside a file that must stay unreachable."""
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder"


@pytest.fixture
def files(folder: Path) -> Iterator[HostFilesystem]:
    """Return the folder as a writable filesystem."""
    filesystem = HostFilesystem(folder, read_only=False)
    yield filesystem
    filesystem.close()


def every_call(path: str) -> list[Callable[[HostFilesystem], object]]:
    return [
        lambda fs: fs.read(path),
        lambda fs: fs.write(path, b"x"),
        lambda fs: fs.append(path, b"x"),
        lambda fs: fs.lstat(path),
        lambda fs: fs.listdir(path),
        lambda fs: fs.mkdir(path),
        lambda fs: fs.remove(path, recursive=True),
        lambda fs: fs.rename(path, "/y"),
        lambda fs: fs.symlink("x", path),
        lambda fs: fs.chmod(path, 0o777),
        lambda fs: fs.touch(path, 0.0),
    ]


def test_symlink_to_a_directory_outside_is_never_entered(
    files: HostFilesystem, folder: Path
) -> None:
    (folder / "out").symlink_to(folder.parent)
    for call in every_call("/out/secret"):
        with pytest.raises(PathNotDirectory):
            call(files)
    assert (folder.parent / "secret").read_text() == "secret"


def test_symlink_to_a_file_outside_is_never_opened(files: HostFilesystem, folder: Path) -> None:
    (folder / "out").symlink_to("/etc/passwd")
    for call in (files.read, lambda p: files.write(p, b""), lambda p: files.append(p, b"")):
        with pytest.raises(SymlinkLoop):
            call("/out")
    with pytest.raises(SymlinkLoop):
        files.chmod("/out", 0o777)
    assert files.readlink("/out") == "/etc/passwd"


@pytest.mark.parametrize("path", ["/../secret", "/d/../../secret", "/..", "/d/.."])
def test_dot_dot_does_not_escape(files: HostFilesystem, folder: Path, path: str) -> None:
    (folder / "d").mkdir()
    for call in every_call(path):
        with pytest.raises(InvalidPath):
            call(files)
    assert (folder.parent / "secret").read_text() == "secret"


def test_removing_a_folder_keeps_symlink_targets(files: HostFilesystem, folder: Path) -> None:
    (folder / "d").mkdir()
    (folder / "d" / "out").symlink_to(folder.parent)
    files.remove("/d", recursive=True)
    assert (folder.parent / "secret").exists()


def test_directory_swapped_for_a_symlink_does_not_escape(
    files: HostFilesystem, folder: Path
) -> None:
    """A thread keeps replacing the directory in use with a link to the outside."""
    (folder / "inside").mkdir()
    (folder / "inside" / "secret").write_text("public")
    (folder / "outside").symlink_to(folder.parent)
    done = threading.Event()

    def swap() -> None:
        while not done.is_set():
            for name in ("inside", "outside"):
                os.rename(folder / name, folder / "used")
                os.rename(folder / "used", folder / name)

    swapper = threading.Thread(target=swap)
    swapper.start()
    seen: set[bytes] = set()
    for _ in range(2000):
        with suppress(PathError):
            seen.add(files.read("/used/secret"))
        with suppress(PathError):
            files.write("/used/written", b"x")
    done.set()
    swapper.join()
    assert seen <= {b"public"}
    assert not (folder.parent / "written").exists()


def test_host_folders_are_read_only_by_default(folder: Path) -> None:
    (folder / "a").write_text("kept")
    files = HostFilesystem(folder)
    assert files.read("/a") == b"kept"
    for call in every_call("/a"):
        with suppress(AccessDenied, PathNotDirectory):
            call(files)
    assert [(item.name, item.read_text()) for item in folder.iterdir()] == [("a", "kept")]
    with pytest.raises(AccessDenied, match="read_only=False"):
        files.write("/b", b"")


def test_errors_do_not_reveal_the_host_path(files: HostFilesystem, folder: Path) -> None:
    for path in ("/nothing", "/" + "n" * 300, "/nothing/below"):
        with pytest.raises(PathError) as caught:
            files.read(path)
        assert str(folder) not in repr(caught.value) + str(caught.value)
        assert caught.value.__suppress_context__


def test_missing_folder_fails_at_creation(tmp_path: Path) -> None:
    with pytest.raises(PathNotFound):
        HostFilesystem(tmp_path / "missing")
    (tmp_path / "file").touch()
    with pytest.raises(PathNotDirectory):
        HostFilesystem(tmp_path / "file")


def test_failed_write_keeps_the_file_and_leaves_no_other(
    files: HostFilesystem, folder: Path
) -> None:
    """RLIMIT_FSIZE stands in for a full disk: the kernel stops the write half-way."""
    (folder / "a").write_bytes(b"kept")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(FileTooLarge):
            files.write("/a", bytes(200_000))
        with pytest.raises(FileTooLarge):
            files.append("/a", bytes(200_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [item.name for item in folder.iterdir()] == ["a"]
    assert (folder / "a").read_bytes() == b"kept"


def test_hard_link_elsewhere_keeps_its_content(files: HostFilesystem, folder: Path) -> None:
    os.link(folder.parent / "secret", folder / "shared")
    files.append("/shared", b"+")
    files.write("/shared", files.read("/shared") + b"+")
    assert (folder / "shared").read_text() == "secret++"
    assert (folder.parent / "secret").read_text() == "secret"


def test_pipes_are_listed_and_not_opened(files: HostFilesystem, folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    assert files.listdir("/")["pipe"].kind == files.lstat("/pipe").kind == "other"
    for call in (files.read, lambda p: files.write(p, b""), lambda p: files.append(p, b"")):
        with pytest.raises(AccessDenied):
            call("/pipe")


def test_names_that_are_not_utf8_are_left_out(files: HostFilesystem, folder: Path) -> None:
    (folder / "d").mkdir()
    Path(os.fsdecode(bytes(folder) + b"/d/\xff")).touch()
    assert dict(files.listdir("/d")) == {}
    files.remove("/d", recursive=True)
    assert files.peek("/d") is None


def test_file_over_the_limit_is_not_read(folder: Path) -> None:
    (folder / "a").write_bytes(b"12345")
    with pytest.raises(FileTooLarge, match="5 bytes"):
        HostFilesystem(folder, max_file_size=4).read("/a")


def test_set_id_bits_are_not_set(files: HostFilesystem, folder: Path) -> None:
    files.write("/a", b"")
    files.chmod("/a", 0o6755)
    assert (folder / "a").stat().st_mode & 0o7777 == 0o755


def test_touch_sets_the_time(files: HostFilesystem) -> None:
    files.write("/a", b"")
    files.touch("/a", 12345.5)
    assert files.lstat("/a").mtime == 12345.5


def test_moved_folder_stays_mounted(files: HostFilesystem, folder: Path) -> None:
    (folder / "a").write_text("x")
    folder.rename(folder.parent / "elsewhere")
    assert files.read("/a") == b"x"


def test_no_file_stays_open(files: HostFilesystem, folder: Path) -> None:
    files.makedirs("/d/e/f")
    before = len(os.listdir("/proc/self/fd"))
    for path in ("/d/e/f", "/d/e/nothing/x", "/d", "/d/e/f/new"):
        for call in every_call(path):
            with suppress(PathError):
                call(files)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_closed_filesystem_refuses_calls(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    files = HostFilesystem(folder)
    files.close()
    files.close()
    with pytest.raises(AccessDenied, match="closed"):
        files.lstat("/")
    assert len(os.listdir("/proc/self/fd")) <= before
