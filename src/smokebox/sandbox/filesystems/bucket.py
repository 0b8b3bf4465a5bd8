"""An object store as a filesystem: directories are what keys share, bodies are read when asked for.

What a command has seen it need not ask again; `refresh` ends that, and belongs before each
command, so that what others put, change or delete shows in the next one.
"""

from __future__ import annotations

import posixpath
import threading
from typing import TYPE_CHECKING

from obstore.store import LocalStore, MemoryStore, S3Store

from smokebox.errors import (
    AccessDenied,
    DirectoryNotEmpty,
    InvalidOption,
    PathExists,
    PathIsDirectory,
    PathNotDirectory,
    PathNotFound,
)
from smokebox.sandbox.bucket_names import check_prefix
from smokebox.sandbox.filesystems.filesystem import Entry, Filesystem, check_move
from smokebox.sandbox.filesystems.folder_objects import FolderObjects
from smokebox.sandbox.filesystems.objects import DIRECTORY, Body, Found, Objects
from smokebox.sandbox.filesystems.read_ahead import Bodies, ReadAhead
from smokebox.sandbox.filesystems.s3_objects import S3Objects
from smokebox.sandbox.filesystems.sightings import HOLDS, Sightings
from smokebox.sandbox.filesystems.walks import directories, resume_after

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import BinaryIO

    from obstore.store import ObjectStore

    from smokebox.sandbox.filesystems.sightings import Listing

# A walk is listed ahead by so many keys at first, and then by twice as many each time.
_FIRST_WALK, _LONGEST_WALK = 2000, 8000


