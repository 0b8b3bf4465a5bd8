"""Bodies relayed by the egress proxy: bounded memory and back-pressure in both directions."""

from __future__ import annotations

import asyncio
import hashlib
import os
import resource
import socket
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import ClientSession, WSMsgType, web

from engine.egress_web.standalone_proxy import (
    HOST,
    TOKEN,
    StandaloneProxy,
    allow,
    http_server,
    inject_token,
    open_proxy,
    raw_server,
    split_response,
)
from smokebox.egress.policy import Egress

if TYPE_CHECKING:
    from smokebox.egress.handler import HandlerContext
    from smokebox.egress.message import Request
    from smokebox.engine.egress.authority import Authority

GET = f"GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()
LARGE = 48 * 1024 * 1024


def memory_growth(before: int) -> int:
    """Return the growth of this process in bytes, at its peak."""
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


@pytest.mark.parametrize("policy", [allow, inject_token])
async def test_large_response_is_relayed_in_bounded_memory(
    authority: Authority, policy: Any
) -> None:
    piece = os.urandom(1024 * 1024)
    sent_hash = hashlib.sha256()

    async def send(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(LARGE // len(piece)):
            sent_hash.update(piece)
            await response.write(piece)
        return response

    async with (
        http_server(send) as address,
        open_proxy(authority, policy(address)) as proxy,
        proxy.connect() as (reader, writer),
    ):
        writer.write(GET)
        await reader.readuntil(b"\r\n\r\n")
        received_hash, before = hashlib.sha256(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        while size := int(await reader.readuntil(b"\r\n"), 16):
            received_hash.update(await reader.readexactly(size))
            await reader.readexactly(2)
    assert received_hash.digest() == sent_hash.digest()
    assert memory_growth(before) < LARGE // 2
    assert proxy.events[0].received == LARGE


@pytest.mark.parametrize("chunked", [True, False])
async def test_large_upload_is_relayed(authority: Authority, chunked: bool) -> None:
    piece = os.urandom(1024 * 1024)
    received_hash = hashlib.sha256()

    async def receive(request: web.Request) -> web.Response:
        assert ("Content-Length" in request.headers) is not chunked
        async for data in request.content.iter_any():
            received_hash.update(data)
        return web.Response(text="done")

    framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {LARGE}"
    async with (
        http_server(receive) as address,
        open_proxy(authority, allow(address)) as proxy,
        proxy.connect() as (reader, writer),
    ):
        sent_hash = hashlib.sha256()
        writer.write(f"PUT / HTTP/1.1\r\nHost: {HOST}\r\n{framing}\r\n\r\n".encode())
        for _ in range(LARGE // len(piece)):
            sent_hash.update(piece)
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
            await writer.drain()
        writer.write(b"0\r\n\r\n" if chunked else b"")
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(4) == b"done"
    assert received_hash.digest() == sent_hash.digest()
    assert proxy.events[0].sent == LARGE


async def test_slow_program_slows_down_the_server(authority: Authority) -> None:
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()
            sent += 65536

    async with (
        raw_server(flood) as address,
        open_proxy(authority, allow(address)) as proxy,
    ):
        with socket.create_connection(("127.0.0.1", proxy.port)) as program:
            program.sendall(GET)
            before = -1
            while not sent or sent != before:
                before = sent
                await asyncio.sleep(0.3)
            assert 0 < sent < 64 * 1024 * 1024


async def test_server_sent_events_are_relayed_at_once(authority: Authority) -> None:
    more = asyncio.Event()

    async def events(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number in range(3):
            await more.wait()
            more.clear()
            await response.write(f"data: {number}\n\n".encode())
        await response.write(f"data: {request.headers['authorization']}\n\n".encode())
        return response

    async with (
        http_server(events) as address,
        open_proxy(authority, inject_token(address)) as proxy,
        proxy.connect() as (reader, writer),
    ):
        writer.write(GET)
        assert b"text/event-stream" in await reader.readuntil(b"\r\n\r\n")
        for number in range(3):
            more.set()
            event = b"data: %d\n\n" % number
            assert event in await reader.readuntil(event)
        rest = await reader.readuntil(b"0\r\n\r\n")
    assert b"data: [redacted]" in rest or b"[redacted]" in rest
    assert TOKEN.encode() not in rest


async def test_program_that_disconnects_cancels_the_request(authority: Authority) -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def wait(request: web.Request) -> web.Response:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return web.Response()

    async with http_server(wait) as address, open_proxy(authority, allow(address)) as proxy:
        async with proxy.connect() as (_, writer):
            writer.write(GET)
            await asyncio.wait_for(started.wait(), 10)
        await asyncio.wait_for(cancelled.wait(), 10)
        await asyncio.wait(proxy.tasks, timeout=10)
        assert proxy.tasks[0].exception() is None
    assert proxy.events[0].reason == "the program left"


async def test_program_that_disconnects_cancels_its_handler(authority: Authority) -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def wait(request: Request, env: Any, context: HandlerContext) -> Request:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return request

    policy = Egress(outbound_by_host={HOST: wait})
    async with open_proxy(authority, policy) as proxy:
        async with proxy.connect() as (_, writer):
            writer.write(GET)
            await asyncio.wait_for(started.wait(), 10)
        await asyncio.wait_for(cancelled.wait(), 10)


async def put_with_expect(proxy: StandaloneProxy, size: int = 5) -> bytes:
    """Send a body after `100 Continue`, and return all responses."""
    head = f"PUT / HTTP/1.1\r\nHost: {HOST}\r\nExpect: 100-continue\r\nConnection: close\r\n"
    async with proxy.connect() as (reader, writer):
        writer.write(f"{head}Content-Length: {size}\r\n\r\n".encode())
        first = await reader.readuntil(b"\r\n\r\n")
        if b" 100 " in first:
            writer.write(b"x" * size)
        return first + await reader.read()


async def test_expect_continue_is_relayed_from_the_server(authority: Authority) -> None:
    async def receive(request: web.Request) -> web.Response:
        return web.Response(text=str(len(await request.read())))

    async with http_server(receive) as address, open_proxy(authority, allow(address)) as proxy:
        first = await put_with_expect(proxy)
        proxy.policy = inject_token(address)
        second = await put_with_expect(proxy)
    assert first.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200") and first.endswith(b"5")
    assert second.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200")


async def test_expect_continue_gets_a_refusal_before_the_body(authority: Authority) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert b"100-continue" in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        assert await reader.read() == b""

    async with raw_server(refuse) as address, open_proxy(authority, allow(address)) as proxy:
        assert (await put_with_expect(proxy)).startswith(b"HTTP/1.1 401")
        proxy.policy = Egress(denied_hosts=[HOST])
        assert (await put_with_expect(proxy)).startswith(b"HTTP/1.1 403")


async def test_server_that_ignores_expect_gets_the_body(authority: Authority) -> None:
    async def ignore_expect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = await reader.readexactly(5)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n" + body)
        await writer.drain()

    async with raw_server(ignore_expect) as address, open_proxy(authority, allow(address)) as proxy:
        assert (await put_with_expect(proxy)).endswith(b"xxxxx")


async def test_response_may_start_before_the_request_has_ended(authority: Authority) -> None:
    async def echo_chunks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(3):
            writer.write(await reader.readexactly(6))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    head = f"POST / HTTP/1.1\r\nHost: {HOST}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    async with (
        raw_server(echo_chunks) as address,
        open_proxy(authority, allow(address)) as proxy,
        proxy.connect() as (reader, writer),
    ):
        writer.write(head)
        for letter in (b"a", b"b", b"c"):
            writer.write(b"1\r\n%b\r\n" % letter)
            assert letter + b"\r\n" in await reader.readuntil(letter + b"\r\n")
        await reader.readuntil(b"0\r\n\r\n")


async def test_websocket_is_relayed_and_scrubbed(authority: Authority) -> None:
    requests = []

    async def serve(request: web.Request) -> web.WebSocketResponse:
        requests.append(request.headers.copy())
        socket = web.WebSocketResponse()
        socket.headers["X-Echo"] = request.headers["authorization"]
        await socket.prepare(request)
        async for incoming in socket:
            if incoming.type is WSMsgType.BINARY:
                await socket.send_bytes(incoming.data)
            else:
                await socket.send_str(f"{incoming.data} {request.headers['authorization']}")
        return socket

    async with (
        http_server(serve) as address,
        open_proxy(authority, inject_token(address)) as proxy,
        ClientSession() as session,
        session.ws_connect(
            f"http://127.0.0.1:{proxy.port}/ws", headers={"Host": HOST}, compress=15
        ) as socket,
    ):
        assert "[redacted]" in str(socket._response.headers["x-echo"])
        for size in (0, 1, 125, 126, 70_000, 300_000):
            await socket.send_bytes(b"t" * size)
            assert await socket.receive_bytes(timeout=10) == b"t" * size
        await socket.send_str("hello")
        message = await socket.receive_str(timeout=10)
    assert requests[0]["authorization"] == f"Bearer {TOKEN}"
    assert "sec-websocket-extensions" not in requests[0]
    assert message.startswith("hello [redacted]") or "[redacted]" in message
    assert TOKEN not in message
    await asyncio.wait(proxy.tasks, timeout=10)
    assert proxy.events[0].status == 101
    assert proxy.events[0].sent > 370_000


async def test_refused_websocket_is_an_ordinary_response(
    authority: Authority,
) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=403, text="no")

    async with http_server(refuse) as address, open_proxy(authority, allow(address)) as proxy:
        response = await proxy.send(
            f"GET / HTTP/1.1\r\nHost: {HOST}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
            "\r\n"
            f"GET /x HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n".encode()
        )
    assert split_response(response)[0] == 403
    assert response.count(b"HTTP/1.1 403") == 2
