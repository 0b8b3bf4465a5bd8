"""Reading tar archives from bytes as they come, in constant memory and without trust.

Readers are generators: they yield when they need more bytes, which are sent to them, and
an empty send is the end. Nothing that an archive says is believed before it is checked.
"""

from __future__ import annotations

import tarfile
import zlib
from typing import TYPE_CHECKING

from smokebox.engine.files.headers import decode

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator


BLOCK = tarfile.BLOCKSIZE
PIECE = 1 << 20
MAX_HEADER = 256 << 10
MAX_HEADERS = 16

_GZIP = b"\x1f\x8b"
_PAX = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_LONG = {tarfile.GNUTYPE_LONGNAME: "path", tarfile.GNUTYPE_LONGLINK: "linkpath"}
_ABOUT_THE_NEXT = (*_PAX, tarfile.XGLTYPE, *_LONG)


class BrokenTar(Exception):
    """What is wrong with an archive, in words. Never leaves `archive`."""


class Source:
    """The bytes that were sent and not yet taken."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._ended = False

    def take(self, count: int) -> Generator[None, bytes, bytes]:
        """Exactly `count` bytes, or what there is before the end."""
        while len(self._buffer) < count and not self._ended:
            self._put((yield))
        return self._cut(count)

    def some(self, most: int) -> Generator[None, bytes, bytes]:
        """At least one byte and at most `most`; none at the end."""
        while not self._buffer and not self._ended:
            self._put((yield))
        return self._cut(most)

    def _put(self, data: bytes) -> None:
        self._ended = not data
        self._buffer += data

    def _cut(self, count: int) -> bytes:
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        return data


class Inflater:
    """Takes gzip away where there is any, never more than a piece at a time."""

    def __init__(self) -> None:
        self._start = b""
        self._known = False
        self._inflate: zlib._Decompress | None = None

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The plain bytes of `data`."""
        if not self._known:
            self._start += data
            if len(self._start) < len(_GZIP) and data:
                return
            data, self._start, self._known = self._start, b"", True
            if data.startswith(_GZIP):
                self._inflate = zlib.decompressobj(31)
        if self._inflate is None:
            if data:
                yield data
            return
        yield from self._inflated(data)

    def finish(self) -> None:
        """Raise unless the compressed bytes came to their end."""
        if self._inflate is not None and not self._inflate.eof:
            raise BrokenTar("its compressed bytes end too early")

    def _inflated(self, data: bytes) -> Iterator[bytes]:
        assert self._inflate is not None
        try:
            while data:
                if self._inflate.eof:
                    # Some tools pad with zeros; anything else is a second gzip stream.
                    data = data.lstrip(b"\0")
                    if not data:
                        return
                    self._inflate = zlib.decompressobj(31)
                if plain := self._inflate.decompress(data, PIECE):
                    yield plain
                data = self._inflate.unconsumed_tail or self._inflate.unused_data
        except zlib.error as error:
            raise BrokenTar(f"its compressed bytes are damaged ({error})") from None


def next_member(source: Source) -> Generator[None, bytes, tarfile.TarInfo | None]:
    """The next member of an archive, whose content follows; None at its end mark."""
    said: dict[str, str] = {}
    for _ in range(MAX_HEADERS):
        block = yield from source.take(BLOCK)
        if not block:
            raise BrokenTar("it ends without an end mark, so it was cut short")
        try:
            member = decode(block)
        except tarfile.HeaderError as error:
            if block == bytes(BLOCK):
                return None
            raise BrokenTar(f"a header is damaged ({error})") from None
        if member.type not in _ABOUT_THE_NEXT:
            return _amended(member, said)
        said |= yield from _said(member, source)
    raise BrokenTar("a member has too many headers")


def _said(header: tarfile.TarInfo, source: Source) -> Generator[None, bytes, dict[str, str]]:
    """What a header says of the member after it."""
    if not 0 <= header.size <= MAX_HEADER:
        raise BrokenTar(f"a header claims {header.size} bytes")
    content = yield from source.take(padded(header.size))
    content = content[: header.size]
    if len(content) < header.size:
        raise BrokenTar("it was cut short in a header")
    if header.type in _LONG:
        return {_LONG[header.type]: _text(content.rstrip(b"\0"))}
    return _records(content) if header.type in _PAX else {}


def _records(content: bytes) -> dict[str, str]:
    """The records of a pax header: `length key=value` and a newline, each."""
    records: dict[str, str] = {}
    while content.strip(b"\0"):
        size, _, _ = content[:12].partition(b" ")
        length = int(size) if size.isdigit() else 0
        record = content[len(size) + 1 : length - 1]
        key, equals, value = record.partition(b"=")
        if not len(size) + 3 <= length <= len(content) or not equals:
            raise BrokenTar("an extended header is damaged")
        records[_text(key)] = _text(value)
        content = content[length:]
    return records


def _amended(member: tarfile.TarInfo, said: dict[str, str]) -> tarfile.TarInfo:
    if member.type == tarfile.GNUTYPE_SPARSE or any(key.startswith("GNU.sparse") for key in said):
        raise BrokenTar(f"{member.name!r} is sparse, which is not supported")
    member.name = said.get("path", member.name)
    member.linkname = said.get("linkpath", member.linkname)
    try:
        member.size = int(said.get("size", member.size))
        member.mtime = float(said.get("mtime", member.mtime))
        member.uid = int(said.get("uid", member.uid))
        member.gid = int(said.get("gid", member.gid))
    except ValueError as error:
        raise BrokenTar(f"an extended header is damaged ({error})") from None
    member.pax_headers = said
    if member.size < 0:
        raise BrokenTar(f"{member.name!r} claims {member.size} bytes")
    return member


def padded(size: int) -> int:
    """How many bytes a content takes in an archive."""
    return -(-size // BLOCK) * BLOCK


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
