"""One tree of paths over several filesystems, with symlinks followed across all of them."""

from __future__ import annotations

import itertools
import posixpath
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

from smokebox.errors import (
    AccessDenied,
    InvalidOption,
    PathError,
    PathExists,
    PathIsDirectory,
    PathNotDirectory,
    PathNotFound,
    SymlinkLoop,
)
from smokebox.foundation.paths import parents, resolve
from smokebox.sandbox.filesystems.filesystem import Entry, Filesystem, check_move
from smokebox.sandbox.glob import GlobEntry, glob_paths
from smokebox.types import FileInfo

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from smokebox.types import FileType

MAX_HOPS = 40

_IMPLIED = Entry("directory", mode=0o755)


class Location(NamedTuple):
    """Resolved location of a path: a filesystem, the path inside it, and its entry.

    `path` is the path in the tree with every symlink followed. `entry` is None if nothing is there
    but its parent directory exists.
    """

    filesystem: Filesystem
    inner: str
    path: str
    entry: Entry | None


class Tree:
    """Filesystems mounted over one another, seen as one. Paths are absolute and normalized.

    Errors name the path that the caller passed, not where its symlinks lead. The parents of a mount
    point exist even if no filesystem holds them.
    """

    def __init__(self, root: Filesystem, mounts: Mapping[str, Filesystem] | None = None) -> None:
        self.root = root
        self.mounts = {_mount_point(point): fs for point, fs in (mounts or {}).items()}
        # The innermost mount wins.
        self._innermost_first = sorted(self.mounts.items(), key=lambda item: -len(item[0]))
        self._implied: dict[str, set[str]] = {}
        for point in self.mounts:
            while point != "/":
                point, name = posixpath.split(point)
                self._implied.setdefault(point, set()).add(name)

    def read(self, path: str) -> bytes:
        """Return the contents of a file."""
        location = self._existing(path)
        if location.entry is _IMPLIED:
            raise PathIsDirectory(path)
        with _errors_at(path):
            return location.filesystem.read(location.inner)

    def write(self, path: str, data: bytes) -> None:
        """Create or replace a file and its parent directories atomically."""
        with self._with_parents(path):
            location = self._writable(path)
            with _errors_at(path):
                self._create_implied_parent(location)
                location.filesystem.write(location.inner, data)

    def append(self, path: str, data: bytes) -> None:
        """Append to a file, creating it and its parents if needed."""
        with self._with_parents(path):
            location = self._writable(path)
            with _errors_at(path):
                self._create_implied_parent(location)
                location.filesystem.append(location.inner, data)

    def stat(self, path: str, *, follow_symlinks: bool = True) -> FileInfo:
        """Return the metadata of `path`; a dangling symlink exists only if not followed."""
        entry = self._existing(path, follow=False).entry
        is_symlink = entry is not None and entry.kind == "symlink"
        if is_symlink and follow_symlinks:
            entry = self._existing(path).entry
        assert entry is not None
        return _info(path, entry, is_symlink)

    def exists(self, path: str) -> bool:
        """Return whether `path` exists, following symlinks."""
        try:
            return self.locate(path).entry is not None
        except PathError:
            return False

    def readdir(self, path: str) -> list[str]:
        """Return the sorted names in a directory, including mount points."""
        return sorted(self.entries(path))

    def entries(self, path: str) -> dict[str, Entry]:
        """Return the entries of a directory by name, with mount points as directories."""
        location = self._existing(path)
        return self._listed(path, location)

    def mkdir(self, path: str, *, recursive: bool = False) -> None:
        """Create a directory; `recursive` creates parents and accepts an existing one."""
        if recursive:
            with self._with_parents(path):
                self._make_directory(path, accept=True)
        else:
            self._make_directory(path, accept=False)

    def remove(self, path: str, *, recursive: bool = False, force: bool = False) -> None:
        """Remove a file or a symlink, or with `recursive` a directory.

        `force` accepts a missing path. Raises `AccessDenied` for the root, mount points and
        their parents.
        """
        try:
            location = self._existing(path, follow=False)
        except PathNotFound:
            if force:
                return
            raise
        self.check_movable(path, location)
        if location.entry is not None and location.entry.kind == "directory" and not recursive:
            raise PathIsDirectory(path, hint="Pass recursive=True to remove it and its contents.")
        with _errors_at(path):
            location.filesystem.remove(location.inner, recursive=recursive)

    def rename(self, source: str, target: str) -> None:
        """Move a file or directory, also across filesystems, replacing an existing file."""
        old, new = self._existing(source, follow=False), self.locate(target, follow=False)
        self.check_movable(source, old)
        self.check_movable(target, new)
        self._create_implied_parent(new)
        if old.filesystem is new.filesystem:
            try:
                return old.filesystem.rename(old.inner, new.inner)
            except PathError as error:
                blamed = target if error.path == new.inner else source
                raise _at_path(error, blamed) from None
        assert old.entry is not None
        check_move(source, target, old.entry, new.entry)
        if new.entry is not None:
            self._remove_at(target, new)
        self._copy(old.path, new.path, old.entry)
        return self.remove(old.path, recursive=True)

    def copy(self, source: str, target: str) -> None:
        """Copy a file or a directory tree with permissions.

        A symlink passed as `source` is followed; those inside a directory stay symlinks.
        """
        old = self._existing(source)
        assert old.entry is not None
        if old.entry.kind == "directory" and (target + "/").startswith(old.path + "/"):
            raise PathError(target, f"cannot copy {source} into itself: {target}")
        self._copy(old.path, target, old.entry)

    def symlink(self, target: str, path: str) -> None:
        """Create a symlink at `path` with the given target."""
        location = self.locate(path, follow=False)
        if location.entry is not None:
            raise PathExists(path)
        with _errors_at(path):
            self._create_implied_parent(location)
            location.filesystem.symlink(target, location.inner)

    def readlink(self, path: str) -> str:
        """Return the target of the symlink at `path`, as written."""
        location = self._existing(path, follow=False)
        with _errors_at(path):
            return location.filesystem.readlink(location.inner)

    def chmod(self, path: str, mode: int) -> None:
        """Set the permission bits of the file that `path` leads to."""
        location = self._existing(path)
        with _errors_at(path):
            if location.entry is _IMPLIED:
                location.filesystem.makedirs(location.inner)
            location.filesystem.chmod(location.inner, mode)

    def touch(self, path: str, mtime: float) -> None:
        """Set the modification time of the file that `path` leads to, creating it if missing."""
        location = self.locate(path)
        with _errors_at(path):
            if location.entry is None:
                self._create_implied_parent(location)
                location.filesystem.write(location.inner, b"")
            if location.entry is not _IMPLIED:
                location.filesystem.touch(location.inner, mtime)

    def glob(
        self, pattern: str, *, cwd: str = "/", hidden: bool = False, files_only: bool = False
    ) -> list[str]:
        """Return the sorted absolute paths that match, as `SandboxApi.glob` does."""
        return glob_paths(pattern, cwd, self._scan, hidden=hidden, files_only=files_only)

    def walk(self, path: str = "/") -> Iterator[FileInfo]:
        """Yield everything below a directory, parents first, sorted; symlinks are not followed."""
        pending = self._children(path)
        while pending:
            info = pending.pop()
            yield info
            if info.is_directory:
                pending.extend(self._children(info.path))

    def locate(self, path: str, *, follow: bool = True) -> Location:
        """Resolve `path`, following symlinks; `follow` applies to the last component only."""
        current = path
        for _ in range(MAX_HOPS + 1):
            filesystem, inner = self.filesystem_at(current)
            entry = self._entry(filesystem, inner, current)
            if entry is None:
                onward = self._behind_ancestor(current, path)
                if onward is None:
                    return Location(filesystem, inner, current, None)
                current = onward
            elif follow and entry.kind == "symlink":
                current = _target(current, filesystem.readlink(inner))
            else:
                return Location(filesystem, inner, current, entry)
        raise SymlinkLoop(path)

    def filesystem_at(self, path: str) -> tuple[Filesystem, str]:
        """Return the filesystem that holds a path, and the path inside it."""
        for point, filesystem in self._innermost_first:
            if path.startswith(point) and path[len(point) : len(point) + 1] in ("", "/"):
                return filesystem, path[len(point) :] or "/"
        return self.root, path

    def _entry(self, filesystem: Filesystem, inner: str, path: str) -> Entry | None:
        try:
            entry = filesystem.peek(inner)
        except PathNotDirectory:
            entry = None
        if entry is None and path in self._implied:
            return _IMPLIED
        return entry

    def _behind_ancestor(self, missing: str, original: str) -> str | None:
        """Return `missing` with a symlinked ancestor resolved; None if its parent exists.

        Looks from the innermost ancestor outwards: usually the first one exists.
        """
        above = missing
        while above != "/":
            above = posixpath.dirname(above)
            filesystem, inner = self.filesystem_at(above)
            entry = self._entry(filesystem, inner, above)
            if entry is None:
                continue
            if entry.kind == "symlink":
                target = _target(above, filesystem.readlink(inner))
                return posixpath.join(target, missing[len(above) :].lstrip("/"))
            if entry.kind != "directory":
                raise PathNotDirectory(original)
            if above != posixpath.dirname(missing):
                raise PathNotFound(original)
            return None
        raise PathNotFound(original)

    def _children(self, path: str) -> list[FileInfo]:
        """Return the children of a directory in reverse order, for a stack."""
        prefix = path.rstrip("/") + "/"
        return [
            _info(prefix + name, entry, entry.kind == "symlink")
            for name, entry in sorted(self.entries(path).items(), reverse=True)
        ]

    def _existing(self, path: str, *, follow: bool = True) -> Location:
        location = self.locate(path, follow=follow)
        if location.entry is None:
            raise PathNotFound(path)
        return location

    def _writable(self, path: str) -> Location:
        location = self.locate(path)
        if location.entry is not None and location.entry.kind == "directory":
            raise PathIsDirectory(path)
        return location

    def _listed(self, path: str, location: Location) -> dict[str, Entry]:
        if location.entry is None or location.entry.kind != "directory":
            raise PathNotDirectory(path)
        implied = self._implied.get(location.path)
        if location.entry is _IMPLIED:
            return dict.fromkeys(implied or (), _IMPLIED)
        with _errors_at(path):
            listed = dict(location.filesystem.listdir(location.inner))
        # A mount point hides an entry of the same name below it.
        listed.update(dict.fromkeys(implied or (), _IMPLIED))
        return listed

    def _make_directory(self, path: str, *, accept: bool) -> None:
        location = self.locate(path)
        if location.entry is not None:
            if accept and location.entry.kind == "directory":
                return
            raise PathExists(path)
        if self.locate(path, follow=False).entry is not None:
            # A dangling symlink occupies the name.
            raise PathExists(path)
        with _errors_at(path):
            self._create_implied_parent(location)
            location.filesystem.mkdir(location.inner)

    @contextmanager
    def _with_parents(self, path: str) -> Iterator[None]:
        """Create the parents of `path`, and remove them again if the body fails."""
        above = [] if self.exists(posixpath.dirname(path)) else parents(path)
        missing = itertools.dropwhile(self.exists, above)
        created: list[str] = []
        try:
            for directory in missing:
                self._make_directory(directory, accept=False)
                created.append(directory)
            yield
        except PathError as error:
            self._remove_created(created)
            raise _at_path(error, path) from None
        except BaseException:
            self._remove_created(created)
            raise

    def _create_implied_parent(self, location: Location) -> None:
        """Create the parent of `location` if only a mount point implies it so far."""
        above = posixpath.dirname(location.path)
        if above in self._implied:
            filesystem, inner = self.filesystem_at(above)
            filesystem.makedirs(inner)

    def _remove_created(self, created: list[str]) -> None:
        for directory in reversed(created):
            with suppress(PathError):
                location = self._existing(directory)
                location.filesystem.remove(location.inner)

    def check_movable(self, path: str, location: Location) -> None:
        """Raise `AccessDenied` for the root, mount points, and their parents."""
        if location.path == "/" or location.path in self._implied or location.path in self.mounts:
            raise AccessDenied(
                path,
                f"{path} is, or contains, a mount point and cannot be removed.",
                hint="Remove its contents instead.",
            )

    def _remove_at(self, target: str, location: Location) -> None:
        with _errors_at(target):
            location.filesystem.remove(location.inner)

    def _copy(self, source: str, target: str, entry: Entry) -> None:
        self._copy_one(source, target, entry.kind)
        if entry.kind != "symlink":
            self.chmod(target, entry.mode)
        for info in list(self.walk(source)) if entry.kind == "directory" else ():
            copied = target + info.path[len(source) :]
            self._copy_one(info.path, copied, info.type)
            if info.type != "symlink" and info.mode is not None:
                self.chmod(copied, info.mode)

    def _copy_one(self, source: str, target: str, kind: FileType) -> None:
        if kind == "symlink":
            self.symlink(self.readlink(source), target)
        elif kind == "directory":
            self.mkdir(target, recursive=True)
        else:
            self.write(target, self.read(source))

    def _scan(self, path: str) -> Iterator[GlobEntry]:
        prefix = path.rstrip("/") + "/"
        for name, entry in self.entries(path).items():
            if entry.kind != "symlink":
                yield GlobEntry(name, entry.kind)
                continue
            with suppress(PathError):
                target_entry = self.locate(prefix + name).entry
                if target_entry is not None:
                    yield GlobEntry(name, target_entry.kind, is_symlink=True)
                    continue
            yield GlobEntry(name, "symlink", is_symlink=True)


def _mount_point(point: str) -> str:
    if point in ("", "/") or resolve(point, "/") != point:
        raise InvalidOption(
            f"{point!r} is not a valid mount point.",
            hint="Use an absolute path below the root, such as '/data'.",
            option="mounts",
            value=point,
        )
    return point


def _target(link: str, text: str) -> str:
    """Resolve a symlink's target relative to the directory that holds it."""
    joined = posixpath.normpath(posixpath.join(posixpath.dirname(link), text))
    return "/" + joined.lstrip("/")


def _info(path: str, entry: Entry, is_symlink: bool) -> FileInfo:
    return FileInfo(
        path=path,
        type=entry.kind,
        is_symlink=is_symlink,
        size=entry.size,
        mtime=entry.mtime or None,
        mode=entry.mode,
    )


@contextmanager
def _errors_at(path: str) -> Iterator[None]:
    """Replace the path in errors from a filesystem with the caller's path."""
    try:
        yield
    except PathError as error:
        raise _at_path(error, path) from None


def _at_path(error: PathError, path: str) -> PathError:
    if error.path == path:
        return error
    message = error.message.replace(error.path, path, 1)
    return type(error)(path, message, hint=error.hint, **error.fields)
