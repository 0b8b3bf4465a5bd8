"""The server that sandboxes reach through their egress proxy: origin.py, which prints its port.

`/SIZE` responds with so many bytes, and `/endless` with as many as the client takes.
"""

from __future__ import annotations

import asyncio
import contextlib

from soak.plan import report

_PIECE = b"o" * 65536
_ENDLESS = 1 << 40


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve the requests of one connection."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split(b" ", 2)[1].decode()
            size = _ENDLESS if path == "/endless" else int(path[1:] or 2)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
            # After the client has left, `drain` neither waits nor fails.
            while size and not writer.is_closing():
                piece = _PIECE[:size]
                writer.write(piece)
                size -= len(piece)
                await writer.drain()
    writer.close()


async def main() -> None:
    """Serve until this process is killed."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    report(server.sockets[0].getsockname()[1])
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
