"""A bucket as a filesystem for the kernel: inodes, attributes and open files.

Writes go to a local draft, which is uploaded as a whole when the file is closed or synced. All
methods raise `OSError` or a `SmokeboxError`, and are called from several threads.
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

# A bucket has no users: everyone in the sandbox may do what the mount may.
DIRECTORY_MODE = stat.S_IFDIR | 0o777
FILE_MODE = 0o666

# Entries of every directory.
DOTS = (".", "..")

_NO_REPLACE = 1
# Each upload holds a part of its file in memory.
_MAX_UPLOADS = 4


@dataclass(frozen=True, slots=True)
class Attributes:
    """Attributes of an inode for stat(2)."""

    number: int
    mode: int
    size: int
    mtime: float


@dataclass(slots=True)
class OpenFile:
    """One open file. `reader` reads the version at the time of opening, if it is not written."""

    inode: Inode
    reader: ObjectReader | None


@dataclass(frozen=True, slots=True)
class ListedName:
    """One name in a directory, as it was when that was opened."""

    name: str
    entry: Entry


class Volume:
    """One mounted bucket. `invalidate` drops what the kernel has cached of an inode."""

    def __init__(
        self, bucket: BucketFilesystem, spool: Spool, invalidate: Callable[[int], None]
    ) -> None:
        self.inodes = Inodes()
        self._bucket = bucket
        self._spool = spool
        self._invalidate = invalidate
        self._source = ObjectSource(bucket)
        self._open_files: dict[int, OpenFile] = {}
        self._listings: dict[int, list[ListedName]] = {}
        self._handles = count(1)
        self._mounted_at = time.time()
        self._changing = threading.Lock()
        self._uploads = threading.Semaphore(_MAX_UPLOADS)

    def lookup(self, parent: int, name: bytes) -> Attributes:
        """Return the attributes of a name, and count a reference of the kernel."""
        path = self._child(parent, name)
        entry = self._entry(path)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", path)
        return self._attributes(self.inodes.look_up(path), entry)

    def attributes(self, number: int) -> Attributes:
        """Return the attributes of an inode."""
        inode = self.inodes[number]
        return self._attributes(inode, self._existing_entry(inode))

    def set_attributes(
        self,
        number: int,
        *,
        size: int | None = None,
        mode: int | None = None,
        mtime: float | None = None,
    ) -> Attributes:
        """Truncate a file, or set a mode or time, which last only as long as the mount."""
        inode = self.inodes[number]
        entry = self._existing_entry(inode)
        if size is not None:
            if entry.kind == "directory":
                raise IsADirectoryError(errno.EISDIR, "a directory", inode.path)
            with inode.lock:
                self._get_draft(inode, keep=size > 0).truncate(size)
                if not inode.handles:
                    self._upload(inode)
                    self.inodes.discard_draft(inode)
        if mode is not None:
            inode.mode = stat.S_IMODE(mode)
        if mtime is not None:
            inode.mtime = mtime
        return self.attributes(number)

    def make_directory(self, parent: int, name: bytes) -> Attributes:
        """Create a directory, which is a marker object."""
        path = self._child(parent, name, new=True)
        self._bucket.mkdir(path)
        return self._attributes(self.inodes.look_up(path), DIRECTORY.entry)

    def create(self, parent: int, name: bytes, mode: int) -> tuple[Attributes, int]:
        """Create a file and open it. It is uploaded when it is closed."""
        path = self._child(parent, name, new=True)
        if self._entry(path) is not None:
            raise FileExistsError(errno.EEXIST, "the name is taken", path)
        inode = self.inodes.look_up(path)
        with inode.lock:
            inode.mode = stat.S_IMODE(mode)
            self.inodes.add_draft(inode, Draft(self._spool))
            handle = self._add_handle(inode, None)
        return self._attributes(inode, self._existing_entry(inode)), handle

    def open(self, number: int, flags: int) -> tuple[int, bool]:
        """Open a file; return a handle, and whether the page cache of the kernel is still valid."""
        inode = self.inodes[number]
        if flags & os.O_ACCMODE == os.O_RDONLY:
            return self._open_for_reading(inode)
        with inode.lock:
            if self._existing_entry(inode).kind == "directory":
                raise IsADirectoryError(errno.EISDIR, "a directory", inode.path)
            if flags & os.O_TRUNC:
                self._get_draft(inode, keep=False).truncate(0)
            inode.cached = ""
            return self._add_handle(inode, None), False

    def read(self, handle: int, offset: int, size: int) -> bytes:
        """Read from an open file."""
        opened = self._open_files[handle]
        inode = opened.inode
        if inode.draft is not None:
            with inode.lock:
                if inode.draft is not None:
                    return inode.draft.read(offset, size)
        if opened.reader is None:
            opened.reader = self._reader(inode)
        return opened.reader.read(offset, size)

    def write(self, handle: int, offset: int, data: memoryview, *, append: bool) -> int:
        """Write to an open file, at an offset or at its end."""
        inode = self._open_files[handle].inode
        with inode.lock:
            draft = self._get_draft(inode, keep=True)
            return draft.write(draft.size if append else offset, data)

    def sync(self, handle: int) -> None:
        """Upload pending writes."""
        inode = self._open_files[handle].inode
        with inode.lock:
            self._upload(inode)

    def release(self, handle: int) -> None:
        """Close a handle; the last one of an inode uploads its draft."""
        inode = self._open_files.pop(handle).inode
        with inode.lock:
            inode.handles -= 1
            if inode.handles:
                return
            try:
                # Written through a memory mapping after the last close.
                self._upload(inode)
            finally:
                self.inodes.discard_draft(inode)
                self.inodes.released(inode)

    def unlink(self, parent: int, name: bytes) -> None:
        """Remove a file. Open handles stay usable, but are not uploaded any more."""
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
        """Move a file or a directory, which copies each of its objects."""
        source, destination = self._child(parent, name), self._child(target, to, new=True)
        if flags & ~_NO_REPLACE:
            raise OSError(errno.EINVAL, "exchanging files is not supported", source)
        entry, existing = self._entry(source), self._entry(destination)
        if entry is None:
            raise PathNotFound(source)
        if existing is not None and flags & _NO_REPLACE:
            raise FileExistsError(errno.EEXIST, "the name is taken", destination)
        check_move(source, destination, entry, existing)
        with self._changing:
            if entry.kind == "directory":
                for drafted in self.inodes.drafts(source):
                    with drafted.lock:
                        self._upload(drafted)
                self._bucket.rename(source, destination)
            else:
                self._move_file(source, destination)
            self.inodes.move(source, destination)

    def open_directory(self, number: int) -> int:
        """List a directory for later reads, and return a handle."""
        path = self.inodes[number].path
        found = {name: item.entry for name, item in self._bucket.listing(path).items()}
        prefix = path.rstrip("/") + "/"
        for inode in self.inodes.drafts(path):
            name = inode.path.removeprefix(prefix)
            if "/" not in name and inode.draft is not None:
                found[name] = Entry("file", inode.draft.size, inode.draft.mtime)
        handle = next(self._handles)
        self._listings[handle] = [ListedName(name, DIRECTORY.entry) for name in DOTS] + [
            ListedName(name, entry)
            for name, entry in sorted(found.items())
            if len(name.encode()) <= NAME_MAX
        ]
        return handle

    def listing(self, handle: int) -> list[ListedName]:
        """Return the entries of a directory when it was opened."""
        return self._listings[handle]

    def look_up_listed(self, directory: int, name: str, entry: Entry) -> Attributes:
        """Like `lookup`, for an entry of a listing."""
        path = self.inodes[directory].path.rstrip("/") + f"/{name}"
        inode = self.inodes.look_up(path)
        return self._attributes(inode, self._draft_entry(inode) or entry)

    def release_directory(self, handle: int) -> None:
        """Close a handle of a directory."""
        self._listings.pop(handle, None)

    def _open_for_reading(self, inode: Inode) -> tuple[int, bool]:
        with inode.lock:
            if inode.draft is not None:
                return self._add_handle(inode, None), False
        reader = self._reader(inode)
        version = reader.version
        keep_cache = version.tag == inode.cached
        inode.cached = version.tag
        if inode.known_size not in (None, version.size):
            # The kernel would truncate reads to the size that it knows.
            self._invalidate(inode.number)
        with inode.lock:
            return self._add_handle(inode, reader), keep_cache

    def _reader(self, inode: Inode) -> ObjectReader:
        found = None if inode.gone else self._bucket.find(inode.path)
        if found is None:
            raise OSError(errno.ESTALE, "the object is gone", inode.path)
        if found.is_directory:
            raise IsADirectoryError(errno.EISDIR, "a directory", inode.path)
        version = ObjectVersion(inode.path, found.version, found.entry.size)
        if version.size <= SMALL:
            # The body is of the current version, which may be newer than the entry.
            body = self._bucket.body(inode.path)
            version = ObjectVersion(inode.path, body.version, len(body.data))
        return ObjectReader(self._source, version)

    def _add_handle(self, inode: Inode, reader: ObjectReader | None) -> int:
        handle = next(self._handles)
        self._open_files[handle] = OpenFile(inode, reader)
        inode.handles += 1
        return handle

    def _get_draft(self, inode: Inode, *, keep: bool) -> Draft:
        """Return the draft of an inode; a new one starts with the object's content if `keep`."""
        if inode.draft is not None:
            return inode.draft
        draft = Draft(self._spool)
        try:
            if keep:
                draft.fill(self._source.chunks(self._reader(inode).version))
        except BaseException:
            draft.close()
            raise
        inode.mtime = None
        self.inodes.add_draft(inode, draft)
        return draft

    def _upload(self, inode: Inode) -> None:
        """Upload a changed draft, unless its name is gone. The caller holds the inode's lock.

        A temporary file of the engine is uploaded only under its final name, so that a killed
        engine leaves nothing in the bucket.
        """
        temporary = TEMPORARY.fullmatch(inode.path.rpartition("/")[2])
        if inode.draft is not None and inode.draft.dirty and not inode.gone and not temporary:
            self._put(inode.draft, inode.path)

    def _put(self, draft: Draft, path: str) -> None:
        with self._uploads, open(os.dup(draft.fd), "rb") as file:
            file.seek(0)
            self._bucket.put(path, file, draft.size)
        draft.dirty = False

    def _move_file(self, source: str, destination: str) -> None:
        inode = self.inodes.at(source)
        if inode is None:
            self._bucket.rename(source, destination)
            return
        with inode.lock:
            if inode.draft is None or not inode.draft.dirty:
                self._bucket.rename(source, destination)
                return
            # Directly to the target, where readers see either the old or the new content.
            self._put(inode.draft, destination)
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
            raise OSError(errno.ENAMETOOLONG, "the name is too long")
        path = directory.path.rstrip("/") + f"/{text}"
        if new:
            self._bucket.check_name(path)
        return path

    def _entry(self, path: str) -> Entry | None:
        inode = self.inodes.at(path)
        return (self._draft_entry(inode) if inode is not None else None) or self._bucket.peek(path)

    def _existing_entry(self, inode: Inode) -> Entry:
        entry = self._draft_entry(inode)
        if entry is None and not inode.gone:
            entry = self._bucket.peek(inode.path)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", inode.path)
        return entry

    def _draft_entry(self, inode: Inode) -> Entry | None:
        draft = inode.draft
        return None if draft is None else Entry("file", draft.size, draft.mtime)

    def _attributes(self, inode: Inode, entry: Entry) -> Attributes:
        if entry.kind == "directory":
            mode = DIRECTORY_MODE if inode.mode is None else stat.S_IFDIR | inode.mode
            return Attributes(inode.number, mode, 0, inode.mtime or self._mounted_at)
        mode = stat.S_IFREG | (FILE_MODE if inode.mode is None else inode.mode)
        inode.known_size = entry.size
        mtime = entry.mtime if inode.mtime is None else inode.mtime
        return Attributes(inode.number, mode, entry.size, mtime)
