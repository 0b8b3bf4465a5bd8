"""Headers of tar archives, as POSIX has them: ustar, and what does not fit there in pax records.

The standard library writes and reads the same, five times slower, and a tree of small files is
made of little else.
"""

from __future__ import annotations

import functools
import os
import struct
import tarfile
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator


_BLOCK = struct.Struct("100s8s8s8s12s12s8s1s100s8s32s32s8s8s167x")
_READ = struct.Struct("100s8s8s8s12s12s8sc100s8s80x155s12x")
_PLAIN = frozenset(
    (tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.XHDTYPE)
)
_MAGIC = b"ustar\x0000"
_BLANK = b"        "
_NONE = b"0000000\0"
_NAME = 100
_DEVICE = slice(329, 345)
_MOST_ID = 0o7777777
_MOST_SIZE = 0o77777777777
_RECORDS = b"././@PaxHeader"


def encode_header(
    name: str,
    kind: bytes,
    *,
    mode: int,
    uid: int,
    gid: int,
    size: int = 0,
    mtime: int,
    link: str = "",
    exact: int | None = None,
) -> bytes:
    """The header of a member, whose kind is a type of `tarfile`.

    `exact` is its time in nanoseconds, where that is to be kept.
    """
    path, target = os.fsencode(name), os.fsencode(link)
    if kind == tarfile.DIRTYPE:
        path += b"/"
    records = b""
    if len(path) > _NAME:
        records += _record(b"path", path)
    if len(target) > _NAME:
        records += _record(b"linkpath", target)
    if size > _MOST_SIZE:
        records += _record(b"size", b"%d" % size)
    if exact is not None:
        records += _record(b"mtime", _moment(exact))
    elif not 0 <= mtime <= _MOST_SIZE:
        records += _record(b"mtime", b"%d" % mtime)
    if uid > _MOST_ID or gid > _MOST_ID:
        records += _record(b"uid", b"%d" % uid) + _record(b"gid", b"%d" % gid)
    block = _block(path, kind, mode, uid, gid, size, mtime, target)
    return _extended(records) + block if records else block


def decode_header(block: bytes) -> tarfile.TarInfo:
    """What a block says of a member, save names of owners.

    Raises what `tarfile.TarInfo.frombuf` raises, which reads whatever is not as plain as ours,
    such as the numbers of other dialects.
    """
    if len(block) != tarfile.BLOCKSIZE:
        return _other(block)
    path, mode, uid, gid, size, mtime, total, kind, target, magic, prefix = _READ.unpack(block)
    if magic != _MAGIC or kind not in _PLAIN or prefix[:1] != b"\0":
        return _other(block)
    if block[_DEVICE] not in (_NONE * 2, bytes(16)):
        return _other(block)
    try:
        numbers = [int(field.rstrip(b" \0"), 8) for field in (mode, uid, gid, size, mtime, total)]
    except ValueError:
        return _other(block)
    if sum(block) - sum(total) + sum(_BLANK) != numbers[5]:
        return _other(block)
    member = tarfile.TarInfo(_field_text(path))
    member.mode, member.uid, member.gid, member.size, member.mtime, member.chksum = numbers
    member.type, member.linkname = kind, _field_text(target)
    if kind == tarfile.DIRTYPE:
        member.name = member.name.rstrip("/")
    return member


def _other(block: bytes) -> tarfile.TarInfo:
    return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")


def _field_text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _moment(nanoseconds: int) -> bytes:
    seconds, fraction = divmod(abs(nanoseconds), 1_000_000_000)
    return b"%s%d.%09d" % (b"-" if nanoseconds < 0 else b"", seconds, fraction)


def _block(
    path: bytes, kind: bytes, mode: int, uid: int, gid: int, size: int, mtime: int, target: bytes
) -> bytes:
    fields = (
        path[:_NAME],
        b"%07o\0" % (mode & 0o7777),
        b"%07o\0" % (uid if uid <= _MOST_ID else 0),
        b"%07o\0" % (gid if gid <= _MOST_ID else 0),
        b"%011o\0" % (size if size <= _MOST_SIZE else 0),
        b"%011o\0" % (mtime if 0 <= mtime <= _MOST_SIZE else 0),
    )
    rest = (kind, target[:_NAME], _MAGIC, b"", b"", _NONE, _NONE)
    total = sum(_BLOCK.pack(*fields, _BLANK, *rest))
    return _BLOCK.pack(*fields, b"%06o\0 " % total, *rest)


def _extended(records: bytes) -> bytes:
    """Records for the member that follows."""
    return _extended_block(len(records)) + records + bytes(-len(records) % tarfile.BLOCKSIZE)


@functools.lru_cache(1024)
def _extended_block(size: int) -> bytes:
    return _block(_RECORDS, tarfile.XHDTYPE, 0o644, 0, 0, size, 0, b"")


def _record(key: bytes, value: bytes) -> bytes:
    """`length key=value` and a newline, where the length counts itself."""
    length = len(key) + len(value) + 3
    digits = len(b"%d" % length)
    if len(b"%d" % (length + digits)) > digits:
        digits += 1
    return b"%d %s=%s\n" % (length + digits, key, value)


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


class TarSource:
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


def next_member(source: TarSource) -> Generator[None, bytes, tarfile.TarInfo | None]:
    """The next member of an archive, whose content follows; None at its end mark."""
    said: dict[str, str] = {}
    for _ in range(MAX_HEADERS):
        block = yield from source.take(BLOCK)
        if not block:
            raise BrokenTar("it ends without an end mark, so it was cut short")
        try:
            member = decode_header(block)
        except tarfile.HeaderError as error:
            if block == bytes(BLOCK):
                return None
            raise BrokenTar(f"a header is damaged ({error})") from None
        if member.type not in _ABOUT_THE_NEXT:
            return _amended(member, said)
        said |= yield from _said(member, source)
    raise BrokenTar("a member has too many headers")


def _said(header: tarfile.TarInfo, source: TarSource) -> Generator[None, bytes, dict[str, str]]:
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
