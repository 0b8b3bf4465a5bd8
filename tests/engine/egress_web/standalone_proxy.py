"""An egress proxy without a sandbox, servers for it to reach, and their certificates.

It listens on loopback, and each test chooses the destination of its connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web

from smokebox.egress.address_guard import AddressGuard
from smokebox.egress.meter import Meter
from smokebox.egress.policy import Egress
from smokebox.egress.upstream import UpstreamPool
from smokebox.engine.egress import http_proxy
from smokebox.engine.egress.audit_log import AuditLog
from smokebox.engine.egress.listener import IncomingConnection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from smokebox.egress.handler import HandlerContext, HandlerOption
    from smokebox.egress.message import Request
    from smokebox.engine.egress.authority import Authority
    from smokebox.types import NetworkEvent

    Converse = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

HOST = "api.test"
TOKEN = "tok-5f3a9c77d1-VERYSECRET"


def allow(address: str) -> Egress:
    """Return a policy that forwards requests for `HOST` to an address."""
    return Egress(allowed_hosts=[HOST], hosts={HOST: address})


def handle(handler: HandlerOption, address: str, **options: Any) -> Egress:
    """Return a policy that passes requests for `HOST` to a handler."""
    return Egress(outbound_by_host={HOST: handler}, hosts={HOST: address}, **options)


async def inject(request: Request, env: Any, context: HandlerContext) -> Request:
    """Add the token to a request (a handler)."""
    request.headers["authorization"] = f"Bearer {env['TOKEN']}"
    return request


def inject_token(address: str) -> Egress:
    """Return a policy whose handler adds the token."""
    return handle(inject, address)


def client_tls(authority: Authority) -> ssl.SSLContext:
    """Return the TLS context of a client that trusts only this authority."""
    return ssl.create_default_context(cadata=authority.pem.decode())


def server_tls(authority: Authority) -> ssl.SSLContext:
    """Return the TLS context of a server that has a certificate for every name."""

    def choose(connection: ssl.SSLObject, name: str, _: ssl.SSLContext) -> None:
        connection.context = authority.context_for(name)

    context = authority.context_for("default.test")
    context.sni_callback = choose
    return context


@dataclass
class StandaloneProxy:
    """A `ProxyContext`, the port that it listens on, and the events that it logged."""

    authority: Authority
    policy: Egress
    pool: UpstreamPool
    port: int = 0
    sandbox_id: str = "box"
    events: list[NetworkEvent] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=lambda: {"TOKEN": TOKEN})
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.audit_log = AuditLog(self.events.append)
        self.meter = Meter(lambda: self.policy)

    async def send(self, request: bytes) -> bytes:
        """Send bytes, and return everything up to the end of the connection."""
        async with self.connect() as (reader, writer):
            writer.write(request)
            return await reader.read()

    async def get(self, path: str = "/", **headers: str) -> bytes:
        """Return the response to a plain GET."""
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n{lines}\r\n"
        return await self.send(head.encode())

    @contextlib.asynccontextmanager
    async def connect(
        self, tls: ssl.SSLContext | None = None, name: str = HOST
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Open a connection to the proxy."""
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=tls, server_hostname=name if tls else None
        )
        try:
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def wait(self) -> None:
        """Wait until every connection has ended."""
        await asyncio.wait(self.tasks, timeout=10)


@contextlib.asynccontextmanager
async def open_proxy(
    authority: Authority,
    policy: Egress,
    *,
    host: str | None = HOST,
    port: int = 80,
    hello: bool = False,
    sni: str | None = None,
    address: str = "198.18.0.7",
    resolver: Callable[[str, int], Awaitable[list[str]]] | None = None,
) -> AsyncIterator[StandaloneProxy]:
    """Run a proxy that takes every connection for one to this host, address and port."""
    proxy = StandaloneProxy(
        authority, policy, UpstreamPool(AddressGuard(trusts_policy=True), resolver=resolver)
    )
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    proxy.port = listener.getsockname()[1]

    async def accept() -> None:
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            incoming = IncomingConnection(
                sock=sock, address=address, port=port, host=host, hello=hello, sni=sni
            )
            proxy.tasks.append(asyncio.create_task(http_proxy.serve(proxy, incoming)))

    accepting = asyncio.create_task(accept())
    try:
        yield proxy
    finally:
        accepting.cancel()
        for task in proxy.tasks:
            task.cancel()
        results = await asyncio.gather(accepting, *proxy.tasks, return_exceptions=True)
        listener.close()
        proxy.pool.close()
        for result in results:
            if isinstance(result, Exception):
                raise result


@contextlib.asynccontextmanager
async def http_server(
    handle: Callable[[web.Request], Awaitable[web.StreamResponse]],
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[str]:
    """Run an HTTP server on loopback, and yield its address."""
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"{host}:{port}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def raw_server(converse: Converse) -> AsyncIterator[str]:
    """Run a server that can send any bytes, and yield its address."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await converse(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def respond_with(data: bytes) -> Converse:
    """Return a function for `raw_server` that sends `data` after the first request."""

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(data)
        await writer.drain()

    return converse


async def echo(request: web.Request) -> web.Response:
    """Respond with the request as JSON."""
    return web.json_response(
        {
            "method": request.method,
            "path": request.raw_path,
            "headers": [[name.lower(), value] for name, value in request.headers.items()],
            "body": (await request.read()).decode("latin-1"),
        }
    )


def split_response(response: bytes) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of a response, with its chunks joined."""
    head, _, body = response.partition(b"\r\n\r\n")
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
