"""Directories of a sandbox as one file each: a tar archive, compressed with zstd.

Everything here blocks, and runs in a thread that acts as root of the sandbox.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from smokebox.engine.backups.ignore_rules import IgnoreRules
from smokebox.engine.disk import available_bytes
from smokebox.engine.files.archive_reader import ArchiveReader
from smokebox.engine.files.archive_writer import ArchiveWriter
from smokebox.engine.files.descriptors import LIST, closing, path_errors
from smokebox.engine.files.patterns import Patterns
from smokebox.engine.files.replacement import TEMPORARY, write_all
from smokebox.engine.workers import checkpoint
from smokebox.errors import BadSnapshot, PathError, PathNotDirectory, StorageFull
from smokebox.types import Extracted

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.engine.files.rooted_files import RootedFiles

CHUNK = 1 << 20
# Bytes written between two checks of the host's free space.
CHECK_EVERY = 32 << 20
_THREADS = 2
# Input of each thread at a time. The default would take hundreds of megabytes.
_JOB_SIZE = 1 << 20


@dataclass(slots=True, eq=False)
class BackupOperation:
    """A running or queued backup or restore, with its progress; see `BackupProgress`."""

    id: str
    operation: Literal["create", "restore"]
    path: str
    bytes: int = 0
    total: int | None = None
    begun: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveOptions:
    """Filters and the level of compression."""

    excludes: tuple[str, ...]
    gitignore: bool
    compression: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveSummary:
    """Sizes and checksum of a complete archive."""

    size: int
    bytes: int
    files: int
    disk: int
    checksum: str


def write(
    files: RootedFiles, path: str, target: int, options: ArchiveOptions, operation: BackupOperation
) -> ArchiveSummary:
    """Pack a directory into an open file, and sync that to disk."""
    # Imported here, as most engines never make a backup.
    import zstandard

    output = _Output(target)
    writer = ArchiveWriter(files, path, exact=True)
    parameters = zstandard.ZstdCompressionParameters.from_level(
        options.compression, write_checksum=True, threads=_THREADS, job_size=_JOB_SIZE
    )
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    with path_errors(path), closing(files.open(path, LIST)) as top:
        for chunk in writer.chunks(_filter(top, options)):
            checkpoint()
            output.write(compressor.compress(chunk))
            operation.bytes = writer.bytes
    output.write(compressor.flush())
    output.finish()
    return ArchiveSummary(
        size=output.size,
        bytes=writer.bytes,
        files=writer.files,
        disk=writer.disk,
        checksum=output.digest.hexdigest(),
    )


def _filter(top: int, options: ArchiveOptions) -> Callable[[str], bool]:
    patterns = Patterns("excludes", options.excludes)
    ignored = IgnoreRules(top) if options.gitignore else None

    def skip(path: str) -> bool:
        # Temporary files, such as those of a restore, are not the user's.
        if TEMPORARY.fullmatch(path.rpartition("/")[2]):
            return True
        return patterns.cover(path) or (ignored is not None and ignored(path))

    return skip


class _Output:
    """The file of an archive, with its size and checksum."""

    def __init__(self, fd: int) -> None:
        self.size = 0
        self.digest = hashlib.sha256()
        self._fd = fd
        self._pending = bytearray()
        self._next_check = 0

    def write(self, data: bytes) -> None:
        self._pending += data
        if len(self._pending) >= CHUNK:
            self._flush()

    def finish(self) -> None:
        self._flush()
        os.fsync(self._fd)

    def _flush(self) -> None:
        if self.size >= self._next_check:
            self._next_check = self.size + CHECK_EVERY
            if available_bytes(self._fd) < CHECK_EVERY:
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


def unpack(
    files: RootedFiles, top: int, path: str, source: int, operation: BackupOperation
) -> Extracted:
    """Unpack the archive in an open file into an empty open directory, exactly as packed.

    Owners are kept if the sandbox has several users. `path` is for errors.
    """
    import zstandard

    result = Extracted()
    reader = ArchiveReader(files, top, path, result, files.owner.count > 1, None, exact=True)
    with contextlib.closing(reader), open(source, "rb", closefd=False) as file:
        try:
            with zstandard.ZstdDecompressor().stream_reader(file, closefd=False) as stream:
                while data := stream.read(CHUNK):
                    checkpoint()
                    with reader.failures():
                        if reader.feed(data):
                            return result
                    operation.bytes = result.bytes
        except zstandard.ZstdError as error:
            raise BadSnapshot(f"the archive is damaged: {error}.") from error
    raise BadSnapshot("the archive ends too early.")


def check_directory(files: RootedFiles, path: str) -> None:
    """Raise unless `path` is a directory that can be packed."""
    if path == "/":
        raise PathError(
            path,
            "a backup is of a directory, not of the whole sandbox.",
            hint="Pass a directory, such as /workspace.",
        )
    if not files.info(path).is_directory:
        raise PathNotDirectory(path, hint="Pass the directory that it is in.")


def _no_room() -> StorageFull:
    return StorageFull(
        "backups",
        "the host's disk has no room for this backup.",
        hint="Delete backups, exclude files with excludes=, or free disk space.",
    )
