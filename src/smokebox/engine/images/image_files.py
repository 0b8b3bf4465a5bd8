"""Files of an OCI layout or of `docker save`: in a directory, or in a tar archive.

The directory is the operator's, but its content is untrusted: no name leads out of it, and only
regular files are opened.
"""

from __future__ import annotations

import abc
import asyncio
import os
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.engine.files.descriptors import (
    BENEATH,
    READ,
    SEARCH,
    check_regular,
    closing,
    path_errors,
)
from smokebox.engine.files.tar_format import TarSource, next_member, padded
from smokebox.engine.jail.linux import openat2
from smokebox.errors import ImageError, PathNotFound
from smokebox.foundation.compression import BrokenTar, decompress

if TYPE_CHECKING:
    import tarfile
    from collections.abc import AsyncGenerator, Iterator

MAX_DOCUMENT = 4 << 20
"""Bytes of a manifest or config."""

_CHUNK = 1 << 20
_MAX_MEMBERS = 10_000
_MAX_LINKS = 8
_BLOCK = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePart:
    """A part of an open file, which the opener closes."""

    fd: int
    start: int
    size: int


class ImageFiles(abc.ABC):
    """Files by name. `path` is where they are."""

    def __init__(self, path: str) -> None:
        self.path = path

    @abc.abstractmethod
    def exists(self, name: str) -> bool:
        """Return whether there is a file of that name."""

    @abc.abstractmethod
    def open(self, name: str) -> FilePart:
        """Open a regular file. Raises `ImageError` if it is missing."""

    def read(self, name: str) -> bytes:
        """Return a small document."""
        part = self.open(name)
        with closing(part.fd):
            if part.size > MAX_DOCUMENT:
                raise ImageError(
                    f"the document {name!r:.200} of the image has {part.size} bytes.",
                    hint=f"Manifests and configurations have at most {MAX_DOCUMENT}.",
                    reason="damaged",
                    image=name,
                )
            return os.pread(part.fd, part.size, part.start)

    async def chunks(self, name: str) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of a file."""
        part = await asyncio.to_thread(self.open, name)
        with closing(part.fd):
            at, end = part.start, part.start + part.size
            while at < end:
                chunk = await asyncio.to_thread(os.pread, part.fd, min(_CHUNK, end - at), at)
                if not chunk:
                    return
                yield chunk
                at += len(chunk)


class DirectoryFiles(ImageFiles):
    """Files below a directory."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        with path_errors(path):
            self._top = os.open(path, SEARCH | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the directory."""
        os.close(self._top)

    def exists(self, name: str) -> bool:
        try:
            os.close(openat2(self._top, name, os.O_PATH, resolve=BENEATH))
        except OSError:
            return False
        return True

    def open(self, name: str) -> FilePart:
        where = os.path.join(self.path, name)
        with path_errors(where):
            try:
                fd = openat2(self._top, name, READ, resolve=BENEATH)
            except FileNotFoundError:
                raise absent(name) from None
            try:
                found = check_regular(fd, where)
            except BaseException:
                os.close(fd)
                raise
        return FilePart(fd=fd, start=0, size=found.st_size)


class ArchiveFiles(ImageFiles):
    """Files of a tar archive. A compressed one is unpacked to a temporary file first."""

    def __init__(self, path: str, temporary: str) -> None:
        super().__init__(path)
        with path_errors(path):
            self._fd = os.open(path, READ | os.O_CLOEXEC)
            try:
                check_regular(self._fd, path)
                self._decompress(temporary)
                self._members = self._index()
            except BrokenTar as error:
                os.close(self._fd)
                raise ImageError(
                    f"{path} is not an archive of images: {error}.",
                    hint="Make it with `docker save`, or as a tar archive of an OCI layout.",
                    reason="damaged",
                    image=path,
                ) from None
            except BaseException:
                os.close(self._fd)
                raise

    def close(self) -> None:
        """Close the archive."""
        os.close(self._fd)

    def exists(self, name: str) -> bool:
        return name in self._members

    def open(self, name: str) -> FilePart:
        for _ in range(_MAX_LINKS):
            member = self._members.get(name)
            if member is None:
                break
            if not member.linkname:
                return FilePart(fd=os.dup(self._fd), start=member.offset_data, size=member.size)
            # `docker save` links layers that occur twice.
            name = os.path.normpath(os.path.join(os.path.dirname(name), member.linkname))
        raise absent(name)

    def _decompress(self, temporary: str) -> None:
        chunks = iter(lambda: os.read(self._fd, _CHUNK), b"")
        first = next(chunks, b"")
        plain = decompress(_with_first(first, chunks))
        start = next(plain, b"")
        if start[:_BLOCK] == first[:_BLOCK]:
            return
        with tempfile.TemporaryFile(dir=temporary) as file:
            file.write(start)
            for chunk in plain:
                file.write(chunk)
            file.flush()
            os.dup2(file.fileno(), self._fd, inheritable=False)

    def _index(self) -> dict[str, tarfile.TarInfo]:
        """Return the files by name. The first is used if there are several of a name."""
        os.lseek(self._fd, 0, os.SEEK_SET)
        members: dict[str, tarfile.TarInfo] = {}
        while (member := self._next_member()) is not None:
            member.offset_data = os.lseek(self._fd, 0, os.SEEK_CUR)
            if member.isreg():
                member.linkname = ""
                os.lseek(self._fd, padded(member.size), os.SEEK_CUR)
            if member.isreg() or member.issym():
                members.setdefault(os.path.normpath(member.name), member)
            if len(members) > _MAX_MEMBERS:
                raise BrokenTar(f"it has more than {_MAX_MEMBERS} files")
        return members

    def _next_member(self) -> tarfile.TarInfo | None:
        # By blocks, so that nothing after the header is consumed.
        step = next_member(TarSource())
        try:
            next(step)
            while True:
                step.send(os.read(self._fd, _BLOCK))
        except StopIteration as done:
            member: tarfile.TarInfo | None = done.value
            return member


def absent(name: str) -> ImageError:
    """Return the error for a file that an image lacks."""
    return ImageError(
        f"the image has no file {name!r:.200}.",
        hint="Copy the whole image again.",
        reason="damaged",
        image=name,
    )


def check_present(files: ImageFiles, *names: str) -> None:
    """Raise unless there is one of these files."""
    if not any(files.exists(name) for name in names):
        raise PathNotFound(
            files.path,
            f"{files.path} is no image: it has no {' or '.join(names)}",
            hint="Pass an OCI layout, or an archive of `docker save`.",
        )


def _with_first(first: bytes, chunks: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from chunks
