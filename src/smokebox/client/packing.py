"""Directories of this machine as tar archives, packed piece by piece, and unpacked."""

from __future__ import annotations

import io
import os
import tarfile
from typing import TYPE_CHECKING

from smokebox.errors import ServiceUnavailable

if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import IO

PIECE = 1 << 20


def pack(source: str) -> Generator[bytes, None, None]:
    """What is in a directory, with names relative to it, symlinks as themselves.

    What is neither a file, a directory nor a symlink is left out. A file that grows
    meanwhile is cut to the size it had, and one that shrinks is filled up with zeros.
    """
    # Only to tell of files: which of them are one by several names.
    teller = tarfile.TarFile(fileobj=io.BytesIO(), mode="w", format=tarfile.PAX_FORMAT)
    for path in _walk(source):
        info = teller.gettarinfo(path, os.path.relpath(path, source))
        # None for a socket, of which an archive knows nothing.
        if info is None or not (info.isreg() or info.isdir() or info.issym() or info.islnk()):
            continue
        file = open(path, "rb") if info.isreg() else None  # noqa: SIM115
        yield info.tobuf(tarfile.PAX_FORMAT)
        if file is not None:
            with file:
                yield from _content(file, info.size)
    yield bytes(2 * tarfile.BLOCKSIZE)


def unpack(archive: IO[bytes], target: str) -> None:
    """Unpack into a directory of this machine, and nowhere else, whatever the archive says."""
    try:
        with tarfile.open(fileobj=archive) as members:
            members.extractall(target, filter="data")
    except tarfile.TarError as error:
        raise ServiceUnavailable(
            f"the archive of a directory cannot be unpacked: {error}.",
            hint="Read what is in it with `download_tar`, or leave that out.",
            service="archive",
        ) from error


def _walk(source: str) -> Generator[str, None, None]:
    for folder, folders, files in os.walk(source, onerror=_refuse):
        folders.sort()
        for name in sorted((*folders, *files)):
            yield os.path.join(folder, name)


def _refuse(error: OSError) -> None:
    raise error


def _content(file: IO[bytes], size: int) -> Generator[bytes, None, None]:
    left = size
    while left:
        piece = file.read(min(left, PIECE)) or bytes(min(left, PIECE))
        left -= len(piece)
        yield piece
    if rest := size % tarfile.BLOCKSIZE:
        yield bytes(tarfile.BLOCKSIZE - rest)
