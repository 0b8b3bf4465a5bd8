"""Trees that COPY reads: the build context, and the root of a sandbox or of an unpacked archive."""

from __future__ import annotations

import hashlib
import os
import posixpath
import stat as stat_bits
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from smokebox.engine.files.descriptors import (
    LIST,
    READ,
    check_regular,
    closing,
    is_kernel_file,
    open_beneath,
)
from smokebox.engine.files.trees import names_in, walk
from smokebox.engine.images.build.patterns import compile_name, has_wildcard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smokebox.engine.files.rooted_files import RootedFiles
    from smokebox.engine.images.build.context import ContentStore, ContextTree
    from smokebox.wire.builds import ContextEntry

_MAX_LINKS = 40
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceEntry:
    """An entry to copy: its place in the source, its metadata, and the target of a symlink.

    `type` is a file type of `stat`. Ids are those inside a sandbox. `content` finds its bytes.
    """

    path: str
    type: int
    mode: int
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    size: int = 0
    target: str = ""
    content: str = ""

    @property
    def is_directory(self) -> bool:
        """True for a directory."""
        return self.type == stat_bits.S_IFDIR

    @property
    def is_link(self) -> bool:
        """True for a symlink."""
        return self.type == stat_bits.S_IFLNK

    @property
    def is_file(self) -> bool:
        """True for a regular file."""
        return self.type == stat_bits.S_IFREG


class Source(Protocol):
    """A tree to copy from. Paths are relative to its root, without a leading slash."""

    def entry(self, path: str) -> SourceEntry | None:
        """Return the entry of a path whose parents are directories, or None."""
        ...

    def names(self, path: str) -> list[str]:
        """Return the names in a directory."""
        ...

    def walk(self, path: str) -> Iterator[SourceEntry]:
        """Yield the entries below a directory, parents first."""
        ...

    def open(self, entry: SourceEntry) -> int:
        """Open the content of a file."""
        ...


class ContextSource:
    """The build context of one scope."""

    def __init__(self, tree: ContextTree, store: ContentStore, scope: str) -> None:
        self._tree = tree
        self._store = store
        self._scope = scope

    def entry(self, path: str) -> SourceEntry | None:
        if not path:
            return SourceEntry(path="", type=stat_bits.S_IFDIR, mode=0o755)
        found = self._tree.get(path)
        return None if found is None else _converted(found)

    def names(self, path: str) -> list[str]:
        return self._tree.names(path)

    def walk(self, path: str) -> Iterator[SourceEntry]:
        return (_converted(one) for one in self._tree.walk(path))

    def open(self, entry: SourceEntry) -> int:
        return self._store.open(entry.content, scope=self._scope)


_TYPES = {
    "file": stat_bits.S_IFREG,
    "directory": stat_bits.S_IFDIR,
    "symlink": stat_bits.S_IFLNK,
}


def _converted(entry: ContextEntry) -> SourceEntry:
    return SourceEntry(
        path=entry.path,
        type=_TYPES[entry.type],
        mode=entry.mode & 0o7777,
        mtime_ns=entry.mtime_ns,
        size=entry.size,
        target=entry.target,
        content=entry.digest,
    )


