"""Loop devices: block devices over a file, one typed function each."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct

_GET_FREE = 0x4C82
_CONFIGURE, _SET_CAPACITY, _GET_STATUS = 0x4C0A, 0x4C07, 0x4C05
# A device is detached when its last user is gone, so that a killed engine leaves none behind.
_AUTOCLEAR, _DIRECT_IO = 4, 16
_INFO_SIZE = 232
_FLAGS_AT, _NAME_AT, _NAME_SIZE = 52, 56, 64
_TRIES = 64


def attach(image: int, name: str) -> int:
    """Attach a file to a free device, with direct I/O where its file system can.

    Returns a descriptor of the device. It is detached when the last descriptor and mount of it
    are gone.
    """
    with contextlib.closing(_Control()) as control:
        for _ in range(_TRIES):
            device = os.open(f"/dev/loop{control.free()}", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(device, _CONFIGURE, _configuration(image, name))
                return device
            except OSError as error:
                os.close(device)
                # Another process was faster.
                if error.errno != errno.EBUSY:
                    raise
    raise OSError(errno.EBUSY, "other processes take every free loop device")


def find(image: str) -> str | None:
    """Return the path of the device that a file is attached to, or None."""
    try:
        wanted = os.stat(image)
    except FileNotFoundError:
        return None
    for name in os.listdir("/sys/block"):
        if name.startswith("loop") and os.path.exists(f"/sys/block/{name}/loop"):
            with contextlib.suppress(OSError):
                device = os.open(f"/dev/{name}", os.O_RDONLY | os.O_CLOEXEC)
                try:
                    status = fcntl.ioctl(device, _GET_STATUS, bytes(_INFO_SIZE))
                finally:
                    os.close(device)
                _, inode = struct.unpack_from("=2Q", status)
                # Not by the number of its file system, which the kernel encodes in another way.
                backing = f"/sys/block/{name}/loop/backing_file"
                if inode == wanted.st_ino and _same_file(backing, wanted):
                    return f"/dev/{name}"
    return None


def refresh_size(device: str) -> None:
    """Let a device take the present size of its file."""
    fd = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _SET_CAPACITY, 0)
    finally:
        os.close(fd)


def _same_file(backing: str, wanted: os.stat_result) -> bool:
    with open(backing, encoding="utf-8", errors="surrogateescape") as file:
        found = os.stat(file.read().rstrip("\n"))
    return (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino)


class _Control:
    def __init__(self) -> None:
        self._fd = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)

    def free(self) -> int:
        return fcntl.ioctl(self._fd, _GET_FREE)

    def close(self) -> None:
        os.close(self._fd)


def _configuration(image: int, name: str) -> bytes:
    """Encode struct loop_config: the file, the default block size, and struct loop_info64."""
    info = bytearray(_INFO_SIZE)
    struct.pack_into("=I", info, _FLAGS_AT, _AUTOCLEAR | _DIRECT_IO)
    shown = os.fsencode(name)[: _NAME_SIZE - 1]
    info[_NAME_AT : _NAME_AT + len(shown)] = shown
    return struct.pack("=2I", image, 0) + bytes(info) + bytes(64)
