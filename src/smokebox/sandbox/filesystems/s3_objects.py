"""S3 and what speaks like it, with the keys that obstore cannot name.

obstore keeps no trailing slash in a key and fails a whole listing for one key with an empty
name or a control character in it. It does sign any address, with whatever credentials it has,
and puts the bucket's name in the address as it is: so the slash, or the query, travels there.
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
from smokebox.sandbox.filesystems.objects import DIRECTORY, Found, Listed, Objects, Walked, add

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Literal

_SPACE = "{http://s3.amazonaws.com/doc/2006-03-01/}"
_DEADLINE = 15.0


class S3Objects(Objects):
    """Directories made on purpose are empty objects whose key ends in a slash."""

    marker = ""
    ordered = True
    # SeaweedFS takes a backslash for a slash, and says nothing.
    refused_in_names = "\n\\"

    def __init__(self, store: S3Store, prefix: str, place: str) -> None:
        # A prefix inside the store would not be in the addresses that are made here.
        inner = store.prefix or ""
        super().__init__(_without_prefix(store), "/".join(p for p in (inner, prefix) if p), place)

    def check_name(self, key: str) -> None:
        """Refuse a key that no object can have, or not everywhere."""
        super().check_name(key)
        if "\\" in key:
            raise InvalidPath(
                f"/{key} holds a backslash, which some S3 servers take for a slash.",
                hint="Use another character.",
                path=f"/{key}",
            )

    def listdir_odd(self, directory: str, error: InvalidPathError) -> Listed:
        """What is in a directory, without the keys that cannot be paths."""
        prefix = self._slashed(directory)
        found: dict[str, Found] = {}
        exists = False
        for page in self._odd_pages(directory, {"prefix": prefix, "delimiter": ""}):
            exists = True
            for key in page.directories:
                name = key[len(prefix) : -1]
                if self._shown(name):
                    found.setdefault(name, DIRECTORY)
            for key, item in page.objects:
                if self._shown(key[len(prefix) :]):
                    add(found, key[len(prefix) :], item)
        return Listed(found, exists)

    def walk(self, directory: str, after: str = "", limit: int = 1000) -> Walked:
        """About `limit` objects below a directory, in order; none where some have no name."""
        try:
            return super().walk(directory, after, limit)
        except InvalidPathError:
            if limit >= 2**62:
                raise
            return self._walk_odd(directory)

    def _walk_odd(self, directory: str) -> Walked:
        """Enough to tell that the directory exists; the rest is listed directory by directory."""
        exists = self.listdir_odd(directory, InvalidPathError()).exists
        return Walked([], ended=False, exists=exists)

    def make_directory(self, key: str) -> None:
        """Keep a directory although nothing is in it."""
        with self.asking(key):
            obstore.put(self._store_at(quote(f"/{self.full(key)}")), "", b"")

    def drop_directory(self, key: str) -> None:
        """Keep it no longer."""
        with self.asking(key):
            self._ask("DELETE", quote(f"/{self.full(key)}"))

    def drop_directories(self, keys: Iterable[str]) -> None:
        """Keep these no longer: keys of empty objects, which may stand for directories."""
        for key in sorted(keys, reverse=True):
            self.drop_directory(key)

    def remove_tree(self, directory: str) -> None:
        """Delete everything below a directory, and see that it is gone."""
        super().remove_tree(directory)
        self._drop_hollow(directory)

    def _drop_hollow(self, directory: str) -> None:
        """Some servers (SeaweedFS) have directories of their own, and go on to show them."""
        listed = self.listdir(directory)
        for name in listed.found:
            self._drop_hollow(f"{directory}/{name}")
        if listed.exists:
            self.drop_directory(directory)

    def copy_object(self, source: str, target: str, item: Found) -> None:
        """Copy what a listing of everything gave, where a marker looks like an empty file."""
        if item.entry.size or self.head(source) is not None:
            self.copy(source, target)
        else:
            self.make_directory(target)

    def _slashed(self, directory: str) -> str:
        prefix = self.full(directory)
        return f"{prefix}/" if prefix else ""

    def _shown(self, name: str) -> bool:
        return name not in ("", ".", "..") and "/" not in name and self.names(name)

    def _odd_pages(self, directory: str, query: dict[str, str]) -> Iterator[_Page]:
        asked = {"list-type": "2", "encoding-type": "url"}
        while True:
            with self.asking(directory):
                # obstore ends the address with a slash, which becomes the delimiter's value.
                page = _Page(self._ask("GET", "?" + urlencode({**asked, **query})))
            if page.directories or page.objects:
                yield page
            if not page.following:
                return
            asked["continuation-token"] = page.following

    def _ask(self, method: Literal["GET", "DELETE"], tail: str) -> bytes:
        url = obstore.sign(self._store_at(tail), method, "", timedelta(minutes=5))
        request = urllib.request.Request(url, method=method)
        with urllib.request.urlopen(request, timeout=_DEADLINE) as answer:
            return bytes(answer.read())

    def _store_at(self, tail: str) -> S3Store:
        assert isinstance(self.store, S3Store)
        return _remade(self.store, bucket=str(self.store.config["bucket"]) + tail)


class _Page:
    """One answer to a listing, with keys as they are."""

    def __init__(self, answer: bytes) -> None:
        root = ElementTree.fromstring(answer)
        self.objects = [_object(item) for item in root.iter(f"{_SPACE}Contents")]
        self.directories = [
            unquote_plus(item.findtext(f"{_SPACE}Prefix", ""))
            for item in root.iter(f"{_SPACE}CommonPrefixes")
        ]
        self.following = root.findtext(f"{_SPACE}NextContinuationToken", "")


def _object(item: ElementTree.Element) -> tuple[str, Found]:
    modified = datetime.fromisoformat(item.findtext(f"{_SPACE}LastModified", ""))
    entry = Entry(
        "file",
        int(item.findtext(f"{_SPACE}Size", "0")),
        modified.replace(tzinfo=modified.tzinfo or UTC).timestamp(),
    )
    version = item.findtext(f"{_SPACE}ETag", "")
    return unquote_plus(item.findtext(f"{_SPACE}Key", "")), Found(entry, version)


def _without_prefix(store: S3Store) -> S3Store:
    return _remade(store) if store.prefix else store


def _remade(store: S3Store, *, bucket: str = "") -> S3Store:
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
