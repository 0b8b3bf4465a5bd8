"""The objects below one prefix of a bucket, by relative key, through obstore.

Every store is used through `Objects`; what S3 and a folder can do better is in
`s3_objects` and `folder_objects`. Nothing here remembers anything.
"""

from __future__ import annotations

import unicodedata
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import InvalidPathError, NotModifiedError, PreconditionError

from smokebox.errors import (
    BucketNotFound,
    DirectoryNotEmpty,
    InvalidPath,
    PathError,
    PathNotFound,
    ServiceUnavailable,
    SmokeboxError,
)
from smokebox.sandbox.filesystems.filesystem import Entry
from smokebox.sandbox.filesystems.object_errors import translated

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import BinaryIO

    from obstore import ObjectMeta
    from obstore.store import ObjectStore

DIRECTORY_ENTRY = Entry("directory", mode=0o755)
MAX_KEY = 1024

# One request: a larger one is cut into parts, and a part that fails is sent again alone.
_SINGLE_PUT = 64 * 1024 * 1024
_PAGE = 1000
_NOTHING = ".smokebox-nothing"
_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Found:
    """One name in a bucket: what it is, and which version of it was seen."""

    entry: Entry
    version: str = ""

    @property
    def is_directory(self) -> bool:
        """True for a directory, which has no version."""
        return self.entry.kind == "directory"


@dataclass(frozen=True, slots=True)
class Body:
    """The bytes of one version of an object."""

    data: bytes
    version: str


@dataclass(frozen=True, slots=True)
class Listed:
    """One directory. It `exists` also when only a marker says so."""

    found: dict[str, Found]
    exists: bool


@dataclass(frozen=True, slots=True)
class Walked:
    """Objects below a directory in the order of their keys, `ended` where there are no more.

    `exists` tells whether there are any, also where none could be given.
    """

    found: list[tuple[str, Found]]
    ended: bool
    exists: bool


DIRECTORY = Found(DIRECTORY_ENTRY)


