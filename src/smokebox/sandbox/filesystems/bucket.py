"""Object store as a filesystem: shared key prefixes are directories, bodies are read on demand.

Listings are cached for one command. `refresh` drops the cache and is called before each command, so
that changes made by others show in the next one.
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
from smokebox.sandbox.access import check_prefix
from smokebox.sandbox.filesystems.filesystem import Entry, Filesystem, check_move
from smokebox.sandbox.filesystems.folder_objects import FolderObjects
from smokebox.sandbox.filesystems.object_cache import (
    LISTING_SECONDS,
    BodyCache,
    ListingCache,
    ReadAhead,
    directories,
    resume_after,
)
from smokebox.sandbox.filesystems.objects import DIRECTORY, ObjectBody, ObjectEntry, Objects
from smokebox.sandbox.filesystems.s3_objects import S3Objects

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import BinaryIO

    from obstore.store import ObjectStore

    from smokebox.sandbox.filesystems.object_cache import Listing

# Keys listed ahead on the first walk; each further walk doubles it.
_FIRST_WALK, _LONGEST_WALK = 2000, 8000


class BucketFilesystem(Filesystem):
    """Filesystem over the objects of an obstore `store` below `prefix`.

    Reads go through a cache of `cache_bytes`, used only for the version that the store reports.
    `prefetch` is the number of small objects fetched in parallel ahead of a command that reads a
    directory in order; 0 disables it.
    """

    def __init__(
        self,
        store: ObjectStore,
        prefix: str = "",
        *,
        read_only: bool = False,
        cache_bytes: int = 64 * 1024 * 1024,
        prefetch: int = 32,
        label: str = "",
    ) -> None:
        _check_amount("cache_bytes", cache_bytes)
        _check_amount("prefetch", prefetch)
        self.read_only = read_only
        self._objects = _objects(store, check_prefix(prefix), label or repr(store))
        self._listings = ListingCache()
        self._bodies = BodyCache(cache_bytes)
        self._large: set[str] = set()
        self._read_ahead = ReadAhead(
            self._objects,
            self._listings,
            self._bodies,
            0 if cache_bytes == 0 or isinstance(store, (LocalStore, MemoryStore)) else prefetch,
        )
        self._checked = False
        self._check_lock = threading.Lock()

    @property
    def refused_in_names(self) -> str:
        """Characters that no name in this store can contain."""
        return self._objects.refused_in_names

    def check_name(self, path: str) -> None:
        """Raise `InvalidPath` for a path that no file here can have."""
        self._objects.check_name(path[1:])

    def refresh(self) -> None:
        """Drop cached listings. On the first call and after a failure, check the bucket."""
        with self._check_lock:
            if not self._checked or self._objects.failed:
                self._objects.check()
                self._objects.failed = False
                self._checked = True
        self._listings.clear()
        self._listings.valid_for = LISTING_SECONDS
        self._read_ahead.forget()

    def serve(self, valid_for: float) -> None:
        """Serve programs whose start is not announced by `refresh`, as a mount does.

        Cached listings are valid for `valid_for` seconds. Reads of all threads count as one scan.
        """
        self._listings.valid_for = valid_for
        self._read_ahead.share_scan()

    def close(self) -> None:
        """Stop the read-ahead threads. Safe to repeat."""
        self._read_ahead.close()

    def read(self, path: str) -> bytes:
        return self.body(path).data

    def body(self, path: str) -> ObjectBody:
        """Return a whole file and its version."""
        known, found = self._listings.lookup(path)
        if path == "/" or (found is not None and found.is_directory):
            raise PathIsDirectory(path)
        if (known and found is None) or not self._objects.is_valid_key(path[1:]):
            raise PathNotFound(path)
        self._read_ahead.read(path)
        return self._read_ahead.take(path) or self._cached(path, found) or self._fetched(path)

    def part(self, path: str, start: int, end: int, version: str) -> bytes | None:
        """Return a byte range of one version of a file, or None if the version has changed."""
        return self._objects.part(path[1:], start, end, version)

    def _cached(self, path: str, found: ObjectEntry | None) -> ObjectBody | None:
        body = self._bodies.get(path)
        if body is None or found is None or found.version != body.version:
            return None
        return body

    def _fetched(self, path: str) -> ObjectBody:
        held = self._bodies.get(path)
        try:
            body = self._objects.get(path[1:], unless=held.version if held else "")
        except PathNotFound:
            self._listings.drop(path)
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
        """Create or replace a file, from bytes or from an open file of `size` bytes."""
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

    def listing(self, path: str) -> Mapping[str, ObjectEntry]:
        """Return a directory's entries with their versions."""
        listing = self._listings.listing(path)
        return self._list_directory(path) if listing is None else listing.found

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

    def find(self, path: str) -> ObjectEntry | None:
        """Return the entry at `path` with its version, or None."""
        if path == "/":
            return DIRECTORY
        known, found = self._listings.lookup(path)
        if not known:
            since = self._listings.changes
            if self._objects.is_valid_key(path[1:]):
                found = self._request_entry(path[1:], since)
            self._listings.add_entry(path, found, since=since)
        return found

    def _request_entry(self, key: str, since: int) -> ObjectEntry | None:
        found = self._objects.head(key)
        if found is not None and found.entry.size:
            return found
        # An empty object with others below it is a directory marker in an older convention.
        walked = self._objects.walk(key)
        if walked.ended and walked.found:
            self._listings.add(directories(walked, "/" + key, self._objects.marker), since=since)
        return DIRECTORY if walked.exists else found

    def _list_directory(self, path: str) -> Mapping[str, ObjectEntry]:
        walked = self._walk_siblings(path) or self._list_recursively(path)
        if walked is not None:
            return walked.found
        since = self._listings.changes
        listed = self._objects.listdir(path[1:])
        if not listed.exists and path != "/":
            if self.find(path) is None:
                raise PathNotFound(path)
            raise PathNotDirectory(path)
        self._listings.add({path: listed.found}, since=since)
        return listed.found

    def _list_recursively(self, path: str) -> Listing | None:
        """List a directory tree of any depth in one or two pages of keys.

        Directories with more keys are remembered, so that the attempt is made only once.
        """
        if not self._objects.ordered or path in self._large:
            return None
        since = self._listings.changes
        walked = self._objects.walk(path[1:], limit=_FIRST_WALK + 1)
        if not walked.ended:
            self._large.add(path)
            return None
        if not walked.found:
            # Missing or empty: listing the directory itself shows which.
            return None
        listings = directories(walked, path, self._objects.marker)
        self._listings.add(listings, since=since, delivered=False)
        return self._listings.listing(path)

    def _walk_siblings(self, path: str) -> Listing | None:
        """List the following directories too, once two siblings have been listed."""
        above = posixpath.dirname(path)
        around = self._listings.peek(above) if path != "/" else None
        if around is None or not self._objects.ordered:
            return None
        around.descents += 1
        if around.descents < 2 or around.walked_all:
            return None
        # Always continue from the first key, so that no access order lists anything twice.
        limit = min(_FIRST_WALK << around.walks, _LONGEST_WALK)
        since = self._listings.changes
        walked = self._objects.walk(above[1:], after=around.reached, limit=limit)
        listings = directories(walked, above, self._objects.marker, after=around.reached)
        # Only a part of the parent may have been listed.
        listings.pop(above, None)
        self._listings.add(listings, since=since, delivered=False)
        around.walks += 1
        around.walked_all = walked.ended or not walked.found
        around.reached = resume_after(walked, above, around.reached)
        return self._listings.listing(path)

    def _changed(self, path: str, *, tree: bool = False) -> None:
        self._listings.drop(path, tree=tree)
        self._read_ahead.forget(None if tree else path)

    def _check_writable(self, path: str) -> None:
        if self.read_only:
            raise AccessDenied(
                path,
                f"the bucket is read-only, so {path} was not changed.",
                hint="Write outside of it, or open it without read_only=True.",
            )
        if path == "/":
            raise AccessDenied(
                path, "the root of the bucket cannot be removed.", hint="Pass a path inside it."
            )
        self.check_name(path)

    def _check_parent(self, path: str) -> None:
        above = posixpath.dirname(path)
        parent = self.find(above)
        if parent is None:
            raise PathNotFound(above)
        if not parent.is_directory:
            raise PathNotDirectory(above)


def _objects(store: ObjectStore, prefix: str, label: str) -> Objects:
    if isinstance(store, S3Store):
        return S3Objects(store, prefix, label)
    if isinstance(store, LocalStore):
        return FolderObjects(store, prefix, label)
    return Objects(store, prefix, label)


def _check_amount(option: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidOption(
            f"{option} must be a non-negative integer, not {value!r}.",
            hint=f"Pass {option}=0 to disable it.",
            option=option,
            value=value,
        )
