"""Files and directories between this machine and a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import os
import posixpath
import stat
import tempfile
from typing import TYPE_CHECKING, TypeAlias

from smokebox.client import packing
from smokebox.client.files import Files

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator
    from typing import IO

Progress: TypeAlias = "Callable[[int, int | None], None]"
"""Is told how many bytes have passed, and of how many, where that is known."""


class Transfers(Files):
    """`upload` and `download`."""

    async def upload(
        self,
        local: str | os.PathLike[str],
        remote: str,
        *,
        progress: Progress | None = None,
    ) -> None:
        """Copy a file, or a directory with all that is in it, into the sandbox.

        A file replaces that at `remote`, or goes below it where that ends with a slash; what
        is in a directory goes below `remote`, with modes, and symlinks as themselves.
        """
        source = os.fspath(local)
        if await asyncio.to_thread(os.path.isdir, source):
            await self.upload_tar(remote, _told(_packed(source), progress, None))
            return
        target = remote + os.path.basename(source) if remote.endswith("/") else remote
        file = await asyncio.to_thread(open, source, "rb")
        try:
            status = os.fstat(file.fileno())
            await self.write_stream(target, _told(_pieces(file), progress, status.st_size))
        finally:
            file.close()
        if status.st_mode & 0o111:
            await self.chmod(target, stat.S_IMODE(status.st_mode) & 0o777)

    async def download(
        self,
        remote: str,
        local: str | os.PathLike[str],
        *,
        progress: Progress | None = None,
    ) -> None:
        """Copy a file, or a directory with all that is in it, out of the sandbox.

        A file replaces that at `local`, all or nothing, or goes into it where that is a
        directory; what is in a directory goes below `local` once all of it is here. Nothing
        is written elsewhere, whatever links the sandbox has made.
        """
        target, info = os.fspath(local), await self.stat(remote)
        if info.is_directory:
            await asyncio.to_thread(os.makedirs, target, exist_ok=True)
            with tempfile.TemporaryFile(dir=target) as archive:
                await _save(_told(self.download_tar(remote), progress, None), archive)
                archive.seek(0)
                await asyncio.to_thread(packing.unpack, archive, target)
            return
        if await asyncio.to_thread(os.path.isdir, target):
            target = os.path.join(target, posixpath.basename(self.resolve_path(remote)))
        folder, name = os.path.split(target)
        with tempfile.NamedTemporaryFile(
            dir=folder or ".", prefix=f".{name}.", delete=False
        ) as file:
            try:
                await _save(_told(self.read_stream(remote), progress, info.size), file)
                os.chmod(file.name, 0o755 if (info.mode or 0) & 0o100 else 0o644)
                os.replace(file.name, target)
            except BaseException:
                os.unlink(file.name)
                raise


async def _packed(source: str) -> AsyncGenerator[bytes, None]:
    steps: Generator[bytes, None, None] = packing.pack(source)
    while (piece := await asyncio.to_thread(next, steps, None)) is not None:
        yield piece


async def _pieces(file: IO[bytes]) -> AsyncGenerator[bytes, None]:
    while piece := await asyncio.to_thread(file.read, packing.PIECE):
        yield piece


async def _told(
    pieces: AsyncGenerator[bytes, None], progress: Progress | None, total: int | None
) -> AsyncGenerator[bytes, None]:
    done = 0
    async with contextlib.aclosing(pieces):
        async for piece in pieces:
            yield piece
            done += len(piece)
            if progress is not None:
                progress(done, total)


async def _save(pieces: AsyncGenerator[bytes, None], file: IO[bytes]) -> None:
    async with contextlib.aclosing(pieces):
        async for piece in pieces:
            await asyncio.to_thread(file.write, piece)
    await asyncio.to_thread(file.flush)
