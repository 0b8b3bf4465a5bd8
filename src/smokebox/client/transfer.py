"""Copying files and directories between this machine and a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import posixpath
import stat
import tarfile
import tempfile
from typing import TYPE_CHECKING, TypeAlias

from smokebox.errors import ServiceUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator
    from typing import IO

    from smokebox.client.sandbox_files import SandboxFiles

Progress: TypeAlias = "Callable[[int, int | None], None]"
"""Called with the number of bytes copied so far, and with the total where it is known."""

_CHUNK = 1 << 20


async def upload(
    sandbox: SandboxFiles, source: str, target: str, progress: Progress | None
) -> None:
    """Copy a file or a directory into a sandbox; see `Sandbox.upload`."""
    if await asyncio.to_thread(os.path.isdir, source):
        await sandbox.upload_tar(target, _with_progress(_packed(source), progress, None))
        return
    target = target + os.path.basename(source) if target.endswith("/") else target
    file = await asyncio.to_thread(open, source, "rb")
    try:
        status = os.fstat(file.fileno())
        chunks = _with_progress(_file_chunks(file), progress, status.st_size)
        await sandbox.write_stream(target, chunks)
    finally:
        file.close()
    if status.st_mode & 0o111:
        await sandbox.chmod(target, stat.S_IMODE(status.st_mode) & 0o777)


async def download(
    sandbox: SandboxFiles, source: str, target: str, progress: Progress | None
) -> None:
    """Copy a file or a directory out of a sandbox; see `Sandbox.download`."""
    info = await sandbox.stat(source)
    if info.is_directory:
        await asyncio.to_thread(os.makedirs, target, exist_ok=True)
        with tempfile.TemporaryFile(dir=target) as archive:
            await _save(_with_progress(sandbox.download_tar(source), progress, None), archive)
            archive.seek(0)
            await asyncio.to_thread(_unpack, archive, target)
        return
    if await asyncio.to_thread(os.path.isdir, target):
        target = os.path.join(target, posixpath.basename(sandbox.resolve_path(source)))
    folder, name = os.path.split(target)
    with tempfile.NamedTemporaryFile(dir=folder or ".", prefix=f".{name}.", delete=False) as file:
        try:
            chunks = _with_progress(sandbox.read_stream(source), progress, info.size)
            await _save(chunks, file)
            os.chmod(file.name, 0o755 if (info.mode or 0) & 0o100 else 0o644)
            os.replace(file.name, target)
        except BaseException:
            os.unlink(file.name)
            raise


async def _packed(source: str) -> AsyncGenerator[bytes, None]:
    archive = pack(source)
    while (chunk := await asyncio.to_thread(next, archive, None)) is not None:
        yield chunk


async def _file_chunks(file: IO[bytes]) -> AsyncGenerator[bytes, None]:
    while chunk := await asyncio.to_thread(file.read, _CHUNK):
        yield chunk


async def _with_progress(
    chunks: AsyncGenerator[bytes, None], progress: Progress | None, total: int | None
) -> AsyncGenerator[bytes, None]:
    done = 0
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            yield chunk
            done += len(chunk)
            if progress is not None:
                progress(done, total)


async def _save(chunks: AsyncGenerator[bytes, None], file: IO[bytes]) -> None:
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            await asyncio.to_thread(file.write, chunk)
    await asyncio.to_thread(file.flush)


def pack(source: str) -> Generator[bytes, None, None]:
    """Yield a directory as a tar archive, with relative names and symlinks as themselves.

    Leaves out what is neither a file, a directory nor a symlink. A file that grows meanwhile
    is cut to the size it had, and one that shrinks is padded with zeros.
    """
    # Only for `gettarinfo`, which detects hard links.
    headers = tarfile.TarFile(fileobj=io.BytesIO(), mode="w", format=tarfile.PAX_FORMAT)
    for path in _walk(source):
        info = headers.gettarinfo(path, os.path.relpath(path, source))
        # None for a socket, which an archive cannot hold.
        if info is None or not (info.isreg() or info.isdir() or info.issym() or info.islnk()):
            continue
        file = open(path, "rb") if info.isreg() else None  # noqa: SIM115
        yield info.tobuf(tarfile.PAX_FORMAT)
        if file is not None:
            with file:
                yield from _padded_content(file, info.size)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _unpack(archive: IO[bytes], target: str) -> None:
    """Unpack into a directory of this machine; members that lead out of it are refused."""
    try:
        with tarfile.open(fileobj=archive) as members:
            members.extractall(target, filter="data")
    except tarfile.TarError as error:
        raise ServiceUnavailable(
            f"the archive of a directory cannot be unpacked: {error}.",
            hint="Look at its content with `download_tar`, or exclude that file.",
            service="archive",
        ) from error


def _walk(source: str) -> Generator[str, None, None]:
    for folder, folders, files in os.walk(source, onerror=_raise):
        folders.sort()
        for name in sorted((*folders, *files)):
            yield os.path.join(folder, name)


def _raise(error: OSError) -> None:
    raise error


def _padded_content(file: IO[bytes], size: int) -> Generator[bytes, None, None]:
    remaining = size
    while remaining:
        chunk = file.read(min(remaining, _CHUNK)) or bytes(min(remaining, _CHUNK))
        remaining -= len(chunk)
        yield chunk
    if rest := size % tarfile.BLOCKSIZE:
        yield bytes(tarfile.BLOCKSIZE - rest)
