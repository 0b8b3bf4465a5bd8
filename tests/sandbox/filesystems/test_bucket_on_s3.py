"""`BucketFilesystem` on a real S3 server: the requests it sends, and keys that are not paths."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from urllib.parse import quote
from urllib.request import Request, urlopen

import obstore
import pytest
from obstore.store import S3Store

from sandbox.filesystems.recording_proxy import RecordingProxy
from smokebox.errors import AccessDenied, BucketNotFound, PathError, PathNotFound
from smokebox.sandbox.filesystems.bucket import BucketFilesystem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from smokebox.testing import SeaweedServer


def connect(seaweed: SeaweedServer, name: str, endpoint: str = "", secret: str = "") -> S3Store:
    return S3Store(
        name,
        endpoint=endpoint or seaweed.endpoint,
        access_key_id=seaweed.access_key,
        secret_access_key=secret or seaweed.secret_key,
        client_options={"allow_http": True},
    )


@pytest.fixture
def store(seaweed: SeaweedServer, bucket_name: str) -> S3Store:
    return connect(seaweed, bucket_name)


@pytest.fixture
def proxy(seaweed: SeaweedServer, bucket_name: str) -> Iterator[RecordingProxy]:
    with RecordingProxy(seaweed.endpoint) as proxy:
        yield proxy


@pytest.fixture
def fs(
    seaweed: SeaweedServer, bucket_name: str, proxy: RecordingProxy
) -> Iterator[BucketFilesystem]:
    filesystem = BucketFilesystem(connect(seaweed, bucket_name, proxy.endpoint))
    yield filesystem
    filesystem.close()


def fill(store: S3Store, keys: Iterable[str]) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: obstore.put(store, key, key.encode()), keys))


def scan(fs: BucketFilesystem, path: str = "/") -> int:
    """List, stat and read every file in sequence, as `grep -r` does."""
    read = 0
    for name, entry in sorted(fs.listdir(path).items()):
        below = f"{path.rstrip('/')}/{name}"
        if entry.kind == "directory":
            read += scan(fs, below)
            continue
        assert fs.lstat(below).size == len(fs.read(below))
        read += 1
    return read


def test_listing_serves_stat_of_its_files(
    fs: BucketFilesystem, store: S3Store, proxy: RecordingProxy
) -> None:
    fill(store, (f"d/{number}" for number in range(50)))
    for name in fs.listdir("/d"):
        assert fs.lstat(f"/d/{name}").kind == "file"
    assert len(proxy.requests) == 1


def test_listing_past_the_first_page(
    fs: BucketFilesystem, store: S3Store, proxy: RecordingProxy
) -> None:
    fill(store, (f"d/{number:04}" for number in range(1500)))
    assert len(fs.listdir("/d")) == 1500
    assert len(proxy.requests) == 2
    fs.remove("/d", recursive=True)
    assert fs.listdir("/") == {}


def test_walk_lists_pages_and_not_directories(
    fs: BucketFilesystem, store: S3Store, proxy: RecordingProxy
) -> None:
    fill(store, (f"t/{number % 100:02}/x/{number}.txt" for number in range(300)))
    # As before a command: otherwise listings expire after a second, less than a slow scan takes.
    fs.refresh()
    assert scan(fs) == 300
    listings = [line for line in proxy.requests if "list-type" in line]
    assert len(listings) < 10
    assert not [line for line in proxy.requests if line.startswith("HEAD")]


def test_scan_fetches_each_object_once(
    fs: BucketFilesystem, store: S3Store, proxy: RecordingProxy
) -> None:
    fill(store, (f"{number % 3}/{number}" for number in range(200)))
    assert scan(fs) == 200
    assert proxy.bodies() == 200


def test_files_that_are_not_read_are_not_downloaded(
    fs: BucketFilesystem, store: S3Store, proxy: RecordingProxy
) -> None:
    fill(store, (f"d/{number:02}" for number in range(50)))
    fs.listdir("/d")
    fs.read("/d/07")
    fs.read("/d/08")
    fs.read("/d/31")
    assert proxy.bodies() == 3


def test_scan_of_one_kind_of_file_downloads_no_other(
    fs: BucketFilesystem, store: S3Store, proxy: RecordingProxy
) -> None:
    fill(store, (f"d/{number:03}.{kind}" for number in range(60) for kind in ("md", "png")))
    for name in sorted(fs.listdir("/d")):
        if name.endswith(".md"):
            fs.read(f"/d/{name}")
    fs.close()
    assert not [line for line in proxy.requests if ".png " in line]


def test_without_prefetch_only_read_files_are_downloaded(
    seaweed: SeaweedServer, bucket_name: str, store: S3Store, proxy: RecordingProxy
) -> None:
    fill(store, (f"d/{number:02}" for number in range(50)))
    fs = BucketFilesystem(connect(seaweed, bucket_name, proxy.endpoint), prefetch=0)
    for name in sorted(fs.listdir("/d"))[:20]:
        fs.read(f"/d/{name}")
    assert proxy.bodies() == 20


def test_unchanged_object_is_not_downloaded_again(
    fs: BucketFilesystem, store: S3Store, proxy: RecordingProxy
) -> None:
    fill(store, ["d/a", "d/b"])
    for _ in range(3):
        fs.refresh()
        for name in fs.listdir("/d"):
            fs.read(f"/d/{name}")
    assert proxy.bodies() == 2


def test_new_object_is_visible_within_one_command(fs: BucketFilesystem, store: S3Store) -> None:
    assert fs.listdir("/") == {}
    with pytest.raises(PathNotFound):
        fs.lstat("/done")
    fill(store, ["done"])
    deadline = time.monotonic() + 10
    while "done" not in fs.listdir("/"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert fs.lstat("/done").kind == "file"


def test_directory_is_kept_as_an_empty_object_that_ends_in_a_slash(
    fs: BucketFilesystem, proxy: RecordingProxy
) -> None:
    fs.mkdir("/console")
    assert [line.endswith("/console/") for line in proxy.requests if line.startswith("PUT")] == [
        True
    ]
    fs.remove("/console")
    assert "/console/?" in proxy.requests[-1] and proxy.requests[-1].startswith("DELETE")


def test_keys_that_obstore_cannot_represent_are_hidden(
    seaweed: SeaweedServer, fs: BucketFilesystem, store: S3Store, bucket_name: str
) -> None:
    fill(store, ["d/good", "d/e/f", "top", *(f"d/long/{n:04}" for n in range(1100))])
    for name in ("tab\tx", "new\nline", "long/\t"):
        put_through_filer(seaweed, bucket_name, f"d/{name}")
    assert sorted(fs.listdir("/d")) == ["e", "good", "long"]
    assert scan(fs) == 1103


def test_directory_with_invalid_keys_is_not_partly_removed(
    seaweed: SeaweedServer, fs: BucketFilesystem, store: S3Store, bucket_name: str
) -> None:
    fill(store, ["d/good"])
    put_through_filer(seaweed, bucket_name, "d/new\nline")
    with pytest.raises(PathError, match="not valid paths"):
        fs.remove("/d", recursive=True)
    assert fs.read("/d/good") == b"d/good"


def test_file_hides_the_directory_of_its_name(fs: BucketFilesystem, store: S3Store) -> None:
    fill(store, ["d/x", "d/x/under"])
    assert {name: entry.kind for name, entry in fs.listdir("/d").items()} == {"x": "file"}
    assert (fs.read("/d/x"), fs.read("/d/x/under")) == (b"d/x", b"d/x/under")
    fs.remove("/d", recursive=True)
    assert fs.listdir("/") == {}


def test_large_object(fs: BucketFilesystem, store: S3Store) -> None:
    data = bytes(range(256)) * (50 * 4096)
    fs.write("/large", data)
    assert obstore.head(store, "large")["size"] == len(data)
    fs.refresh()
    assert fs.read("/large") == data


def test_prefix_inside_the_store_is_respected(seaweed: SeaweedServer, store: S3Store) -> None:
    fill(store, ["in/side/a", "out"])
    inner = S3Store(
        store.config["bucket"],
        prefix="in",
        endpoint=seaweed.endpoint,
        access_key_id=seaweed.access_key,
        secret_access_key=seaweed.secret_key,
        client_options={"allow_http": True},
    )
    fs = BucketFilesystem(inner, "side")
    assert sorted(fs.listdir("/")) == ["a"]
    fs.mkdir("/new")
    assert BucketFilesystem(store).lstat("/in/side/new").kind == "directory"


def test_without_refresh_the_cache_expires(fs: BucketFilesystem, store: S3Store) -> None:
    fill(store, ["d/f"])
    assert (fs.listdir("/d")["f"].size, fs.read("/d/f")) == (3, b"d/f")
    obstore.put(store, "d/f", b"longer")
    deadline = time.monotonic() + 10
    while fs.lstat("/d/f").size == 3:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert fs.read("/d/f") == b"longer"


def test_missing_bucket(seaweed: SeaweedServer) -> None:
    fs = BucketFilesystem(connect(seaweed, "no-such-bucket"))
    for attempt in (fs.refresh, lambda: fs.listdir("/"), lambda: fs.read("/x")):
        with pytest.raises(BucketNotFound):
            attempt()


def test_wrong_credentials(seaweed: SeaweedServer, bucket_name: str) -> None:
    fs = BucketFilesystem(connect(seaweed, bucket_name, secret="wrong"))
    for attempt in (fs.refresh, lambda: fs.listdir("/"), lambda: fs.write("/x", b"")):
        with pytest.raises(AccessDenied, match="AWS_SECRET_ACCESS_KEY") as caught:
            attempt()
        assert "wrong" not in str(caught.value)


def put_through_filer(seaweed: SeaweedServer, bucket: str, key: str) -> None:
    """Put a key that obstore refuses, as a client with other rules can."""
    port = seaweed._ports["filer"]
    url = f"http://127.0.0.1:{port}/buckets/{bucket}/{quote(key)}"
    with urlopen(Request(url, data=b"x", method="PUT"), timeout=10):
        pass
