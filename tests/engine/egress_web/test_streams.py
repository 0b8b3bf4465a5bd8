"""Bodies as they come: at constant memory, at the pace of the slower side, either way."""

from __future__ import annotations

import asyncio
import hashlib
import os
import resource
import socket
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import ClientSession, WSMsgType, web

from engine.egress_web.doors import HOST, TOKEN, EgressProxy, open_door, parts, saying, serving
from smokebox.egress.policy import Egress

if TYPE_CHECKING:
    from engine.egress_web.doors import Authority
    from smokebox.egress.handler import HandlerContext
    from smokebox.egress.message import Request

GET = f"GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()
LARGE = 48 * 1024 * 1024


def to(address: str) -> Egress:
    return Egress(allowed_hosts=[HOST], hosts={HOST: address})


async def inject(request: Request, env: Any, context: HandlerContext) -> Request:
    request.headers["authorization"] = f"Bearer {env['TOKEN']}"
    return request


def injecting(address: str) -> Egress:
    return Egress(outbound_by_host={HOST: inject}, hosts={HOST: address})


def grown(before: int) -> int:
    """How many bytes this process has grown at its largest."""
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


@pytest.mark.parametrize("policy", [to, injecting])
async def test_large_answers_pass_whole(authority: Authority, policy: Any) -> None:
    piece = os.urandom(1024 * 1024)
    told = hashlib.sha256()

    async def send(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(LARGE // len(piece)):
            told.update(piece)
            await response.write(piece)
        return response

    async with (
        serving(send) as address,
        open_door(authority, policy(address)) as door,
        door.connected() as (reader, writer),
    ):
        writer.write(GET)
        await reader.readuntil(b"\r\n\r\n")
        heard, before = hashlib.sha256(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        while size := int(await reader.readuntil(b"\r\n"), 16):
            heard.update(await reader.readexactly(size))
            await reader.readexactly(2)
    assert heard.digest() == told.digest()
    assert grown(before) < LARGE // 2
    assert door.audit_log.notes[0]["received"] == LARGE


@pytest.mark.parametrize("chunked", [True, False])
async def test_large_uploads_pass_whole(authority: Authority, chunked: bool) -> None:
    piece = os.urandom(1024 * 1024)
    heard = hashlib.sha256()

    async def take(request: web.Request) -> web.Response:
        assert ("Content-Length" in request.headers) is not chunked
        async for data in request.content.iter_any():
            heard.update(data)
        return web.Response(text="done")

    framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {LARGE}"
    async with (
        serving(take) as address,
        open_door(authority, to(address)) as door,
        door.connected() as (reader, writer),
    ):
        told = hashlib.sha256()
        writer.write(f"PUT / HTTP/1.1\r\nHost: {HOST}\r\n{framing}\r\n\r\n".encode())
        for _ in range(LARGE // len(piece)):
            told.update(piece)
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
            await writer.drain()
        writer.write(b"0\r\n\r\n" if chunked else b"")
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(4) == b"done"
    assert heard.digest() == told.digest()
    assert door.audit_log.notes[0]["sent"] == LARGE


async def test_a_program_that_does_not_read_holds_the_server_back(authority: Authority) -> None:
    sent = 0

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x" * 65536)
            await writer.drain()
            sent += 65536

    async with (
        saying(pour) as address,
        open_door(authority, to(address)) as door,
    ):
        with socket.create_connection(("127.0.0.1", door.port)) as program:
            program.sendall(GET)
            before = -1
            while not sent or sent != before:
                before = sent
                await asyncio.sleep(0.3)
            assert 0 < sent < 64 * 1024 * 1024


async def test_events_pass_as_they_come(authority: Authority) -> None:
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
        serving(events) as address,
        open_door(authority, injecting(address)) as door,
        door.connected() as (reader, writer),
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


async def test_a_program_that_leaves_ends_the_request(authority: Authority) -> None:
    begun, gone = asyncio.Event(), asyncio.Event()

    async def wait(request: web.Request) -> web.Response:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()
        return web.Response()

    async with serving(wait) as address, open_door(authority, to(address)) as door:
        async with door.connected() as (_, writer):
            writer.write(GET)
            await asyncio.wait_for(begun.wait(), 10)
        await asyncio.wait_for(gone.wait(), 10)
        await asyncio.wait(door.served, timeout=10)
        assert door.served[0].exception() is None
    assert door.audit_log.notes[0]["reason"] == "the program left"


async def test_a_program_that_leaves_ends_its_handler(authority: Authority) -> None:
    begun, gone = asyncio.Event(), asyncio.Event()

    async def wait(request: Request, env: Any, context: HandlerContext) -> Request:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()
        return request

    policy = Egress(outbound_by_host={HOST: wait})
    async with open_door(authority, policy) as door:
        async with door.connected() as (_, writer):
            writer.write(GET)
            await asyncio.wait_for(begun.wait(), 10)
        await asyncio.wait_for(gone.wait(), 10)


async def expecting(door: EgressProxy, size: int = 5) -> bytes:
    """Send a body only when told to; all that was said before and after."""
    head = f"PUT / HTTP/1.1\r\nHost: {HOST}\r\nExpect: 100-continue\r\nConnection: close\r\n"
    async with door.connected() as (reader, writer):
        writer.write(f"{head}Content-Length: {size}\r\n\r\n".encode())
        first = await reader.readuntil(b"\r\n\r\n")
        if b" 100 " in first:
            writer.write(b"x" * size)
        return first + await reader.read()


async def test_a_program_that_waits_is_told_to_go_on_by_the_server(authority: Authority) -> None:
    async def take(request: web.Request) -> web.Response:
        return web.Response(text=str(len(await request.read())))

    async with serving(take) as address, open_door(authority, to(address)) as door:
        said = await expecting(door)
        door.policy = injecting(address)
        again = await expecting(door)
    assert said.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200") and said.endswith(b"5")
    assert again.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200")


async def test_a_program_that_waits_hears_a_refusal_instead(authority: Authority) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert b"100-continue" in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        assert await reader.read() == b""

    async with saying(refuse) as address, open_door(authority, to(address)) as door:
        assert (await expecting(door)).startswith(b"HTTP/1.1 401")
        door.policy = Egress(denied_hosts=[HOST])
        assert (await expecting(door)).startswith(b"HTTP/1.1 403")


async def test_a_server_that_does_not_know_the_word_gets_the_body(authority: Authority) -> None:
    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = await reader.readexactly(5)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n" + body)
        await writer.drain()

    async with saying(deaf) as address, open_door(authority, to(address)) as door:
        assert (await expecting(door)).endswith(b"xxxxx")


async def test_a_server_may_answer_while_it_is_still_sent_to(authority: Authority) -> None:
    async def both(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(3):
            writer.write(await reader.readexactly(6))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    head = f"POST / HTTP/1.1\r\nHost: {HOST}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    async with (
        saying(both) as address,
        open_door(authority, to(address)) as door,
        door.connected() as (reader, writer),
    ):
        writer.write(head)
        for letter in (b"a", b"b", b"c"):
            writer.write(b"1\r\n%b\r\n" % letter)
            assert letter + b"\r\n" in await reader.readuntil(letter + b"\r\n")
        await reader.readuntil(b"0\r\n\r\n")


async def test_a_websocket_is_passed_and_scrubbed(authority: Authority) -> None:
    got = []

    async def talk(request: web.Request) -> web.WebSocketResponse:
        got.append(request.headers.copy())
        socket = web.WebSocketResponse()
        socket.headers["X-Echo"] = request.headers["authorization"]
        await socket.prepare(request)
        async for message in socket:
            if message.type is WSMsgType.BINARY:
                await socket.send_bytes(message.data)
            else:
                await socket.send_str(f"{message.data} {request.headers['authorization']}")
        return socket

    async with (
        serving(talk) as address,
        open_door(authority, injecting(address)) as door,
        ClientSession() as session,
        session.ws_connect(
            f"http://127.0.0.1:{door.port}/ws", headers={"Host": HOST}, compress=15
        ) as socket,
    ):
        assert "[redacted]" in str(socket._response.headers["x-echo"])
        for size in (0, 1, 125, 126, 70_000, 300_000):
            await socket.send_bytes(b"t" * size)
            assert await socket.receive_bytes(timeout=10) == b"t" * size
        await socket.send_str("hello")
        said = await socket.receive_str(timeout=10)
    assert got[0]["authorization"] == f"Bearer {TOKEN}"
    assert "sec-websocket-extensions" not in got[0]
    assert said.startswith("hello [redacted]") or "[redacted]" in said
    assert TOKEN not in said
    await asyncio.wait(door.served, timeout=10)
    assert door.audit_log.notes[0]["status"] == 101
    assert door.audit_log.notes[0]["sent"] > 370_000


async def test_a_websocket_that_the_server_refuses_is_an_ordinary_answer(
    authority: Authority,
) -> None:
    async def no(request: web.Request) -> web.Response:
        return web.Response(status=403, text="no")

    async with serving(no) as address, open_door(authority, to(address)) as door:
        answer = await door.ask(
            f"GET / HTTP/1.1\r\nHost: {HOST}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
            "\r\n"
            f"GET /x HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n".encode()
        )
    assert parts(answer)[0] == 403
    assert answer.count(b"HTTP/1.1 403") == 2
