"""Headers of tar archives, as POSIX has them: ustar, and what does not fit there in pax records.

The standard library writes and reads the same, five times slower, and a tree of small files is
made of little else.
"""

from __future__ import annotations

import functools
import os
import struct
import tarfile

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


def encode(
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


def decode(block: bytes) -> tarfile.TarInfo:
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
    member = tarfile.TarInfo(_text(path))
    member.mode, member.uid, member.gid, member.size, member.mtime, member.chksum = numbers
    member.type, member.linkname = kind, _text(target)
    if kind == tarfile.DIRTYPE:
        member.name = member.name.rstrip("/")
    return member


def _other(block: bytes) -> tarfile.TarInfo:
    return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")


def _text(field: bytes) -> str:
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