class BucketFilesystem(Filesystem):
    """The objects of an obstore `store` below `prefix`, as files.

    Reads go through a cache of `cache_bytes`, which is only used for the version that the
    store says is there. `prefetch` is how many small objects are fetched at once ahead of a
    command that reads a directory in order; 0 fetches nothing that is not read.
    """

    def __init__(
        self,
        store: ObjectStore,
        prefix: str = "",
        *,
        read_only: bool = False,
        cache_bytes: int = 64 * 1024 * 1024,
        prefetch: int = 32,
        place: str = "",
    ) -> None:
        _check_amount("cache_bytes", cache_bytes)
        _check_amount("prefetch", prefetch)
        self.read_only = read_only
        self._objects = _objects(store, check_prefix(prefix), place or repr(store))
        self._sightings = Sightings()
        self._bodies = Bodies(cache_bytes)
        self._large: set[str] = set()
        self._ahead = ReadAhead(
            self._objects,
            self._sightings,
            self._bodies,
            0 if cache_bytes == 0 or isinstance(store, (LocalStore, MemoryStore)) else prefetch,
        )
        self._seen = False
        self._checking = threading.Lock()

    @property
    def refused_in_names(self) -> str:
        """Characters that no name in this store can have."""
        return self._objects.refused_in_names

    def check_name(self, path: str) -> None:
        """Refuse a path that no file here can have."""
        self._objects.check_name(path[1:])

    def refresh(self) -> None:
        """Ask the store anew from here on. See that it is there, at first and after a failure."""
        with self._checking:
            if not self._seen or self._objects.failed:
                self._objects.check()
                self._objects.failed = False
                self._seen = True
        self._sightings.forget()
        self._sightings.holds = HOLDS
        self._ahead.forget()

    def serve(self, holds: float) -> None:
        """Be for programs that nobody tells of, by `refresh`, when they begin.

        What was seen is believed for so many seconds, and what several threads read is taken
        for what one program reads.
        """
        self._sightings.holds = holds
        self._ahead.share()

    def close(self) -> None:
        """Let go of the threads. Safe to repeat."""
        self._ahead.close()

    def read(self, path: str) -> bytes:
        return self.body(path).data

    def body(self, path: str) -> Body:
        """The whole of a file, and which version of it that is."""
        known, found = self._sightings.look(path)
        if path == "/" or (found is not None and found.is_directory):
            raise PathIsDirectory(path)
        if (known and found is None) or not self._objects.names(path[1:]):
            raise PathNotFound(path)
        self._ahead.read(path)
        return self._ahead.take(path) or self._cached(path, found) or self._fetched(path)

    def part(self, path: str, start: int, end: int, version: str) -> bytes | None:
        """Some bytes of one version of a file; None where it is another by now."""
        return self._objects.part(path[1:], start, end, version)

    def _cached(self, path: str, found: Found | None) -> Body | None:
        body = self._bodies.get(path)
        if body is None or found is None or found.version != body.version:
            return None
        return body

    def _fetched(self, path: str) -> Body:
        held = self._bodies.get(path)
        try:
            body = self._objects.get(path[1:], unless=held.version if held else "")
        except PathNotFound:
            self._sightings.drop(path)
            if self.find(path) is not None:
                raise PathIsDirectory(path) from None
            raise
        if body is None:
            assert held is not None
            return held
        self._bodies.put(path, body)
        return body

    def write(self, path: str, data: bytes) -> None:
        self.put(path, data)

    def put(self, path: str, data: bytes | BinaryIO, size: int | None = None) -> None:
        """Make or replace a file, from bytes or from a file with so many."""
        self._check_writable(path)
        found = self.find(path)
        if found is not None and found.is_directory:
            raise PathIsDirectory(path)
        if found is None:
            self._check_parent(path)
        self._objects.put(path[1:], data, size)
        self._changed(path)

    def lstat(self, path: str) -> Entry:
        found = self.find(path)
        if found is None:
            raise PathNotFound(path)
        return found.entry

    def peek(self, path: str) -> Entry | None:
        found = self.find(path)
        return None if found is None else found.entry

    def listdir(self, path: str) -> Mapping[str, Entry]:
        return {name: item.entry for name, item in self.listing(path).items()}

    def listing(self, path: str) -> Mapping[str, Found]:
        """As `listdir`, with which version of each is there."""
        listing = self._sightings.listing(path)
        return self._listed(path) if listing is None else listing.found

    def mkdir(self, path: str) -> None:
        self._check_writable(path)
        if self.find(path) is not None:
            raise PathExists(path)
        self._check_parent(path)
        self._objects.make_directory(path[1:])
        self._changed(path)

    def remove(self, path: str, *, recursive: bool = False) -> None:
        self._check_writable(path)
        found = self.find(path)
        if found is None:
            raise PathNotFound(path)
        if not found.is_directory:
            self._objects.delete([path[1:]])
        elif recursive:
            self._objects.remove_tree(path[1:])
        elif self._objects.listdir(path[1:]).found:
            raise DirectoryNotEmpty(path)
        else:
            self._objects.drop_directory(path[1:])
        self._changed(path, tree=found.is_directory)

    def rename(self, source: str, target: str) -> None:
        self._check_writable(source)
        self._check_writable(target)
        found, existing = self.find(source), self.find(target)
        if found is None:
            raise PathNotFound(source)
        if source == target:
            return
        check_move(source, target, found.entry, existing.entry if existing else None)
        if existing is None:
            self._check_parent(target)
        elif existing.is_directory:
            self.remove(target)
        if found.is_directory:
            self._objects.move_tree(source[1:], target[1:])
        else:
            self._objects.copy(source[1:], target[1:])
            self._objects.delete([source[1:]])
        self._changed(source, tree=True)
        self._changed(target, tree=True)

    def copy(self, source: str, target: str) -> None:
        found = self.find(source)
        if found is None or found.is_directory:
            return super().copy(source, target)
        self._check_writable(target)
        existing = self.find(target)
        check_move(source, target, found.entry, existing.entry if existing else None)
        if existing is None:
            self._check_parent(target)
        self._objects.copy(source[1:], target[1:])
        return self._changed(target)

    def find(self, path: str) -> Found | None:
        """As `peek`, with which version is there."""
        if path == "/":
            return DIRECTORY
        known, found = self._sightings.look(path)
        if not known:
            asked = self._sightings.changes
            found = self._asked(path[1:], asked) if self._objects.names(path[1:]) else None
            self._sightings.note(path, found, asked=asked)
        return found

    def _asked(self, key: str, asked: int) -> Found | None:
        found = self._objects.head(key)
        if found is not None and found.entry.size:
            return found
        # An empty object with others below it is a directory in an older spelling.
        walked = self._objects.walk(key)
        if walked.ended and walked.found:
            self._sightings.add(directories(walked, "/" + key, self._objects.marker), asked=asked)
        return DIRECTORY if walked.exists else found

    def _listed(self, path: str) -> Mapping[str, Found]:
        walked = self._walk_on(path) or self._whole(path)
        if walked is not None:
            return walked.found
        asked = self._sightings.changes
        listed = self._objects.listdir(path[1:])
        if not listed.exists and path != "/":
            if self.find(path) is None:
                raise PathNotFound(path)
            raise PathNotDirectory(path)
        self._sightings.add({path: listed.found}, asked=asked)
        return listed.found

    def _whole(self, path: str) -> Listing | None:
        """List all that is below a directory at once, where that is a page or two of keys.

        One request for a page, whatever the depth. Where there is more, that is remembered,
        so that it is asked for in vain only once.
        """
        if not self._objects.ordered or path in self._large:
            return None
        asked = self._sightings.changes
        walked = self._objects.walk(path[1:], limit=_FIRST_WALK + 1)
        if not walked.ended:
            self._large.add(path)
            return None
        if not walked.found:
            # Not there, or empty: the listing of the directory itself tells.
            return None
        seen = directories(walked, path, self._objects.marker)
        self._sightings.add(seen, asked=asked, given=False)
        return self._sightings.listing(path)

    def _walk_on(self, path: str) -> Listing | None:
        """List the following directories too, once two in the same one have been asked for."""
        above = posixpath.dirname(path)
        around = self._sightings.peek(above) if path != "/" else None
        if around is None or not self._objects.ordered:
            return None
        around.descents += 1
        if around.descents < 2 or around.everything:
            return None
        # Always onward from the first key, so that no order of asking lists anything twice.
        limit = min(_FIRST_WALK << around.walks, _LONGEST_WALK)
        asked = self._sightings.changes
        walked = self._objects.walk(above[1:], after=around.reached, limit=limit)
        seen = directories(walked, above, self._objects.marker, after=around.reached)
        # Of the one above, only a part may have been seen.
        seen.pop(above, None)
        self._sightings.add(seen, asked=asked, given=False)
        around.walks += 1
        around.everything = walked.ended or not walked.found
        around.reached = resume_after(walked, above, around.reached)
        return self._sightings.listing(path)

    def _changed(self, path: str, *, tree: bool = False) -> None:
        self._sightings.drop(path, tree=tree)
        self._ahead.forget(None if tree else path)

    def _check_writable(self, path: str) -> None:
        if self.read_only:
            raise AccessDenied(
                path,
                f"the bucket is read-only, so {path} stays as it is.",
                hint="Write outside of it, or open it without read_only=True.",
            )
        if path == "/":
            raise AccessDenied(path, "the root of the bucket stays.", hint="Name what is in it.")
        self.check_name(path)

    def _check_parent(self, path: str) -> None:
        above = posixpath.dirname(path)
        parent = self.find(above)
        if parent is None:
            raise PathNotFound(above)
        if not parent.is_directory:
            raise PathNotDirectory(above)


def _objects(store: ObjectStore, prefix: str, place: str) -> Objects:
    if isinstance(store, S3Store):
        return S3Objects(store, prefix, place)
    if isinstance(store, LocalStore):
        return FolderObjects(store, prefix, place)
    return Objects(store, prefix, place)


def _check_amount(option: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidOption(
            f"{option} is a whole number from 0 on, not {value!r}.",
            hint=f"Pass {option}=0 to do without.",
            option=option,
            value=value,
        )
