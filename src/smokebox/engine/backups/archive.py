"""A directory of a sandbox as one file, and back: a tar archive, compressed with zstd.

Everything here blocks, and runs in a thread that acts as the root of the sandbox.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.engine.backups.ignore_rules import IgnoreRules
from smokebox.engine.disk import room
from smokebox.engine.files.archive_reader import ArchiveReader
from smokebox.engine.files.archive_writer import ArchiveWriter, packed
from smokebox.engine.files.descriptors import LIST, closing, naming
from smokebox.engine.files.patterns import Patterns
from smokebox.engine.files.replacement import TEMPORARY, write_all
from smokebox.engine.workers import checkpoint
from smokebox.errors import BadSnapshot, PathError, PathNotDirectory, StorageFull
from smokebox.types import Extracted

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from smokebox.engine.files.rooted import Rooted

PIECE = 1 << 20
# What is written between two looks at how much room the host has.
LOOK_EVERY = 32 << 20
_THREADS = 2
# What each thread takes at a time. By default it is so much that all of it together is hundreds
# of megabytes.
_JOB = 1 << 20


@dataclass(slots=True)
class Progress:
    """How far something is, for whoever asks meanwhile."""

    total: int | None = None
    bytes: int = 0
    begun: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveOptions:
    """What of a directory is packed, and how hard it is compressed."""

    excludes: tuple[str, ...]
    gitignore: bool
    compression: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveSummary:
    """An archive that is whole."""

    size: int
    bytes: int
    files: int
    disk: int
    checksum: str


def write(
    files: Rooted, path: str, target: int, choice: ArchiveOptions, tally: Progress
) -> ArchiveSummary:
    """Pack a directory into an open file, which is on the disk when this returns."""
    # Here, as most engines never make a backup.
    import zstandard

    out = _Out(target)
    packing = ArchiveWriter(files, path, exact=True)
    parameters = zstandard.ZstdCompressionParameters.from_level(
        choice.compression, write_checksum=True, threads=_THREADS, job_size=_JOB
    )
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    with naming(path), closing(files.open(path, LIST)) as top:
        for piece in packed(files, path, packing, _skip(top, choice)):
            checkpoint()
            out.write(compressor.compress(piece))
            tally.bytes = packing.bytes
    out.write(compressor.flush())
    out.finish()
    return ArchiveSummary(
        size=out.size,
        bytes=packing.bytes,
        files=packing.files,
        disk=packing.disk,
        checksum=out.digest.hexdigest(),
    )


def _skip(top: int, choice: ArchiveOptions) -> Callable[[str], bool]:
    patterns = Patterns("excludes", choice.excludes)
    ignored = IgnoreRules(top) if choice.gitignore else None

    def skip(path: str) -> bool:
        # What is in the making, such as another restore, is not of the user.
        if TEMPORARY.fullmatch(path.rpartition("/")[2]):
            return True
        return patterns.cover(path) or (ignored is not None and ignored(path))

    return skip


class _Out:
    """The file of an archive: its bytes are gathered, summed and written."""

    def __init__(self, fd: int) -> None:
        self.size = 0
        self.digest = hashlib.sha256()
        self._fd = fd
        self._pending = bytearray()
        self._look_at = 0

    def write(self, data: bytes) -> None:
        self._pending += data
        if len(self._pending) >= PIECE:
            self._flush()

    def finish(self) -> None:
        self._flush()
        os.fsync(self._fd)

    def _flush(self) -> None:
        if self.size >= self._look_at:
            self._look_at = self.size + LOOK_EVERY
            if room(self._fd) < LOOK_EVERY:
                raise _no_room()
        self.digest.update(self._pending)
        try:
            write_all(self._fd, bytes(self._pending))
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _no_room() from error
            raise
        self.size += len(self._pending)
        self._pending.clear()


def unpack(files: Rooted, top: int, path: str, source: int, tally: Progress) -> Extracted:
    """Unpack the archive in an open file into an empty open directory, as it was packed.

    Owners are kept where the sandbox has users of its own. `path` is for errors.
    """
    import zstandard

    result = Extracted()
    unpacking = ArchiveReader(files, top, path, result, files.owner.count > 1, None, exact=True)
    with contextlib.closing(unpacking.run()) as run, open(source, "rb", closefd=False) as file:
        next(run)
        try:
            with zstandard.ZstdDecompressor().stream_reader(file, closefd=False) as stream:
                while data := stream.read(PIECE):
                    checkpoint()
                    with unpacking.failing():
                        if not _taken(run, data):
                            return result
                    tally.bytes = result.bytes
        except zstandard.ZstdError as error:
            raise BadSnapshot(f"the archive is damaged: {error}.") from error
    raise BadSnapshot("the archive ends too early.")


def _taken(run: Generator[None, bytes, None], data: bytes) -> bool:
    """Whether more is needed."""
    try:
        run.send(data)
    except StopIteration:
        return False
    return True


def check_directory(files: Rooted, path: str) -> None:
    """Raise unless a directory is there that can be packed."""
    if path == "/":
        raise PathError(
            path,
            "a backup is of a directory, not of the whole sandbox.",
            hint="Name a directory, such as /workspace.",
        )
    if not files.info(path).is_directory:
        raise PathNotDirectory(path, hint="Name the directory that it is in.")


def _no_room() -> StorageFull:
    return StorageFull(
        "backups",
        "the host's disk has no room for this backup.",
        hint="Delete backups, leave something out with excludes=, or free some.",
    )
