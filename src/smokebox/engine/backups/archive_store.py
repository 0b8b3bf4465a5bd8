"""Stores of the archives of backups: the state directory, or a bucket.

An archive is always written in the state directory first, so that reading the sandbox does not
wait for a network. The credentials of a bucket are those of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from smokebox.engine.disk import available_bytes
from smokebox.engine.names import check_id
from smokebox.engine.record.rows import BackupRow
from smokebox.errors import (
    BadSnapshot,
    InvalidOption,
    MissingDependency,
    PathNotFound,
    StorageFull,
    from_os_error,
)
from smokebox.sandbox.access import Access

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping

    from smokebox.sandbox.stores import StoreTarget


PART = ".part"
ARCHIVE = ".tar.zst"
MANIFEST = ".json"
CHUNK = 1 << 20

MAX_MANIFEST = 64 << 10
FORMAT = {"format": "tar+zstd", "version": 1}
ID = re.compile(r"b-[0-9a-f]{32}")

_CHECKSUM = re.compile(r"[0-9a-f]{64}")
_UPLOAD_PART_SIZE = 16 << 20
_MAX_UPLOADS = 4


class ArchiveStore(Protocol):
    """A store of archives, by the ids of their backups."""

    @property
    def place(self) -> str:
        """Name of the store in the record; empty for the state directory."""
        ...

    async def keep(self, row: BackupRow, part: str) -> None:
        """Store a complete archive durably. The file `part` is moved or removed."""
        ...

    def fetch(self, row: BackupRow) -> contextlib.AbstractAsyncContextManager[str]:
        """Return the path of a local file with the archive, after its checksum was verified."""
        ...

    async def find(self, id: str) -> BackupRow | None:
        """Return the backup that is stored here, independent of the record."""
        ...

    async def remove(self, id: str) -> None:
        """Remove an archive, complete or not. Absence is fine."""
        ...


class FolderArchiveStore:
    """The archives in the state directory."""

    place = ""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        os.makedirs(folder, mode=0o700, exist_ok=True)

    def part(self, id: str) -> str:
        """Return the path of an incomplete archive."""
        return os.path.join(self.folder, id + PART)

    async def keep(self, row: BackupRow, part: str) -> None:
        """Rename an archive, then write its manifest."""
        await asyncio.to_thread(self._keep, row, part)

    @contextlib.asynccontextmanager
    async def fetch(self, row: BackupRow) -> AsyncIterator[str]:
        """Return the path of the archive itself."""
        path = self._archive(row.id)
        check_checksum(row, await asyncio.to_thread(checksum, row, path))
        yield path

    async def find(self, id: str) -> BackupRow | None:
        """Find a backup by its manifest."""
        return await asyncio.to_thread(self._find, id)

    async def remove(self, id: str) -> None:
        """Remove the files of a backup."""
        await asyncio.to_thread(self._remove, id)

    def sweep(self, known: set[str]) -> list[BackupRow]:
        """Remove files that belong to no backup; return complete backups that are not `known`."""
        found: dict[str, BackupRow] = {}
        for name in os.listdir(self.folder):
            id, _, _ = name.partition(".")
            if name == id + MANIFEST and id not in known and (row := self._find(id)) is not None:
                found[id] = row
        for name in os.listdir(self.folder):
            id, _, _ = name.partition(".")
            if name.endswith(PART) or (id not in known and id not in found):
                _unlink(os.path.join(self.folder, name))
        return list(found.values())

    def check_room(self, size: int) -> None:
        """Raise `StorageFull` unless there is room for `size` bytes besides the host's reserve."""
        if available_bytes(self.folder) < size:
            raise StorageFull(
                self.folder,
                f"the host's disk has no room for a backup ({size} bytes and its reserve).",
                hint="Delete backups, or keep them in a bucket: `smokebox serve --backups`.",
            )

    def _keep(self, row: BackupRow, part: str) -> None:
        os.rename(part, self._archive(row.id))
        manifest = self._manifest(row.id)
        with open(manifest + PART, "xb", opener=_open_private) as file:
            file.write(encode_manifest(row))
            file.flush()
            os.fsync(file.fileno())
        os.rename(manifest + PART, manifest)
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _remove(self, id: str) -> None:
        # The manifest first: without it there is no backup.
        manifest = self._manifest(id)
        for path in (manifest, manifest + PART, self._archive(id), self.part(id)):
            _unlink(path)

    def _find(self, id: str) -> BackupRow | None:
        if not ID.fullmatch(id):
            return None
        try:
            with open(self._manifest(id), "rb") as file:
                row = decode_manifest(file.read(MAX_MANIFEST), id, self.place)
            size = os.stat(self._archive(id)).st_size
        except FileNotFoundError:
            return None
        return row if row is not None and row.size == size else None

    def _archive(self, id: str) -> str:
        return os.path.join(self.folder, id + ARCHIVE)

    def _manifest(self, id: str) -> str:
        return os.path.join(self.folder, id + MANIFEST)


