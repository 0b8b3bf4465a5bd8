"""A bucket as the kernel sees it: inodes, attributes, open files. What is written is kept here
as a draft until its file is closed or synced, and then put whole.

All raise `OSError` or an error of ours. Calls come from several threads at once.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from smokebox.engine.files.replacement import TEMPORARY
from smokebox.engine.mounts.fuse_protocol import NAME_MAX
from smokebox.engine.mounts.inodes import Draft, Inode, Inodes
from smokebox.engine.mounts.reader import SMALL, ObjectReader, ObjectSource, ObjectVersion
from smokebox.errors import DirectoryNotEmpty, PathNotFound
from smokebox.sandbox.filesystems.filesystem import Entry, check_move
from smokebox.sandbox.filesystems.objects import DIRECTORY

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.engine.mounts.inodes import Spool
    from smokebox.sandbox.filesystems.bucket import BucketFilesystem

# A bucket has no users: whoever is in the sandbox may do what the mount may.
DIRECTORY_MODE = stat.S_IFDIR | 0o777
FILE_MODE = 0o666

# What every directory holds besides.
DOTS = (".", "..")

_NO_REPLACE = 1
# Each holds some of its file in memory.
_UPLOADS = 4


@dataclass(frozen=True, slots=True)
class Attributes:
    """What stat(2) says of an inode."""

    number: int
    mode: int
    size: int
    mtime: float


class OpenFile:
    """One open file. `reader` is of the version that was there, for who does not write."""

    __slots__ = ("inode", "reader")

    def __init__(self, inode: Inode, reader: ObjectReader | None) -> None:
        self.inode = inode
        self.reader = reader


@dataclass(frozen=True, slots=True)
class DirectoryListing:
    """One name in a directory, as it was when that was opened."""

    name: str
    entry: Entry


class Volume:
    """One mounted bucket. `invalidate` tells the kernel that an inode is not what it knows."""

    def __init__(
        self, bucket: BucketFilesystem, spool: Spool, invalidate: Callable[[int], None]
    ) -> None:
        self.inodes = Inodes()
        self._bucket = bucket
        self._spool = spool
        self._invalidate = invalidate
        self._source = ObjectSource(bucket)
        self._opened: dict[int, OpenFile] = {}
        self._listed: dict[int, list[DirectoryListing]] = {}
        self._handles = count(1)
        self._began = time.time()
        self._changing = threading.Lock()
        self._uploads = threading.Semaphore(_UPLOADS)

    def lookup(self, parent: int, name: bytes) -> Attributes:
        """What has a name in a directory, of which the kernel then knows."""
        path = self._child(parent, name)
        entry = self._entry(path)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", path)
        return self._told(self.inodes.looked_up(path), entry)

    def attributes(self, number: int) -> Attributes:
        """What is at an inode."""
        inode = self.inodes[number]
        return self._told(inode, self._present(inode))

    def set_attributes(
        self,
        number: int,
        *,
        size: int | None = None,
        mode: int | None = None,
        mtime: float | None = None,
    ) -> Attributes:
        """Cut a file, or have another mode or time, which are kept here and not in the bucket."""
        inode = self.inodes[number]
        entry = self._present(inode)
        if size is not None:
            if entry.kind == "directory":
                raise IsADirectoryError(errno.EISDIR, "a directory", inode.path)
            with inode.lock:
                self._draft(inode, keep=size > 0).truncate(size)
                if not inode.handles:
                    self._upload(inode)
                    self.inodes.end(inode)
        if mode is not None:
            inode.mode = stat.S_IMODE(mode)
        if mtime is not None:
            inode.mtime = mtime
        return self.attributes(number)

    def make_directory(self, parent: int, name: bytes) -> Attributes:
        """Make a directory, which is an object that says so."""
        path = self._child(parent, name, new=True)
        self._bucket.mkdir(path)
        return self._told(self.inodes.looked_up(path), DIRECTORY.entry)

    def create(self, parent: int, name: bytes, mode: int) -> tuple[Attributes, int]:
        """Make a file and open it. It is in the bucket when it is closed."""
        path = self._child(parent, name, new=True)
        if self._entry(path) is not None:
            raise FileExistsError(errno.EEXIST, "there is one already", path)
        inode = self.inodes.looked_up(path)
        with inode.lock:
            inode.mode = stat.S_IMODE(mode)
            self.inodes.begin(inode, Draft(self._spool))
            handle = self._handle(inode, None)
        return self._told(inode, self._present(inode)), handle

    def open(self, number: int, flags: int) -> tuple[int, bool]:
        """Open a file. The handle, and whether what the kernel read of it still holds."""
        inode = self.inodes[number]
        if flags & os.O_ACCMODE == os.O_RDONLY:
            return self._open_to_read(inode)
        with inode.lock:
            if self._present(inode).kind == "directory":
                raise IsADirectoryError(errno.EISDIR, "a directory", inode.path)
            if flags & os.O_TRUNC:
                self._draft(inode, keep=False).truncate(0)
            inode.cached = ""
            return self._handle(inode, None), False

    def read(self, handle: int, offset: int, size: int) -> bytes:
        """Bytes of an open file."""
        opened = self._opened[handle]
        inode = opened.inode
        if inode.draft is not None:
            with inode.lock:
                if inode.draft is not None:
                    return inode.draft.read(offset, size)
        if opened.reader is None:
            opened.reader = self._reader(inode)
        return opened.reader.read(offset, size)

    def write(self, handle: int, offset: int, data: memoryview, *, append: bool) -> int:
        """Put bytes in an open file, or at its end."""
        inode = self._opened[handle].inode
        with inode.lock:
            draft = self._draft(inode, keep=True)
            return draft.write(draft.size if append else offset, data)

    def sync(self, handle: int) -> None:
        """Have what was written be in the bucket."""
        inode = self._opened[handle].inode
        with inode.lock:
            self._upload(inode)

    def release(self, handle: int) -> None:
        """Nobody uses a handle any more."""
        inode = self._opened.pop(handle).inode
        with inode.lock:
            inode.handles -= 1
            if inode.handles:
                return
            try:
                # Written after the last close, by who had it mapped.
                self._upload(inode)
            finally:
                self.inodes.end(inode)
                self.inodes.released(inode)

    def unlink(self, parent: int, name: bytes) -> None:
        """Remove a file. Who writes it goes on, and none of it gets into the bucket."""
        path = self._child(parent, name)
        inode = self.inodes.at(path)
        in_bucket = self._bucket.find(path)
        if in_bucket is not None:
            self._bucket.remove(path)
        elif inode is None or inode.draft is None:
            raise PathNotFound(path)
        self.inodes.remove(path)

    def remove_directory(self, parent: int, name: bytes) -> None:
        """Remove an empty directory."""
        path = self._child(parent, name)
        if self.inodes.drafts(path):
            raise DirectoryNotEmpty(path)
        self._bucket.remove(path)
        self.inodes.remove(path)

    def rename(self, parent: int, name: bytes, target: int, to: bytes, flags: int = 0) -> None:
        """Move a file or a directory, of which each object is copied."""
        source, place = self._child(parent, name), self._child(target, to, new=True)
        if flags & ~_NO_REPLACE:
            raise OSError(errno.EINVAL, "files cannot change places", source)
        entry, existing = self._entry(source), self._entry(place)
        if entry is None:
            raise PathNotFound(source)
        if existing is not None and flags & _NO_REPLACE:
            raise FileExistsError(errno.EEXIST, "there is one already", place)
        check_move(source, place, entry, existing)
        with self._changing:
            if entry.kind == "directory":
                for drafted in self.inodes.drafts(source):
                    with drafted.lock:
                        self._upload(drafted)
                self._bucket.rename(source, place)
            else:
                self._move_file(source, place)
            self.inodes.move(source, place)

    def open_directory(self, number: int) -> int:
        """Take a look at a directory, which is then read from."""
        path = self.inodes[number].path
        found = {name: item.entry for name, item in self._bucket.listing(path).items()}
        inside = path.rstrip("/") + "/"
        for inode in self.inodes.drafts(path):
            name = inode.path.removeprefix(inside)
            if "/" not in name and inode.draft is not None:
                found[name] = Entry("file", inode.draft.size, inode.draft.mtime)
        handle = next(self._handles)
        self._listed[handle] = [DirectoryListing(name, DIRECTORY.entry) for name in DOTS] + [
            DirectoryListing(name, entry)
            for name, entry in sorted(found.items())
            if len(name.encode()) <= NAME_MAX
        ]
        return handle

    def listing(self, handle: int) -> list[DirectoryListing]:
        """What a directory held when it was opened."""
        return self._listed[handle]

    def listed(self, directory: int, name: str, entry: Entry) -> Attributes:
        """One name of a directory, of which the kernel then knows."""
        path = self.inodes[directory].path.rstrip("/") + f"/{name}"
        inode = self.inodes.looked_up(path)
        return self._told(inode, self._drafted(inode) or entry)

    def release_directory(self, handle: int) -> None:
        """Nobody reads from it any more."""
        self._listed.pop(handle, None)

    def _open_to_read(self, inode: Inode) -> tuple[int, bool]:
        with inode.lock:
            if inode.draft is not None:
                return self._handle(inode, None), False
        reader = self._reader(inode)
        version = reader.version
        kept = version.tag == inode.cached
        inode.cached = version.tag
        if inode.told not in (None, version.size):
            # The kernel would cut what is read at the size that it knows.
            self._invalidate(inode.number)
        with inode.lock:
            return self._handle(inode, reader), kept

    def _reader(self, inode: Inode) -> ObjectReader:
        found = None if inode.gone else self._bucket.find(inode.path)
        if found is None:
            raise OSError(errno.ESTALE, "the object is gone", inode.path)
        if found.is_directory:
            raise IsADirectoryError(errno.EISDIR, "a directory", inode.path)
        version = ObjectVersion(inode.path, found.version, found.entry.size)
        if version.size <= SMALL:
            # What is read is what is there now, which may be another than was seen before.
            body = self._bucket.body(inode.path)
            version = ObjectVersion(inode.path, body.version, len(body.data))
        return ObjectReader(self._source, version)

    def _handle(self, inode: Inode, reader: ObjectReader | None) -> int:
        handle = next(self._handles)
        self._opened[handle] = OpenFile(inode, reader)
        inode.handles += 1
        return handle

    def _draft(self, inode: Inode, *, keep: bool) -> Draft:
        """What is to be written to, with what the object holds where that is to be kept."""
        if inode.draft is not None:
            return inode.draft
        draft = Draft(self._spool)
        try:
            if keep:
                draft.fill(self._source.everything(self._reader(inode).version))
        except BaseException:
            draft.close()
            raise
        inode.mtime = None
        self.inodes.begin(inode, draft)
        return draft

    def _upload(self, inode: Inode) -> None:
        """Put what was written, unless its name is gone. The lock of the inode is held.

        What the engine has in the making is put under its last name alone: where the engine
        is killed, nothing of it is left.
        """
        in_the_making = TEMPORARY.fullmatch(inode.path.rpartition("/")[2])
        if inode.draft is not None and inode.draft.dirty and not inode.gone and not in_the_making:
            self._put(inode.draft, inode.path)

    def _put(self, draft: Draft, path: str) -> None:
        with self._uploads, open(os.dup(draft.fd), "rb") as file:
            file.seek(0)
            self._bucket.put(path, file, draft.size)
        draft.dirty = False

    def _move_file(self, source: str, place: str) -> None:
        inode = self.inodes.at(source)
        if inode is None:
            self._bucket.rename(source, place)
            return
        with inode.lock:
            if inode.draft is None or not inode.draft.dirty:
                self._bucket.rename(source, place)
                return
            # At once to where it shall be: whoever looks there sees the old or the new.
            self._put(inode.draft, place)
            if self._bucket.find(source) is not None:
                self._bucket.remove(source)

    def _child(self, parent: int, name: bytes, *, new: bool = False) -> str:
        directory = self.inodes[parent]
        if directory.gone:
            raise FileNotFoundError(errno.ENOENT, "the directory is gone", directory.path)
        try:
            text = name.decode()
        except UnicodeDecodeError as error:
            number = errno.EILSEQ if new else errno.ENOENT
            raise OSError(number, "not UTF-8") from error
        if len(name) > NAME_MAX:
            raise OSError(errno.ENAMETOOLONG, "a long name")
        path = directory.path.rstrip("/") + f"/{text}"
        if new:
            self._bucket.check_name(path)
        return path

    def _entry(self, path: str) -> Entry | None:
        inode = self.inodes.at(path)
        return (self._drafted(inode) if inode is not None else None) or self._bucket.peek(path)

    def _present(self, inode: Inode) -> Entry:
        entry = self._drafted(inode)
        if entry is None and not inode.gone:
            entry = self._bucket.peek(inode.path)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", inode.path)
        return entry

    def _drafted(self, inode: Inode) -> Entry | None:
        draft = inode.draft
        return None if draft is None else Entry("file", draft.size, draft.mtime)

    def _told(self, inode: Inode, entry: Entry) -> Attributes:
        if entry.kind == "directory":
            mode = DIRECTORY_MODE if inode.mode is None else stat.S_IFDIR | inode.mode
            return Attributes(inode.number, mode, 0, inode.mtime or self._began)
        mode = stat.S_IFREG | (FILE_MODE if inode.mode is None else inode.mode)
        inode.told = entry.size
        mtime = entry.mtime if inode.mtime is None else inode.mtime
        return Attributes(inode.number, mode, entry.size, mtime)
