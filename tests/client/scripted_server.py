"""HTTP server that sends prepared responses, also invalid ones that no real server sends."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

DROP = b""
"""Close the connection instead of sending a response."""


class ScriptedServer:
    """Records requests, and sends one response for each; the last one is repeated."""

    def __init__(self, responses: list[bytes]) -> None:
        self.requests: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.bodies: list[bytes] = []
        self.connections = self.closed = self.port = 0
        self._responses = responses

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while line := await reader.readline():
                self.requests.append(" ".join(line.decode().split()[:2]))
                self.headers.append(await _headers(reader))
                self.bodies.append(await _body(reader, self.headers[-1]))
                data = self._responses.pop(0) if len(self._responses) > 1 else self._responses[0]
                if data is DROP:
                    break
                writer.write(data)
        self.closed += 1
        writer.close()


def response(status: int, body: bytes = b"", **headers: str) -> bytes:
    """Encode a response."""
    lines = [f"HTTP/1.1 {status} Reason", f"content-length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


@contextlib.asynccontextmanager
async def scripted_server(path: str | None, *responses: bytes) -> AsyncIterator[ScriptedServer]:
    """Run a scripted server on a unix socket, or on a TCP port if `path` is None."""
    script = ScriptedServer(list(responses))
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
    headers = {}
    while (line := (await reader.readline()).decode().strip()) != "":
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return headers


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding") != "chunked":
        return await reader.readexactly(int(headers.get("content-length", "0")))
    pieces = []
    while size := int(await reader.readline(), 16):
        pieces.append(await reader.readexactly(size))
        await reader.readline()
    await reader.readline()
    return b"".join(pieces)
