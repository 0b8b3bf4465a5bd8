"""A door without a sandbox: it listens on loopback, and a test says where a program wanted to go.

Servers for it to reach, and the certificates of both.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import socket
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web as aioweb
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from smokebox.engine.egress import web
from smokebox.engine.egress.http.upstream import UpstreamPool
from smokebox.engine.egress.listener import IncomingConnection
from smokebox.engine.egress.proxy import HandlerResolver

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from smokebox.egress.policy import Egress

HOST = "api.test"
TOKEN = "tok-5f3a9c77d1-VERYSECRET"


class Authority:
    """A certificate authority; `file` holds what clients of its servers trust."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "ca.pem"
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "the authority")])
        self._own = self._certificate(self._name, self._key, ())
        self.file.write_bytes(self._own.public_bytes(serialization.Encoding.PEM))
        self._contexts: dict[str, ssl.SSLContext] = {}

    def context_for(self, host: str) -> ssl.SSLContext:
        """What a server of that name shows."""
        if host not in self._contexts:
            self._contexts[host] = self.context_of(host)
        return self._contexts[host]

    def trusting(self) -> ssl.SSLContext:
        """What a client of it needs."""
        return ssl.create_default_context(cafile=self.file)

    def context_of(self, *hosts: str) -> ssl.SSLContext:
        """What one server of many names shows."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0])])
        made = self._certificate(name, key, hosts)
        file = self._folder / f"{hosts[0]}.pem"
        secret = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        file.write_bytes(secret + made.public_bytes(serialization.Encoding.PEM))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(file)
        return context

    def _certificate(
        self, name: x509.Name, key: ec.EllipticCurvePrivateKey, hosts: tuple[str, ...]
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=2))
            .add_extension(x509.BasicConstraints(ca=not hosts, path_length=None), critical=True)
        )
        if hosts:
            names = x509.SubjectAlternativeName([x509.DNSName(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self._key, hashes.SHA256())


class AuditLog:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[dict[str, Any]] = []

    def note(self, **fields: Any) -> None:
        """Of `AuditLog`."""
        self.notes.append(fields)


@dataclass
class Meter:
    """Says no when told to."""

    over: str = ""
    most: int | None = None
    counted: int = 0

    def admit(self) -> str:
        """Of `Meter`."""
        return self.over

    def count(self, size: int) -> str:
        """Of `Meter`."""
        self.counted += size
        over = self.most is not None and self.counted > self.most
        return f"more than max_bytes={self.most}" if over else ""


@dataclass
class EgressProxy:
    """A `Doorway`, and the port that it listens on."""

    authority: Authority
    policy: Egress
    port: int = 0
    sandbox_id: str = "box"
    audit_log: AuditLog = field(default_factory=AuditLog)
    meter: Meter = field(default_factory=Meter)
    env: dict[str, str] = field(default_factory=lambda: {"TOKEN": TOKEN})
    handlers: HandlerResolver = field(default_factory=HandlerResolver)
    pool: UpstreamPool = field(default_factory=UpstreamPool)
    served: list[asyncio.Task[None]] = field(default_factory=list)

    async def ask(self, request: bytes) -> bytes:
        """All that is answered to some bytes, until the door closes the connection."""
        async with self.connected() as (reader, writer):
            writer.write(request)
            return await reader.read()

    async def get(self, path: str = "/", **headers: str) -> bytes:
        """The answer to a plain GET."""
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n{lines}\r\n"
        return await self.ask(head.encode())

    @contextlib.asynccontextmanager
    async def connected(
        self, tls: ssl.SSLContext | None = None, name: str = HOST
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection of a program."""
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=tls, server_hostname=name if tls else None
        )
        try:
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


@contextlib.asynccontextmanager
async def open_door(
    authority: Authority,
    policy: Egress,
    *,
    host: str | None = HOST,
    port: int = 80,
    hello: bool = False,
    sni: str | None = None,
    address: str = "198.18.0.7",
    resolver: Callable[[str, int], Awaitable[list[str]]] | None = None,
) -> AsyncIterator[EgressProxy]:
    """A door at which every connection arrives as said."""
    door = EgressProxy(authority, policy, pool=UpstreamPool(resolver=resolver))
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    door.port = listener.getsockname()[1]

    async def accept() -> None:
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            arrival = IncomingConnection(
                sock=sock, address=address, port=port, host=host, hello=hello, sni=sni
            )
            door.served.append(asyncio.create_task(web.serve(door, arrival)))

    accepting = asyncio.create_task(accept())
    try:
        yield door
    finally:
        accepting.cancel()
        for task in door.served:
            task.cancel()
        done = await asyncio.gather(accepting, *door.served, return_exceptions=True)
        listener.close()
        door.pool.close()
        for result in done:
            if isinstance(result, Exception):
                raise result


@contextlib.asynccontextmanager
async def serving(
    handle: Callable[[aioweb.Request], Awaitable[aioweb.StreamResponse]],
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[str]:
    """A server on loopback; its address."""
    app = aioweb.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", handle)
    runner = aioweb.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = aioweb.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"{host}:{port}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def saying(
    converse: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """A server that says whatever it likes; its address."""
    tasks: set[asyncio.Task[None]] = set()

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await converse(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(one, "127.0.0.1", 0)
    try:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def answers(data: bytes) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """What to give to `saying` for the same answer to each connection's first request."""

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(data)
        await writer.drain()

    return converse


async def echo(request: aioweb.Request) -> aioweb.Response:
    """What was asked, as JSON."""
    return aioweb.json_response(
        {
            "method": request.method,
            "path": request.raw_path,
            "headers": [[name.lower(), value] for name, value in request.headers.items()],
            "body": (await request.read()).decode("latin-1"),
        }
    )


def parts(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer; chunks are put together."""
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        whole = b""
        while body:
            size, _, body = body.partition(b"\r\n")
            whole += body[: int(size, 16)]
            body = body[int(size, 16) + 2 :]
        body = whole
    return int(first.split(" ")[1]), headers, body
