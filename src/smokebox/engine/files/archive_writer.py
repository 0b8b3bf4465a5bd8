"""Directories of a sandbox as tar archives, made piece by piece in constant memory."""

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
    naming,
    open_child,
    refuse_kernel,
)
from smokebox.engine.files.patterns import Patterns
from smokebox.engine.files.tar_format import encode_header, padded
from smokebox.engine.files.trees import walk
from smokebox.engine.workers import checkpoint
from smokebox.errors import PathError, SymlinkLoop
from smokebox.sandbox.hostfiles import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from smokebox.engine.files.rooted import Rooted

PIECE = 256 << 10
MAX_REMEMBERED = 100_000
# What a name takes of a disk besides its content, roughly.
BLOCK_OF_DISK = 4096


def pack(
    files: Rooted, path: str, *, compress: bool = False, exclude: tuple[str, ...] = ()
) -> Generator[bytes, None, None]:
    """A directory or a file as the pieces of a tar archive."""
    left_out = Patterns("exclude", exclude).cover if exclude else None
    deflate = zlib.compressobj(6, wbits=31) if compress else None
    pending = bytearray()
    for piece in packed(files, path, ArchiveWriter(files, path), left_out):
        checkpoint()
        pending += deflate.compress(piece) if deflate else piece
        if len(pending) >= PIECE:
            yield bytes(pending)
            pending.clear()
    if deflate:
        pending += deflate.flush()
    yield bytes(pending)


def packed(
    files: Rooted, path: str, packing: ArchiveWriter, skip: Callable[[str], bool] | None = None
) -> Iterator[bytes]:
    """An archive as the pieces that `packing` makes of it, without the paths to `skip`."""
    with naming(path), closing(files.open(path, os.O_PATH)) as fd:
        found = os.fstat(fd)
        refuse_kernel(fd, path)
        if stat_bits.S_ISDIR(found.st_mode):
            yield packing.header(".", found)
            for seen in walk(fd, skip=skip, stay=packing.exact):
                yield from packing.member(seen.folder, seen.name, seen.path, seen.stat)
        else:
            yield from _packed_file(files, packing, path)
    # Two empty blocks end an archive, and readers expect whole records.
    yield bytes(tarfile.RECORDSIZE)


def _packed_file(files: Rooted, packing: ArchiveWriter, path: str) -> Iterator[bytes]:
    with closing(files.open(path, READ)) as fd:
        found = check_regular(fd, path)
        yield from packing.file(fd, found, posixpath.basename(path), path)


class ArchiveWriter:
    """One archive in the making, of a tree that others may change meanwhile.

    What vanishes is left out. A file that is read at once is whole as it was at that moment;
    a greater one is cut where it ended when it was opened. With `exact`, times are kept to the
    nanosecond, and no other file system is entered. `files`, `bytes` and `disk` count what was
    packed, and what it takes of a disk.
    """

    def __init__(self, files: Rooted, path: str, *, exact: bool = False) -> None:
        self.files = 0
        self.bytes = 0
        self.disk = 0
        self._owner = files.owner
        self._path = path
        self.exact = exact
        self._first_names: dict[tuple[int, int], str] = {}

    def member(
        self, folder: int, name: str, relative: str, found: os.stat_result
    ) -> Iterator[bytes]:
        """What is at one name of an open directory, as it is by now."""
        mode = found.st_mode
        self.disk += BLOCK_OF_DISK
        if stat_bits.S_ISDIR(mode):
            yield self.header(relative, found)
        elif stat_bits.S_ISREG(mode):
            with contextlib.suppress(FileNotFoundError, SymlinkLoop):
                yield from self._file(folder, name, relative)
        elif stat_bits.S_ISLNK(mode):
            try:
                target = os.readlink(name, dir_fd=folder)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINVAL):
                    return
                raise
            yield self.header(relative, found, target)

    def _file(self, folder: int, name: str, relative: str) -> Iterator[bytes]:
        path = posixpath.join(self._path, shown(relative))
        with naming(path), closing(open_child(folder, name, READ)) as fd:
            found = os.fstat(fd)
            if not stat_bits.S_ISREG(found.st_mode):
                # Another kind of thing has its name by now.
                return
            refuse_kernel(fd, path)
            first = self._first_names.get((found.st_dev, found.st_ino))
            if first is not None:
                yield self.header(relative, found, first)
                return
            yield from self.file(fd, found, relative, path)
        if found.st_nlink > 1 and len(self._first_names) < MAX_REMEMBERED:
            self._first_names[(found.st_dev, found.st_ino)] = relative

    def file(self, fd: int, found: os.stat_result, name: str, path: str) -> Iterator[bytes]:
        """The header and the bytes of an open file."""
        self.files += 1
        self.disk += min(found.st_blocks * 512, found.st_size)
        if found.st_size > PIECE:
            yield self.header(name, found)
            yield from self._content(fd, found.st_size, path)
            return
        # Its header says as many bytes as there are, whoever writes to it meanwhile.
        data = _read(fd, found.st_size)
        self.bytes += len(data)
        yield self.header(name, found, size=len(data))
        yield data + bytes(padded(len(data)) - len(data))

    def _content(self, fd: int, size: int, path: str) -> Iterator[bytes]:
        """The bytes of a file: as many as its header says, or an error."""
        left = size
        while left:
            piece = os.read(fd, min(PIECE, left))
            if not piece:
                raise PathError(
                    path,
                    f"{path} was cut short while it was read.",
                    hint="Try again, when nobody writes to it.",
                )
            self.bytes += len(piece)
            yield piece
            left -= len(piece)
        yield bytes(padded(size) - size)

    def header(
        self, name: str, found: os.stat_result, target: str = "", *, size: int | None = None
    ) -> bytes:
        """The header of a member; with `target`, of a link that leads there."""
        if stat_bits.S_ISDIR(found.st_mode):
            kind = tarfile.DIRTYPE
        elif target:
            kind = tarfile.SYMTYPE if stat_bits.S_ISLNK(found.st_mode) else tarfile.LNKTYPE
        else:
            kind = tarfile.REGTYPE
            size = found.st_size if size is None else size
        return encode_header(
            name,
            kind,
            mode=found.st_mode,
            uid=self._inside(found.st_uid, self._owner.uid),
            gid=self._inside(found.st_gid, self._owner.gid),
            size=size or 0,
            mtime=int(found.st_mtime),
            link=target,
            exact=found.st_mtime_ns if self.exact else None,
        )

    def _inside(self, outside: int, first: int) -> int:
        number = outside - first
        return number if 0 <= number < self._owner.count else 65534


def _read(fd: int, most: int) -> bytes:
    data = os.read(fd, most)
    while len(data) < most and (more := os.read(fd, most - len(data))):
        data += more
    return data
