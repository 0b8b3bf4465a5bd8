"""Changes over a lower filesystem that never receives them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from smokebox.errors import DirectoryNotEmpty, PathNotFound, StorageFull
from smokebox.sandbox.filesystems import HostFilesystem, MemoryFilesystem, OverlayFilesystem

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pytest import TempPathFactory as Factory


@pytest.fixture
def lower(tmp_path: Path) -> Path:
    """Return a folder with a few entries."""
    (tmp_path / "d" / "e").mkdir(parents=True)
    (tmp_path / "d" / "a").write_text("lower")
    (tmp_path / "d" / "e" / "deep").write_text("deep")
    (tmp_path / "d" / "a").chmod(0o750)
    (tmp_path / "link").symlink_to("d")
    return tmp_path


@pytest.fixture
def files(lower: Path) -> OverlayFilesystem:
    """Return an overlay over that folder."""
    # Writable on purpose: a test would notice a change that reached it.
    return OverlayFilesystem(HostFilesystem(lower, read_only=False))


@pytest.fixture(autouse=True)
def unchanged(lower: Path) -> Iterator[None]:
    """Check that the lower folder is the same after each test."""
    before = snapshot(lower)
    yield
    assert snapshot(lower) == before


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path): (path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in folder.rglob("*")
    }


def test_both_layers_are_visible(files: OverlayFilesystem) -> None:
    files.write("/d/b", b"upper")
    assert sorted(files.listdir("/d")) == ["a", "b", "e"]
    assert (files.read("/d/a"), files.read("/d/b")) == (b"lower", b"upper")
    assert files.readlink("/link") == "d"


def test_changed_file_hides_the_lower_one_and_keeps_its_permissions(
    files: OverlayFilesystem,
) -> None:
    files.write("/d/a", b"changed")
    assert (files.read("/d/a"), files.lstat("/d/a").mode) == (b"changed", 0o750)


def test_append_starts_with_the_lower_content(files: OverlayFilesystem) -> None:
    files.append("/d/a", b"+")
    files.append("/d/a", b"+")
    assert files.read("/d/a") == b"lower++"


def test_permissions_and_times_change_in_the_upper_layer(files: OverlayFilesystem) -> None:
    files.chmod("/d/a", 0o600)
    files.touch("/d/a", 5.0)
    files.chmod("/d/e", 0o700)
    assert (files.lstat("/d/a").mode, files.lstat("/d/a").mtime) == (0o600, 5.0)
    assert (files.lstat("/d/e").mode, files.read("/d/e/deep")) == (0o700, b"deep")


def test_removed_file_is_gone_until_written_again(files: OverlayFilesystem) -> None:
    files.remove("/d/a")
    with pytest.raises(PathNotFound):
        files.read("/d/a")
    assert "a" not in files.listdir("/d")
    files.append("/d/a", b"again")
    assert files.read("/d/a") == b"again"
    files.remove("/d/a")
    assert files.peek("/d/a") is None


def test_directory_created_again_is_empty(files: OverlayFilesystem) -> None:
    files.remove("/d", recursive=True)
    assert files.peek("/d/e/deep") is None
    files.mkdir("/d")
    assert dict(files.listdir("/d")) == {}
    files.write("/d/e", b"a file where a directory was")
    assert files.read("/d/e") == b"a file where a directory was"


def test_directory_with_lower_files_is_not_empty(files: OverlayFilesystem) -> None:
    with pytest.raises(DirectoryNotEmpty):
        files.remove("/d/e")
    files.remove("/d/e/deep")
    files.remove("/d/e")
    assert sorted(files.listdir("/d")) == ["a"]


def test_lower_directory_can_be_renamed(files: OverlayFilesystem) -> None:
    files.rename("/d", "/moved")
    assert (files.peek("/d"), files.read("/moved/e/deep")) == (None, b"deep")
    files.rename("/moved", "/d")
    assert (files.read("/d/a"), files.lstat("/d/a").mode) == (b"lower", 0o750)


def test_rename_over_the_quota_changes_nothing(lower: Path) -> None:
    files = OverlayFilesystem(HostFilesystem(lower), MemoryFilesystem(quota=6))
    with pytest.raises(StorageFull):
        files.rename("/d", "/moved")
    assert (files.peek("/moved"), files.read("/d/e/deep")) == (None, b"deep")


def test_another_filesystem_can_hold_the_changes(lower: Path, tmp_path_factory: Factory) -> None:
    changes = tmp_path_factory.mktemp("changes")
    files = OverlayFilesystem(HostFilesystem(lower), HostFilesystem(changes, read_only=False))
    files.write("/d/e/b", b"kept")
    files.close()
    assert (changes / "d" / "e" / "b").read_bytes() == b"kept"
