"""Directories of a sandbox as tar archives, made piece by piece in constant memory."""

from __future__ import annotations

import contextlib
import os
import posixpath
import stat as stat_bits
import tarfile
import zlib
from typing import TYPE_CHECKING

from smokebox.engine.files.opening import (
    READ,
    check_regular,
    closing,
    naming,
    open_child,
    refuse_kernel,
)
from smokebox.engine.files.patterns import Patterns
from smokebox.engine.files.tarstream import padded
from smokebox.engine.files.trees import walk
from smokebox.engine.workers import checkpoint
from smokebox.errors import PathError
from smokebox.sandbox.hostfiles import shown

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from smokebox.engine.files.rooted import Rooted

PIECE = 256 << 10
MAX_REMEMBERED = 100_000


def pack(
    files: Rooted, path: str, *, compress: bool = False, exclude: tuple[str, ...] = ()
) -> Generator[bytes, None, None]:
    """A directory or a file as the pieces of a tar archive."""
    left_out = Patterns("exclude", exclude)
    deflate = zlib.compressobj(6, wbits=31) if compress else None
    pending = bytearray()
    for piece in _packed(files, path, left_out):
        checkpoint()
        pending += deflate.compress(piece) if deflate else piece
        if len(pending) >= PIECE:
            yield bytes(pending)
            pending.clear()
    if deflate:
        pending += deflate.flush()
    yield bytes(pending)


def _packed(files: Rooted, path: str, left_out: Patterns) -> Iterator[bytes]:
    packing = _Packing(files, path)
    with naming(path), closing(files.open(path, os.O_PATH)) as fd:
        found = os.fstat(fd)
        refuse_kernel(fd, path)
        if stat_bits.S_ISDIR(found.st_mode):
            yield packing.header(".", found)
            for seen in walk(fd, skip=left_out.cover):
                yield from packing.member(seen.folder, seen.name, seen.path, seen.stat)
        else:
            yield from _packed_file(files, packing, path)
    # Two empty blocks end an archive, and readers expect whole records.
    yield bytes(tarfile.RECORDSIZE)


def _packed_file(files: Rooted, packing: _Packing, path: str) -> Iterator[bytes]:
    with closing(files.open(path, READ)) as fd:
        found = check_regular(fd, path)
        yield packing.header(posixpath.basename(path), found)
        yield from packing.content(fd, found.st_size, path)


class _Packing:
    """One archive in the making."""

    def __init__(self, files: Rooted, path: str) -> None:
        self._owner = files.owner
        self._path = path
        self._first_names: dict[tuple[int, int], str] = {}

    def member(
        self, folder: int, name: str, relative: str, found: os.stat_result
    ) -> Iterator[bytes]:
        mode = found.st_mode
        if stat_bits.S_ISLNK(mode):
            yield self.header(relative, found, os.readlink(name, dir_fd=folder))
        elif stat_bits.S_ISDIR(mode):
            yield self.header(relative, found)
        elif stat_bits.S_ISREG(mode):
            with contextlib.suppress(FileNotFoundError):
                yield from self._file(folder, name, relative)

    def _file(self, folder: int, name: str, relative: str) -> Iterator[bytes]:
        path = posixpath.join(self._path, shown(relative))
        with naming(path), closing(open_child(folder, name, READ)) as fd:
            found = check_regular(fd, path)
            first = self._first_names.get((found.st_dev, found.st_ino))
            if first is not None:
                yield self.header(relative, found, first)
                return
            yield self.header(relative, found)
            yield from self.content(fd, found.st_size, path)
        if found.st_nlink > 1 and len(self._first_names) < MAX_REMEMBERED:
            self._first_names[(found.st_dev, found.st_ino)] = relative

    def content(self, fd: int, size: int, path: str) -> Iterator[bytes]:
        """The bytes of a file: as many as its header says, or an error."""
        left = size
        while left:
            piece = os.read(fd, min(PIECE, left))
            if not piece:
                raise PathError(path, f"{path} was cut short while it was read.")
            yield piece
            left -= len(piece)
        yield bytes(padded(size) - size)

    def header(self, name: str, found: os.stat_result, target: str = "") -> bytes:
        """The header of a member; with `target`, of a link that leads there."""
        member = tarfile.TarInfo(name)
        member.mode = stat_bits.S_IMODE(found.st_mode)
        member.mtime = int(found.st_mtime)
        member.uid = self._inside(found.st_uid, self._owner.uid)
        member.gid = self._inside(found.st_gid, self._owner.gid)
        member.linkname = target
        if stat_bits.S_ISDIR(found.st_mode):
            member.type = tarfile.DIRTYPE
        elif target:
            is_link = stat_bits.S_ISLNK(found.st_mode)
            member.type = tarfile.SYMTYPE if is_link else tarfile.LNKTYPE
        else:
            member.size = found.st_size
        return member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")

    def _inside(self, outside: int, first: int) -> int:
        number = outside - first
        return number if 0 <= number < self._owner.count else 65534
