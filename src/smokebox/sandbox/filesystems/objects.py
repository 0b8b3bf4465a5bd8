"""Objects below one prefix of a bucket, by relative key, through obstore.

Every store is used through `Objects`; `s3_objects` and `folder_objects` override what S3 and a
folder do better. Nothing is cached here.
"""

from __future__ import annotations

import re
import unicodedata
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.error import HTTPError, URLError

import obstore
from obstore.exceptions import (
    BaseError,
    InvalidPathError,
    NotModifiedError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from smokebox.errors import (
    AccessDenied,
    BucketNotFound,
    DirectoryNotEmpty,
    InvalidOption,
    InvalidPath,
    PathError,
    PathNotFound,
    ServiceUnavailable,
    SmokeboxError,
    StorageFull,
    Unsupported,
    from_os_error,
)
from smokebox.sandbox.filesystems.filesystem import Entry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import BinaryIO

    from obstore import ObjectMeta
    from obstore.store import ObjectStore


DIRECTORY_ENTRY = Entry("directory", mode=0o755)
MAX_KEY = 1024

# One request up to this size; larger objects are uploaded in parts that are retried alone.
_SINGLE_PUT = 64 * 1024 * 1024
_PAGE = 1000
_MISSING_KEY = ".smokebox-nothing"
_DELETE_ATTEMPTS = 4


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """Entry of one name in a bucket, with its version."""

    entry: Entry
    version: str = ""

    @property
    def is_directory(self) -> bool:
        """True for a directory, which has no version."""
        return self.entry.kind == "directory"


@dataclass(frozen=True, slots=True)
class ObjectBody:
    """Bytes of one version of an object."""

    data: bytes
    version: str


@dataclass(frozen=True, slots=True)
class ObjectListing:
    """Entries of one directory. `exists` is also true for a directory that has only a marker."""

    found: dict[str, ObjectEntry]
    exists: bool


@dataclass(frozen=True, slots=True)
class ObjectWalk:
    """Objects below a directory in key order; `ended` if these are the last.

    `exists` is True if there are any, even if none could be returned.
    """

    found: list[tuple[str, ObjectEntry]]
    ended: bool
    exists: bool


DIRECTORY = ObjectEntry(DIRECTORY_ENTRY)


class Objects:
    """Objects of a bucket below `prefix`. An empty directory is kept by a marker object."""

    marker = ".smokebox-directory"
    refused_in_names = "\n"
    # Set if long listings come in key order and can resume after a key.
    ordered = False

    def __init__(self, store: ObjectStore, prefix: str, label: str) -> None:
        self.store = store
        self.prefix = prefix
        self.label = label
        # Set if the last request failed because the bucket or the service is unavailable.
        self.failed = False

    @contextmanager
    def errors_for(self, key: str) -> Iterator[None]:
        """Translate the store's errors into ours, for a key."""
        try:
            with store_errors(f"/{key}", self.label):
                yield
        except (BucketNotFound, ServiceUnavailable):
            self.failed = True
            raise

    def full(self, key: str) -> str:
        """Return the full key in the bucket for a key below the prefix."""
        return "/".join(part for part in (self.prefix, key) if part)

    def check(self) -> None:
        """Raise unless the bucket exists and is accessible, with one empty listing."""
        try:
            with self.errors_for(""):
                next(obstore.list(self.store, self.full(_MISSING_KEY)), None)
        except PathNotFound as error:
            raise BucketNotFound(
                f"there is no bucket {self.label}.",
                hint="Check its name and endpoint, or create it first.",
                bucket=self.label,
            ) from error

    def is_valid_key(self, key: str) -> bool:
        """Return whether an object can have this key, in this store and through obstore."""
        parts = key.split("/")
        if (self.marker and self.marker in parts) or len(self.full(key).encode()) > MAX_KEY:
            return False
        return not any(unicodedata.category(char) == "Cc" for char in key)

    def check_name(self, key: str) -> None:
        """Raise `InvalidPath` for a key that no object can have."""
        if not self.is_valid_key(key):
            raise InvalidPath(
                f"/{key!r} is not a valid object name.",
                hint=f"Use at most {MAX_KEY} bytes without control characters.",
                path=f"/{key}",
            )

    def listdir(self, directory: str) -> ObjectListing:
        """Return the entries of a directory; an empty listing if it does not exist."""
        prefix = self.full(directory)
        with self.errors_for(directory):
            try:
                result = obstore.list_with_delimiter(self.store, prefix or None)
            except InvalidPathError as error:
                return self.listdir_with_invalid_keys(directory, error)
        start = len(prefix) + 1 if prefix else 0
        found = {path[start:]: DIRECTORY for path in result["common_prefixes"]}
        for meta in result["objects"]:
            add_object(found, meta["path"][start:], object_entry(meta))
        exists = bool(result["common_prefixes"] or result["objects"])
        # obstore returns an empty name for a key that begins with a slash.
        for hidden in (self.marker, ""):
            found.pop(hidden, None)
        return ObjectListing(found, exists)

    def listdir_with_invalid_keys(self, directory: str, error: InvalidPathError) -> ObjectListing:
        """Return the entries of a directory with keys that obstore cannot represent."""
        raise _invalid_keys_error(directory, error) from error

    def walk(self, directory: str, after: str = "", limit: int = _PAGE) -> ObjectWalk:
        """Return about `limit` objects below a directory, with markers, after the key `after`."""
        found: list[tuple[str, ObjectEntry]] = []
        with self.errors_for(directory):
            for page in self._pages(directory, after):
                found.extend((self.relative(meta["path"]), object_entry(meta)) for meta in page)
                if len(found) >= limit:
                    return ObjectWalk(found, ended=False, exists=True)
        return ObjectWalk(found, ended=True, exists=bool(found))

    def relative(self, path: str) -> str:
        """Return the key below the prefix for a full key."""
        return path[len(self.prefix) + 1 :] if self.prefix else path

    def _pages(self, directory: str, after: str) -> Iterator[Sequence[ObjectMeta]]:
        offset = self.full(after) if after else None
        prefix = self.full(directory) or None
        yield from obstore.list(self.store, prefix, offset=offset, chunk_size=_PAGE)

    def below(self, directory: str) -> list[tuple[str, ObjectEntry]]:
        """Return everything below a directory, including markers. Raises if a key has no path."""
        try:
            return self.walk(directory, limit=2**62).found
        except InvalidPathError as error:
            raise _invalid_keys_error(directory, error) from error

    def remove_tree(self, directory: str) -> None:
        """Delete everything below a directory, and verify that it is gone."""
        for _ in range(_DELETE_ATTEMPTS):
            found = self.below(directory)
            if not found:
                return
            self.delete(key for key, _ in found)
            self.drop_directories(key for key, item in found if not item.entry.size)
        raise DirectoryNotEmpty(
            f"/{directory}",
            f"objects keep appearing below /{directory}: {found[0][0]}",
            hint="Stop the program that writes there and try again.",
        )

    def move_tree(self, source: str, target: str) -> None:
        """Copy everything below a directory, then delete it. A failed copy is undone."""
        found = self.below(source)
        created: list[str] = []
        try:
            for key, item in found:
                created.append(target + key[len(source) :])
                self.copy_object(key, created[-1], item)
        except BaseException:
            with suppress(SmokeboxError):
                self.delete(created)
                self.drop_directories(created)
            raise
        self.remove_tree(source)

    def copy_object(self, source: str, target: str, item: ObjectEntry) -> None:
        """Copy an object from a full listing, which may be a file or a marker."""
        self.copy(source, target)

    def head(self, key: str) -> ObjectEntry | None:
        """Return the entry of an object, or None."""
        try:
            with self.errors_for(key):
                return object_entry(obstore.head(self.store, self.full(key)))
        except PathNotFound:
            return None

    def get(self, key: str, unless: str = "") -> ObjectBody | None:
        """Return an object's body, or None if its version is `unless`."""
        with self.errors_for(key):
            try:
                result = obstore.get(
                    self.store,
                    self.full(key),
                    options={"if_none_match": unless} if unless.startswith('"') else None,
                )
            except NotModifiedError:
                return None
            meta = result.meta
            return ObjectBody(result.bytes().to_bytes(), object_entry(meta).version)

    def part(self, key: str, start: int, end: int, version: str) -> bytes | None:
        """Return a byte range of one version of an object, or None if the version has changed."""
        with self.errors_for(key):
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
            unchanged = object_entry(result.meta).version == version
            return result.bytes().to_bytes() if unchanged else None

    def put(self, key: str, data: bytes | BinaryIO, size: int | None = None) -> str:
        """Create or replace an object atomically, and return its version.

        An open file is read from its position to the end, in parts if `size` requires it.
        """
        size = len(data) if isinstance(data, bytes) else size or 0
        with self.errors_for(key):
            result = obstore.put(self.store, self.full(key), data, use_multipart=size > _SINGLE_PUT)
        return result["e_tag"] or ""

    def copy(self, source: str, target: str) -> None:
        """Copy an object inside the store."""
        with self.errors_for(source):
            obstore.copy(self.store, self.full(source), self.full(target))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects in batches. A missing object is not an error."""
        paths = [self.full(key) for key in keys]
        for start in range(0, len(paths), _PAGE):
            batch = paths[start : start + _PAGE]
            with self.errors_for(self.relative(batch[0])):
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
        """Create a marker that keeps an empty directory."""
        self.put(f"{key}/{self.marker}", b"")

    def drop_directory(self, key: str) -> None:
        """Delete a directory's marker."""
        self.delete([f"{key}/{self.marker}"])

    def drop_directories(self, keys: Iterable[str]) -> None:
        """Delete the markers among keys of empty objects."""


def object_entry(meta: ObjectMeta) -> ObjectEntry:
    """Return the entry for an object's metadata."""
    modified = meta["last_modified"].timestamp()
    version = meta["e_tag"] or f"{meta['size']}-{modified}"
    return ObjectEntry(Entry("file", meta["size"], modified), version)


def add_object(found: dict[str, ObjectEntry], name: str, item: ObjectEntry) -> None:
    """Add an object to a listing, unless it is only a directory marker.

    The directory's own marker has an empty name there, and an empty object named like a directory
    is a marker in an older convention. Any other object hides a directory of its name.
    """
    if name and (item.entry.size or name not in found):
        found[name] = item


def _invalid_keys_error(directory: str, error: Exception) -> PathError:
    reason = str(error).partition("\n\nDebug source:")[0]
    return PathError(
        f"/{directory}",
        f"/{directory} contains keys that are not valid paths ({reason!r}).",
        hint="Rename or remove them with another client.",
    )


CREDENTIALS_HINT = (
    "Credentials come from access_key= and secret_key= (and session_token=), or else from "
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment of this process; "
    "anonymous=True sends none."
)

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_MISSING_BUCKET_CODES = frozenset({"NoSuchBucket", "ContainerNotFound", "InvalidBucketName"})
_FULL_CODES = frozenset(
    {"QuotaExceeded", "EntityTooLarge", "XMinioStorageFull", "InsufficientStorage"}
)
# Where obstore looks for instance credentials when it was given none.
_METADATA_HOST = "169.254.169.254"


@contextmanager
def store_errors(path: str, label: str) -> Iterator[None]:
    """Translate an object store's errors into ours about `path`.

    `InvalidPathError`, for a listing with keys that obstore cannot represent, passes through.
    """
    try:
        yield
    except (InvalidPathError, SmokeboxError):
        raise
    except (BaseError, HTTPError, URLError, OSError, ValueError) as error:
        raise translate(error, path, label) from error


def translate(error: Exception, path: str, label: str) -> SmokeboxError:
    """Return our error for an object store's error about `path`; `label` names the store."""
    text = _text(error)
    status, code = _first(_STATUS, text), _first(_CODE, text)
    if code in _MISSING_BUCKET_CODES:
        return BucketNotFound(
            f"there is no bucket {label}.",
            hint="Check its name and endpoint, or create it first.",
            bucket=label,
        )
    if _is_denied(error, text, status):
        return AccessDenied(
            path, f"{label} refused these credentials ({code or status}).", hint=CREDENTIALS_HINT
        )
    if code in _FULL_CODES or status == "507":
        return StorageFull(path, hint="Free some space in the bucket and try again.")
    if isinstance(error, FileNotFoundError) or status == "404":
        return PathNotFound(path)
    return _service_error(text, status, label) or _other_error(error, text, code, path)


def _is_denied(error: Exception, text: str, status: str) -> bool:
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError)):
        return True
    return status in ("401", "403") or _METADATA_HOST in text