class Objects:
    """A bucket below `prefix`. A directory made on purpose is kept by an object in it."""

    marker = ".smokebox-directory"
    refused_in_names = "\n"
    # Whether a long listing comes in the order of keys and can be resumed after one.
    ordered = False

    def __init__(self, store: ObjectStore, prefix: str, place: str) -> None:
        self.store = store
        self.prefix = prefix
        self.place = place
        # Whether the last thing it said was that nothing can be had from it.
        self.failed = False

    @contextmanager
    def asking(self, key: str) -> Iterator[None]:
        """Raise what the store raises inside as an error of ours about a key."""
        try:
            with translated(f"/{key}", self.place):
                yield
        except (BucketNotFound, ServiceUnavailable):
            self.failed = True
            raise

    def full(self, key: str) -> str:
        """The key in the bucket of a key below the prefix."""
        return "/".join(part for part in (self.prefix, key) if part)

    def check(self) -> None:
        """Ask once whether the bucket is there and opens, by listing nothing."""
        try:
            with self.asking(""):
                next(obstore.list(self.store, self.full(_NOTHING)), None)
        except PathNotFound as error:
            raise BucketNotFound(
                f"there is no bucket {self.place}.",
                hint="Check its name and endpoint, or make it first.",
                bucket=self.place,
            ) from error

    def names(self, key: str) -> bool:
        """Whether an object can have this key, in this store and through obstore."""
        parts = key.split("/")
        if (self.marker and self.marker in parts) or len(self.full(key).encode()) > MAX_KEY:
            return False
        return not any(unicodedata.category(char) == "Cc" for char in key)

    def check_name(self, key: str) -> None:
        """Refuse a key that no object can have."""
        if not self.names(key):
            raise InvalidPath(
                f"/{key!r} cannot be the name of an object.",
                hint=f"Use at most {MAX_KEY} bytes without control characters.",
                path=f"/{key}",
            )

    def listdir(self, directory: str) -> Listed:
        """What is in a directory. Raises nothing for one that is not there."""
        prefix = self.full(directory)
        with self.asking(directory):
            try:
                result = obstore.list_with_delimiter(self.store, prefix or None)
            except InvalidPathError as error:
                return self.listdir_odd(directory, error)
        start = len(prefix) + 1 if prefix else 0
        found = {path[start:]: DIRECTORY for path in result["common_prefixes"]}
        for meta in result["objects"]:
            add(found, meta["path"][start:], of(meta))
        exists = bool(result["common_prefixes"] or result["objects"])
        # The second is how obstore gives a key that begins with a slash.
        for hidden in (self.marker, ""):
            found.pop(hidden, None)
        return Listed(found, exists)

    def listdir_odd(self, directory: str, error: InvalidPathError) -> Listed:
        """What is in a directory that holds keys which obstore cannot name."""
        raise _unlistable(directory, error) from error

    def walk(self, directory: str, after: str = "", limit: int = _PAGE) -> Walked:
        """About `limit` objects below a directory, markers too, from the key `after` on."""
        found: list[tuple[str, Found]] = []
        with self.asking(directory):
            for page in self._pages(directory, after):
                found.extend((self.relative(meta["path"]), of(meta)) for meta in page)
                if len(found) >= limit:
                    return Walked(found, ended=False, exists=True)
        return Walked(found, ended=True, exists=bool(found))

    def relative(self, path: str) -> str:
        """The key below the prefix of a key in the bucket."""
        return path[len(self.prefix) + 1 :] if self.prefix else path

    def _pages(self, directory: str, after: str) -> Iterator[Sequence[ObjectMeta]]:
        offset = self.full(after) if after else None
        prefix = self.full(directory) or None
        yield from obstore.list(self.store, prefix, offset=offset, chunk_size=_PAGE)

    def below(self, directory: str) -> list[tuple[str, Found]]:
        """Everything below a directory, markers too. Refuses where some of it has no name."""
        try:
            return self.walk(directory, limit=2**62).found
        except InvalidPathError as error:
            raise _unlistable(directory, error) from error

    def remove_tree(self, directory: str) -> None:
        """Delete everything below a directory, and see that it is gone."""
        for _ in range(_ROUNDS):
            found = self.below(directory)
            if not found:
                return
            self.delete(key for key, _ in found)
            self.drop_directories(key for key, item in found if not item.entry.size)
        raise DirectoryNotEmpty(
            f"/{directory}",
            f"objects keep appearing below /{directory}: {found[0][0]}",
            hint="Stop what writes there and try again.",
        )

    def move_tree(self, source: str, target: str) -> None:
        """Copy everything below a directory, then delete it. A failed copy is undone."""
        found = self.below(source)
        made: list[str] = []
        try:
            for key, item in found:
                made.append(target + key[len(source) :])
                self.copy_object(key, made[-1], item)
        except BaseException:
            with suppress(SmokeboxError):
                self.delete(made)
                self.drop_directories(made)
            raise
        self.remove_tree(source)

    def copy_object(self, source: str, target: str, item: Found) -> None:
        """Copy what a listing of everything gave, be it a file or a marker."""
        self.copy(source, target)

    def head(self, key: str) -> Found | None:
        """The object with this key."""
        try:
            with self.asking(key):
                return of(obstore.head(self.store, self.full(key)))
        except PathNotFound:
            return None

    def get(self, key: str, unless: str = "") -> Body | None:
        """The bytes of an object; None where its version is `unless`."""
        with self.asking(key):
            try:
                result = obstore.get(
                    self.store,
                    self.full(key),
                    options={"if_none_match": unless} if unless.startswith('"') else None,
                )
            except NotModifiedError:
                return None
            meta = result.meta
            return Body(result.bytes().to_bytes(), of(meta).version)

    def part(self, key: str, start: int, end: int, version: str) -> bytes | None:
        """Some bytes of one version of an object; None where another has its key."""
        with self.asking(key):
            try:
                result = obstore.get(
                    self.store,
                    self.full(key),
                    options={"range": (start, end)}
                    if not version.startswith('"')
                    else {"range": (start, end), "if_match": version},
                )
            except PreconditionError:
                return None
            return result.bytes().to_bytes() if of(result.meta).version == version else None

    def put(self, key: str, data: bytes | BinaryIO, size: int | None = None) -> str:
        """Make or replace an object, whole or not at all. Its version.

        A file is read from where it is to its end, in parts where it has a `size` for that.
        """
        size = len(data) if isinstance(data, bytes) else size or 0
        with self.asking(key):
            result = obstore.put(self.store, self.full(key), data, use_multipart=size > _SINGLE_PUT)
        return result["e_tag"] or ""

    def copy(self, source: str, target: str) -> None:
        """Copy an object inside the store."""
        with self.asking(source):
            obstore.copy(self.store, self.full(source), self.full(target))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects, many at a time. One that is gone already is no error."""
        paths = [self.full(key) for key in keys]
        for start in range(0, len(paths), _PAGE):
            batch = paths[start : start + _PAGE]
            with self.asking(self.relative(batch[0])):
                try:
                    obstore.delete(self.store, batch)
                except FileNotFoundError:
                    self._delete_one_by_one(batch)

    def _delete_one_by_one(self, paths: list[str]) -> None:
        for path in paths:
            try:
                obstore.delete(self.store, path)
            except FileNotFoundError:
                continue

    def make_directory(self, key: str) -> None:
        """Keep a directory although nothing is in it."""
        self.put(f"{key}/{self.marker}", b"")

    def drop_directory(self, key: str) -> None:
        """Keep it no longer."""
        self.delete([f"{key}/{self.marker}"])

    def drop_directories(self, keys: Iterable[str]) -> None:
        """Keep these no longer: keys of empty objects, which may stand for directories."""


def of(meta: ObjectMeta) -> Found:
    """What a store said of one object."""
    modified = meta["last_modified"].timestamp()
    version = meta["e_tag"] or f"{meta['size']}-{modified}"
    return Found(Entry("file", meta["size"], modified), version)


def add(found: dict[str, Found], name: str, item: Found) -> None:
    """Put an object in a listing, unless it only stands for a directory.

    The directory's own marker has no name in it, and an empty object that shares its name
    with a directory is one in an older spelling. Any other object hides a directory of its name.
    """
    if name and (item.entry.size or name not in found):
        found[name] = item


def _unlistable(directory: str, error: Exception) -> PathError:
    said = str(error).partition("\n\nDebug source:")[0]
    return PathError(
        f"/{directory}",
        f"/{directory} holds keys that cannot be paths ({said!r}).",
        hint="Rename or remove them with another client.",
    )
