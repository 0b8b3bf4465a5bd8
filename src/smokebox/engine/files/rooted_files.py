"""Files below the root of a sandbox, as blocking calls that never leave that root."""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import stat as stat_bits
from typing import TYPE_CHECKING, NamedTuple

from smokebox.engine.files.descriptors import (
    IN_ROOT,
    LIST,
    SEARCH,
    check_regular,
    closing,
    is_harmless_device,
    not_regular,
    open_child,
    open_regular,
    path_errors,
    refuse_kernel_file,
)
from smokebox.engine.files.replacement import FILE_MODE, Replacement, Sink, write_all
from smokebox.engine.files.trees import lstat, names_in, remove_tree
from smokebox.engine.jail.linux import openat2
from smokebox.engine.workers import checkpoint
from smokebox.errors import AccessDenied, FileTooLarge, PathError, PathIsDirectory, Unsupported
from smokebox.sandbox.glob import GlobEntry
from smokebox.sandbox.local_files import display_name, file_type
from smokebox.types import FileInfo

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from smokebox.engine.jail.spec import Owner

DIRECTORY_MODE = 0o755
MAX_READ = 256 << 20
CHUNK = 256 << 10

_MAX_LINKS = 40
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.ENAMETOOLONG)


class ResolvedPath(NamedTuple):
    """A name in an open directory."""

    parent: int
    name: str