class RootSource:
    """The files below the root of a sandbox, or below a directory of ours."""

    def __init__(self, files: RootedFiles) -> None:
        self._files = files

    def entry(self, path: str) -> SourceEntry | None:
        try:
            with closing(open_beneath(self._files.root, path, os.O_PATH | os.O_NOFOLLOW)) as fd:
                found = os.fstat(fd)
                target = os.readlink("", dir_fd=fd) if stat_bits.S_ISLNK(found.st_mode) else ""
        except (FileNotFoundError, NotADirectoryError):
            return None
        return self._converted(path, found, target)

    def names(self, path: str) -> list[str]:
        with closing(open_beneath(self._files.root, path, LIST)) as fd:
            return names_in(fd)

    def walk(self, path: str) -> Iterator[SourceEntry]:
        with closing(open_beneath(self._files.root, path, LIST)) as top:
            if is_kernel_file(top):
                return
            for entry in walk(top, one_filesystem=True):
                target = ""
                if stat_bits.S_ISLNK(entry.stat.st_mode):
                    target = os.readlink(entry.name, dir_fd=entry.folder)
                yield self._converted(posixpath.join(path, entry.path), entry.stat, target)

    def open(self, entry: SourceEntry) -> int:
        fd = open_beneath(self._files.root, entry.path, READ)
        try:
            check_regular(fd, entry.path)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _converted(self, path: str, found: os.stat_result, target: str) -> SourceEntry:
        owner = self._files.owner
        return SourceEntry(
            path=path,
            type=stat_bits.S_IFMT(found.st_mode),
            mode=stat_bits.S_IMODE(found.st_mode),
            uid=_inside(found.st_uid, owner.uid, owner.count),
            gid=_inside(found.st_gid, owner.gid, owner.count),
            mtime_ns=found.st_mtime_ns,
            size=found.st_size,
            target=target,
        )


def _inside(outside: int, first: int, count: int) -> int:
    number = outside - first
    return number if 0 <= number < count else 0


def clean(path: str) -> str:
    """Return a path relative to the root of its source; `..` at the root has no effect."""
    return posixpath.normpath(f"/{path}").lstrip("/")


def follow(source: Source, path: str) -> str | None:
    """Return where a path leads, following symlinks inside the source; None if nowhere."""
    done: list[str] = []
    waiting = [part for part in path.split("/") if part]
    links = 0
    while waiting:
        part = waiting.pop(0)
        if part in (".", ".."):
            if part == ".." and done:
                done.pop()
            continue
        found = source.entry("/".join([*done, part]))
        if found is None:
            return None
        if not found.is_link:
            done.append(part)
            continue
        links += 1
        if links > _MAX_LINKS:
            return None
        if found.target.startswith("/"):
            done.clear()
        waiting = [one for one in found.target.split("/") if one] + waiting
    return "/".join(done)


def expand(source: Source, pattern: str) -> list[str]:
    """Return the paths that match a source of COPY, sorted. Without wildcards it is the path."""
    if not has_wildcard(pattern):
        return [pattern]
    found = [""]
    for part in pattern.split("/"):
        found = [match for parent in found for match in _matches(source, parent, part)]
    return sorted(found)


def _matches(source: Source, parent: str, part: str) -> Iterator[str]:
    if not has_wildcard(part):
        yield posixpath.join(parent, part)
        return
    place = follow(source, parent)
    found = None if place is None else source.entry(place)
    if place is None or found is None or not found.is_directory:
        return
    expression = compile_name(part)
    for name in source.names(place):
        if expression.fullmatch(name):
            yield posixpath.join(parent, name)


def digest_tree(source: Source, path: str, *, keep_owner: bool) -> str:
    """Hash what COPY takes of a path: names, types, modes, content and targets, and no times."""
    place = follow(source, path)
    top = None if place is None else source.entry(place)
    if place is None or top is None:
        return "missing"
    digest = hashlib.sha256()
    entries = source.walk(place) if top.is_directory else iter([top])
    for entry in entries:
        name = posixpath.relpath(entry.path, place or ".") if top.is_directory else ""
        owner = f" {entry.uid}:{entry.gid}" if keep_owner else ""
        content = entry.content or (_hash_content(source, entry) if entry.is_file else "")
        line = f"{name}\0{entry.type | entry.mode:o}{owner}\0{entry.target}\0{content}\0"
        digest.update(line.encode(errors="surrogateescape"))
    return digest.hexdigest()


def _hash_content(source: Source, entry: SourceEntry) -> str:
    digest = hashlib.sha256()
    with closing(source.open(entry)) as fd:
        while chunk := os.read(fd, _CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
