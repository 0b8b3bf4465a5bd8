"""Project quotas of the kernel, one typed function each. No policy lives here.

The commands are those of XFS, which the kernel serves for ext4 as well. All work on the file
system of an open file or directory, and on the initial user namespace only.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import struct
from dataclasses import dataclass

from smokebox.engine.jail.linux import syscall

# The project of files that were never put into one; it has no limits.
NO_PROJECT = 0

_SYS_QUOTACTL_FD = 443
_PROJECT_QUOTA = 2
_GET_STATE, _GET_QUOTA, _SET_LIMITS = 0x5805, 0x5803, 0x5804
_ENFORCED = 1 << 5
_INODE_LIMITS, _BLOCK_LIMITS = 0b11, 0b1100
# struct fs_disk_quota starts with these, in units of 512 bytes: version, type, fields to set,
# project, hard and soft limit of blocks, and of inodes; then the blocks and inodes in use.
_LIMITS, _USE = struct.Struct("=bbHI4Q"), struct.Struct("=2Q")
_QUOTA_SIZE = 112
_BLOCK = 512

_GET_ATTRIBUTES, _SET_ATTRIBUTES = 0x801C581F, 0x401C5820
_INHERIT = 0x200
# struct fsxattr.
_ATTRIBUTES = struct.Struct("=5I8s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Use and limits of a project; a limit of 0 is none."""

    bytes: int = 0
    inodes: int = 0
    byte_limit: int = 0
    inode_limit: int = 0


def is_enforced(fd: int) -> bool:
    """Return whether the file system enforces limits on projects."""
    # struct fs_quota_stat is shorter.
    state = ctypes.create_string_buffer(256)
    try:
        _quotactl(fd, _GET_STATE, 0, state)
    except OSError:
        return False
    (flags,) = struct.unpack_from("=H", state, 2)
    return bool(flags & _ENFORCED)


def get_quota(fd: int, project: int) -> Quota:
    """Return the use and limits of a project, all 0 for one that was never used."""
    buffer = ctypes.create_string_buffer(_QUOTA_SIZE)
    try:
        _quotactl(fd, _GET_QUOTA, project, buffer)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESRCH):
            return Quota()
        raise
    *_, byte_limit, _, inode_limit, _ = _LIMITS.unpack_from(buffer, 0)
    used, inodes = _USE.unpack_from(buffer, _LIMITS.size)
    return Quota(
        bytes=used * _BLOCK,
        inodes=inodes,
        byte_limit=byte_limit * _BLOCK,
        inode_limit=inode_limit,
    )


def set_limits(fd: int, project: int, *, bytes: int, inodes: int) -> None:
    """Set the hard limits of a project. They may be below its present use; 0 is no limit."""
    blocks = -(-bytes // _BLOCK)
    mask = _INODE_LIMITS | _BLOCK_LIMITS
    buffer = ctypes.create_string_buffer(_QUOTA_SIZE)
    _LIMITS.pack_into(buffer, 0, 1, _PROJECT_QUOTA, mask, project, blocks, 0, inodes, 0)
    _quotactl(fd, _SET_LIMITS, project, buffer)


def get_project(fd: int) -> int:
    """Return the project of a file or directory, or `NO_PROJECT`."""
    try:
        return _attributes(fd)[3]
    except OSError as error:
        if error.errno in (errno.ENOTTY, errno.EOPNOTSUPP, errno.EINVAL):
            return NO_PROJECT
        raise


def set_project(directory: int, project: int) -> None:
    """Put a directory into a project, and with it all that is created in it from then on."""
    flags, extent, extents, _, cow = _attributes(directory)[:5]
    packed = _ATTRIBUTES.pack(flags | _INHERIT, extent, extents, project, cow, b"")
    fcntl.ioctl(directory, _SET_ATTRIBUTES, packed)


def _attributes(fd: int) -> tuple[int, ...]:
    data = fcntl.ioctl(fd, _GET_ATTRIBUTES, bytes(_ATTRIBUTES.size))
    return _ATTRIBUTES.unpack(data)[:5]


def _quotactl(fd: int, command: int, id: int, buffer: ctypes.Array[ctypes.c_char]) -> None:
    number = command << 8 | _PROJECT_QUOTA
    syscall("quotactl_fd", _SYS_QUOTACTL_FD, fd, ctypes.c_uint(number), ctypes.c_uint(id), buffer)
