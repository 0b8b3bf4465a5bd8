"""Reading one version of an object: small ones whole, large ones in pieces, ahead of who reads.

What a file holds does not change while it is open: where the object was replaced meanwhile,
its reader is told so (ESTALE) and gets no mixture.
"""

from __future__ import annotations

import errno
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from smokebox.sandbox.filesystems.bucket import BucketFilesystem

SMALL = 1 << 20
PIECE = 4 << 20
# All readers share so many pieces, and one has so many fetched ahead of it.
_PIECES = 16
_MOST_AHEAD = 4
# The kernel reads ahead in requests of its own, which may overtake each other.
_NEAR = 4 << 20


@dataclass(frozen=True, slots=True)
class ObjectVersion:
    """An object as it was when somebody opened it."""

    path: str
    tag: str
    size: int


class _Key(NamedTuple):
    version: ObjectVersion
    number: int


class PieceCache:
    """Pieces of objects, the least recently used given up. Each is fetched once at a time."""

    def __init__(self, fetch: Callable[[ObjectVersion, int, int], bytes]) -> None:
        self._fetch = fetch
        self._lock = threading.Lock()
        self._held: OrderedDict[_Key, Future[bytes]] = OrderedDict()
        self._pool = ThreadPoolExecutor(_PIECES // 2, thread_name_prefix="smokebox-pieces")

    def get(self, version: ObjectVersion, number: int) -> bytes:
        """A piece, as soon as it is there."""
        return self.start(version, number).result()

    def start(self, version: ObjectVersion, number: int) -> Future[bytes]:
        """A piece on its way."""
        key = _Key(version, number)
        with self._lock:
            coming = self._held.get(key)
            if coming is None:
                coming = self._held[key] = self._pool.submit(self._fetched, key)
                while len(self._held) > _PIECES:
                    _, oldest = self._held.popitem(last=False)
                    oldest.cancel()
            else:
                self._held.move_to_end(key)
            return coming

    def holds(self, version: ObjectVersion, number: int) -> bool:
        """Whether a piece is there, or on its way."""
        with self._lock:
            return _Key(version, number) in self._held

    def _fetched(self, key: _Key) -> bytes:
        start = key.number * PIECE
        try:
            return self._fetch(key.version, start, min(start + PIECE, key.version.size))
        except BaseException:
            with self._lock:
                self._held.pop(key, None)
            raise


class ObjectSource:
    """What all readers of a mounted bucket read from."""

    def __init__(self, bucket: BucketFilesystem) -> None:
        self._bucket = bucket
        self.pieces = PieceCache(self.fetch)

    def fetch(self, version: ObjectVersion, start: int, end: int) -> bytes:
        """Bytes of an object; raises ESTALE where it is another by now."""
        data = self._bucket.part(version.path, start, end, version.tag)
        if data is None:
            raise stale(version.path)
        return data

    def whole(self, version: ObjectVersion) -> bytes:
        """All of a small object."""
        body = self._bucket.body(version.path)
        if body.version != version.tag:
            raise stale(version.path)
        return body.data

    def everything(self, version: ObjectVersion) -> Iterator[bytes]:
        """All of an object of any size, piece by piece."""
        if version.size <= SMALL:
            yield self.whole(version)
            return
        for number in range(-(-version.size // PIECE)):
            if (number + 1) * PIECE < version.size:
                self.pieces.start(version, number + 1)
            yield self.pieces.get(version, number)


class ObjectReader:
    """One open file that is read from the bucket."""

    def __init__(self, source: ObjectSource, version: ObjectVersion) -> None:
        self.version = version
        self._source = source
        self._reached = 0
        self._ahead = 0

    def read(self, offset: int, size: int) -> bytes:
        """Bytes from an offset on, fewer at the end."""
        end = min(offset + size, self.version.size)
        if offset >= end:
            return b""
        if self.version.size <= SMALL:
            return self._source.whole(self.version)[offset:end]
        first = offset // PIECE
        goes_on = abs(offset - self._reached) <= _NEAR
        self._reached = end
        if not goes_on and not self._source.pieces.holds(self.version, first):
            self._ahead = 0
            return self._source.fetch(self.version, offset, end)
        return self._in_pieces(first, offset, end)

    def _in_pieces(self, first: int, offset: int, end: int) -> bytes:
        last = (end - 1) // PIECE
        pieces = self._source.pieces
        coming = [pieces.start(self.version, number) for number in range(first, last + 1)]
        for number in range(last + 1, last + 1 + self._ahead):
            if number * PIECE < self.version.size:
                pieces.start(self.version, number)
        self._ahead = min(_MOST_AHEAD, max(1, self._ahead * 2))
        start = first * PIECE
        data = [one.result() for one in coming]
        whole = data[0] if len(data) == 1 else b"".join(data)
        return whole[offset - start : end - start]


def stale(path: str) -> OSError:
    """The error for an object that is another than the one that was opened."""
    return OSError(errno.ESTALE, "the object was replaced or removed", path)
