"""Archives that ADD unpacks: tar, plain or compressed by gzip, bzip2, xz or zstd."""

from __future__ import annotations

import bz2
import lzma
import os
from typing import TYPE_CHECKING, Protocol

from smokebox.engine.files.archive_reader import ArchiveReader
from smokebox.engine.files.descriptors import closing
from smokebox.engine.files.rooted_files import RootedFiles
from smokebox.engine.files.tar_format import Inflater
from smokebox.engine.jail.spec import Owner
from smokebox.foundation.compression import BrokenTar
from smokebox.types import Extracted

if TYPE_CHECKING:
    import tarfile
    from collections.abc import Generator, Iterator

MAX_BYTES = 64 << 30
_CHUNK = 1 << 20
_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_USTAR = slice(257, 262)


class _Decompressor(Protocol):
    def decompress(self, data: bytes, /) -> bytes: ...


class _RootReader(ArchiveReader):
    """Extracts an archive that may be a root file system: its devices are left out."""

    def _extract(self, member: tarfile.TarInfo, relative: str) -> Generator[None, bytes, None]:
        if not (member.ischr() or member.isblk() or member.isfifo()):
            yield from super()._extract(member, relative)


def is_archive(start: bytes) -> bool:
    """Return True if a file that starts so is unpacked by ADD."""
    return start[_USTAR] == b"ustar" or _compression(start) != ""


def _compression(start: bytes) -> str:
    return next((name for magic, name in _MAGIC.items() if start.startswith(magic)), "")


def unpack(archive: bytes | int, directory: str) -> None:
    """Unpack an archive, given as bytes or as an open file, into an empty directory.

    Owners are kept where this process may set them. Devices are left out: a sandbox has its own.

    Raises:
        PathError: It is damaged, or a member leads out of the directory.
        LimitReached: It holds too many bytes.
    """
    root = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    with closing(root):
        privileged = os.geteuid() == 0
        owner = Owner(uid=os.geteuid(), gid=os.getegid(), count=1 << 16 if privileged else 1)
        files = RootedFiles(root, owner)
        reader = _RootReader(
            files, root, "the archive", Extracted(), privileged, MAX_BYTES, exact=True
        )
        try:
            with reader.failures():
                ended = False
                for chunk in _plain_chunks(archive):
                    ended = ended or reader.feed(chunk)
                if not ended:
                    reader.feed(b"")
        finally:
            reader.close()


def _plain_chunks(archive: bytes | int) -> Iterator[bytes]:
    chunks = _chunks(archive)
    first = next(chunks, b"")
    kind = _compression(first)
    if kind in ("", "gzip"):
        inflater = Inflater()
        yield from inflater.feed(first)
        for chunk in chunks:
            yield from inflater.feed(chunk)
        inflater.finish()
        return
    decompressor = _decompressor(kind)
    try:
        yield decompressor.decompress(first)
        for chunk in chunks:
            yield decompressor.decompress(chunk)
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise BrokenTar(f"its compressed bytes are damaged ({error})") from None


def _decompressor(kind: str) -> _Decompressor:
    if kind == "bzip2":
        return bz2.BZ2Decompressor()
    if kind == "xz":
        return lzma.LZMADecompressor()
    import zstandard

    return zstandard.ZstdDecompressor().decompressobj()


def _chunks(archive: bytes | int) -> Iterator[bytes]:
    if isinstance(archive, bytes):
        yield archive
        return
    while chunk := os.read(archive, _CHUNK):
        yield chunk
