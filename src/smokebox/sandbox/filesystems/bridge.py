"""The operations the shell asks of a filesystem, in terms of a `Tree`."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING

from smokebox.errors import PathIsDirectory, PathNotFound, SymlinkLoop

if TYPE_CHECKING:
    from smokebox.sandbox.filesystems.filesystem import Entry
    from smokebox.sandbox.filesystems.tree import Tree


class Bridge:
    """The part of a tree below one path, as the shell sees it.

    Paths start at the root of that part. The shell writes no parents, removes an empty
    directory as it removes a file, and knows `stat` only, not `lstat`.
    """

    def __init__(self, tree: Tree, at: str) -> None:
        self._tree = tree
        self._base = at.rstrip("/")

    def read_file(self, path: str) -> bytes:
        spot = self._tree.locate(self._place(path))
        if spot.entry is None:
            raise PathNotFound(path)
        return spot.filesystem.read(spot.inner)

    def write_file(self, path: str, data: bytes) -> None:
        spot = self._tree.locate(self._place(path))
        if spot.entry is not None and spot.entry.kind == "directory":
            raise PathIsDirectory(path)
        spot.filesystem.write(spot.inner, data)

    def append_file(self, path: str, data: bytes) -> None:
        spot = self._tree.locate(self._place(path))
        if spot.entry is not None and spot.entry.kind == "directory":
            raise PathIsDirectory(path)
        spot.filesystem.append(spot.inner, data)

    def mkdir(self, path: str, recursive: bool) -> None:
        self._tree.mkdir(self._place(path), recursive=recursive)

    def remove(self, path: str, recursive: bool) -> None:
        place = self._place(path)
        spot = self._tree.locate(place, follow=False)
        if spot.entry is None:
            raise PathNotFound(path)
        self._tree.check_movable(place, spot)
        spot.filesystem.remove(spot.inner, recursive=recursive)

    def stat(self, path: str) -> Entry:
        """What a path leads to, or the symlink that does not lead anywhere."""
        place = self._place(path)
        try:
            entry = self._tree.locate(place).entry
        except (PathNotFound, SymlinkLoop):
            entry = None
        if entry is None:
            entry = self._tree.locate(place, follow=False).entry
        if entry is None:
            raise PathNotFound(path)
        return entry

    def read_dir(self, path: str) -> dict[str, Entry]:
        return self._tree.entries(self._place(path))

    def exists(self, path: str) -> bool:
        """Symlinks that lead nowhere exist too: `rm` asks before it removes."""
        try:
            return self._tree.locate(self._place(path), follow=False).entry is not None
        except OSError as error:
            if isinstance(error, ConnectionError | TimeoutError):
                raise
            return False

    def rename(self, source: str, target: str) -> None:
        self._tree.rename(self._place(source), self._place(target))

    def copy(self, source: str, target: str) -> None:
        self._tree.copy(self._place(source), self._place(target))

    def symlink(self, target: str, path: str) -> None:
        self._tree.symlink(target, self._place(path))

    def read_link(self, path: str) -> str:
        return self._tree.readlink(self._place(path))

    def chmod(self, path: str, mode: int) -> None:
        self._tree.chmod(self._place(path), mode)

    def _place(self, path: str) -> str:
        if "/." in path or "//" in path or path[:1] != "/" or (path[-1] == "/" and path != "/"):
            path = "/" + posixpath.normpath("/" + path).lstrip("/")
        return self._base + path if path != "/" else self._base or "/"
