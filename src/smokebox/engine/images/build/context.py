"""The build context as the engine sees it: entries that a client listed, and content by digest.

The engine opens no path that a client names. A file's content is in the content store, under the
digest that the client's listing gives.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import posixpath
import re
import time
from typing import TYPE_CHECKING

from smokebox.errors import (
    InvalidOption,
    NotFound,
    RequestTooLarge,
    SmokeboxError,
    from_os_error,
)
from smokebox.foundation.ids import new_id
from smokebox.wire.builds import ContextEntry

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Iterable, Iterator, Sequence

    from smokebox.engine.images.usage import Charge


MAX_ENTRIES = 500_000
MAX_FILE = 16 << 30
KEEP_SECONDS = 7 * 86400.0

_DIGEST = re.compile(r"[0-9a-f]{64}")
_UNFINISHED = ".receiving-"


class ContentStore:
    """Contents of files by SHA-256, apart for each scope, so that none learns of another's.

    Contents that no build used for a week are removed.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def missing(self, digests: Iterable[str], *, scope: str = "") -> list[str]:
        """Return the digests whose content is not stored; the others stay for a build."""
        missing = []
        for digest in digests:
            try:
                os.utime(self._path(digest, scope))
            except FileNotFoundError:
                missing.append(digest)
        return missing

    async def put(
        self,
        digest: str,
        chunks: AsyncIterable[bytes],
        *,
        scope: str = "",
        limit: int = MAX_FILE,
        charge: Charge | None = None,
    ) -> int:
        """Store a content that arrives in chunks, and return its size.

        Raises:
            LimitReached: The owner may not store more.
            InvalidOption: The content does not have this digest.
            RequestTooLarge: It is longer than `limit`.
            StorageFull: The disk is full.
        """
        path = self._path(digest, scope)
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        unfinished = os.path.join(os.path.dirname(path), _UNFINISHED + new_id())
        sha, size = hashlib.sha256(), 0
        try:
            # Written in small pieces, which go to the page cache.
            with open(unfinished, "xb") as file:  # noqa: ASYNC230
                async for chunk in chunks:
                    size += len(chunk)
                    if size > limit:
                        raise RequestTooLarge(
                            f"a file of the build context is longer than {limit} bytes.",
                            hint="Exclude it in .dockerignore.",
                            limit=limit,
                        )
                    if charge is not None:
                        charge.add(len(chunk))
                    sha.update(chunk)
                    file.write(chunk)
            if sha.hexdigest() != digest:
                raise InvalidOption(
                    f"the content has the digest {sha.hexdigest()}, not {digest}.",
                    hint="The file is damaged, or changed while it was read: try again.",
                    option="digest",
                    value=digest,
                )
            os.rename(unfinished, path)
        except OSError as error:
            if isinstance(error, SmokeboxError):
                raise
            raise from_os_error(error, f"sha256:{digest}") from error
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(unfinished)
        return size

    def open(self, digest: str, *, scope: str = "") -> int:
        """Open a content for reading. Raises `NotFound`."""
        try:
            return os.open(self._path(digest, scope), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise NotFound(
                f"the content {digest} of the build context was not uploaded.",
                hint="Build again: missing files are uploaded first.",
                kind="content",
                name=digest,
            ) from None

    def size(self, digest: str, *, scope: str = "") -> int:
        """Return the size of a content; 0 if it is not stored."""
        try:
            return os.stat(self._path(digest, scope)).st_size
        except FileNotFoundError:
            return 0

    def remove(self, digest: str, *, scope: str = "") -> None:
        """Remove a content, if it is stored."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(digest, scope))

    def usage(self, *, scope: str = "") -> int:
        """Return the bytes that a scope's contents take."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self._scope(scope)) as entries:
            return sum(entry.stat().st_size for entry in entries)
        return 0

    def clear(self, *, scope: str) -> None:
        """Remove the contents of a scope, except those that are being received."""
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self._scope(scope)):
                if not name.startswith(_UNFINISHED):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(os.path.join(self._scope(scope), name))

    def prune(self, *, unused_for: float = KEEP_SECONDS) -> None:
        """Remove contents that were not used for that many seconds."""
        oldest = time.time() - unused_for
        with contextlib.suppress(FileNotFoundError):
            for scope in os.listdir(self._directory):
                directory = os.path.join(self._directory, scope)
                with os.scandir(directory) as entries:
                    old = [entry.path for entry in entries if entry.stat().st_mtime < oldest]
                for path in old:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path)

    def _scope(self, scope: str) -> str:
        name = hashlib.sha256(scope.encode()).hexdigest()[:32]
        return os.path.join(self._directory, name)

    def _path(self, digest: str, scope: str) -> str:
        if not _DIGEST.fullmatch(digest):
            raise InvalidOption(
                f"{digest!r:.80} is not a SHA-256 digest.",
                hint="Pass 64 hexadecimal digits.",
                option="digest",
                value=digest,
            )
        return os.path.join(self._scope(scope), digest)


class ContextTree:
    """The entries of a build context by path."""

    def __init__(self, entries: Sequence[ContextEntry]) -> None:
        if len(entries) > MAX_ENTRIES:
            raise RequestTooLarge(
                f"the build context has more than {MAX_ENTRIES} entries.",
                hint="Exclude directories in .dockerignore.",
                limit=MAX_ENTRIES,
            )
        self._entries: dict[str, ContextEntry] = {}
        self._children: dict[str, list[str]] = {"": []}
        for entry in sorted(entries, key=lambda one: one.path.split("/")):
            _check_path(entry.path)
            if entry.path not in self._entries:
                self._add(entry)

    def get(self, path: str) -> ContextEntry | None:
        """Return the entry of a path, without following a symlink at its end."""
        return self._entries.get(path)

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a directory."""
        return [posixpath.basename(child) for child in self._children.get(path, ())]

    def walk(self, path: str) -> Iterator[ContextEntry]:
        """Yield the entries below a directory, parents first."""
        for child in self._children.get(path, ()):
            entry = self._entries[child]
            yield entry
            if entry.type == "directory":
                yield from self.walk(child)

    def digests(self) -> set[str]:
        """Return the digests of all files."""
        return {one.digest for one in self._entries.values() if one.type == "file"}

    def _add(self, entry: ContextEntry) -> None:
        """Add an entry, and the directories above it that are not listed."""
        parent = posixpath.dirname(entry.path)
        if parent and parent not in self._entries:
            self._add(ContextEntry(path=parent, type="directory", mode=0o755))
        if parent and self._entries[parent].type != "directory":
            raise InvalidOption(
                f"{parent!r:.200} of the build context is no directory, and has entries below it.",
                hint="Upload the context again.",
                option="entries",
                value=parent,
            )
        self._entries[entry.path] = entry
        self._children[parent].append(entry.path)
        if entry.type == "directory":
            self._children[entry.path] = []


def _check_path(path: str) -> None:
    parts = path.split("/")
    if not path or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise InvalidOption(
            f"{path!r:.200} is not a path inside the build context.",
            hint="Pass relative paths without '.' and '..'.",
            option="entries",
            value=path,
        )
