"""`BucketFilesystem` over a memory store, a folder, and a real S3 server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import obstore
import pytest
from obstore.store import LocalStore, MemoryStore, S3Store

from smokebox.errors import (
    AccessDenied,
    BucketNotFound,
    DirectoryNotEmpty,
    InvalidOption,
    InvalidPath,
    PathError,
    PathExists,
    PathIsDirectory,
    PathNotDirectory,
    PathNotFound,
    Unsupported,
)
from smokebox.sandbox.filesystems.bucket import BucketFilesystem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from obstore.store import ObjectStore

    from smokebox.testing import SeaweedServer


def s3(seaweed: SeaweedServer, name: str) -> S3Store:
    return S3Store(
        name,
        endpoint=seaweed.endpoint,
        access_key_id=seaweed.access_key,
        secret_access_key=seaweed.secret_key,
        client_options={"allow_http": True},
    )


@pytest.fixture(params=["memory", "folder", "s3"])
def store(request: pytest.FixtureRequest, seaweed: SeaweedServer, tmp_path: Path) -> ObjectStore:
    if request.param == "memory":
        return MemoryStore()
    if request.param == "folder":
        return LocalStore(tmp_path)
    return s3(seaweed, request.getfixturevalue("bucket_name"))


@pytest.fixture
def fs(store: ObjectStore) -> Iterator[BucketFilesystem]:
    filesystem = BucketFilesystem(store)
    yield filesystem
    filesystem.close()


def names(fs: BucketFilesystem, path: str = "/") -> list[str]:
    fs.refresh()
    return sorted(fs.listdir(path))


def keys(store: ObjectStore) -> set[str]:
    return {meta["path"] for meta in obstore.list(store).collect()}


def test_object_of_another_client_is_read(fs: BucketFilesystem, store: ObjectStore) -> None:
    obstore.put(store, "docs/a.txt", b"hello")
    assert fs.read("/docs/a.txt") == b"hello"
    assert (fs.lstat("/docs").kind, fs.lstat("/docs/a.txt").size) == ("directory", 5)
    assert names(fs) == ["docs"]


def test_written_file_is_an_object_at_once(fs: BucketFilesystem, store: ObjectStore) -> None:
    fs.write("/ü x.txt", b"data")
    assert obstore.get(store, "ü x.txt").bytes() == b"data"


def test_object_put_by_others_shows_after_refresh(fs: BucketFilesystem, store: ObjectStore) -> None:
    assert names(fs) == []
    obstore.put(store, "late", b"x")
    assert names(fs) == ["late"]
    obstore.delete(store, "late")
    assert names(fs) == []


def test_changed_object_is_read_fresh(fs: BucketFilesystem, store: ObjectStore) -> None:
    for text in (b"one", b"two", b"six"):
        obstore.put(store, "f", text)
        fs.refresh()
        assert fs.listdir("/")["f"].size == 3
        assert fs.read("/f") == text
        fs.refresh()
        assert fs.read("/f") == text


def test_prefix_is_the_root(store: ObjectStore) -> None:
    obstore.put(store, "team/docs/a", b"x")
    obstore.put(store, "team/docs-old", b"y")
    fs = BucketFilesystem(store, "/team/docs/")
    assert names(fs) == ["a"]
    fs.write("/b", b"z")
    assert "team/docs/b" in keys(store)


def test_empty_prefix_is_an_empty_directory(store: ObjectStore) -> None:
    fs = BucketFilesystem(store, "nothing/here")
    assert (names(fs), fs.lstat("/").kind) == ([], "directory")


def test_mkdir_persists_and_its_marker_is_hidden(fs: BucketFilesystem, store: ObjectStore) -> None:
    fs.mkdir("/d")
    fs.mkdir("/d/e")
    other = BucketFilesystem(store)
    assert (names(other), names(other, "/d"), names(other, "/d/e")) == (["d"], ["e"], [])
    assert other.lstat("/d/e").kind == "directory"


def test_directory_remains_after_its_last_file(fs: BucketFilesystem) -> None:
    fs.mkdir("/d")
    fs.write("/d/f", b"x")
    fs.remove("/d/f")
    assert names(fs, "/d") == []


def test_mkdir_refuses_existing_paths_and_missing_parents(fs: BucketFilesystem) -> None:
    fs.mkdir("/d")
    fs.write("/f", b"x")
    for path in ("/d", "/f"):
        with pytest.raises(PathExists):
            fs.mkdir(path)
    with pytest.raises(PathNotFound):
        fs.mkdir("/no/d")
    with pytest.raises(PathNotDirectory):
        fs.mkdir("/f/d")


def test_write_refuses_a_directory_and_a_missing_parent(fs: BucketFilesystem) -> None:
    fs.mkdir("/d")
    with pytest.raises(PathIsDirectory):
        fs.write("/d", b"x")
    with pytest.raises(PathNotFound):
        fs.write("/no/f", b"x")
    assert names(fs) == ["d"]


def test_read_distinguishes_a_directory_from_a_missing_file(
    fs: BucketFilesystem, store: ObjectStore
) -> None:
    obstore.put(store, "d/f", b"x")
    with pytest.raises(PathIsDirectory):
        fs.read("/d")
    with pytest.raises(PathNotFound):
        fs.read("/nope")
    with pytest.raises(PathNotDirectory):
        fs.listdir("/d/f")
    with pytest.raises(PathNotFound):
        fs.listdir("/nope")


def test_append_creates_and_extends(fs: BucketFilesystem) -> None:
    fs.append("/log", b"one\n")
    fs.append("/log", b"two\n")
    assert fs.read("/log") == b"one\ntwo\n"


def test_empty_file(fs: BucketFilesystem) -> None:
    fs.mkdir("/d")
    fs.write("/d/empty", b"")
    fs.write("/d/full", b"x")
    assert names(fs, "/d") == ["empty", "full"]
    fs.refresh()
    assert (fs.lstat("/d/empty").kind, fs.read("/d/empty")) == ("file", b"")


def test_remove_a_file_and_an_empty_directory(fs: BucketFilesystem) -> None:
    fs.mkdir("/d")
    fs.write("/d/f", b"x")
    with pytest.raises(DirectoryNotEmpty):
        fs.remove("/d")
    fs.remove("/d/f")
    fs.remove("/d")
    assert names(fs) == []
    with pytest.raises(PathNotFound):
        fs.remove("/d")


def test_remove_recursive_leaves_nothing(fs: BucketFilesystem, store: ObjectStore) -> None:
    fs.mkdir("/d")
    fs.mkdir("/d/empty")
    for key in ("d/a", "d/e/f", "d/none", "d-kept"):
        obstore.put(store, key, b"" if key == "d/none" else b"x")
    fs.refresh()
    fs.remove("/d", recursive=True)
    assert (names(fs), keys(store)) == (["d-kept"], {"d-kept"})


def test_root_is_never_removed(fs: BucketFilesystem, store: ObjectStore) -> None:
    obstore.put(store, "kept", b"x")
    with pytest.raises(AccessDenied):
        fs.remove("/", recursive=True)
    assert names(fs) == ["kept"]


def test_rename_moves_a_file_over_another(fs: BucketFilesystem) -> None:
    fs.mkdir("/d")
    fs.write("/a", b"new")
    fs.write("/d/b", b"old")
    fs.rename("/a", "/d/b")
    assert (names(fs), fs.read("/d/b")) == (["d"], b"new")


def test_rename_moves_a_directory_with_its_contents(fs: BucketFilesystem) -> None:
    for path in ("/d", "/d/empty"):
        fs.mkdir(path)
    for path in ("/d/a", "/d/none"):
        fs.write(path, b"" if path == "/d/none" else b"x")
    fs.rename("/d", "/t")
    assert (names(fs), names(fs, "/t")) == (["t"], ["a", "empty", "none"])
    assert (fs.lstat("/t/empty").kind, fs.lstat("/t/none").kind) == ("directory", "file")


def test_rename_refuses_before_anything_changes(fs: BucketFilesystem) -> None:
    fs.mkdir("/d")
    fs.mkdir("/e")
    fs.write("/e/f", b"x")
    for source, target, error in (
        ("/d", "/d/inner", PathError),
        ("/e/f", "/d", PathIsDirectory),
        ("/d", "/e/f", PathNotDirectory),
        ("/d", "/e", DirectoryNotEmpty),
        ("/nope", "/x", PathNotFound),
        ("/e/f", "/no/f", PathNotFound),
    ):
        with pytest.raises(error):
            fs.rename(source, target)
    assert (names(fs), names(fs, "/e")) == (["d", "e"], ["f"])


def test_read_only_refuses_before_anything_changes(store: ObjectStore) -> None:
    obstore.put(store, "d/f", b"x")
    fs = BucketFilesystem(store, read_only=True)
    attempts: tuple[Callable[[], None], ...] = (
        lambda: fs.write("/g", b""),
        lambda: fs.append("/d/f", b""),
        lambda: fs.mkdir("/e"),
        lambda: fs.remove("/d/f"),
        lambda: fs.remove("/d", recursive=True),
        lambda: fs.rename("/d/f", "/g"),
    )
    for attempt in attempts:
        with pytest.raises(AccessDenied):
            attempt()
    assert (fs.read("/d/f"), keys(store)) == (b"x", {"d/f"})


def test_symlinks_are_unsupported(fs: BucketFilesystem) -> None:
    with pytest.raises(Unsupported):
        fs.symlink("/a", "/b")


@pytest.mark.parametrize("name", ["new\nline", "tab\tx", "x" * 1025])
def test_invalid_name_is_refused(fs: BucketFilesystem, name: str) -> None:
    with pytest.raises(InvalidPath):
        fs.write(f"/{name}", b"x")
    with pytest.raises(PathNotFound):
        fs.lstat(f"/{name}")
    with pytest.raises(PathNotFound):
        fs.read(f"/{name}")
    assert names(fs) == []


@pytest.mark.parametrize(
    "name", ["ü ñ日本😀", "a#b?c%20+&=", "q'\"`$(x)", "w*[1]{2}", "%2e%2e", "a:b", " s ", "-rf"]
)
def test_unusual_name_round_trips(fs: BucketFilesystem, name: str) -> None:
    fs.mkdir(f"/{name}")
    fs.write(f"/{name}/{name}", b"x")
    assert (names(fs), names(fs, f"/{name}")) == ([name], [name])
    fs.rename(f"/{name}", "/plain")
    assert fs.read(f"/plain/{name}") == b"x"


def test_threads_work_concurrently(fs: BucketFilesystem) -> None:
    fs.mkdir("/d")

    def work(number: int) -> bytes:
        fs.write(f"/d/{number}", b"%d" % number)
        fs.refresh()
        return fs.read(f"/d/{number}")

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(40))) == [b"%d" % n for n in range(40)]
    assert len(names(fs, "/d")) == 40


def test_cache_stays_within_its_limit(store: ObjectStore) -> None:
    fs = BucketFilesystem(store, cache_bytes=10_000)
    for number in range(30):
        fs.write(f"/{number}", b"x" * 1000)
        fs.read(f"/{number}")
    fs.write("/large", b"x" * 9000)
    assert (fs.read("/large"), fs._bodies.size <= 10_000) == (b"x" * 9000, True)


@pytest.mark.parametrize("prefix", ["a//b", "../a", "a/./b"])
def test_invalid_prefix_is_refused(prefix: str) -> None:
    with pytest.raises(InvalidOption, match="prefix"):
        BucketFilesystem(MemoryStore(), prefix)


@pytest.mark.parametrize("option", ["cache_bytes", "prefetch"])
def test_negative_amount_is_refused(option: str) -> None:
    with pytest.raises(InvalidOption, match=option):
        BucketFilesystem(MemoryStore(), **{option: -1})  # type: ignore[arg-type]


def test_folder_hides_its_symlinks(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "secret").write_text("s")
    (tmp_path / "in").mkdir()
    (tmp_path / "in/link").symlink_to(tmp_path / "secret")
    (tmp_path / "in/dir").symlink_to(tmp_path / "out")
    fs = BucketFilesystem(LocalStore(tmp_path / "in"))
    assert names(fs) == []
    with pytest.raises(PathNotFound):
        fs.read("/link")
    with pytest.raises(PathError):
        fs.write("/dir/x", b"")
    assert list((tmp_path / "out").iterdir()) == []


def test_deleted_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    fs = BucketFilesystem(LocalStore(tmp_path / "b"))
    (tmp_path / "b").rmdir()
    with pytest.raises(BucketNotFound):
        fs.refresh()
