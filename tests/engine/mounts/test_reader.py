"""The cache of blocks that readers of a mounted bucket share."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

from smokebox.engine.mounts.reader import BLOCK, BlockCache, ObjectVersion

BLOCKS = 40
VERSION = ObjectVersion("/object", "1", BLOCKS * BLOCK)


def test_block_evicted_from_the_queue_is_fetched_nevertheless() -> None:
    """With more readers at once than the cache has blocks, evicted fetches became I/O errors."""
    release, requested = threading.Event(), threading.Semaphore(0)

    class CountingCache(BlockCache):
        def start(self, version: ObjectVersion, number: int) -> Future[bytes]:
            future = super().start(version, number)
            requested.release()
            return future

    def fetch(version: ObjectVersion, start: int, end: int) -> bytes:
        release.wait(10)
        return b"%d" % (start // BLOCK)

    cache = CountingCache(fetch)
    with ThreadPoolExecutor(BLOCKS) as readers:
        results = [readers.submit(cache.get, VERSION, number) for number in range(BLOCKS)]
        for _ in range(BLOCKS):
            assert requested.acquire(timeout=10)
        release.set()
        assert [result.result(10) for result in results] == [b"%d" % n for n in range(BLOCKS)]


def test_concurrent_requests_share_a_fetch() -> None:
    calls = []

    def fetch(version: ObjectVersion, start: int, end: int) -> bytes:
        calls.append(start)
        return b"x"

    cache = BlockCache(fetch)
    assert {cache.get(VERSION, 3) for _ in range(5)} == {b"x"}
    assert calls == [3 * BLOCK]
