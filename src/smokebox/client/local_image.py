"""Images in files of this machine: OCI layouts and archives of `docker save`.

Their documents are read here and sent to the server, which parses them. The layers are found here
by their names, and only those that the server lacks are uploaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import posixpath
import re
import tarfile
import tempfile
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Protocol

import msgspec

from smokebox.client.contents import LocalContent
from smokebox.errors import ImageError, PathError, PathNotFound, from_os_error
from smokebox.foundation.compression import BrokenTar, decompress

if TYPE_CHECKING:
    from collections.abc import Iterator

_INDEX, _DOCKER = "index.json", "manifest.json"
_SHA256 = re.compile(r"blobs/sha256/([0-9a-f]{64})")
_CHUNK = 1 << 20
_MAX_DOCUMENT = 4 << 20
_MAX_DOCUMENTS = 500
_MAX_LINKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalImage:
    """An image to load. `contents` are digests by name, and `parts` what they are of by digest."""

    image: str
    reference: str | None
    documents: dict[str, bytes] = field(default_factory=dict)
    contents: dict[str, str] = field(default_factory=dict)
    parts: dict[str, LocalContent] = field(default_factory=dict)


def split_image(image: str) -> tuple[str, str, str | None]:
    """Return the prefix, the path and the reference of `oci:DIR[:NAME]` or `archive:FILE[:NAME]`.

    The longest part that exists is the path.
    """
    prefix, colon, rest = image.partition(":")
    path, reference = rest, None
    while not os.path.exists(path) and ":" in path:
        path = path.rpartition(":")[0]
        reference = rest[len(path) + 1 :]
    if not os.path.exists(path):
        path, reference = rest, None
    return prefix + colon, path, reference


@contextlib.contextmanager
def open_image(image: str) -> Iterator[LocalImage]:
    """Read the documents of an image, and keep its layers readable during the block.

    Args:
        image: "oci:DIR" or "archive:FILE", with ":NAME" behind it if there are several images.

    Raises:
        PathError: A file cannot be read.
        ImageError: There is no image, or it is damaged.
    """
    prefix, path, reference = split_image(image)
    opened = _Directory(path) if prefix == "oci:" else _Archive(path)
    with opened as files:
        found = LocalImage(image=image, reference=reference)
        try:
            _read(files, found)
        except OSError as error:
            if isinstance(error, PathError):
                raise
            raise from_os_error(error, error.filename or path) from error
        except msgspec.MsgspecError as error:
            raise _damaged(path, str(error)) from None
        yield found


class _Files(Protocol):
    def find(self, name: str) -> LocalContent | None:
        """Return a file; None if there is none."""
        ...


class _Directory(contextlib.AbstractContextManager["_Directory"]):
    """A directory with an OCI layout."""

    def __init__(self, path: str) -> None:
        self._path = path
        if not os.path.isdir(path):
            hint = "Name a directory with index.json; archive:FILE is for an archive."
            raise PathNotFound(path, f"there is no directory {path}.", hint=hint)

    def __exit__(self, *_: object) -> None:
        """Do nothing: no file is open."""

    def find(self, name: str) -> LocalContent | None:
        """Return a file; None if there is none."""
        path = os.path.join(self._path, name)
        return LocalContent(path, size=os.stat(path).st_size) if os.path.isfile(path) else None


class _Archive(contextlib.AbstractContextManager["_Archive"]):
    """A tar archive; a compressed one is decompressed to a temporary file."""

    def __init__(self, path: str) -> None:
        self._stack = contextlib.ExitStack()
        if not os.path.isfile(path):
            hint = "Name a file of `docker save`; oci:DIR is for a directory."
            raise PathNotFound(path, f"there is no file {path}.", hint=hint)
        try:
            self._plain = self._stack.enter_context(_decompressed(path))
            self._members = _index(self._plain)
        except (BrokenTar, tarfile.TarError, EOFError) as error:
            self._stack.close()
            raise _damaged(path, str(error)) from None
        except OSError as error:
            self._stack.close()
            raise from_os_error(error, error.filename or path) from error

    def __exit__(self, *_: object) -> None:
        """Close the archive."""
        self._stack.close()

    def find(self, name: str) -> LocalContent | None:
        """Return a file; None if there is none."""
        for _ in range(_MAX_LINKS):
            member = self._members.get(name)
            if member is None:
                break
            if member.isreg():
                # By descriptor, as a temporary file has no name.
                path = f"/proc/self/fd/{self._plain.fileno()}"
                return LocalContent(path, member.offset_data, member.size)
            # `docker save` links layers that occur twice.
            name = posixpath.normpath(posixpath.join(posixpath.dirname(name), member.linkname))
        return None


class _Descriptor(msgspec.Struct):
    digest: str = ""


class _Document(msgspec.Struct):
    manifests: list[_Descriptor] | None = None
    config: _Descriptor | None = None
    layers: list[_Descriptor] | None = None


class _DockerImage(msgspec.Struct, rename="pascal"):
    config: str = ""
    layers: list[str] | None = None


def _read(files: _Files, found: LocalImage) -> None:
    """Fill an image with its documents and contents."""
    if (data := _document(files, _DOCKER, found)) is not None:
        for image in msgspec.json.decode(data, type=list[_DockerImage]):
            _document(files, image.config, found)
            for layer in image.layers or ():
                _add_content(files, layer, found)
        return
    if _document(files, _INDEX, found) is None:
        raise PathNotFound(
            found.image,
            f"{found.image} is no image: it has no {_INDEX} or {_DOCKER}.",
            hint="Make it with `docker save`, or with `skopeo copy ... oci:DIR`.",
        )
    waiting = [_INDEX]
    while waiting:
        document = msgspec.json.decode(found.documents[waiting.pop()], type=_Document)
        for one in document.manifests or ():
            name = _blob(one)
            if name not in found.documents and _document(files, name, found) is not None:
                waiting.append(name)
        if document.config is not None:
            _document(files, _blob(document.config), found)
        for blob in document.layers or ():
            _add_content(files, _blob(blob), found)


def _document(files: _Files, name: str, found: LocalImage) -> bytes | None:
    """Read a document; None if it is missing, which the server reports if it needs it."""
    part = files.find(name)
    if part is None:
        return None
    if (part.size or 0) > _MAX_DOCUMENT or len(found.documents) >= _MAX_DOCUMENTS:
        raise _damaged(found.image, f"{name} is too long, or one document too many")
    with open(part.path, "rb") as file:
        file.seek(part.start)
        found.documents[name] = file.read(part.size or 0)
    return found.documents[name]


def _add_content(files: _Files, name: str, found: LocalImage) -> None:
    part = files.find(name)
    if part is None or name in found.contents:
        return
    known = _SHA256.fullmatch(name)
    digest = known[1] if known is not None else _hash(part)
    found.contents[name] = digest
    found.parts[digest] = part


def _blob(descriptor: _Descriptor) -> str:
    """Return the name of a blob, which leads nowhere else."""
    kind, _, digest = descriptor.digest.partition(":")
    return f"blobs/{kind}/{digest}" if f"{kind}{digest}".isalnum() else ""


def _hash(part: LocalContent) -> str:
    digest, remaining = hashlib.sha256(), part.size or 0
    with open(part.path, "rb") as file:
        file.seek(part.start)
        while remaining and (chunk := file.read(min(_CHUNK, remaining))):
            remaining -= len(chunk)
            digest.update(chunk)
    return digest.hexdigest()


@contextlib.contextmanager
def _decompressed(path: str) -> Iterator[IO[bytes]]:
    with open(path, "rb") as file:
        start = file.read(_CHUNK)
        file.seek(0)
        plain = decompress(iter(lambda: file.read(_CHUNK), b""))
        first = next(plain, b"")
        if first[:512] == start[:512]:
            yield file
            return
        with tempfile.TemporaryFile() as unpacked:
            unpacked.write(first)
            for chunk in plain:
                unpacked.write(chunk)
            unpacked.flush()
            yield unpacked


def _index(file: IO[bytes]) -> dict[str, tarfile.TarInfo]:
    """Return the files of an archive by name, the first of each."""
    file.seek(0)
    members: dict[str, tarfile.TarInfo] = {}
    with tarfile.open(fileobj=file, mode="r:") as archive:
        for member in archive:
            if member.isreg() or member.issym():
                members.setdefault(posixpath.normpath(member.name), member)
    return members


def _damaged(path: str, problem: str) -> ImageError:
    return ImageError(
        f"{path} is not an image: {problem}.",
        hint="Make it with `docker save`, or with `skopeo copy ... oci:DIR`.",
        reason="damaged",
        image=path,
    )