class BucketArchiveStore:
    """The archives in an object store, transferred through files of the state directory."""

    def __init__(self, target: StoreTarget, folder: FolderArchiveStore) -> None:
        self._target = target
        self._folder = folder
        self.place = f"{target.label}/{target.prefix}".rstrip("/")

    async def keep(self, row: BackupRow, part: str) -> None:
        """Upload an archive, then the manifest."""
        await self.upload(row.id + ARCHIVE, part)
        await self.put(row.id + MANIFEST, encode_manifest(row))
        await self._folder.remove(row.id)

    @contextlib.asynccontextmanager
    async def fetch(self, row: BackupRow) -> AsyncIterator[str]:
        """Download the archive to a file that is removed at the end."""
        self._folder.check_room(row.size)
        # A unique name: several tasks may fetch it at once.
        path = self._folder.part(f"{row.id}.{os.urandom(4).hex()}")
        try:
            check_checksum(row, await self._download(row, path))
            yield path
        finally:
            _unlink(path)

    async def find(self, id: str) -> BackupRow | None:
        """Find a backup by its manifest, made by this or another server."""
        data = await self.read(id + MANIFEST, MAX_MANIFEST) if ID.fullmatch(id) else None
        return None if data is None else decode_manifest(data, id, self.place)

    async def remove(self, id: str) -> None:
        """Remove the objects of a backup, and its local files."""
        import obstore

        await self._folder.remove(id)
        for kind in (MANIFEST, ARCHIVE):
            with contextlib.suppress(PathNotFound), self._object(id + kind) as key:
                await obstore.delete_async(self._target.store, key)

    async def upload(self, name: str, path: str) -> None:
        """Upload a file as an object in concurrent parts, and verify its size."""
        import obstore

        size = (await asyncio.to_thread(os.stat, path)).st_size
        with self._object(name) as key:
            await obstore.put_async(
                self._target.store,
                key,
                Path(path),
                chunk_size=_UPLOAD_PART_SIZE,
                max_concurrency=_MAX_UPLOADS,
            )
        found = await self.size(name)
        if found != size:
            raise BadSnapshot(
                f"{found} of {size} bytes of {name} arrived in {self.place}.",
                hint="Try again.",
                kind="object",
                name=name,
            )

    async def size(self, name: str) -> int | None:
        """Return the bytes of an object, or None if it does not exist."""
        import obstore

        try:
            with self._object(name) as key:
                return (await obstore.head_async(self._target.store, key))["size"]
        except PathNotFound:
            return None

    async def put(self, name: str, data: bytes) -> None:
        """Create or replace an object."""
        import obstore

        with self._object(name) as key:
            await obstore.put_async(self._target.store, key, data)

    async def read(self, name: str, limit: int) -> bytes | None:
        """Return a small object, or None if it does not exist or is larger than the limit."""
        import obstore

        try:
            with self._object(name) as key:
                response = await obstore.get_async(self._target.store, key)
                if response.meta["size"] > limit:
                    return None
                return bytes(await response.bytes_async())
        except PathNotFound:
            return None

    async def chunks(self, name: str) -> AsyncGenerator[bytes, None]:
        """Yield an object."""
        import obstore

        with self._object(name) as key:
            response = await obstore.get_async(self._target.store, key)
            async for chunk in response.stream(min_chunk_size=CHUNK):
                yield bytes(chunk)

    async def _download(self, row: BackupRow, path: str) -> str:
        """Download an archive and return its checksum."""
        received, digest = 0, hashlib.sha256()
        file = _open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            async with contextlib.aclosing(self.chunks(row.id + ARCHIVE)) as chunks:
                async for chunk in chunks:
                    received += len(chunk)
                    if received > row.size:
                        raise _damaged(row, f"it has more than {row.size} bytes")
                    await asyncio.to_thread(_write, file, digest, chunk)
        except PathNotFound:
            raise _damaged(row, f"it is missing in {self.place}") from None
        finally:
            os.close(file)
        return digest.hexdigest()

    @contextlib.contextmanager
    def _object(self, name: str) -> Iterator[str]:
        """Give the key of an object, and translate errors about it."""
        from smokebox.sandbox.filesystems.objects import store_errors

        key = "/".join(part for part in (self._target.prefix, name) if part)
        with store_errors(f"/{key}", self._target.label):
            yield key


