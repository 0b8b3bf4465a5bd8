"""Encoding of FUSE messages between the kernel and a filesystem server (linux/fuse.h, 7.31)."""

from __future__ import annotations

import struct
from enum import IntEnum, IntFlag

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

DEVICE = "/dev/fuse"
MAJOR, MINOR = 7, 31
# Largest payload of a request, in bytes and in pages.
MAX_DATA = 1 << 20
MAX_PAGES = 256
# The payload and the longest header.
BUFFER_SIZE = MAX_DATA + 4096
ROOT = 1
NAME_MAX = 255
# FUSE_SUPER_MAGIC of statfs(2).
MAGIC = 0x65735546
NOTIFY_INVALID_INODE = 2


class Op(IntEnum):
    """Opcodes. Others get ENOSYS."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42
    READDIRPLUS = 44
    RENAME2 = 45


class Init(IntFlag):
    """Flags of INIT that the server supports."""

    ASYNC_READ = 1 << 0
    ATOMIC_O_TRUNC = 1 << 3
    BIG_WRITES = 1 << 5
    AUTO_INVAL_DATA = 1 << 12
    DO_READDIRPLUS = 1 << 13
    READDIRPLUS_AUTO = 1 << 14
    PARALLEL_DIROPS = 1 << 18
    MAX_PAGES = 1 << 22


class Valid(IntFlag):
    """Attributes that SETATTR sets."""

    MODE = 1 << 0
    UID = 1 << 1
    GID = 1 << 2
    SIZE = 1 << 3
    MTIME = 1 << 5
    MTIME_NOW = 1 << 8


KEEP_CACHE = 1 << 1

# len, opcode, unique, nodeid, uid, gid, pid, extensions, padding
IN_HEADER = struct.Struct("=IIQQIIIHH")
# len, error, unique
OUT_HEADER = struct.Struct("=IiQ")
INIT_IN = struct.Struct("=IIII")
# major, minor, readahead, flags, background, congestion, write, granularity, pages, unused
INIT_OUT = struct.Struct("=IIIIHHIIHH32x")
# ino, size, blocks, 3 times, their nanoseconds, mode, links, uid, gid, rdev, block size, flags
ATTR = struct.Struct("=QQQQQQIIIIIIIIII")
# nodeid, generation, validity of the entry and of its attributes in seconds, their nanoseconds
ENTRY = struct.Struct("=QQQQII")
ATTR_OUT = struct.Struct("=QII")
# valid, padding, fh, size, lock, 3 times, their nanoseconds, mode, unused, uid, gid, unused
SETATTR_IN = struct.Struct("=IIQQQQQQIIIIIIII")
MKNOD_IN = struct.Struct("=IIII")
MKDIR_IN = struct.Struct("=II")
RENAME_IN = struct.Struct("=Q")
RENAME2_IN = struct.Struct("=QII")
OPEN_IN = struct.Struct("=II")
OPEN_OUT = struct.Struct("=QII")
CREATE_IN = struct.Struct("=IIII")
READ_IN = struct.Struct("=QQIIQII")
WRITE_IN = struct.Struct("=QQIIQII")
WRITE_OUT = struct.Struct("=II")
HANDLE_IN = struct.Struct("=Q")
FORGET_IN = struct.Struct("=Q")
FORGET_ONE = struct.Struct("=QQ")
BATCH_FORGET_IN = struct.Struct("=II")
# blocks, free, available, files, free files, block size, name length, fragment size, unused
STATFS_OUT = struct.Struct("=QQQQQIII28x")
# ino, offset of the next, length of the name, type
DIRENT = struct.Struct("=QQII")
INVALID_INODE = struct.Struct("=Qqq")


def names(body: memoryview) -> list[bytes]:
    """Return the names at the end of a request, each terminated by a NUL."""
    return bytes(body).split(b"\0")[:-1]


def parse_batch_forget(body: memoryview) -> Iterator[tuple[int, int]]:
    """Yield the inodes of a BATCH_FORGET, each with a number of lookups."""
    count, _ = BATCH_FORGET_IN.unpack_from(body)
    for index in range(count):
        yield FORGET_ONE.unpack_from(body, BATCH_FORGET_IN.size + index * FORGET_ONE.size)


def dirent(number: int, offset: int, name: bytes, kind: int) -> bytes:
    """Encode an entry of a directory, padded to eight bytes."""
    data = DIRENT.pack(number, offset, len(name), kind) + name
    return data + b"\0" * (-len(data) % 8)
