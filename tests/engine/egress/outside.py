"""What is outside of a sandbox: servers of this machine, and programs inside that reach them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox.engine.sandbox import Sandbox
    from smokebox.types import NetworkEvent

ASK = """
import errno, socket, sys
where, port, *words = sys.argv[1:]
try:
    with socket.create_connection((where, int(port)), 10) as sock:
        sock.sendall(" ".join(words).encode())
        sock.shutdown(socket.SHUT_WR)
        while data := sock.recv(1 << 16):
            sys.stdout.write(data.decode())
except socket.gaierror as error:
    print("no such name")
except OSError as error:
    # A connection that was reset says so once, to whatever is called first: not always to recv.
    broken = error.errno in (errno.ENOTCONN, errno.EPIPE)
    print("ECONNRESET" if broken else errno.errorcode.get(error.errno, error))
"""


async def ask(sandbox: Sandbox, where: str, port: int, *words: str) -> str:
    """What a program inside is answered by a server, or what kept it from that."""
    result = await sandbox.exec(["python3", "-c", ASK, where, str(port), *words], timeout=15)
    return result.stdout.strip() or result.stderr


@contextlib.asynccontextmanager
async def shouting(host: str = "127.0.0.1") -> AsyncIterator[int]:
    """A server that waits for all that is said, and answers in capitals; its port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write((await reader.read()).upper())
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, host, 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def noted(sandbox: Sandbox, count: int = 1) -> list[NetworkEvent]:
    """Return the events of the audit log once there are `count`."""
    async with asyncio.timeout(10):
        while len(events := await sandbox.egress_proxy.audit_log.read()) < count:
            await asyncio.sleep(0.01)
    return events[-count:]
