"""Where the archives of backups are kept: in the state directory, or in a bucket.

An archive is made in the state directory in any case: how long a sandbox is read does not
depend on a network. Credentials of a bucket are those of this process and go nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from smokebox.engine.disk import room
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
    from collections.abc import AsyncIterator, Iterator

    from smokebox.sandbox.stores import Target


PART = ".part"
ARCHIVE = ".tar.zst"
MANIFEST = ".json"
PIECE = 1 << 20

_PART_OF_UPLOAD = 16 << 20
_UPLOADS_AT_ONCE = 4


class ArchiveStore(Protocol):
    """A place for archives, by the ids of their backups."""

    @property
    def place(self) -> str:
        """What it is called in the record; empty for the state directory."""
        ...

    async def keep(self, row: BackupRow, part: str) -> None:
        """Take a whole archive from a file, which is gone then. After it, it is there for good."""
        ...

    def fetch(self, row: BackupRow) -> contextlib.AbstractAsyncContextManager[str]:
        """The archive as a file of this machine, once its checksum was found to be right."""
        ...

    async def find(self, id: str) -> BackupRow | None:
        """The backup that is kept here under that id, whatever the record knows of it."""
        ...

    async def remove(self, id: str) -> None:
        """Remove an archive, or what there is of it. Absence is fine."""
        ...


class FolderArchiveStore:
    """The archives in the state directory."""

    place = ""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        os.makedirs(folder, mode=0o700, exist_ok=True)

    def part(self, id: str) -> str:
        """Where an archive is while it is made, or on its way."""
        return os.path.join(self.folder, id + PART)

    async def keep(self, row: BackupRow, part: str) -> None:
        """Give a file its name, and then its"""
        await asyncio.to_thread(self._keep, row, part)

    @contextlib.asynccontextmanager
    async def fetch(self, row: BackupRow) -> AsyncIterator[str]:
        """The file itself."""
        path = self._archive(row.id)
        check_checksum(row, await asyncio.to_thread(checksum, row, path))
        yield path

    async def find(self, id: str) -> BackupRow | None:
        """The backup by its"""
        return await asyncio.to_thread(self._find, id)

    async def remove(self, id: str) -> None:
        """Remove the file, whole or in the making."""
        await asyncio.to_thread(self._remove, id)

    def sweep(self, known: set[str]) -> list[BackupRow]:
        """Remove what is of no backup; those that have all but a place in the record, give."""
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

    def check_room(self, size: int = 0) -> None:
        """Raise `StorageFull` unless so many bytes have room, besides what the host keeps."""
        if room(self.folder) < size:
            raise StorageFull(
                self.folder,
                f"the host's disk has no room for a backup ({size} bytes and its reserve).",
                hint="Delete backups, or have them kept in a bucket: `smokebox serve --backups`.",
            )

    def _keep(self, row: BackupRow, part: str) -> None:
        os.rename(part, self._archive(row.id))
        told = self._manifest(row.id)
        with open(told + PART, "xb", opener=_private) as file:
            file.write(encode_manifest(row))
            file.flush()
            os.fsync(file.fileno())
        os.rename(told + PART, told)
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _remove(self, id: str) -> None:
        # The manifest first: without it there is no backup.
        told = self._manifest(id)
        for path in (told, told + PART, self._archive(id), self.part(id)):
            _unlink(path)

    def _find(self, id: str) -> BackupRow | None:
        if not ID.fullmatch(id):
            return None
        try:
            with open(self._manifest(id), "rb") as file:
                row = decode_manifest(file.read(LONGEST), id, self.place)
            size = os.stat(self._archive(id)).st_size
        except FileNotFoundError:
            return None
        return row if row is not None and row.size == size else None

    def _archive(self, id: str) -> str:
        return os.path.join(self.folder, id + ARCHIVE)

    def _manifest(self, id: str) -> str:
        return os.path.join(self.folder, id + MANIFEST)


class BucketArchiveStore:
    """The archives in an object store, on their way by a file of the state directory."""

    def __init__(self, target: Target, folder: FolderArchiveStore) -> None:
        self._target = target
        self._folder = folder
        self.place = f"{target.place}/{target.prefix}".rstrip("/")

    async def keep(self, row: BackupRow, part: str) -> None:
        """Send a file, in parts of which several are on their way, and see that it has come."""
        import obstore

        with self._asking(row.id):
            store, key = self._target.store, self._key(row.id)
            await obstore.put_async(
                store,
                key,
                Path(part),
                chunk_size=_PART_OF_UPLOAD,
                max_concurrency=_UPLOADS_AT_ONCE,
            )
            found = await obstore.head_async(store, key)
            if found["size"] != row.size:
                raise _damaged(row, f"of {row.size} bytes {found['size']} came to {self.place}")
            await obstore.put_async(store, self._key(row.id, MANIFEST), encode_manifest(row))
        await self._folder.remove(row.id)

    @contextlib.asynccontextmanager
    async def fetch(self, row: BackupRow) -> AsyncIterator[str]:
        """A copy of the archive, for as long as it is needed."""
        self._folder.check_room(row.size)
        # Not by its id alone: several may fetch it at once.
        path = self._folder.part(f"{row.id}.{os.urandom(4).hex()}")
        try:
            check_checksum(row, await self._copy(row, path))
            yield path
        finally:
            _unlink(path)

    async def find(self, id: str) -> BackupRow | None:
        """The backup by its manifest, whichever server has made it."""
        import obstore

        if not ID.fullmatch(id):
            return None
        try:
            with self._asking(id):
                answer = await obstore.get_async(self._target.store, self._key(id, MANIFEST))
                if answer.meta["size"] > LONGEST:
                    return None
                return decode_manifest(bytes(await answer.bytes_async()), id, self.place)
        except PathNotFound:
            return None

    async def remove(self, id: str) -> None:
        """Remove the objects, and what is on its way to them."""
        import obstore

        await self._folder.remove(id)
        for kind in (MANIFEST, ARCHIVE):
            with contextlib.suppress(PathNotFound), self._asking(id):
                await obstore.delete_async(self._target.store, self._key(id, kind))

    async def _copy(self, row: BackupRow, path: str) -> str:
        import obstore

        found, digest = 0, hashlib.sha256()
        file = _private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            with self._asking(row.id):
                answer = await obstore.get_async(self._target.store, self._key(row.id))
                async for piece in answer.stream(min_chunk_size=PIECE):
                    found += len(piece)
                    if found > row.size:
                        raise _damaged(row, f"it has more than {row.size} bytes")
                    await asyncio.to_thread(_take, file, digest, bytes(piece))
        except PathNotFound:
            raise _damaged(row, f"{self.place} has it no more") from None
        finally:
            os.close(file)
        return digest.hexdigest()

    def _key(self, id: str, kind: str = ARCHIVE) -> str:
        return "/".join(part for part in (self._target.prefix, id + kind) if part)

    @contextlib.contextmanager
    def _asking(self, id: str) -> Iterator[None]:
        from smokebox.sandbox.filesystems.objects import translated

        with translated(f"/{self._key(id)}", self._target.place):
            yield


def open_bucket(url: str, folder: FolderArchiveStore) -> BucketArchiveStore:
    """The shelf that a URL names: s3://, gs://, az:// or file://. Nothing is asked of it yet."""
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
    """The SHA-256 of a file."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise _damaged(row, "its archive is gone from the state directory") from None
    except OSError as error:
        raise from_os_error(error, path) from error


def check_checksum(row: BackupRow, found: str) -> None:
    """Raise `BadSnapshot` for an archive that is not what was kept."""
    if found != row.checksum:
        raise _damaged(row, f"its SHA-256 is {found}, and was {row.checksum}")


def _damaged(row: BackupRow, what: str) -> BadSnapshot:
    return BadSnapshot(
        f"backup {row.id} is damaged: {what}.",
        hint="Nothing was changed. Use another backup.",
        kind="backup",
        name=row.id,
    )


def _take(fd: int, digest: hashlib._Hash, piece: bytes) -> None:
    digest.update(piece)
    view = memoryview(piece)
    while view:
        view = view[os.write(fd, view) :]


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


LONGEST = 64 << 10
FORMAT = {"format": "tar+zstd", "version": 1}

ID = re.compile(r"b-[0-9a-f]{32}")
_CHECKSUM = re.compile(r"[0-9a-f]{64}")
_KINDS: dict[str, tuple[type, ...]] = {
    "id": (str,),
    "sandbox_id": (str,),
    "path": (str,),
    "name": (str, type(None)),
    "created_at": (float, int),
    "expires_at": (float, int, type(None)),
    "size": (int,),
    "bytes": (int,),
    "files": (int,),
    "disk": (int,),
    "checksum": (str,),
}


def encode_manifest(row: BackupRow) -> bytes:
    """The manifest of a backup."""
    told = asdict(row)
    return json.dumps({**FORMAT, **{name: told[name] for name in _KINDS}}, indent=2).encode()


def decode_manifest(data: bytes, id: str, place: str) -> BackupRow | None:
    """The row that a manifest is of; None for what is none, or of another backup."""
    try:
        told = json.loads(data)
        fields = {name: told[name] for name in _KINDS}
        if told["format"] != FORMAT["format"] or told["version"] != FORMAT["version"]:
            return None
        check_id(fields["sandbox_id"])
    except (ValueError, TypeError, KeyError, InvalidOption):
        return None
    if not all(type(fields[name]) in kinds for name, kinds in _KINDS.items()):
        return None
    row = BackupRow(**fields, status="ready", place=place)
    fits = row.id == id and row.path.startswith("/") and _CHECKSUM.fullmatch(row.checksum)
    return row if fits and min(row.size, row.bytes, row.files, row.disk) >= 0 else None
