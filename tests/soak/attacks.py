"""Attacks of the hostile tenant of a soak test, one function each, until cancelled.

Each goes up to what its key may do at once, and what is refused is tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import re
import tarfile
from typing import TYPE_CHECKING

from smokebox import connect
from smokebox.errors import SmokeboxError
from soak.plan import ORIGIN

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from smokebox import Sandbox
    from soak.plan import Setup

# Another address than that of the ordinary tenants, since connections of an address are limited.
SOURCE = "127.0.0.2"
_PORT = 8000
# Refusals come without delay: more attempts would only load the machine that sends them.
_PAUSE = 0.02

_SPIN = "for one in 1 2 3 4; do (while :; do :; done) & done; wait"
_FORK = "bomb() { bomb | bomb & }; while :; do bomb; sleep 0.2; done"
_MEMORY = "while :; do head -c 4G /dev/zero | tail >/dev/null; done"
_DISK = "while :; do dd if=/dev/zero of=big bs=1M count=64 conv=fsync; rm big; done 2>/dev/null"
_FETCH = f"while :; do curl -s -o /dev/null http://{ORIGIN}/100000000; done"
_REQUESTS = f"while :; do curl -s -o /dev/null http://{ORIGIN}/[1-200]; done"
_DNS = """
import socket
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.settimeout(0.05)
sock.connect(("127.0.0.53", 53))
number = 0
while True:
    for _ in range(32):
        number += 1
        name = b"".join(bytes([len(part)]) + part for part in (b"h%d" % number, b"test")) + b"\\0"
        sock.send(b"\\0\\1\\1\\0\\0\\1\\0\\0\\0\\0\\0\\0" + name + b"\\0\\1\\0\\1")
    try:
        sock.recv(4096)
    except OSError:
        pass
"""
# Behind a preview: an endless head, an endless body, and one of tiny chunks.
_WEB = f"""
import socket, threading
HEAD = b"HTTP/1.1 200 OK\\r\\n"
def serve(sock):
    try:
        path = sock.recv(65536).split()[1]
        sock.sendall(HEAD)
        if path == b"/head":
            piece = b"x-more: %s\\r\\n" % (b"x" * 100)
        elif path == b"/chunks":
            sock.sendall(b"transfer-encoding: chunked\\r\\n\\r\\n")
            piece = b"1\\r\\nx\\r\\n" * 8192
        else:
            sock.sendall(b"\\r\\n")
            piece = bytes(262144)
        while True:
            sock.sendall(piece)
    except OSError:
        pass
    finally:
        sock.close()
listener = socket.create_server(("127.0.0.1", {_PORT}), backlog=256)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""


