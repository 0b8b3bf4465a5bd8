"""TCP traffic of a sandbox: a server outside it, a client inside, and their audit log events."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox.engine.sandbox import Sandbox
    from smokebox.types import NetworkEvent

CLIENT = """
import errno, socket, sys
host, port, text = sys.argv[1:]
try:
    with socket.create_connection((host, int(port)), 10) as sock:
        sock.sendall(text.encode())
        sock.shutdown(socket.SHUT_WR)
        while data := sock.recv(1 << 16):
            sys.stdout.write(data.decode())
except socket.gaierror as error:
    print("no such name")
except OSError as error:
    # Only the first call after a reset gets ECONNRESET, and that is not always recv.
    reset = error.errno in (errno.ENOTCONN, errno.EPIPE)
    print("ECONNRESET" if reset else errno.errorcode.get(error.errno, error))
"""


async def send_text(sandbox: Sandbox, host: str, port: int, text: str = "") -> str:
    """Send text from inside a sandbox, and return the response or the name of the error."""
    result = await sandbox.exec(["python3", "-c", CLIENT, host, str(port), text], timeout=15)
    return result.stdout.strip() or result.stderr


@contextlib.asynccontextmanager
async def uppercase_server(host: str = "127.0.0.1") -> AsyncIterator[int]:
    """Run a server that returns each request in upper case after its end; yields the port."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write((await reader.read()).upper())
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(respond, host, 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def wait_for_events(sandbox: Sandbox, count: int = 1) -> list[NetworkEvent]:
    """Wait until the audit log has `count` events, and return the last ones."""
    async with asyncio.timeout(10):
        while len(events := await sandbox.egress_proxy.audit_log.read()) < count:
            await asyncio.sleep(0.01)
    return events[-count:]
