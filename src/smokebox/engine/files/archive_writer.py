"""Creation of tar archives from directories of a sandbox, in constant memory."""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import stat as stat_bits
import tarfile
import zlib
from typing import TYPE_CHECKING

from smokebox.engine.files.descriptors import (
    READ,
    check_regular,
    closing,
    open_child,
    path_errors,
    refuse_kernel_file,
)
from smokebox.engine.files.patterns import Patterns
from smokebox.engine.files.tar_format import encode_header, padded
from smokebox.engine.files.trees import walk
from smokebox.engine.workers import checkpoint
from smokebox.errors import PathError, SymlinkLoop
from smokebox.sandbox.local_files import display_name

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from smokebox.engine.files.rooted_files import RootedFiles
    from smokebox.engine.files.trees import TreeEntry

CHUNK = 256 << 10
MAX_HARD_LINKS = 100_000
# Rough disk usage of a name besides its content.
ENTRY_BYTES = 4096


def pack(
    files: RootedFiles, path: str, *, compress: bool = False, exclude: tuple[str, ...] = ()
) -> Generator[bytes, None, None]:
    """Yield a tar archive of a directory or a file in chunks."""
    skip = Patterns("exclude", exclude).cover if exclude else None
    deflate = zlib.compressobj(6, wbits=31) if compress else None
    pending = bytearray()
    for chunk in ArchiveWriter(files, path).chunks(skip):
        checkpoint()
        pending += deflate.compress(chunk) if deflate else chunk
        if len(pending) >= CHUNK:
            yield bytes(pending)
            pending.clear()
    if deflate:
        pending += deflate.flush()
    yield bytes(pending)


class ArchiveWriter:
    """One archive of a tree that may change while it is read.

    Entries that vanish are omitted. A small file is read at once, a larger one up to its size at
    the time of opening. With `exact`, times are kept to the nanosecond, and no other file system
    is entered. `files`, `bytes` and `disk` count what was packed, and its disk usage.
    """

    def __init__(self, files: RootedFiles, path: str, *, exact: bool = False) -> None:
        self.files = 0
        self.bytes = 0
        self.disk = 0
        self._files = files
        self._path = path
        self._exact = exact
        self._first_names: dict[tuple[int, int], str] = {}

    def chunks(self, skip: Callable[[str], bool] | None = None) -> Iterator[bytes]:
        """Yield the archive, without the relative paths for which `skip` returns true."""
        path = self._path
        with path_errors(path), closing(self._files.open(path, os.O_PATH)) as fd:
            found = os.fstat(fd)
            refuse_kernel_file(fd, path)
            if stat_bits.S_ISDIR(found.st_mode):
                yield self._header(".", found)
                for entry in walk(fd, skip=skip, one_filesystem=self._exact):
                    yield from self._member(entry)
            else:
                with closing(self._files.open(path, READ)) as file:
                    found = check_regular(file, path)
                    yield from self._content(file, found, posixpath.basename(path), path)
        # Two empty blocks end an archive, and readers expect whole records.
        yield bytes(tarfile.RECORDSIZE)

    def _member(self, entry: TreeEntry) -> Iterator[bytes]:
        mode = entry.stat.st_mode
        self.disk += ENTRY_BYTES
        if stat_bits.S_ISDIR(mode):
            yield self._header(entry.path, entry.stat)
        elif stat_bits.S_ISREG(mode):
            with contextlib.suppress(FileNotFoundError, SymlinkLoop):
                yield from self._file(entry)
        elif stat_bits.S_ISLNK(mode):
            try:
                target = os.readlink(entry.name, dir_fd=entry.folder)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINVAL):
                    return
                raise
            yield self._header(entry.path, entry.stat, target)

    def _file(self, entry: TreeEntry) -> Iterator[bytes]:
        path = posixpath.join(self._path, display_name(entry.path))
        with path_errors(path), closing(open_child(entry.folder, entry.name, READ)) as fd:
            found = os.fstat(fd)
            if not stat_bits.S_ISREG(found.st_mode):
                # It was replaced by something else.
                return
            refuse_kernel_file(fd, path)
            first = self._first_names.get((found.st_dev, found.st_ino))
            if first is not None:
                yield self._header(entry.path, found, first)
                return
            yield from self._content(fd, found, entry.path, path)
        if found.st_nlink > 1 and len(self._first_names) < MAX_HARD_LINKS:
            self._first_names[(found.st_dev, found.st_ino)] = entry.path

    def _content(self, fd: int, found: os.stat_result, name: str, path: str) -> Iterator[bytes]:
        """Yield the header and the bytes of an open file."""
        self.files += 1
        self.disk += min(found.st_blocks * 512, found.st_size)
        if found.st_size > CHUNK:
            yield self._header(name, found)
            yield from self._large_content(fd, found.st_size, path)
            return
        # Read before the header is written, so that a concurrent write cannot change the size.
        data = _read(fd, found.st_size)
        self.bytes += len(data)
        yield self._header(name, found, size=len(data))
        yield data + bytes(padded(len(data)) - len(data))

    def _large_content(self, fd: int, size: int, path: str) -> Iterator[bytes]:
        """Yield as many bytes as the header says, or raise."""
        left = size
        while left:
            chunk = os.read(fd, min(CHUNK, left))
            if not chunk:
                raise PathError(
                    path,
                    f"{path} was truncated while it was read.",
                    hint="Try again when no process writes to it.",
                )
            self.bytes += len(chunk)
            yield chunk
            left -= len(chunk)
        yield bytes(padded(size) - size)

    def _header(
        self, name: str, found: os.stat_result, target: str = "", *, size: int | None = None
    ) -> bytes:
        """Encode the header of a member; with `target`, of a link to it."""
        if stat_bits.S_ISDIR(found.st_mode):
            kind = tarfile.DIRTYPE
        elif target:
            kind = tarfile.SYMTYPE if stat_bits.S_ISLNK(found.st_mode) else tarfile.LNKTYPE
        else:
            kind = tarfile.REGTYPE
            size = found.st_size if size is None else size
        owner = self._files.owner
        return encode_header(
            name,
            kind,
            mode=found.st_mode,
            uid=_id_inside(found.st_uid, owner.uid, owner.count),
            gid=_id_inside(found.st_gid, owner.gid, owner.count),
            size=size or 0,
            mtime=int(found.st_mtime),
            link=target,
            mtime_ns=found.st_mtime_ns if self._exact else None,
        )


def _id_inside(outside: int, first: int, count: int) -> int:
    number = outside - first
    return number if 0 <= number < count else 65534


def _read(fd: int, size: int) -> bytes:
    data = os.read(fd, size)
    while len(data) < size and (more := os.read(fd, size - len(data))):
        data += more
    return data
