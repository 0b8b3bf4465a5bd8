"""Reading of one version of an object: small ones whole, large ones in blocks with readahead.

The content of an open file does not change: if the object was replaced, reads fail with ESTALE
instead of mixing versions.
"""

from __future__ import annotations

import errno
import threading
from collections import OrderedDict
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from smokebox.sandbox.filesystems.bucket import BucketFilesystem

SMALL = 1 << 20
BLOCK = 4 << 20
# Blocks in the cache that all readers share, and blocks that one reader fetches ahead.
_MAX_BLOCKS = 16
_MAX_AHEAD = 4
# The kernel's own readahead requests may arrive out of order within this distance.
_NEAR = 4 << 20


@dataclass(frozen=True, slots=True)
class ObjectVersion:
    """An object as it was when it was opened."""

    path: str
    tag: str
    size: int


class _Key(NamedTuple):
    version: ObjectVersion
    number: int


class BlockCache:
    """LRU cache of blocks of objects. Concurrent requests for a block share one fetch."""

    def __init__(self, fetch: Callable[[ObjectVersion, int, int], bytes]) -> None:
        self._fetch = fetch
        self._lock = threading.Lock()
        self._blocks: OrderedDict[_Key, Future[bytes]] = OrderedDict()
        self._pool = ThreadPoolExecutor(_MAX_BLOCKS // 2, thread_name_prefix="smokebox-blocks")

    def get(self, version: ObjectVersion, number: int) -> bytes:
        """Return a block. If its queued fetch was evicted, fetches it in this thread."""
        try:
            return self.start(version, number).result()
        except CancelledError:
            return self._fetch_block(_Key(version, number))

    def start(self, version: ObjectVersion, number: int) -> Future[bytes]:
        """Return a block that is cached or being fetched."""
        key = _Key(version, number)
        with self._lock:
            block = self._blocks.get(key)
            if block is None:
                block = self._blocks[key] = self._pool.submit(self._fetch_block, key)
                while len(self._blocks) > _MAX_BLOCKS:
                    _, oldest = self._blocks.popitem(last=False)
                    oldest.cancel()
            else:
                self._blocks.move_to_end(key)
            return block

    def holds(self, version: ObjectVersion, number: int) -> bool:
        """Return whether a block is cached or being fetched."""
        with self._lock:
            return _Key(version, number) in self._blocks

    def _fetch_block(self, key: _Key) -> bytes:
        start = key.number * BLOCK
        try:
            return self._fetch(key.version, start, min(start + BLOCK, key.version.size))
        except BaseException:
            with self._lock:
                self._blocks.pop(key, None)
            raise


class ObjectSource:
    """Access to the objects of a mounted bucket, shared by all readers."""

    def __init__(self, bucket: BucketFilesystem) -> None:
        self._bucket = bucket
        self.blocks = BlockCache(self.fetch)

    def fetch(self, version: ObjectVersion, start: int, end: int) -> bytes:
        """Fetch a range of an object; raises ESTALE if it was replaced."""
        data = self._bucket.part(version.path, start, end, version.tag)
        if data is None:
            raise _stale(version.path)
        return data

    def read_small(self, version: ObjectVersion) -> bytes:
        """Return all of a small object."""
        body = self._bucket.body(version.path)
        if body.version != version.tag:
            raise _stale(version.path)
        return body.data

    def chunks(self, version: ObjectVersion) -> Iterator[bytes]:
        """Yield all of an object of any size."""
        if version.size <= SMALL:
            yield self.read_small(version)
            return
        for number in range(-(-version.size // BLOCK)):
            if (number + 1) * BLOCK < version.size:
                self.blocks.start(version, number + 1)
            yield self.blocks.get(version, number)


class ObjectReader:
    """One open file that is read from the bucket."""

    def __init__(self, source: ObjectSource, version: ObjectVersion) -> None:
        self.version = version
        self._source = source
        self._position = 0
        self._ahead = 0

    def read(self, offset: int, size: int) -> bytes:
        """Read from an offset, less at the end."""
        end = min(offset + size, self.version.size)
        if offset >= end:
            return b""
        if self.version.size <= SMALL:
            return self._source.read_small(self.version)[offset:end]
        first = offset // BLOCK
        sequential = abs(offset - self._position) <= _NEAR
        self._position = end
        if not sequential and not self._source.blocks.holds(self.version, first):
            self._ahead = 0
            return self._source.fetch(self.version, offset, end)
        return self._read_blocks(first, offset, end)

    def _read_blocks(self, first: int, offset: int, end: int) -> bytes:
        last = (end - 1) // BLOCK
        blocks = self._source.blocks
        for number in range(first, last + 1 + self._ahead):
            if number * BLOCK < self.version.size:
                blocks.start(self.version, number)
        self._ahead = min(_MAX_AHEAD, max(1, self._ahead * 2))
        start = first * BLOCK
        parts = [blocks.get(self.version, number) for number in range(first, last + 1)]
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        return data[offset - start : end - start]


def _stale(path: str) -> OSError:
    return OSError(errno.ESTALE, "the object was replaced or removed", path)
