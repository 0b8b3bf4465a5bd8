"""A server that answers as it is told, line by line, for what no real one does on demand."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

DROP = b""
"""An answer that is none: the connection ends."""


class Scripted:
    """What was asked, and what is answered next; the last answer is given again and again."""

    def __init__(self, answers: list[bytes]) -> None:
        self.asked: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self.connections = self.ended = self.port = 0
        self._answers = answers

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while line := await reader.readline():
                self.asked.append(" ".join(line.decode().split()[:2]))
                self.headers.append(await _headers(reader))
                self.bodies.append(await _body(reader, self.headers[-1]))
                answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
                if answer is DROP:
                    break
                writer.write(answer)
        self.ended += 1
        writer.close()


def answer(status: int, body: bytes = b"", **headers: str) -> bytes:
    """An answer as it goes over the wire."""
    lines = [f"HTTP/1.1 {status} Whatever", f"content-length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


@contextlib.asynccontextmanager
async def scripted(path: str | None, *answers: bytes) -> AsyncIterator[Scripted]:
    """A scripted server on a unix socket, or without one on a port of this machine."""
    script = Scripted(list(answers))
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await script.serve(reader, writer)

    if path is None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        script.port = server.sockets[0].getsockname()[1]
    else:
        server = await asyncio.start_unix_server(serve, path)
    try:
        yield script
    finally:
        server.close()
        for writer in writers:
            writer.close()
        await server.wait_closed()


async def _headers(reader: asyncio.StreamReader) -> dict[str, str]:
    found = {}
    while (line := (await reader.readline()).decode().strip()) != "":
        name, _, value = line.partition(":")
        found[name.lower()] = value.strip()
    return found


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding") != "chunked":
        return await reader.readexactly(int(headers.get("content-length", "0")))
    pieces = []
    while size := int(await reader.readline(), 16):
        pieces.append(await reader.readexactly(size))
        await reader.readline()
    await reader.readline()
    return b"".join(pieces)
