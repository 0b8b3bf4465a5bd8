"""Long files pass through a server of its own process without staying in its memory."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import re
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from smokebox.foundation.endpoint import socket_path

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

MIB = 1 << 20
SIZE = 64 * MIB
# What the pieces under way take, several times over, and far less than what passes.
GROWTH = 24 * MIB
DEADLINE = 60.0
PLACE = "/api/sandboxes/box"


@contextlib.asynccontextmanager
async def serving(home: Path) -> AsyncIterator[int]:
    """A server in a child process that answers; its pid."""
    words = ["-m", "smokebox", "serve", "--home", str(home), "--no-tcp", "--pool", "0"]
    child = await asyncio.create_subprocess_exec(
        sys.executable, *words, stdin=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(DEADLINE):
            while not await _answers(socket_path(str(home))):
                assert child.returncode is None
                await asyncio.sleep(0.05)
        yield child.pid
    finally:
        child.terminate()
        async with asyncio.timeout(DEADLINE):
            await child.wait()


async def _answers(path: str) -> bool:
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_unix_connection(path)
        writer.close()
        return True
    return False


def peak(pid: int) -> int:
    """The most memory that a process had at once, in bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


class Source(io.RawIOBase):
    """Bytes without end that look random, made as they are read, and their hash."""

    def __init__(self, size: int) -> None:
        self.left = size
        self.hash = hashlib.sha256()
        self._block = os.urandom(MIB)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), self.left, MIB)
        buffer[:count] = self._block[:count]
        self.hash.update(buffer[:count])
        self.left -= count
        return count


async def _pieces(source: io.RawIOBase) -> AsyncIterator[bytes]:
    while piece := source.read(1 << 18):
        yield piece


def _tar(source: Source) -> Iterator[bytes]:
    member = tarfile.TarInfo("long")
    member.size = source.left
    yield member.tobuf()
    while piece := source.read(1 << 18):
        yield piece
    yield bytes(tarfile.RECORDSIZE)


async def _each(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def _digest(answer: aiohttp.ClientResponse, skip: int = 0, most: int = SIZE) -> str:
    """The hash of a body, or of what of it follows the first `skip` bytes."""
    found = hashlib.sha256()
    await answer.content.readexactly(skip)
    async for piece in answer.content.iter_any():
        found.update(piece[:most])
        most -= min(most, len(piece))
    return found.hexdigest()


@pytest.mark.timeout(180)
async def test_files_of_any_length_pass_in_constant_memory(tmp_path: Path) -> None:
    home = tmp_path / "home"
    async with serving(home) as pid:
        connector = aiohttp.UnixConnector(socket_path(str(home)))
        async with aiohttp.ClientSession("http://localhost", connector=connector) as http:

            async def upload(route: str, path: str, body: AsyncIterator[bytes]) -> None:
                where = f"{PLACE}/{route}"
                async with http.put(where, params={"path": path}, data=body) as answer:
                    assert answer.status == 200, await answer.text()

            async def download(route: str, path: str, skip: int = 0) -> str:
                async with http.get(f"{PLACE}/{route}", params={"path": path}) as answer:
                    return await _digest(answer, skip)

            async def there_and_back(size: int) -> None:
                source = Source(size)
                await upload("files", "f", _pieces(source))
                assert await download("files", "f") == source.hash.hexdigest()
                source = Source(size)
                await upload("archive", "d", _each(_tar(source)))
                assert await download("files", "d/long") == source.hash.hexdigest()
                if size == SIZE:
                    # Past the header: a file of this length has the whole answer after it.
                    packed = await download("archive", "d/long", tarfile.BLOCKSIZE)
                    assert packed == source.hash.hexdigest()

            async with http.put(PLACE, json={}) as answer:
                assert answer.status == 200
            await there_and_back(4 * MIB)
            before = peak(pid)
            await there_and_back(SIZE)
            assert peak(pid) - before < GROWTH
            # A sandbox outlives a server that is only stopped.
            async with http.delete(PLACE) as answer:
                assert answer.status == 204
