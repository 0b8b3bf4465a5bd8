"""A file in the making: written beside its place, and put there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat as stat_bits
from typing import Protocol

from smokebox.engine.files.descriptors import open_child
from smokebox.engine.workers import checkpoint
from smokebox.foundation.ids import new_id

FILE_MODE = 0o644
PIECE = 4 << 20
# The letter tells a watcher whether the name it will take is free (c) or taken (m).
TEMPORARY = re.compile(r"\.smokebox-([cm])[0-9a-f]{16}")

# Of older kernels, and of filesystems that have no files without a name.
_NO_NAMELESS = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
_NO_RANGES = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


class Sink(Protocol):
    """What takes the bytes of a file."""

    def write(self, data: bytes) -> None:
        """Take all of `data`."""
        ...


class OpenDevice:
    """An open device, which is written to and never replaced."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, data: bytes) -> None:
        """Take all of `data`."""
        write_all(self._fd, data)


class Replacement:
    """A file without a name that takes one in `parent` when the `with` block ends well.

    If this process is killed before, the kernel forgets the file. A name that is taken, it
    can take only by way of a temporary one, and some filesystems have no files without a
    name: killed at that moment, the temporary one stays, until `leftovers` removes it when
    the sandbox is taken over. The file gets `mode`, and the owner of what it is `like`: at
    first those of what was there.
    """

    def __init__(self, parent: int, name: str, before: os.stat_result | None) -> None:
        self._parent = parent
        self._name = name
        self._fresh = before is None
        self._temporary = ""
        self.like = before
        self.mode = FILE_MODE if before is None else stat_bits.S_IMODE(before.st_mode)
        self.fd = self._open()

    def write(self, data: bytes) -> None:
        """Take all of `data`."""
        write_all(self.fd, data)

    def __enter__(self) -> Replacement:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        try:
            if error is None:
                self._take_place()
        finally:
            os.close(self.fd)
            if self._temporary:
                with contextlib.suppress(OSError):
                    os.unlink(self._temporary, dir_fd=self._parent)

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_CLOEXEC
        try:
            return os.open(".", flags | os.O_TMPFILE, 0o600, dir_fd=self._parent)
        except OSError as error:
            if error.errno not in _NO_NAMELESS:
                raise
        temporary = temporary_name(fresh=self._fresh)
        fd = open_child(self._parent, temporary, flags | os.O_CREAT | os.O_EXCL, 0o600)
        self._temporary = temporary
        return fd

    def _take_place(self) -> None:
        if self.like is not None:
            keep_owner(self.fd, self.like)
        # After the owner, as a change of owner takes setuid bits away.
        os.fchmod(self.fd, self.mode)
        if not self._temporary:
            if self._fresh and self._link(self._name):
                return
            self._temporary = temporary_name(fresh=self._fresh)
            self._link(self._temporary)
        at = self._parent
        os.rename(self._temporary, self._name, src_dir_fd=at, dst_dir_fd=at)
        self._temporary = ""

    def _link(self, name: str) -> bool:
        """Give the file a name, unless it is taken."""
        try:
            os.link(f"/proc/self/fd/{self.fd}", name, dst_dir_fd=self._parent)
        except FileExistsError:
            return False
        return True


class NewFile(Replacement):
    """A file that has its name from the beginning, and is not removed where writing it fails.

    Half the time, where a whole directory appears at once. The name must be free.
    """

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return open_child(self._parent, self._name, flags, 0o600)

    def _take_place(self) -> None:
        os.fchmod(self.fd, self.mode)


def temporary_name(*, fresh: bool) -> str:
    """A name that nobody has, for what will take another."""
    return f".smokebox-{'c' if fresh else 'm'}{new_id()}"


def keep_owner(fd: int, before: os.stat_result) -> None:
    """Give a file the owner of another, where that is allowed."""
    own = os.fstat(fd)
    if (own.st_uid, own.st_gid) != (before.st_uid, before.st_gid):
        with contextlib.suppress(OSError):
            os.fchown(fd, before.st_uid, before.st_gid)


def write_all(fd: int, data: bytes) -> None:
    """Write `data` to the last byte, stopping where the call was cancelled."""
    view = memoryview(data)
    while view:
        checkpoint()
        view = view[os.write(fd, view[:PIECE]) :]


def copy_content(source: int, target: int) -> None:
    """Copy the bytes of a file, leaving out its holes."""
    size = os.fstat(source).st_size
    offset = 0
    while offset < size:
        try:
            offset = os.lseek(source, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            break
        offset = _copy_range(source, target, offset, os.lseek(source, offset, os.SEEK_HOLE))
    os.ftruncate(target, size)


def _copy_range(source: int, target: int, offset: int, end: int) -> int:
    while offset < end:
        checkpoint()
        count = min(PIECE, end - offset)
        try:
            done = os.copy_file_range(source, target, count, offset, offset)
        except OSError as error:
            if error.errno not in _NO_RANGES:
                raise
            done = os.pwrite(target, os.pread(source, count, offset), offset)
        if done == 0:
            # The file was cut short under our hands.
            return end
        offset += done
    return offset
