"""Index of a directory tree: the identity of every file, to find the files that changed since."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from typing import NamedTuple

import msgspec

from smokebox.engine.files.descriptors import (
    LIST,
    READ,
    REPLACED,
    SEARCH,
    closing,
    open_beneath,
    open_child,
)
from smokebox.engine.files.replacement import TEMPORARY
from smokebox.engine.images.overlay import is_opaque
from smokebox.engine.workers import checkpoint

# Times of files advance in steps of a clock tick: one written in the same step as it was listed
# can change again without a later time.
TICK_NS = 20_000_000
_BLOCK = 512


class IndexEntry(NamedTuple):
    """A file of a tree. `opaque` is of directories that hide those of layers below.

    The fields up to `opaque` identify its state. A `ctime_ns` of 0 never equals another state.
    """

    mode: int
    inode: int
    ctime_ns: int
    size: int
    opaque: bool
    links: int
    device: int
    uid: int
    gid: int
    atime_ns: int
    mtime_ns: int
    blocks: int

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_whiteout(self) -> bool:
        """True for the mark that hides a file of a layer below."""
        return stat.S_ISCHR(self.mode) and self.device == 0

    @property
    def disk(self) -> int:
        """The bytes that it occupies."""
        return self.blocks * _BLOCK

    def same(self, other: IndexEntry) -> bool:
        """Return whether this is surely the same state of the same file."""
        return self is other or (self[:5] == other[:5] and self.ctime_ns != 0)


TreeIndex = dict[str, IndexEntry]
"""The files of a tree by their paths relative to its top, parents first. The top is ""."""


def entry_of(found: os.stat_result, *, opaque: bool = False) -> IndexEntry:
    """Return the entry of a status."""
    # By position: programs are frozen while many of these are made.
    return IndexEntry(
        found.st_mode,
        found.st_ino,
        found.st_ctime_ns,
        found.st_size,
        opaque,
        found.st_nlink,
        found.st_rdev,
        found.st_uid,
        found.st_gid,
        found.st_atime_ns,
        found.st_mtime_ns,
        found.st_blocks,
    )


def scan(
    top: int, opened: dict[str, int] | None = None, before: TreeIndex | None = None
) -> TreeIndex:
    """List a tree that may change meanwhile.

    Args:
        top: The open directory.
        before: An earlier index, whose entries are used for files that did not change.
        opened: Takes the modes of directories that their owner may not read, which root of a
            sandbox may: they are opened to the owner until `close_again`. Without it, they are
            listed as empty.
    """
    known = before or {}
    index = {"": with_opaque(entry_of(os.fstat(top)), top, known.get(""))}
    pending = [""]
    while pending:
        checkpoint()
        folder = pending.pop()
        if opened is not None and folder:
            _open_to_owner(top, folder, index[folder].mode, opened)
        try:
            with closing(open_beneath(top, folder, LIST)) as fd:
                if folder:
                    index[folder] = with_opaque(index[folder], fd, known.get(folder))
                _scan_directory(fd, f"{folder}/" if folder else "", index, pending, known)
        except PermissionError:
            if opened is not None:
                raise
        except OSError as error:
            if error.errno not in REPLACED:
                raise
    return index


def with_opaque(entry: IndexEntry, fd: int, before: IndexEntry | None) -> IndexEntry:
    """Return the entry of an open directory, `before` itself if it is the same."""
    if entry is before:
        return entry
    found = entry._replace(opaque=True) if is_opaque(fd) else entry
    return before if before is not None and found == before else found


def _open_to_owner(top: int, folder: str, mode: int, opened: dict[str, int]) -> None:
    if mode & 0o700 != 0o700 and os.geteuid() != 0:
        with closing(open_beneath(top, folder, SEARCH)) as place:
            opened[folder] = stat.S_IMODE(mode)
            os.chmod(f"/proc/self/fd/{place}", opened[folder] | 0o700)


def close_again(top: int, opened: dict[str, int]) -> None:
    """Give directories the modes that they had before `scan`."""
    for path in reversed(opened):
        with (
            contextlib.suppress(FileNotFoundError),
            closing(open_beneath(top, path, SEARCH)) as place,
        ):
            os.chmod(f"/proc/self/fd/{place}", opened[path])


def _scan_directory(
    fd: int, prefix: str, index: TreeIndex, pending: list[str], known: TreeIndex
) -> None:
    with os.scandir(fd) as entries:
        for entry in entries:
            path = prefix + entry.name
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            found = known.get(path)
            if (
                found is None
                or found.ctime_ns != status.st_ctime_ns
                or found.inode != status.st_ino
                or found.size != status.st_size
                or found.mode != status.st_mode
            ):
                found = entry_of(status)
                if is_temporary(entry.name, found.mode):
                    continue
            index[path] = found
            if stat.S_ISDIR(status.st_mode):
                pending.append(path)


def is_temporary(name: str, mode: int) -> bool:
    """Return whether the engine is writing the file, and renames it when it is complete."""
    return stat.S_ISREG(mode) and TEMPORARY.fullmatch(name) is not None


def open_readable(folder: int, name: str) -> int:
    """Open a file for reading, also one that its owner may not read: root of a sandbox may."""
    try:
        return open_child(folder, name, READ)
    except PermissionError:
        with closing(open_child(folder, name, os.O_PATH)) as place:
            path = f"/proc/self/fd/{place}"
            mode = stat.S_IMODE(os.fstat(place).st_mode)
            os.chmod(path, mode | 0o400)
            try:
                return os.open(path, READ | os.O_CLOEXEC)
            finally:
                os.chmod(path, mode)


def settled(index: TreeIndex, at_ns: int, unsettled: set[int]) -> TreeIndex:
    """Return an index in which files that may change without a trace equal no later state.

    Args:
        index: An index that was made after the time `at_ns`.
        at_ns: Time in nanoseconds since the epoch.
        unsettled: Inodes that programs can write to through a mapping.
    """
    return {
        path: entry
        if entry.ctime_ns < at_ns - TICK_NS and entry.inode not in unsettled
        else entry._replace(ctime_ns=0)
        for path, entry in index.items()
    }


def mapped_inodes(pids: list[int]) -> set[int]:
    """Return the inodes that processes have mapped to write to.

    The time of such a file changes with the first write, and not with the later ones.
    """
    found: set[int] = set()
    for pid in pids:
        with (
            contextlib.suppress(OSError, ValueError),
            open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file,
        ):
            for line in file:
                fields = line.split(None, 5)
                if "w" in fields[1] and "s" in fields[1]:
                    found.add(int(fields[4]))
    return found


def dump(indexes: list[TreeIndex]) -> bytes:
    """Encode indexes of several trees."""
    return msgspec.msgpack.encode(
        [[(os.fsencode(path), *entry) for path, entry in one.items()] for one in indexes]
    )


def load(data: bytes) -> list[TreeIndex]:
    """Decode indexes. Raises ValueError."""
    try:
        return [
            {os.fsdecode(path): IndexEntry(*entry) for path, *entry in one}
            for one in msgspec.msgpack.decode(data)
        ]
    except (msgspec.DecodeError, TypeError) as error:
        raise ValueError(f"not an index: {error}") from error


def now_ns() -> int:
    """Return the time in nanoseconds since the epoch."""
    return time.time_ns()
