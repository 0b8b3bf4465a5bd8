"""Memory of a server process during transfers of large files."""

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
# Several times the buffers of a transfer, and far less than the file.
GROWTH = 24 * MIB
DEADLINE = 60.0
SANDBOX = "/api/sandboxes/box"


@contextlib.asynccontextmanager
async def run_server_process(home: Path) -> AsyncIterator[int]:
    """Run a server in a child process, and yield its pid once it accepts connections."""
    arguments = ["-m", "smokebox", "serve", "--home", str(home), "--no-tcp", "--pool", "0"]
    child = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdin=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(DEADLINE):
            while not await _accepts_connections(socket_path(str(home))):
                assert child.returncode is None
                await asyncio.sleep(0.05)
        yield child.pid
    finally:
        child.terminate()
        async with asyncio.timeout(DEADLINE):
            await child.wait()


async def _accepts_connections(path: str) -> bool:
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_unix_connection(path)
        writer.close()
        return True
    return False


def peak_memory(pid: int) -> int:
    """Return the peak resident memory of a process in bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


class RandomFile(io.RawIOBase):
    """A file of `size` random bytes, generated as they are read, with their hash."""

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


def _tar(source: RandomFile) -> Iterator[bytes]:
    member = tarfile.TarInfo("long")
    member.size = source.left
    yield member.tobuf()
    while piece := source.read(1 << 18):
        yield piece
    yield bytes(tarfile.RECORDSIZE)


async def _iterate(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def _digest(response: aiohttp.ClientResponse, skip: int = 0, most: int = SIZE) -> str:
    """Return the hash of a body after its first `skip` bytes."""
    found = hashlib.sha256()
    await response.content.readexactly(skip)
    async for piece in response.content.iter_any():
        found.update(piece[:most])
        most -= min(most, len(piece))
    return found.hexdigest()


@pytest.mark.timeout(180)
async def test_large_transfers_need_constant_memory(tmp_path: Path) -> None:
    home = tmp_path / "home"
    async with run_server_process(home) as pid:
        connector = aiohttp.UnixConnector(socket_path(str(home)))
        async with aiohttp.ClientSession("http://localhost", connector=connector) as http:

            async def upload(route: str, path: str, body: AsyncIterator[bytes]) -> None:
                url = f"{SANDBOX}/{route}"
                async with http.put(url, params={"path": path}, data=body) as response:
                    assert response.status == 200, await response.text()

            async def download(route: str, path: str, skip: int = 0) -> str:
                async with http.get(f"{SANDBOX}/{route}", params={"path": path}) as response:
                    return await _digest(response, skip)

            async def round_trip(size: int) -> None:
                source = RandomFile(size)
                await upload("files", "f", _pieces(source))
                assert await download("files", "f") == source.hash.hexdigest()
                source = RandomFile(size)
                await upload("archive", "d", _iterate(_tar(source)))
                assert await download("files", "d/long") == source.hash.hexdigest()
                if size == SIZE:
                    # After the header of the member; `most` leaves out the end of the archive.
                    packed = await download("archive", "d/long", tarfile.BLOCKSIZE)
                    assert packed == source.hash.hexdigest()

            async with http.put(SANDBOX, json={}) as response:
                assert response.status == 200
            await round_trip(4 * MIB)
            before = peak_memory(pid)
            await round_trip(SIZE)
            assert peak_memory(pid) - before < GROWTH
            # A stopped server leaves its sandboxes running.
            async with http.delete(SANDBOX) as response:
                assert response.status == 204