class RootedFiles:
    """The files below the descriptor of a root, which the caller closes."""

    def __init__(self, root: int, owner: Owner) -> None:
        self.root = root
        self.owner = owner

    def open(self, path: str, flags: int) -> int:
        """Open a path, following symlinks inside the root. Not for content: it may be any file."""
        return openat2(self.root, path, flags, resolve=IN_ROOT)

    @contextlib.contextmanager
    def locate(self, path: str) -> Iterator[ResolvedPath]:
        """Open the parent of a path, whose last name is not followed."""
        parent, name = posixpath.split(path)
        if not name:
            raise AccessDenied(path, "the root directory cannot be replaced.")
        with closing(self.open_directory(parent)) as fd:
            yield ResolvedPath(fd, name)

    @contextlib.contextmanager
    def locate_target(self, path: str) -> Iterator[ResolvedPath]:
        """Open the parent of the target of a path, following symlinks.

        Creates missing parents, and removes them again if the block fails.
        """
        created: list[str] = []
        try:
            place = self._follow_links(path, created)
            with closing(place.parent):
                yield place
        except BaseException:
            self._remove_created(created)
            raise

    def _follow_links(self, path: str, created: list[str]) -> ResolvedPath:
        for _ in range(_MAX_LINKS):
            folder, name = posixpath.split(path)
            if name in ("", ".", ".."):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            parent = self.open_directory(folder, created)
            try:
                target = os.readlink(name, dir_fd=parent)
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.ENOENT):
                    return ResolvedPath(parent, name)
                os.close(parent)
                raise
            os.close(parent)
            path = posixpath.join(folder, target.rstrip("/") or "/")
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))

    def open_directory(self, path: str, created: list[str] | None = None) -> int:
        """Open a directory in which something is to change.

        With `created`, missing directories are created and appended to it.
        """
        try:
            fd = self.open(path or "/", SEARCH)
        except FileNotFoundError:
            if created is None:
                raise
            return self._create_directories(path, created)
        try:
            refuse_kernel_file(fd, path)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _create_directories(self, path: str, created: list[str]) -> int:
        missing: list[str] = []
        while True:
            path, name = posixpath.split(path)
            # `..` after a missing name has no meaning, and climbing as text would leave the root.
            if name in ("", ".", ".."):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            missing.append(name)
            with contextlib.suppress(FileNotFoundError):
                fd = self.open_directory(path)
                break
        try:
            for name in reversed(missing):
                path = posixpath.join(path, name)
                # Another writer may have created it meanwhile.
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, DIRECTORY_MODE, dir_fd=fd)
                    created.append(path)
                below = open_child(fd, name, SEARCH)
                os.close(fd)
                fd = below
        except BaseException:
            os.close(fd)
            self._remove_created(created)
            raise
        return fd

    def _remove_created(self, created: list[str]) -> None:
        while created:
            with contextlib.suppress(OSError), self.locate(created.pop()) as place:
                os.rmdir(place.name, dir_fd=place.parent)

    def read(self, path: str, *, limit: int = MAX_READ) -> bytes:
        """Return the bytes of a regular file of at most `limit` bytes."""
        with path_errors(path), closing(open_regular(self.root, path)) as fd:
            size = _check_size(path, os.fstat(fd).st_size, limit)
            data = os.read(fd, size + 1)
            # One read is enough, unless the file changes at the same time.
            while len(data) != size and (more := os.read(fd, CHUNK)):
                data += more
                _check_size(path, len(data), limit)
            return data

    def read_range(
        self, path: str, offset: int, length: int | None = None, *, limit: int = MAX_READ
    ) -> bytes:
        """Return a part of a file, shorter if the file ends before."""
        with path_errors(path), closing(open_regular(self.root, path)) as fd:
            available = max(0, os.fstat(fd).st_size - offset)
            size = available if length is None else min(available, length)
            return b"".join(_read_chunks(fd, offset, _check_size(path, size, limit)))

    def chunks(
        self, path: str, offset: int = 0, length: int | None = None
    ) -> Generator[bytes, None, None]:
        """Yield a file in chunks, to its end or for `length` bytes."""
        with path_errors(path), closing(open_regular(self.root, path)) as fd:
            yield from _read_chunks(fd, offset, length)

    def write(self, path: str, data: bytes) -> None:
        """Create or replace a file and its parent directories, atomically."""
        with self.writing(path) as sink:
            sink.write(data)

    def write_chunks(self, path: str) -> Generator[None, bytes | None, None]:
        """Like `write`, from the chunks that are sent. None ends the file; closing discards it."""
        with self.writing(path) as sink:
            while (chunk := (yield)) is not None:
                sink.write(chunk)

    @contextlib.contextmanager
    def writing(self, path: str) -> Iterator[Sink]:
        """Open a sink for the content of a file, which takes its place if the block succeeds."""
        with path_errors(path), self.locate_target(path) as place:
            before = lstat(place.parent, place.name)
            if before is not None and is_harmless_device(before):
                with open(_open_device(place), "wb") as device:
                    yield device
                return
            if before is not None and not stat_bits.S_ISREG(before.st_mode):
                raise not_regular(path, before.st_mode)
            with Replacement(place.parent, place.name, before) as file:
                yield file

    def append(self, path: str, data: bytes) -> None:
        """Append to a file, creating it and its parents. Not atomic."""
        with path_errors(path), self.locate_target(path) as place:
            before = lstat(place.parent, place.name)
            if before is not None and is_harmless_device(before):
                return
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY
            if before is not None and not stat_bits.S_ISREG(before.st_mode):
                raise not_regular(path, before.st_mode)
            with closing(open_child(place.parent, place.name, flags, FILE_MODE)) as fd:
                check_regular(fd, path)
                write_all(fd, data)

    def info(self, path: str, *, follow_symlinks: bool = True) -> FileInfo:
        """Return the metadata of `path`."""
        with path_errors(path):
            with closing(self.open(path, os.O_PATH | os.O_NOFOLLOW)) as fd:
                found = os.fstat(fd)
            is_symlink = stat_bits.S_ISLNK(found.st_mode)
            if is_symlink and follow_symlinks:
                with closing(self.open(path, os.O_PATH)) as fd:
                    found = os.fstat(fd)
            return file_info(path, found, is_symlink)

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a directory; bytes that are not UTF-8 become `\\xNN`."""
        with path_errors(path), closing(self.open(path, LIST)) as fd:
            return sorted(display_name(name) for name in names_in(fd))

    def listing(self, path: str) -> Iterator[GlobEntry]:
        """List a directory for `glob_paths`. Raises OSError if there is none."""
        with closing(self.open(path, LIST)) as fd:
            for name in names_in(fd):
                checkpoint()
                found = lstat(fd, name)
                if found is not None:
                    yield self._found(f"{path}/{name}", name, found)

    def _found(self, path: str, name: str, found: os.stat_result) -> GlobEntry:
        if not stat_bits.S_ISLNK(found.st_mode):
            return GlobEntry(display_name(name), file_type(found.st_mode))
        with contextlib.suppress(OSError), closing(self.open(path, os.O_PATH)) as fd:
            return GlobEntry(display_name(name), file_type(os.fstat(fd).st_mode), True)
        return GlobEntry(display_name(name), "symlink", True)

    def exists(self, path: str) -> bool:
        """Return whether `path` leads to something visible to us."""
        try:
            os.close(self.open(path, os.O_PATH))
        except OSError as error:
            if error.errno in _ABSENT:
                return False
            with path_errors(path):
                raise
        return True

    def make_directory(self, path: str, *, recursive: bool = False) -> None:
        """Create a directory; `recursive` creates parents and accepts an existing directory."""
        with path_errors(path):
            if not recursive:
                if path == "/":
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
                with self.locate(path) as place:
                    os.mkdir(place.name, DIRECTORY_MODE, dir_fd=place.parent)
                return
            try:
                os.close(self.open_directory(path, []))
            except NotADirectoryError:
                self.info(path, follow_symlinks=False)
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None

    def remove(self, path: str, *, recursive: bool = False, force: bool = False) -> None:
        """Remove a file or a symlink, or with `recursive` a directory."""
        if path == "/":
            raise AccessDenied(
                path, "the root directory cannot be removed.", hint="Name the files in it."
            )
        try:
            with path_errors(path), self.locate(path) as place:
                found = os.stat(place.name, dir_fd=place.parent, follow_symlinks=False)
                if not stat_bits.S_ISDIR(found.st_mode):
                    os.unlink(place.name, dir_fd=place.parent)
                    return
                if not recursive:
                    raise PathIsDirectory(path, hint="Pass recursive=True to remove it.")
                refuse_mount(place, found, path)
                remove_tree(place.parent, place.name, path)
        except FileNotFoundError:
            if not force:
                raise

    def symlink(self, target: str, path: str) -> None:
        """Create a symlink at `path` to `target`, which need not exist."""
        with path_errors(path), self.locate(path) as place:
            os.symlink(target, place.name, dir_fd=place.parent)

    def readlink(self, path: str) -> str:
        """Return the target of the symlink at `path`."""
        with path_errors(path), self.locate(path) as place:
            try:
                return display_name(os.readlink(place.name, dir_fd=place.parent))
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                raise PathError(path, f"not a symlink: {path}.") from None

    def chmod(self, path: str, mode: int) -> None:
        """Set the permission bits of the target of a path."""
        with path_errors(path), self._open_owned(path) as handle:
            os.chmod(handle, mode)

    def chown(self, path: str, uid: int, gid: int) -> None:
        """Set the owner of a file to a user and a group of the sandbox."""
        if not (0 <= uid < self.owner.count and 0 <= gid < self.owner.count):
            raise Unsupported(
                f"the sandbox has no id {uid}:{gid}, only those below {self.owner.count}.",
                hint="Run the engine as root for sandboxes with several users.",
                operation="chown",
            )
        with path_errors(path), self._open_owned(path) as handle:
            os.chown(handle, self.owner.uid + uid, self.owner.gid + gid)

    def touch(self, path: str, mtime: float | None = None) -> None:
        """Set the modification time, by default to the current time; creates a missing file."""
        if not self.exists(path):
            self.append(path, b"")
        with path_errors(path), self._open_owned(path) as handle:
            os.utime(handle, None if mtime is None else (mtime, mtime))

    @contextlib.contextmanager
    def _open_owned(self, path: str) -> Iterator[str]:
        """Return a path to the very file that `path` leads to, which a user of the sandbox owns."""
        with closing(self.open(path, os.O_PATH)) as fd:
            refuse_kernel_file(fd, path)
            # Devices such as /dev/null belong to the host.
            if not 0 <= os.fstat(fd).st_uid - self.owner.uid < self.owner.count:
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
            yield f"/proc/self/fd/{fd}"


def refuse_mount(place: ResolvedPath, found: os.stat_result, path: str) -> None:
    """Raise for a mount point, given the result of `lstat`.

    From outside it looks like any directory, but removing it would unmount it in the sandbox.
    """
    if stat_bits.S_ISDIR(found.st_mode) and found.st_dev != os.fstat(place.parent).st_dev:
        raise AccessDenied(
            path,
            f"{path} is a mount point of the sandbox and cannot be moved or removed.",
            hint="Name the files in it.",
        )


def file_info(path: str, found: os.stat_result, is_symlink: bool) -> FileInfo:
    """Return the metadata of a file from its status."""
    return FileInfo(
        path=path,
        type=file_type(found.st_mode),
        is_symlink=is_symlink,
        size=found.st_size,
        mtime=found.st_mtime,
        mode=stat_bits.S_IMODE(found.st_mode),
    )


def _open_device(place: ResolvedPath) -> int:
    fd = open_child(place.parent, place.name, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    if not is_harmless_device(os.fstat(fd)):
        os.close(fd)
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
    return fd


def _read_chunks(fd: int, offset: int, length: int | None) -> Iterator[bytes]:
    while length is None or length > 0:
        checkpoint()
        chunk = os.pread(fd, CHUNK if length is None else min(CHUNK, length), offset)
        if not chunk:
            return
        yield chunk
        offset += len(chunk)
        length = None if length is None else length - len(chunk)


def _check_size(path: str, size: int, limit: int) -> int:
    if size > limit:
        raise FileTooLarge(
            path,
            f"{path} has {size} bytes; at most {limit} are read at once.",
            hint="Use read_range or read_stream.",
            size=size,
            limit=limit,
        )
    return size