def open_bucket(url: str, folder: FolderArchiveStore) -> BucketArchiveStore:
    """Return the store at a URL (s3://, gs://, az:// or file://), without contacting it."""
    try:
        from smokebox.sandbox.stores import open_target
    except ModuleNotFoundError as error:
        raise MissingDependency(
            "backups in a bucket need obstore, which is not installed.",
            hint="Install it with `pip install 'smokebox[bucket]'`.",
            package="obstore",
            extra="bucket",
        ) from error
    return BucketArchiveStore(open_target(url, "", Access()), folder)


def checksum(row: BackupRow, path: str) -> str:
    """Return the SHA-256 of an archive."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise _damaged(row, "its archive is missing in the state directory") from None
    except OSError as error:
        raise from_os_error(error, path) from error


def check_checksum(row: BackupRow, found: str) -> None:
    """Raise `BadSnapshot` unless `found` is the recorded checksum."""
    if found != row.checksum:
        raise _damaged(row, f"its SHA-256 is {found}, but was {row.checksum}")


def _damaged(row: BackupRow, reason: str) -> BadSnapshot:
    return BadSnapshot(
        f"backup {row.id} is damaged: {reason}.",
        hint="Nothing was changed. Use another backup.",
        kind="backup",
        name=row.id,
    )


def _write(fd: int, digest: hashlib._Hash, chunk: bytes) -> None:
    digest.update(chunk)
    view = memoryview(chunk)
    while view:
        view = view[os.write(fd, view) :]


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def parse_manifest(data: bytes, format: Mapping[str, object]) -> dict[str, Any]:
    """Return the fields of a manifest. Raises ValueError if it is damaged or of another format."""
    manifest = json.loads(data)
    if not isinstance(manifest, dict):
        raise ValueError("not a JSON object")
    if {name: manifest.get(name) for name in format} != format:
        raise ValueError("another format")
    return manifest


def encode_manifest(row: BackupRow) -> bytes:
    """Encode the manifest of a backup."""
    values = {name: getattr(row, name) for name in _manifest_fields()}
    return json.dumps(FORMAT | values, indent=2).encode()


def decode_manifest(data: bytes, id: str, place: str) -> BackupRow | None:
    """Decode a manifest; None if it is invalid or of another backup."""
    try:
        manifest = parse_manifest(data, FORMAT)
        values = {name: manifest[name] for name in _manifest_fields()}
        row = msgspec.convert(values | {"status": "ready", "place": place}, BackupRow)
        check_id(row.sandbox_id)
    except (ValueError, TypeError, KeyError, InvalidOption, msgspec.ValidationError):
        return None
    valid = row.id == id and row.path.startswith("/") and _CHECKSUM.fullmatch(row.checksum)
    return row if valid and min(row.size, row.bytes, row.files, row.disk) >= 0 else None


def _manifest_fields() -> list[str]:
    return [field.name for field in fields(BackupRow) if field.name not in ("status", "place")]