def _service_error(text: str, status: str, label: str) -> SmokeboxError | None:
    if "builder error" in text:
        return InvalidOption(
            f"{label} cannot be reached over https.",
            hint="Pass allow_http=True if it serves plain http.",
            option="allow_http",
        )
    if "incorrectly configured region" in text or status == "301":
        return InvalidOption(
            f"{label} is in another region.", hint="Pass its region=.", option="region"
        )
    sending = "error sending request" in text or "operation timed out" in text
    if sending or status.startswith("5") or status == "429":
        return ServiceUnavailable(
            f"{label} did not respond ({status or 'no connection'}).",
            hint="Check the endpoint and that the server is running, then try again.",
            service=label,
        )
    return None


def _other_error(error: Exception, text: str, code: str, path: str) -> SmokeboxError:
    number = _first(_OS_ERROR, text)
    if number:
        return from_os_error(OSError(int(number), text), path)
    if isinstance(error, NotSupportedError):
        return Unsupported(
            f"the store does not support this operation on {path}.", hint="Use another store."
        )
    if code == "KeyTooLongError" or "Could not parse path" in text:
        return InvalidPath(f"{path} is not a valid object name.", path=path)
    return PathError(path, f"{code or text}: {path}")


def _text(error: Exception) -> str:
    """Return the error text without obstore's debug output, which repeats it."""
    if isinstance(error, HTTPError):
        body = error.read(4096).decode(errors="replace")
        return f"status code: {error.code} {body}"
    if isinstance(error, URLError):
        return f"error sending request: {error.reason}"
    return str(error).partition("\n\nDebug source:")[0]


def _first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match else ""
