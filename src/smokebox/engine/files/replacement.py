"""Atomic replacement of a file: written beside its place, then moved there whole or not at all."""

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
CHUNK = 4 << 20
# The letter tells a watch whether the final name is free (c, create) or taken (m, modify).
TEMPORARY = re.compile(r"\.smokebox-([cm])[0-9a-f]{16}")

# Raised by older kernels, and by filesystems that do not support O_TMPFILE.
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
_NO_COPY_RANGE = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


class Sink(Protocol):
    """Destination of the content of a file."""

    def write(self, data: bytes) -> object:
        """Write all of `data`."""
        ...


class Replacement:
    """An unnamed file that gets its name in `parent` when the `with` block succeeds.

    If this process is killed before that, the kernel frees the file. Replacing an existing name
    takes a temporary name, and so does a filesystem without O_TMPFILE: if the process is killed
    in between, the temporary name stays until `leftovers` removes it. The file gets `mode`, and
    the owner of `like`; both are initially those of the file that it replaces.
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
        """Write all of `data`."""
        write_all(self.fd, data)

    def __enter__(self) -> Replacement:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        try:
            if error is None:
                self._commit()
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
            if error.errno not in _NO_TMPFILE:
                raise
        temporary = temporary_name(fresh=self._fresh)
        fd = open_child(self._parent, temporary, flags | os.O_CREAT | os.O_EXCL, 0o600)
        self._temporary = temporary
        return fd

    def _commit(self) -> None:
        if self.like is not None:
            copy_owner(self.like, self.fd)
        # After the owner, as a change of owner clears setuid bits.
        os.fchmod(self.fd, self.mode)
        if not self._temporary:
            if self._fresh and self._link(self._name):
                return
            self._temporary = temporary_name(fresh=self._fresh)
            self._link(self._temporary)
        rename_in(self._parent, self._temporary, self._name)
        self._temporary = ""

    def _link(self, name: str) -> bool:
        """Give the file a name; return False if that is taken."""
        try:
            os.link(f"/proc/self/fd/{self.fd}", name, dst_dir_fd=self._parent)
        except FileExistsError:
            return False
        return True


class NewFile(Replacement):
    """A file that has its name from the start, and stays there if writing it fails.

    Twice as fast as `Replacement`, for directories that appear as a whole. The name must be free.
    """

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return open_child(self._parent, self._name, flags, 0o600)

    def _commit(self) -> None:
        os.fchmod(self.fd, self.mode)


def temporary_name(*, fresh: bool) -> str:
    """Return a unique name for a file that will be renamed. `fresh`: its final name is free."""
    return f".smokebox-{'c' if fresh else 'm'}{new_id()}"


def rename_in(directory: int, source: str, target: str) -> None:
    """Rename within one open directory."""
    os.rename(source, target, src_dir_fd=directory, dst_dir_fd=directory)


def copy_owner(like: os.stat_result, fd: int) -> None:
    """Give a file the owner that `like` has, if that is permitted."""
    own = os.fstat(fd)
    if (own.st_uid, own.st_gid) != (like.st_uid, like.st_gid):
        with contextlib.suppress(OSError):
            os.fchown(fd, like.st_uid, like.st_gid)


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data`, unless the call is cancelled."""
    view = memoryview(data)
    while view:
        checkpoint()
        view = view[os.write(fd, view[:CHUNK]) :]


def copy_content(source: int, target: int) -> None:
    """Copy the bytes of a file, keeping its holes."""
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
        count = min(CHUNK, end - offset)
        try:
            copied = os.copy_file_range(source, target, count, offset, offset)
        except OSError as error:
            if error.errno not in _NO_COPY_RANGE:
                raise
            copied = os.pwrite(target, os.pread(source, count, offset), offset)
        if copied == 0:
            # The file was truncated meanwhile.
            return end
        offset += copied
    return offset
