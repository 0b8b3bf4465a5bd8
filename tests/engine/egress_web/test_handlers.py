"""Handlers in the egress proxy: edited requests, their own responses, and scrubbed secrets."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from engine.egress_web.standalone_proxy import (
    HOST,
    TOKEN,
    echo,
    handle,
    http_server,
    inject,
    open_proxy,
    raw_server,
    respond_with,
    split_response,
)
from smokebox.egress import outbound
from smokebox.egress.handler import Refused
from smokebox.egress.message import MessageBody, Request, Response

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox.egress.handler import Handler, HandlerContext
    from smokebox.engine.egress.authority import Authority

POST = f"POST /p HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello"


async def inject_and_forward(request: Request, env: Any, context: HandlerContext) -> Response:
    return await context.forward(await inject(request, env, context))


@pytest.mark.parametrize("handler", [inject, inject_and_forward])
async def test_injected_header_is_sent_and_its_echo_scrubbed(
    authority: Authority, handler: Handler
) -> None:
    requests = []

    async def record(request: web.Request) -> web.Response:
        requests.append(request.headers.copy())
        response = await echo(request)
        response.headers["X-Echo"] = request.headers["authorization"]
        response.headers["X-Encoded"] = base64.b64encode(TOKEN.encode()).decode()
        return response

    async with (
        http_server(record) as address,
        open_proxy(authority, handle(handler, address)) as proxy,
    ):
        response = await proxy.get("/", Range="bytes=0-5", **{"Accept-Encoding": "br"})
    status, headers, body = split_response(response)
    assert requests[0]["authorization"] == f"Bearer {TOKEN}"
    assert requests[0]["accept-encoding"] == "identity"
    assert "range" not in requests[0]
    assert status == 200
    assert headers["content-length"] == str(len(body))
    assert TOKEN.encode() not in response
    assert base64.b64encode(TOKEN.encode()) not in response
    assert "[redacted]" in dict(json.loads(body)["headers"])["authorization"]
    assert TOKEN not in str(proxy.events)
    assert proxy.events[0].handler == handler.__name__
    assert proxy.events[0].verdict == "forwarded"


@pytest.mark.parametrize("size", [1, 3, 7])
async def test_secret_split_into_chunks_is_scrubbed(authority: Authority, size: int) -> None:
    text = f"<{TOKEN}>".encode()
    chunks = [text[at : at + size] for at in range(0, len(text), size)]
    raw = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    raw += b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"

    async def slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for at in range(0, len(raw), 11):
            writer.write(raw[at : at + 11])
            await writer.drain()

    async with (
        raw_server(slowly) as address,
        open_proxy(authority, handle(inject, address)) as proxy,
    ):
        _, _, body = split_response(await proxy.get())
    assert body.startswith(b"<[redacted]") and body.endswith(b"*>")
    assert len(body) == len(text)


async def test_compressed_echo_is_decompressed_and_scrubbed(authority: Authority) -> None:
    compressed = gzip.compress(f"<{TOKEN}>".encode())
    raw = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(
        compressed
    )
    async with (
        raw_server(respond_with(raw + compressed)) as address,
        open_proxy(authority, handle(inject, address)) as proxy,
    ):
        status, headers, body = split_response(await proxy.get())
    assert status == 200
    assert "content-encoding" not in headers
    assert body.startswith(b"<[redacted]")


async def test_unknown_compression_is_refused_unless_scrubbing_is_off(authority: Authority) -> None:
    raw = b"HTTP/1.1 200 OK\r\nContent-Encoding: br\r\nContent-Length: 1\r\n\r\nx"
    async with (
        raw_server(respond_with(raw)) as address,
        open_proxy(authority, handle(inject, address)) as proxy,
    ):
        status, _, body = split_response(await proxy.get())
        proxy.policy = handle(inject, address, scrub=False)
        passed, _, _ = split_response(await proxy.get())
    assert status == 502
    assert b"scrub=False" in body
    assert passed == 200


async def test_echo_is_not_scrubbed_with_scrub_off(authority: Authority) -> None:
    async with (
        http_server(echo) as address,
        open_proxy(authority, handle(inject, address, scrub=False)) as proxy,
    ):
        assert TOKEN.encode() in await proxy.get()


async def test_secret_in_the_url_is_scrubbed(authority: Authority) -> None:
    async def sign(request: Request, env: Any, context: HandlerContext) -> Request:
        request.url += f"?key={env['TOKEN']}"
        return request

    async def elsewhere(request: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": f"/next?key={request.query['key']}"})

    async with (
        http_server(elsewhere) as address,
        open_proxy(authority, handle(sign, address)) as proxy,
    ):
        status, headers, _ = split_response(await proxy.get("/start"))
    assert status == 302
    assert headers["location"].startswith("/next?key=[redacted]")
    assert proxy.events[0].path == "/start"


def refuse(request: Request, env: Any, context: HandlerContext) -> Request:
    raise Refused("not on a Monday")


async def fail(request: Request, env: Any, context: HandlerContext) -> Request:
    raise RuntimeError(f"could not use {env['TOKEN']}")


async def return_nothing(request: Request, env: Any, context: HandlerContext) -> None:
    request.headers["x"] = "y"


async def hang(request: Request, env: Any, context: HandlerContext) -> Request:
    await asyncio.Event().wait()
    raise AssertionError


async def inject_line_break(request: Request, env: Any, context: HandlerContext) -> Request:
    request.headers["x"] = f"{env['TOKEN']}\r\nHost: other.test"
    return request


async def go_private(request: Request, env: Any, context: HandlerContext) -> Request:
    request.url = "http://127.0.0.1:1/"
    return request


async def odd_status(request: Request, env: Any, context: HandlerContext) -> Response:
    return Response("x", 7)


async def half_read(request: Request, env: Any, context: HandlerContext) -> Request:
    async for _ in request.body:
        break
    return request


@pytest.mark.parametrize(
    ("handler", "status", "reason"),
    [
        (refuse, 403, "not on a Monday"),
        (fail, 502, "failed with RuntimeError"),
        (return_nothing, 502, "failed with TypeError"),
        (hang, 504, "did not decide"),
        (inject_line_break, 502, "the value of the header x cannot be sent"),
        (go_private, 403, "a private address"),
        (odd_status, 502, "the status 7 cannot be sent"),
        (half_read, 502, "did not keep it"),
        ("no.such.module:at_all", 502, "failed with InvalidOption"),
    ],
)
async def test_nothing_is_sent_if_the_handler_fails(
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
    handler: Any,
    status: int,
    reason: str,
) -> None:
    monkeypatch.setattr(outbound, "HANDLER_SECONDS", 0.3 if handler is hang else 30.0)
    requests = []

    async def record(request: web.Request) -> web.Response:
        requests.append(request)
        return web.Response()

    async with (
        http_server(record) as address,
        open_proxy(authority, handle(handler, address)) as proxy,
    ):
        response = await proxy.send(POST.encode())
    found, _, body = split_response(response)
    assert (found, requests) == (status, [])
    assert reason in body.decode()
    assert TOKEN.encode() not in response
    assert TOKEN not in str(proxy.events)


async def test_handler_may_respond_itself(authority: Authority) -> None:
    async def response(request: Request, env: Any, context: HandlerContext) -> Response:
        return Response.of_json({"box": context.sandbox_id, "rule": context.rule, "u": request.url})

    async with open_proxy(authority, handle(response, "127.0.0.1:1")) as proxy:
        status, headers, body = split_response(await proxy.get("/a?b"))
    assert (status, headers["content-type"]) == (200, "application/json")
    assert json.loads(body) == {
        "box": "box",
        "rule": "outbound_by_host['api.test']",
        "u": "http://api.test/a?b",
    }
    assert proxy.events[0].verdict == "answered"


async def test_handler_may_read_and_replace_bodies(authority: Authority) -> None:
    async def uppercase(request: Request, env: Any, context: HandlerContext) -> Response:
        request.body = MessageBody((await request.text()).upper())
        response = await context.forward(request)
        seen = await response.json()
        response.body = MessageBody(pieces(seen["body"]))
        return response

    async def pieces(text: str) -> AsyncIterator[bytes]:
        for letter in text:
            yield letter.encode()

    async with (
        http_server(echo) as address,
        open_proxy(authority, handle(uppercase, address)) as proxy,
    ):
        _, headers, body = split_response(await proxy.send(POST.encode()))
    assert body == b"HELLO"
    assert headers["transfer-encoding"] == "chunked"


async def test_handler_may_forward_to_another_server(authority: Authority) -> None:
    async with http_server(echo) as elsewhere:

        async def redirect(request: Request, env: Any, context: HandlerContext) -> Response:
            return await context.forward(request, to=f"http://{elsewhere}/base/")

        async with open_proxy(authority, handle(redirect, "127.0.0.1:1")) as proxy:
            _, _, body = split_response(await proxy.send(POST.encode()))
    seen = json.loads(body)
    assert (seen["path"], seen["body"]) == ("/base/p", "hello")
    assert dict(seen["headers"])["host"] == elsewhere


async def test_unread_body_keeps_its_length(authority: Authority) -> None:
    async with (
        http_server(echo) as address,
        open_proxy(authority, handle(inject, address)) as proxy,
    ):
        _, _, body = split_response(await proxy.send(POST.encode()))
    seen = json.loads(body)
    assert dict(seen["headers"])["content-length"] == "5"
    assert seen["body"] == "hello"


async def test_waiting_for_a_server_does_not_count_towards_the_deadline(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbound, "HANDLER_SECONDS", 0.3)

    async def slow(request: web.Request) -> web.Response:
        await asyncio.sleep(0.6)
        return web.Response(text="late")

    async with (
        http_server(slow) as address,
        open_proxy(authority, handle(inject_and_forward, address)) as proxy,
    ):
        assert split_response(await proxy.get())[2] == b"late"


async def test_response_body_of_a_handler_that_fails_is_truncated(authority: Authority) -> None:
    async def respond_partly(request: Request, env: Any, context: HandlerContext) -> Response:
        return Response(pieces())

    async def pieces() -> AsyncIterator[bytes]:
        yield b"some"
        raise RuntimeError(TOKEN)

    async with open_proxy(authority, handle(respond_partly, "127.0.0.1:1")) as proxy:
        with pytest.raises(ConnectionError):
            await proxy.get()
        await proxy.wait()
    assert "failed with RuntimeError" in proxy.events[0].reason


async def test_forwarded_response_that_is_not_used_is_closed(authority: Authority) -> None:
    closed = asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"x" * 1000)
                await asyncio.sleep(0.01)
        finally:
            closed.set()

    async def ignore_response(request: Request, env: Any, context: HandlerContext) -> Response:
        await context.forward(request)
        return Response("mine")

    async with (
        http_server(endless) as address,
        open_proxy(authority, handle(ignore_response, address)) as proxy,
    ):
        assert split_response(await proxy.get())[2] == b"mine"
        await asyncio.wait_for(closed.wait(), 10)
