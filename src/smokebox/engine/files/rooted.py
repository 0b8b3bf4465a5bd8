"""Where a path of a sandbox leads: an open directory and a name in it, both inside the root."""

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
    naming,
    not_regular,
    open_child,
    open_regular,
    refuse_kernel,
)
from smokebox.engine.files.replacement import FILE_MODE, OpenDevice, Replacement, Sink, write_all
from smokebox.engine.files.trees import existing, names_in, remove_tree
from smokebox.engine.jail.linux import openat2
from smokebox.engine.workers import checkpoint
from smokebox.errors import (
    AccessDenied,
    FileTooLarge,
    PathError,
    PathIsDirectory,
    Unsupported,
)
from smokebox.sandbox.globbing import Found
from smokebox.sandbox.hostfiles import kind_of, shown
from smokebox.types import FileInfo

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from smokebox.engine.jail.api import Owner


DIRECTORY_MODE = 0o755

_MOST_LINKS = 40


class ResolvedPath(NamedTuple):
    """A name in an open directory, and the parents that were made for it."""

    parent: int
    name: str
    made: list[str]


class PathResolver:
    """Resolves paths below the descriptor of a root, and makes the directories they need."""

    def __init__(self, root: int) -> None:
        self.root = root

    def open(self, path: str, flags: int) -> int:
        """A descriptor of what a path leads to. Only for looking: it may be anything."""
        return openat2(self.root, path, flags, resolve=IN_ROOT)

    @contextlib.contextmanager
    def place(self, path: str) -> Iterator[ResolvedPath]:
        """The parent and the name of a path, whose last name is not followed."""
        parent, name = posixpath.split(path)
        if not name:
            raise AccessDenied(path, "the root directory cannot be replaced.")
        with closing(self.directory(parent)) as fd:
            yield ResolvedPath(fd, name, [])

    @contextlib.contextmanager
    def following(self, path: str) -> Iterator[ResolvedPath]:
        """The place that a path leads to through links, with parents made, or unmade again."""
        place = self._place_behind_links(path)
        try:
            yield place
        except BaseException:
            self._unmake(place.made)
            raise
        finally:
            os.close(place.parent)

    def _place_behind_links(self, path: str) -> ResolvedPath:
        made: list[str] = []
        try:
            for _ in range(_MOST_LINKS):
                folder, name = posixpath.split(path)
                if name in ("", ".", ".."):
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
                parent = self.directory(folder, made)
                try:
                    target = os.readlink(name, dir_fd=parent)
                except OSError as error:
                    if error.errno in (errno.EINVAL, errno.ENOENT):
                        return ResolvedPath(parent, name, made)
                    os.close(parent)
                    raise
                os.close(parent)
                path = posixpath.join(folder, target.rstrip("/") or "/")
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        except BaseException:
            self._unmake(made)
            raise

    def directory(self, path: str, made: list[str] | None = None) -> int:
        """A descriptor of a directory to change things in; `made` takes those it had to make."""
        try:
            fd = self.open(path or "/", SEARCH)
        except FileNotFoundError:
            if made is None:
                raise
            return self._make(path, made)
        with _closing_on_error(fd):
            refuse_kernel(fd, path)
        return fd

    def _make(self, path: str, made: list[str]) -> int:
        above, name = posixpath.split(path)
        if name in ("", ".", ".."):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        missing = [name]
        while True:
            try:
                fd = self.directory(above)
                break
            except FileNotFoundError:
                above, name = posixpath.split(above)
                # Climbing as text would leave the root; what is missing has no parent.
                if name in ("", ".", ".."):
                    raise
                missing.append(name)
        try:
            for name in reversed(missing):
                above = posixpath.join(above, name)
                # Another writer may have made it since we looked.
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, DIRECTORY_MODE, dir_fd=fd)
                    made.append(above)
                below = open_child(fd, name, SEARCH)
                os.close(fd)
                fd = below
        except BaseException:
            os.close(fd)
            self._unmake(made)
            raise
        return fd

    def _unmake(self, made: list[str]) -> None:
        while made:
            with contextlib.suppress(OSError), self.place(made.pop()) as place:
                os.rmdir(place.name, dir_fd=place.parent)


@contextlib.contextmanager
def _closing_on_error(fd: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        os.close(fd)
        raise


def refuse_mount(place: ResolvedPath, found: os.stat_result, path: str) -> None:
    """Raise for a directory that something is mounted on, given what `lstat` found there.

    In here it is like any other: to take it away would take the mount from the sandbox.
    """
    if stat_bits.S_ISDIR(found.st_mode) and found.st_dev != os.fstat(place.parent).st_dev:
        raise AccessDenied(
            path,
            f"{path} belongs to the sandbox itself and stays where it is.",
            hint="Name what is in it.",
        )


MAX_READ = 256 << 20
CHUNK = 256 << 10

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.ENAMETOOLONG)