class Hostile:
    """The hostile tenant: its sandboxes, and the refusals that it was given."""

    def __init__(self, setup: Setup) -> None:
        (self.tenant,) = setup.tenants
        self.setup = setup
        self.client = connect(setup.url, self.tenant.key)
        self.refusals: dict[str, int] = {}
        self.errors: list[str] = []
        egress = {
            "hosts": {ORIGIN: f"127.0.0.1:{setup.origin}"},
            "allowed_hosts": [ORIGIN, "*.test"],
        }
        self.boxes = [self.client.sandbox(id, egress=egress) for id in self.tenant.sandboxes]

    async def prepare(self) -> None:
        """Create the sandboxes."""
        for box in self.boxes:
            await box.wake()

    async def clean(self) -> None:
        """End the bombs, so that the next quiet window is quiet."""
        for box in self.boxes:
            with contextlib.suppress(SmokeboxError):
                await box.kill_all_processes("KILL")
            with contextlib.suppress(SmokeboxError):
                await box.exec("rm -rf /workspace/*", timeout=20)
                await box.cleanup_processes()

    async def repeat(self, attempt: Callable[[], Awaitable[object]]) -> None:
        """Repeat an attempt, and count how it is refused."""
        while True:
            try:
                await attempt()
            except SmokeboxError as error:
                self.refusals[error.code] = self.refusals.get(error.code, 0) + 1
                if error.code == "internal":
                    self.errors.append(repr(error)[:500])
                await asyncio.sleep(_PAUSE)
            except (OSError, asyncio.IncompleteReadError) as error:
                name = type(error).__name__
                self.refusals[name] = self.refusals.get(name, 0) + 1
                await asyncio.sleep(_PAUSE)

    async def several(self, count: int, attempt: Callable[[], Awaitable[object]]) -> None:
        """Repeat an attempt many times at once."""
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(self.repeat(attempt))

    async def bomb(self, command: str | list[str], *, boxes: int = 4) -> None:
        """Run a program in several sandboxes, and start it again when it ends."""

        async def run(box: Sandbox) -> None:
            process = await box.start_process(command)
            await process.wait_for_exit()

        async with asyncio.TaskGroup() as group:
            for box in self.boxes[:boxes]:
                group.create_task(self.repeat(lambda box=box: run(box)))  # type: ignore[misc]

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Open a connection to the server."""
        reader, writer = await asyncio.open_connection(
            *self.setup.address, local_addr=(SOURCE, 0), limit=1 << 20
        )
        try:
            yield reader, writer
        finally:
            writer.transport.abort()


async def spin(hostile: Hostile) -> None:
    await hostile.bomb(_SPIN)


async def fork(hostile: Hostile) -> None:
    await hostile.bomb(_FORK)


async def memory(hostile: Hostile) -> None:
    await hostile.bomb(_MEMORY)


async def disk(hostile: Hostile) -> None:
    await hostile.bomb(_DISK, boxes=2)


async def egress_bodies(hostile: Hostile) -> None:
    await hostile.bomb(f"for one in 1 2 3 4; do ({_FETCH}) & done; wait")


async def egress_requests(hostile: Hostile) -> None:
    await hostile.bomb(f"for one in 1 2 3 4; do ({_REQUESTS}) & done; wait")


async def dns(hostile: Hostile) -> None:
    await hostile.bomb(["python3", "-c", _DNS])


async def preview_heads(hostile: Hostile) -> None:
    await _previews(hostile, "/head")


async def preview_bodies(hostile: Hostile) -> None:
    await _previews(hostile, "/body")


async def preview_chunks(hostile: Hostile) -> None:
    await _previews(hostile, "/chunks")


async def _previews(hostile: Hostile, path: str) -> None:
    """Request what a program in a sandbox sends without end."""
    box = hostile.boxes[0]
    process = await box.start_process(["python3", "-c", _WEB])
    await process.wait_for_port(_PORT, mode="tcp", timeout=30)
    exposed = await box.expose_port(_PORT)
    head = (
        f"GET {path} HTTP/1.1\r\nhost: {exposed.label}.localhost\r\n"
        f"x-smokebox-token: {exposed.token}\r\n\r\n"
    ).encode()

    async def visit() -> None:
        async with hostile.connection() as (reader, writer):
            writer.write(head)
            while await reader.read(1 << 18):
                pass

    await hostile.several(16, visit)


async def regex(hostile: Hostile) -> None:
    """Search logs with expressions that take exponential time."""
    process = await hostile.boxes[1].start_process(f"echo {'a' * 40}; sleep 3600")
    pattern = re.compile("(a+)+$b")
    await hostile.several(16, lambda: process.wait_for_log(pattern, timeout=30))


async def slow_readers(hostile: Hostile) -> None:
    """Read streams and a download a little at a time."""
    box = hostile.boxes[2]
    await box.exec("head -c 64M /dev/zero > large")
    prefix = f"/api/sandboxes/{box.id}"
    authorization = f"host: localhost\r\nauthorization: Bearer {hostile.tenant.key}\r\n"
    body = b'{"command": "yes"}'
    download = f"GET {prefix}/files?path=large HTTP/1.1\r\n{authorization}\r\n".encode()
    stream = (
        f"POST {prefix}/exec/stream HTTP/1.1\r\n{authorization}content-length: {len(body)}\r\n"
        "content-type: application/json\r\n\r\n"
    ).encode() + body

    async def read(request: bytes) -> None:
        async with hostile.connection() as (reader, writer):
            writer.write(request)
            while await reader.read(1024):
                await asyncio.sleep(0.2)

    async with asyncio.TaskGroup() as group:
        group.create_task(hostile.several(6, lambda: read(download)))
        group.create_task(hostile.several(6, lambda: read(stream)))


async def half_open(hostile: Hostile) -> None:
    """Send heads a byte at a time, over as many connections as an address may have."""

    async def dribble() -> None:
        async with hostile.connection() as (_, writer):
            for letter in b"GET /api/sandboxes HTTP/1.1\r\nx-slow: " + b"x" * 4096:
                writer.write(bytes([letter]))
                await writer.drain()
                await asyncio.sleep(0.2)

    await hostile.several(200, dribble)


async def uploads(hostile: Hostile) -> None:
    """Upload files above the limit of the disk, and bodies above that of JSON."""
    piece = bytes(1 << 20)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(4096):
            yield piece

    box = hostile.boxes[3]
    async with asyncio.TaskGroup() as group:
        group.create_task(hostile.several(4, lambda: box.write_stream("huge", pieces())))
        group.create_task(hostile.several(4, lambda: box.exec("true", stdin="x" * (15 << 20))))


async def archives(hostile: Hostile) -> None:
    """Upload archives that unpack to a thousand times their size, or to many files."""
    bomb, many = await asyncio.to_thread(_bomb), await asyncio.to_thread(_many)
    box = hostile.boxes[3]
    async with asyncio.TaskGroup() as group:
        group.create_task(hostile.several(4, lambda: box.upload_tar("bomb", _once(bomb))))
        group.create_task(hostile.several(4, lambda: box.upload_tar("many", _once(many))))


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


def _bomb() -> bytes:
    head = tarfile.TarInfo("zeros")
    head.size = 8 << 30
    output = io.BytesIO()
    with gzip.GzipFile(fileobj=output, mode="wb", compresslevel=6) as archive:
        archive.write(head.tobuf())
        for _ in range(320):
            archive.write(bytes(1 << 20))
    return output.getvalue()


def _many() -> bytes:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w:gz", compresslevel=1) as archive:
        for number in range(20_000):
            archive.addfile(tarfile.TarInfo(f"d{number % 100}/{number}"))
    return output.getvalue()


async def flood(hostile: Hostile) -> None:
    """Send as many small requests as the key may."""
    box = hostile.boxes[4]
    async with asyncio.TaskGroup() as group:
        group.create_task(hostile.several(16, hostile.client.list))
        group.create_task(hostile.several(16, lambda: box.exec("true")))


async def walks(hostile: Hostile) -> None:
    """List and search large trees."""
    box = hostile.boxes[4]
    async with asyncio.TaskGroup() as group:
        group.create_task(hostile.several(4, lambda: box.list_files("/usr", recursive=True)))
        group.create_task(hostile.several(4, lambda: box.glob("/usr/**/*.py")))
        group.create_task(hostile.several(4, lambda: box.disk_usage("/usr")))


async def output(hostile: Hostile) -> None:
    """Run commands that write more than a response should hold."""
    box = hostile.boxes[5]
    await hostile.several(8, lambda: box.exec("yes '\"\\\"' | head -c 64000000"))


async def followers(hostile: Hostile) -> None:
    """Follow the log of a program that writes without a pause, and terminals of others."""
    box = hostile.boxes[6]
    process = await box.start_process("yes", limits={"output_rate": None})

    async def follow() -> None:
        async for _ in process.stream_logs():
            pass

    async def watch() -> None:
        terminal = await box.create_terminal("yes")
        async for _ in terminal:
            pass

    async with asyncio.TaskGroup() as group:
        group.create_task(hostile.several(8, follow))
        group.create_task(hostile.several(8, watch))


async def churn(hostile: Hostile) -> None:
    """Create and destroy sandboxes, and put others to sleep."""
    numbers = iter(range(1 << 40))

    async def create() -> None:
        box = hostile.client.sandbox(f"{hostile.tenant.prefix}churn-{next(numbers) % 16}")
        await box.wake()
        await box.destroy()

    async def sleep() -> None:
        await hostile.boxes[7].wake()
        await hostile.boxes[7].sleep()

    async with asyncio.TaskGroup() as group:
        group.create_task(hostile.several(6, create))
        group.create_task(hostile.several(2, sleep))


ATTACKS: Mapping[str, Callable[[Hostile], Awaitable[None]]] = {
    attack.__name__: attack
    for attack in (
        spin,
        fork,
        memory,
        disk,
        egress_bodies,
        egress_requests,
        dns,
        preview_heads,
        preview_bodies,
        preview_chunks,
        regex,
        slow_readers,
        half_open,
        uploads,
        archives,
        flood,
        walks,
        output,
        followers,
        churn,
    )
}
