"""S3 and compatible stores, including keys that obstore cannot represent.

obstore drops trailing slashes from keys and fails a whole listing for one key with an empty name or
a control character. But it signs any URL with its credentials and puts the bucket's name into the
URL unchanged, so the slash, or the query, is passed through that.
"""

from __future__ import annotations

import urllib.request
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote_plus, urlencode
from xml.etree import ElementTree

import obstore
from obstore.exceptions import InvalidPathError
from obstore.store import S3Store

from smokebox.errors import InvalidPath
from smokebox.sandbox.filesystems.filesystem import Entry
from smokebox.sandbox.filesystems.objects import (
    DIRECTORY,
    ObjectEntry,
    ObjectListing,
    Objects,
    ObjectWalk,
    add_object,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Literal

_NAMESPACE = "{http://s3.amazonaws.com/doc/2006-03-01/}"
_DEADLINE = 15.0


class S3Objects(Objects):
    """Objects of an S3 bucket. Empty directories are empty objects whose key ends in a slash."""

    marker = ""
    ordered = True
    # SeaweedFS silently treats a backslash as a slash.
    refused_in_names = "\n\\"

    def __init__(self, store: S3Store, prefix: str, label: str) -> None:
        # A prefix inside the store would be missing from the URLs made here.
        inner = store.prefix or ""
        super().__init__(_without_prefix(store), "/".join(p for p in (inner, prefix) if p), label)

    def check_name(self, key: str) -> None:
        """Raise `InvalidPath` for a key that not every S3 server accepts."""
        super().check_name(key)
        if "\\" in key:
            raise InvalidPath(
                f"/{key} contains a backslash, which some S3 servers treat as a slash.",
                hint="Use another character.",
                path=f"/{key}",
            )

    def listdir_with_invalid_keys(self, directory: str, error: InvalidPathError) -> ObjectListing:
        """Return the entries of a directory, without the keys that cannot be paths."""
        prefix = self._slashed(directory)
        found: dict[str, ObjectEntry] = {}
        exists = False
        for page in self._raw_pages(directory, {"prefix": prefix, "delimiter": ""}):
            exists = True
            for key in page.directories:
                name = key[len(prefix) : -1]
                if self._shown(name):
                    found.setdefault(name, DIRECTORY)
            for key, item in page.objects:
                if self._shown(key[len(prefix) :]):
                    add_object(found, key[len(prefix) :], item)
        return ObjectListing(found, exists)

    def walk(self, directory: str, after: str = "", limit: int = 1000) -> ObjectWalk:
        """Return about `limit` objects below a directory in order; none if a key has no path."""
        try:
            return super().walk(directory, after, limit)
        except InvalidPathError:
            if limit >= 2**62:
                raise
            return self._walk_with_invalid_keys(directory)

    def _walk_with_invalid_keys(self, directory: str) -> ObjectWalk:
        """Report only that the directory exists; it is listed directory by directory."""
        exists = self.listdir_with_invalid_keys(directory, InvalidPathError()).exists
        return ObjectWalk([], ended=False, exists=exists)

    def make_directory(self, key: str) -> None:
        """Create a marker that keeps an empty directory."""
        with self.errors_for(key):
            obstore.put(self._store_at(quote(f"/{self.full(key)}")), "", b"")

    def drop_directory(self, key: str) -> None:
        """Delete a directory's marker."""
        with self.errors_for(key):
            self._request("DELETE", quote(f"/{self.full(key)}"))

    def drop_directories(self, keys: Iterable[str]) -> None:
        """Delete the markers among keys of empty objects."""
        for key in sorted(keys, reverse=True):
            self.drop_directory(key)

    def remove_tree(self, directory: str) -> None:
        """Delete everything below a directory, and verify that it is gone."""
        super().remove_tree(directory)
        self._drop_empty_directories(directory)

    def _drop_empty_directories(self, directory: str) -> None:
        """Delete the directories that some servers (SeaweedFS) keep and continue to list."""
        listed = self.listdir(directory)
        for name in listed.found:
            self._drop_empty_directories(f"{directory}/{name}")
        if listed.exists:
            self.drop_directory(directory)

    def copy_object(self, source: str, target: str, item: ObjectEntry) -> None:
        """Copy an object from a full listing, where a marker looks like an empty file."""
        if item.entry.size or self.head(source) is not None:
            self.copy(source, target)
        else:
            self.make_directory(target)

    def _slashed(self, directory: str) -> str:
        prefix = self.full(directory)
        return f"{prefix}/" if prefix else ""

    def _shown(self, name: str) -> bool:
        return name not in ("", ".", "..") and "/" not in name and self.is_valid_key(name)

    def _raw_pages(self, directory: str, query: dict[str, str]) -> Iterator[_Page]:
        parameters = {"list-type": "2", "encoding-type": "url"}
        while True:
            with self.errors_for(directory):
                # obstore ends the URL with a slash, which becomes the delimiter's value.
                page = _Page(self._request("GET", "?" + urlencode({**parameters, **query})))
            if page.directories or page.objects:
                yield page
            if not page.following:
                return
            parameters["continuation-token"] = page.following

    def _request(self, method: Literal["GET", "DELETE"], tail: str) -> bytes:
        url = obstore.sign(self._store_at(tail), method, "", timedelta(minutes=5))
        request = urllib.request.Request(url, method=method)
        with urllib.request.urlopen(request, timeout=_DEADLINE) as response:
            return bytes(response.read())

    def _store_at(self, tail: str) -> S3Store:
        assert isinstance(self.store, S3Store)
        return _copy_store(self.store, bucket=str(self.store.config["bucket"]) + tail)


class _Page:
    """One page of a listing, with keys as the server sent them."""

    def __init__(self, body: bytes) -> None:
        root = ElementTree.fromstring(body)
        self.objects = [_object(item) for item in root.iter(f"{_NAMESPACE}Contents")]
        self.directories = [
            unquote_plus(item.findtext(f"{_NAMESPACE}Prefix", ""))
            for item in root.iter(f"{_NAMESPACE}CommonPrefixes")
        ]
        self.following = root.findtext(f"{_NAMESPACE}NextContinuationToken", "")


def _object(item: ElementTree.Element) -> tuple[str, ObjectEntry]:
    modified = datetime.fromisoformat(item.findtext(f"{_NAMESPACE}LastModified", ""))
    entry = Entry(
        "file",
        int(item.findtext(f"{_NAMESPACE}Size", "0")),
        modified.replace(tzinfo=modified.tzinfo or UTC).timestamp(),
    )
    version = item.findtext(f"{_NAMESPACE}ETag", "")
    return unquote_plus(item.findtext(f"{_NAMESPACE}Key", "")), ObjectEntry(entry, version)


def _without_prefix(store: S3Store) -> S3Store:
    return _copy_store(store) if store.prefix else store


def _copy_store(store: S3Store, *, bucket: str = "") -> S3Store:
    config = dict(store.config)
    name = bucket or str(config["bucket"])
    config.pop("bucket")
    return S3Store(
        name,
        config=config,  # type: ignore[arg-type]  # obstore's own, read back from it
        client_options=store.client_options,
        retry_config=store.retry_config,
        credential_provider=store.credential_provider,
    )