class Rooted(PathResolver):
    """The files below a root. Holds the descriptor, and leaves closing it to others."""

    def __init__(self, root: int, owner: Owner) -> None:
        super().__init__(root)
        self.owner = owner

    def read(self, path: str, *, limit: int = MAX_READ) -> bytes:
        """The bytes of a regular file of at most `limit` bytes."""
        with naming(path), closing(open_regular(self.root, path)) as fd:
            size = _check_size(path, os.fstat(fd).st_size, limit)
            data = os.read(fd, size + 1)
            # As many as there were is the rule; else it changes under our hands.
            while len(data) != size and (more := os.read(fd, CHUNK)):
                data += more
                _check_size(path, len(data), limit)
            return data

    def read_range(
        self, path: str, offset: int, length: int | None = None, *, limit: int = MAX_READ
    ) -> bytes:
        """A part of a file; what is beyond its end is left out."""
        with naming(path), closing(open_regular(self.root, path)) as fd:
            there = max(0, os.fstat(fd).st_size - offset)
            wanted = there if length is None else min(there, length)
            return b"".join(_pieces(fd, offset, _check_size(path, wanted, limit)))

    def chunks(
        self, path: str, offset: int = 0, length: int | None = None
    ) -> Generator[bytes, None, None]:
        """A file piece by piece, to its end or for `length` bytes."""
        with naming(path), closing(open_regular(self.root, path)) as fd:
            yield from _pieces(fd, offset, length)

    def write(self, path: str, data: bytes) -> None:
        """Make or replace a file and its parent directories, all or nothing."""
        with self.writing(path) as sink:
            sink.write(data)

    def write_chunks(self, path: str) -> Generator[None, bytes | None, None]:
        """As `write`, from the bytes that are sent; None ends the file, closing drops it."""
        with self.writing(path) as sink:
            while (chunk := (yield)) is not None:
                sink.write(chunk)

    @contextlib.contextmanager
    def writing(self, path: str) -> Iterator[Sink]:
        """What takes the bytes of a file, which is there when the block ends well."""
        with naming(path), self.following(path) as place:
            before = existing(place.parent, place.name)
            if before is not None and is_harmless_device(before):
                with closing(self._open_device(place)) as fd:
                    yield OpenDevice(fd)
                return
            if before is not None and not stat_bits.S_ISREG(before.st_mode):
                raise not_regular(path, before.st_mode)
            with Replacement(place.parent, place.name, before) as file:
                yield file

    def append(self, path: str, data: bytes) -> None:
        """Add to the end of a file, making it and its parents. Not all or nothing."""
        with naming(path), self.following(path) as place:
            before = existing(place.parent, place.name)
            if before is not None and is_harmless_device(before):
                return
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY
            if before is not None and not stat_bits.S_ISREG(before.st_mode):
                raise not_regular(path, before.st_mode)
            with closing(open_child(place.parent, place.name, flags, FILE_MODE)) as fd:
                check_regular(fd, path)
                write_all(fd, data)

    def info(self, path: str, *, follow_symlinks: bool = True) -> FileInfo:
        """What is at `path`."""
        with naming(path):
            with closing(self.open(path, os.O_PATH | os.O_NOFOLLOW)) as fd:
                found = os.fstat(fd)
            is_symlink = stat_bits.S_ISLNK(found.st_mode)
            if is_symlink and follow_symlinks:
                with closing(self.open(path, os.O_PATH)) as fd:
                    found = os.fstat(fd)
            return file_info(path, found, is_symlink)

    def names(self, path: str) -> list[str]:
        """The names in a directory, sorted; bytes that are not UTF-8 show as `\\xNN`."""
        with naming(path), closing(self.open(path, LIST)) as fd:
            return sorted(shown(name) for name in names_in(fd))

    def listing(self, path: str) -> Iterator[Found]:
        """A directory for `glob_paths`. Raises OSError where there is none."""
        with closing(self.open(path, LIST)) as fd:
            for name in names_in(fd):
                checkpoint()
                found = existing(fd, name)
                if found is not None:
                    yield self._found(f"{path}/{name}", name, found)

    def _found(self, path: str, name: str, found: os.stat_result) -> Found:
        if not stat_bits.S_ISLNK(found.st_mode):
            return Found(shown(name), kind_of(found.st_mode))
        with contextlib.suppress(OSError), closing(self.open(path, os.O_PATH)) as fd:
            return Found(shown(name), kind_of(os.fstat(fd).st_mode), True)
        return Found(shown(name), "symlink", True)

    def exists(self, path: str) -> bool:
        """Whether `path` leads to something that we may see."""
        try:
            os.close(self.open(path, os.O_PATH))
        except OSError as error:
            if error.errno in _ABSENT:
                return False
            with naming(path):
                raise
        return True

    def make_directory(self, path: str, *, recursive: bool = False) -> None:
        """Make a directory; `recursive` makes parents and accepts one that is there."""
        with naming(path):
            if not recursive:
                if path == "/":
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
                with self.place(path) as place:
                    os.mkdir(place.name, DIRECTORY_MODE, dir_fd=place.parent)
                return
            try:
                os.close(self.directory(path, []))
            except NotADirectoryError:
                self.info(path, follow_symlinks=False)
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None

    def remove(self, path: str, *, recursive: bool = False, force: bool = False) -> None:
        """Remove a file or a symlink, or with `recursive` a directory."""
        if path == "/":
            raise AccessDenied(
                path, "the root directory cannot be removed.", hint="Name what is in it."
            )
        try:
            with naming(path), self.place(path) as place:
                found = os.stat(place.name, dir_fd=place.parent, follow_symlinks=False)
                is_directory = stat_bits.S_ISDIR(found.st_mode)
                if is_directory and not recursive:
                    raise PathIsDirectory(path, hint="Pass recursive=True to remove it.")
                if is_directory:
                    refuse_mount(place, found, path)
                    remove_tree(place.parent, place.name, path)
                else:
                    os.unlink(place.name, dir_fd=place.parent)
        except FileNotFoundError:
            if not force:
                raise

    def symlink(self, target: str, path: str) -> None:
        """Make a symlink at `path` that leads to `target`, whatever that is."""
        with naming(path), self.place(path) as place:
            os.symlink(target, place.name, dir_fd=place.parent)

    def readlink(self, path: str) -> str:
        """Where the symlink at `path` leads."""
        with naming(path), self.place(path) as place:
            try:
                return shown(os.readlink(place.name, dir_fd=place.parent))
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                raise PathError(path, f"not a symlink: {path}.") from None

    def chmod(self, path: str, mode: int) -> None:
        """Set the permission bits of what a path leads to."""
        with naming(path), self._changing(path) as handle:
            os.chmod(handle, mode)

    def chown(self, path: str, uid: int, gid: int) -> None:
        """Give a file to a user and a group of the sandbox."""
        if not (0 <= uid < self.owner.count and 0 <= gid < self.owner.count):
            raise Unsupported(
                f"the sandbox has no id {uid}:{gid}, only those below {self.owner.count}.",
                hint="Run the engine as root for sandboxes with users of their own.",
                operation="chown",
            )
        with naming(path), self._changing(path) as handle:
            os.chown(handle, self.owner.uid + uid, self.owner.gid + gid)

    def touch(self, path: str, mtime: float | None = None) -> None:
        """Set the time of the last change, by default to this moment, making the file."""
        if not self.exists(path):
            self.append(path, b"")
        with naming(path), self._changing(path) as handle:
            os.utime(handle, None if mtime is None else (mtime, mtime))

    @contextlib.contextmanager
    def _changing(self, path: str) -> Iterator[str]:
        # A descriptor's own link leads to the very file, whatever has its name by then.
        with closing(self.open(path, os.O_PATH)) as fd:
            refuse_kernel(fd, path)
            # Such as /dev/null, which is the host's own: all else of a sandbox is its users'.
            if not 0 <= os.fstat(fd).st_uid - self.owner.uid < self.owner.count:
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
            yield f"/proc/self/fd/{fd}"

    def _open_device(self, place: ResolvedPath) -> int:
        fd = open_child(place.parent, place.name, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        if not is_harmless_device(os.fstat(fd)):
            os.close(fd)
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        return fd


def _pieces(fd: int, offset: int, length: int | None) -> Iterator[bytes]:
    while length is None or length > 0:
        checkpoint()
        piece = os.pread(fd, CHUNK if length is None else min(CHUNK, length), offset)
        if not piece:
            return
        yield piece
        offset += len(piece)
        length = None if length is None else length - len(piece)


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


def file_info(path: str, found: os.stat_result, is_symlink: bool) -> FileInfo:
    """What is told of a file."""
    return FileInfo(
        path=path,
        type=kind_of(found.st_mode),
        is_symlink=is_symlink,
        size=found.st_size,
        mtime=found.st_mtime,
        mode=stat_bits.S_IMODE(found.st_mode),
    )
