"""Requests that the policy allows, and their responses."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from engine.egress_web.standalone_proxy import (
    HOST,
    allow,
    client_tls,
    echo,
    http_server,
    open_proxy,
    raw_server,
    respond_with,
    split_response,
)

if TYPE_CHECKING:
    from smokebox.engine.egress.authority import Authority

GET = f"GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()
LAST = f"GET / HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n".encode()


async def test_request_is_rewritten_and_its_response_relayed(authority: Authority) -> None:
    async with http_server(echo) as address, open_proxy(authority, allow(address)) as proxy:
        status, headers, body = split_response(
            await proxy.send(
                b"POST /a/b?c=d HTTP/1.1\r\nhost:   API.test.  \r\nX-One:1\r\nx-one: 2\r\n"
                b"Connection: close, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: 5\r\nTE: trailers\r\n"
                b"Proxy-Authorization: x\r\nContent-Length: 5\r\n\r\nhello"
            )
        )
    seen = json.loads(body)
    names = [name for name, _ in seen["headers"]]
    assert (status, seen["method"], seen["path"]) == (200, "POST", "/a/b?c=d")
    assert seen["body"] == "hello"
    assert [value for name, value in seen["headers"] if name == "x-one"] == ["1", "2"]
    assert not {"connection", "x-hop", "keep-alive", "te", "proxy-authorization"} & set(names)
    assert headers["connection"] == "close"
    event = proxy.events[0]
    assert (event.verdict, event.rule) == ("forwarded", "allowed_hosts['api.test']")
    assert (event.sent, event.received) == (5, len(body))


async def test_tls_is_terminated_and_the_server_verified(
    authority: Authority,
) -> None:
    async with (
        http_server(echo, authority.context_for(HOST)) as address,
        open_proxy(authority, allow(address), port=443, hello=True, sni=HOST) as proxy,
        proxy.connect(client_tls(authority)) as (reader, writer),
    ):
        writer.write(LAST)
        status, _, _ = split_response(await reader.read())
    assert status == 200
    assert proxy.events[0].protocol == "https"


async def test_server_with_another_name_in_its_certificate_is_refused(
    authority: Authority,
) -> None:
    async with (
        http_server(echo, authority.context_for("other.test")) as address,
        open_proxy(authority, allow(address), port=443, hello=True, sni=HOST) as proxy,
        proxy.connect(client_tls(authority)) as (reader, writer),
    ):
        writer.write(LAST)
        status, _, body = split_response(await reader.read())
    assert status == 502
    assert b"certificate of api.test is not trusted" in body


async def test_pipelined_requests_are_served_in_order(
    authority: Authority,
) -> None:
    async with http_server(echo) as address, open_proxy(authority, allow(address)) as proxy:
        requests = b"".join(GET.replace(b" / ", b" /%d " % number) for number in range(9))
        response = await proxy.send(requests + LAST)
    found = [response.find(b'"path": "/%d"' % number) for number in range(9)]
    assert -1 not in found
    assert found == sorted(found)
    assert response.count(b"HTTP/1.1 200") == 10


async def test_connection_to_the_server_is_reused(authority: Authority) -> None:
    peers = set()

    async def remember(request: web.Request) -> web.Response:
        assert request.transport is not None
        peers.add(request.transport.get_extra_info("peername"))
        return web.Response(text="x")

    async with http_server(remember) as address, open_proxy(authority, allow(address)) as proxy:
        for _ in range(3):
            assert split_response(await proxy.send(GET + GET + LAST))[0] == 200
    assert len(peers) == 1


async def test_idle_connection_that_the_server_closed_is_not_reused(authority: Authority) -> None:
    closed: list[asyncio.StreamWriter] = []

    async def close_after_response(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx")
        await writer.drain()
        if len(closed) < 2:
            # Without `Connection: close`: the next request may meet the end of it.
            closed.append(writer)
            writer.close()
        else:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\ny")

    async with (
        raw_server(close_after_response) as address,
        open_proxy(authority, allow(address)) as proxy,
    ):
        response = await proxy.send(GET + GET + GET + LAST)
    assert response.count(b"HTTP/1.1 200") == 4


@pytest.mark.parametrize(
    ("raw", "status", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", 200, b"hi"),
        (b"HTTP/1.0 200 OK\r\n\r\nuntil the end", 200, b"until the end"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X\r\n\r\n"
            b"2\r\nhi\r\n0\r\nX: 1\r\n\r\n",
            200,
            b"hi",
        ),
        (b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\nHTTP/1.1 204 No\r\n\r\n", 204, b""),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 99\r\n\r\n", 304, b""),
        (
            b"HTTP/1.1 302 Found\r\nLocation: http://10.0.0.1/\r\nContent-Length: 0\r\n\r\n",
            302,
            b"",
        ),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", 502, None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nhi", 502, None),
        (b"SSH-2.0-OpenSSH\r\n\r\n", 502, None),
        (b"", 502, None),
    ],
)
async def test_server_response_is_relayed_or_explained(
    authority: Authority, raw: bytes, status: int, body: bytes | None
) -> None:
    async with (
        raw_server(respond_with(raw)) as address,
        open_proxy(authority, allow(address)) as proxy,
    ):
        found, headers, content = split_response(await proxy.get())
    assert found == status
    if body is None:
        assert content.startswith(b"smokebox: api.test")
        assert proxy.events[0].verdict == "failed"
    else:
        assert content == body
        assert "trailer" not in headers


async def test_response_to_head_has_the_length_and_no_body(authority: Authority) -> None:
    raw = b"HTTP/1.1 200 OK\r\nContent-Length: 1234\r\n\r\n"
    async with (
        raw_server(respond_with(raw)) as address,
        open_proxy(authority, allow(address)) as proxy,
    ):
        response = await proxy.send(LAST.replace(b"GET", b"HEAD"))
    status, headers, body = split_response(response)
    assert (status, headers["content-length"], body) == (200, "1234", b"")


async def test_truncated_response_is_truncated_for_the_program(authority: Authority) -> None:
    raw = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhal"
    async with (
        raw_server(respond_with(raw)) as address,
        open_proxy(authority, allow(address)) as proxy,
        proxy.connect() as (reader, writer),
    ):
        writer.write(GET)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(10)
    assert proxy.events[0].verdict == "failed"
    assert "cut off" in proxy.events[0].reason


async def test_http_1_0_client_gets_no_chunks(authority: Authority) -> None:
    raw = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"
    async with (
        raw_server(respond_with(raw)) as address,
        open_proxy(authority, allow(address)) as proxy,
    ):
        response = await proxy.send(f"GET / HTTP/1.0\r\nHost: {HOST}\r\n\r\n".encode())
    assert response.endswith(b"\r\n\r\nhi")
    assert b"transfer-encoding" not in response.lower()


async def test_absolute_target_is_reduced_to_its_path(authority: Authority) -> None:
    async with http_server(echo) as address, open_proxy(authority, allow(address)) as proxy:
        response = await proxy.send(LAST.replace(b" / ", b" http://API.test/x?y "))
    assert json.loads(split_response(response)[2])["path"] == "/x?y"


async def test_refused_connection_is_explained(authority: Authority) -> None:
    async with raw_server(respond_with(b"")) as address:
        pass
    async with open_proxy(authority, allow(address)) as proxy:
        status, _, body = split_response(await proxy.get())
    assert status == 502
    assert b"Connect" in body or b"refused" in body
