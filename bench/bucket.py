"""Listing and searching objects on a real S3 server, compared with s3fs.

    python bench/bucket.py [--objects 1000] [--rounds 5]

The server is SeaweedFS on the loopback interface. The listing cache of s3fs is off, as ours is
between commands. "first" starts with a client that has not connected yet. The grep of an s3fs user
is a loop over `find()` with `open()` or with `cat_file()`, or one concurrent `cat()`. "the server
alone" is the same listing, signed in advance and with its response discarded: the lower bound of
any client. Each figure is the best of the rounds in milliseconds; a ratio is theirs divided by
ours.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from http.client import HTTPConnection
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import obstore
import s3fs  # type: ignore[import-untyped]
from obstore.store import S3Store

from smokebox import bucket
from smokebox.testing import SeaweedServer

if TYPE_CHECKING:
    from smokebox.sandbox.bucket import BucketSandbox

NAME = "bench-objects"
FOLDERS = 20
TEXT = b"".join(b"line %d of a document with some words in it\n" % n for n in range(40))

Work = Callable[[], Awaitable[int]]


def connect(seaweed: SeaweedServer, name: str) -> S3Store:
    return S3Store(
        name,
        endpoint=seaweed.endpoint,
        access_key_id=seaweed.access_key,
        secret_access_key=seaweed.secret_key,
        client_options={"allow_http": True},
    )


def fill(seaweed: SeaweedServer, objects: int) -> None:
    store = connect(seaweed, seaweed.create_bucket(NAME))

    def put(number: int) -> None:
        data = TEXT + (b"needle\n" if number % 7 == 0 else b"")
        obstore.put(store, f"docs/{number % FOLDERS:02}/{number:05}.md", data)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(put, range(objects)))


def ours(seaweed: SeaweedServer) -> BucketSandbox:
    # A small cache: s3fs has none, and a large one would make the second round free.
    return bucket(
        NAME,
        endpoint=seaweed.endpoint,
        access_key=seaweed.access_key,
        secret_key=seaweed.secret_key,
        cache_bytes=16 * 1024 * 1024,
    )


def theirs(seaweed: SeaweedServer) -> s3fs.S3FileSystem:
    return s3fs.S3FileSystem(
        key=seaweed.access_key,
        secret=seaweed.secret_key,
        endpoint_url=seaweed.endpoint,
        use_listings_cache=False,
        skip_instance_cache=True,
    )


def shell_count(seaweed: SeaweedServer, command: str, sandbox: BucketSandbox | None = None) -> Work:
    """Return a job that runs a command which prints a count, in a new sandbox or in `sandbox`."""

    async def work() -> int:
        opened = sandbox or ours(seaweed)
        result = await opened.exec(command)
        if sandbox is None:
            await opened.aclose()
        assert result.success, result.stderr
        return int(result.stdout)

    return work


def glob_count(sandbox: BucketSandbox) -> Work:
    async def work() -> int:
        return len(await sandbox.glob("**/*.md", files_only=True))

    return work


def server_alone(seaweed: SeaweedServer, objects: int) -> Work:
    # The name of the bucket is not escaped in the URL, so the query to sign can be part of it.
    store = connect(seaweed, f"{NAME}?list-type=2&max-keys={objects}&prefix=docs")
    url = urlsplit(obstore.sign(store, "GET", "", timedelta(hours=1)))
    connection = HTTPConnection(url.netloc)

    def count() -> int:
        connection.request("GET", f"{url.path}?{url.query}")
        return connection.getresponse().read().count(b"<Key>")

    return in_thread(count)


def in_thread(count: Callable[[], int]) -> Work:
    return lambda: asyncio.to_thread(count)


def s3fs_open(fs: s3fs.S3FileSystem) -> int:
    found = 0
    for key in fs.find(NAME):
        with fs.open(key, "rb") as file:
            found += b"needle" in file.read()
    return found


def s3fs_cat_file(fs: s3fs.S3FileSystem) -> int:
    return sum(b"needle" in fs.cat_file(key) for key in fs.find(NAME))


def s3fs_cat(fs: s3fs.S3FileSystem) -> int:
    return sum(b"needle" in data for data in fs.cat(fs.find(NAME)).values())


async def best(work: Work, rounds: int, expected: int) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        result = await work()
        times.append(time.perf_counter() - began)
        assert result == expected, f"{result} is not {expected}"
    return min(times) * 1000


async def measure(seaweed: SeaweedServer, objects: int, rounds: int) -> dict[str, float]:
    fs = theirs(seaweed)
    warm = ours(seaweed)
    needles = len(range(0, objects, 7))
    find = "find /workspace -type f | wc -l"
    grep = "grep -rl needle /workspace | wc -l"
    works: dict[str, tuple[Work, int]] = {
        "list first: shell find": (shell_count(seaweed, find), objects),
        "list first: s3fs find": (in_thread(lambda: len(theirs(seaweed).find(NAME))), objects),
        "list: the server alone": (server_alone(seaweed, objects), min(objects, 1000)),
        "list: shell find": (shell_count(seaweed, find, warm), objects),
        "list: shell ls -R": (
            shell_count(seaweed, "ls -R /workspace | grep -c md", warm),
            objects,
        ),
        "list: sandbox.glob": (glob_count(warm), objects),
        "list: s3fs find": (in_thread(lambda: len(fs.find(NAME))), objects),
        "list: s3fs walk": (
            in_thread(lambda: sum(len(files) for _, _, files in fs.walk(NAME))),
            objects,
        ),
        "grep: shell grep -rl": (shell_count(seaweed, grep), needles),
        "grep: shell grep -rl, read before": (shell_count(seaweed, grep, warm), needles),
        "grep: s3fs find, open, read": (in_thread(lambda: s3fs_open(fs)), needles),
        "grep: s3fs find, cat_file": (in_thread(lambda: s3fs_cat_file(fs)), needles),
        "grep: s3fs find, cat at once": (in_thread(lambda: s3fs_cat(fs)), needles),
    }
    figures = {}
    for name, (work, expected) in works.items():
        figures[name] = await best(work, rounds, expected)
        print(f"{name:36} {figures[name]:9.1f} ms", flush=True)
    await warm.aclose()
    return figures


RATIOS = {
    "list, first": ("list first: s3fs find", "list first: shell find"),
    "list, find against find": ("list: s3fs find", "list: shell find"),
    "list, find against sandbox.glob": ("list: s3fs find", "list: sandbox.glob"),
    "list, walk against ls -R": ("list: s3fs walk", "list: shell ls -R"),
    "grep, against open and read": ("grep: s3fs find, open, read", "grep: shell grep -rl"),
    "grep, against cat_file": ("grep: s3fs find, cat_file", "grep: shell grep -rl"),
    "grep, against cat at once": ("grep: s3fs find, cat at once", "grep: shell grep -rl"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--objects", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with SeaweedServer() as seaweed:
        fill(seaweed, options.objects)
        figures = asyncio.run(measure(seaweed, options.objects, options.rounds))
    print()
    for name, (slow, fast) in RATIOS.items():
        print(f"{name:36} {figures[slow] / figures[fast]:6.1f} times faster")
    if options.objects <= 1000:
        floor = figures["list: the server alone"]
        own = figures["list: sandbox.glob"] - floor
        print(
            f"list, beside the server's {floor:.0f} ms: ours takes {own:.0f} ms, "
            f"s3fs {figures['list: s3fs find'] - floor:.0f} ms"
        )


if __name__ == "__main__":
    main()
