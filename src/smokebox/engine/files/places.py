"""Where a path of a sandbox leads: an open directory and a name in it, both inside the root."""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import stat as stat_bits
from typing import TYPE_CHECKING, NamedTuple

from smokebox.engine.files.opening import (
    IN_ROOT,
    SEARCH,
    closing,
    open_child,
    refuse_kernel,
)
from smokebox.engine.jail.linux import openat2
from smokebox.errors import AccessDenied

if TYPE_CHECKING:
    from collections.abc import Iterator

DIRECTORY_MODE = 0o755

_MOST_LINKS = 40


class Place(NamedTuple):
    """A name in an open directory, and the parents that were made for it."""

    parent: int
    name: str
    made: list[str]


class Places:
    """Resolves paths below the descriptor of a root, and makes the directories they need."""

    def __init__(self, root: int) -> None:
        self.root = root

    def open(self, path: str, flags: int) -> int:
        """A descriptor of what a path leads to. Only for looking: it may be anything."""
        return openat2(self.root, path, flags, resolve=IN_ROOT)

    @contextlib.contextmanager
    def place(self, path: str) -> Iterator[Place]:
        """The parent and the name of a path, whose last name is not followed."""
        parent, name = posixpath.split(path)
        if not name:
            raise AccessDenied(path, "the root directory cannot be replaced.")
        with closing(self.directory(parent)) as fd:
            yield Place(fd, name, [])

    @contextlib.contextmanager
    def following(self, path: str) -> Iterator[Place]:
        """The place that a path leads to through links, with parents made, or unmade again."""
        place = self._place_behind_links(path)
        try:
            yield place
        except BaseException:
            self._unmake(place.made)
            raise
        finally:
            os.close(place.parent)

    def _place_behind_links(self, path: str) -> Place:
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
                        return Place(parent, name, made)
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


def refuse_mount(place: Place, found: os.stat_result, path: str) -> None:
    """Raise for a directory that something is mounted on, given what `lstat` found there.

    In here it is like any other: to take it away would take the mount from the sandbox.
    """
    if stat_bits.S_ISDIR(found.st_mode) and found.st_dev != os.fstat(place.parent).st_dev:
        raise AccessDenied(
            path,
            f"{path} belongs to the sandbox itself and stays where it is.",
            hint="Name what is in it.",
        )
