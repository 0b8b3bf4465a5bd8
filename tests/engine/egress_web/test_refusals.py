"""Requests that the egress proxy refuses: by policy, host, address, limit or syntax."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

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
from smokebox.egress.meter import Meter
from smokebox.egress.policy import Egress

if TYPE_CHECKING:
    from aiohttp import web

    from smokebox.engine.egress.authority import Authority

PAGE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


async def test_refusal_names_the_setting_that_would_open_it(authority: Authority) -> None:
    async with open_proxy(authority, Egress(outbound_by_host={"x.test": "a:b"})) as proxy:
        status, headers, body = split_response(await proxy.get())
        _, _, as_json = split_response(await proxy.get(Accept="application/json"))
    assert (status, headers["x-smokebox-refused"]) == (403, "internet")
    assert b"allowed_hosts=['api.test'] would open it" in body
    assert json.loads(as_json)["error"]["rule"] == "internet"
    assert [event.verdict for event in proxy.events] == ["refused"] * 2


async def test_policy_is_checked_for_each_request(authority: Authority) -> None:
    async with (
        http_server(echo) as address,
        open_proxy(authority, allow(address)) as proxy,
        proxy.connect() as (reader, writer),
    ):
        for status in (b"200", b"403", b"200"):
            proxy.policy = allow(address) if status == b"200" else Egress(denied_hosts=[HOST])
            writer.write(f"GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.split(b" ")[1] == status
            size = int(split_response(head)[1]["content-length"])
            await reader.readexactly(size)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: other.test\r\n\r\n", 421),
        (b"GET / HTTP/1.1\r\nHost: api.test:8080\r\n\r\n", 421),
        (b"GET / HTTP/1.1\r\nHost: 198.18.0.7\r\n\r\n", 421),
        (b"GET / HTTP/1.1\r\nHost: api.test@other.test\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: api.test, other.test\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost:\r\n\r\n", 400),
        (b"GET http://other.test/ HTTP/1.1\r\nHost: api.test\r\n\r\n", 400),
        (b"GET http://api.test@other.test/ HTTP/1.1\r\nHost: api.test\r\n\r\n", 400),
        (b"GET https://api.test/ HTTP/1.1\r\nHost: api.test\r\n\r\n", 400),
        (b"GET ftp://api.test/ HTTP/1.1\r\nHost: api.test\r\n\r\n", 400),
        (b"GET other.test:80 HTTP/1.1\r\nHost: api.test\r\n\r\n", 400),
        (b"GET * HTTP/1.1\r\nHost: api.test\r\n\r\n", 400),
        (b"GET /#x HTTP/1.1\r\nHost: api.test\r\n\r\n", 400),
        (b"CONNECT api.test:443 HTTP/1.1\r\nHost: api.test\r\n\r\n", 405),
        (b"GET / HTTP/1.1\nHost: api.test\n\n", 400),
        (b"GET / HTTP/1.1\r\nHost: api.test\r\nX: " + b"y" * 70_000 + b"\r\n\r\n", 431),
        (b"POST / HTTP/1.1\r\nHost: api.test\r\nExpect: x\r\nContent-Length: 1\r\n\r\n", 417),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"\x16\x03\x01\x00\x05hello\r\n\r\n", 400),
    ],
)
async def test_request_with_a_wrong_host_or_syntax_reaches_no_server(
    authority: Authority, request_: bytes, status: int
) -> None:
    async with (
        raw_server(respond_with(PAGE)) as address,
        open_proxy(authority, allow(address)) as proxy,
    ):
        found, headers, _ = split_response(await proxy.send(request_))
    assert (found, headers["connection"]) == (status, "close")
    assert proxy.events[0].verdict == "refused"
    assert proxy.events[0].reason


@pytest.mark.parametrize(
    "smuggled",
    [
        b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"Content-Length: 0\r\nContent-Length: 40\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n0;\n\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n0\r\n\r\n",
        b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    ],
)
async def test_request_smuggling_is_refused(authority: Authority, smuggled: bytes) -> None:
    seen = []

    async def count(request: web.Request) -> web.Response:
        seen.append(request.path)
        return await echo(request)

    async with http_server(count) as address, open_proxy(authority, allow(address)) as proxy:
        response = await proxy.send(
            b"POST /first HTTP/1.1\r\nHost: api.test\r\n"
            + smuggled
            + b"GET /hidden HTTP/1.1\r\nHost: api.test\r\n\r\n"
        )
    assert split_response(response)[0] == 400
    assert response.count(b"HTTP/1.1 400") == 1
    assert "/hidden" not in seen


@pytest.mark.parametrize(
    ("hello", "sni", "reason"),
    [
        (False, None, "not TLS"),
        (True, None, "without a server name"),
        (True, "other.test", "goes to api.test"),
    ],
)
async def test_port_443_requires_tls_with_the_resolved_name(
    authority: Authority, hello: bool, sni: str | None, reason: str
) -> None:
    policy = Egress(internet=True)
    async with open_proxy(authority, policy, port=443, hello=hello, sni=sni) as proxy:
        assert await proxy.send(b"") == b""
    assert reason in proxy.events[0].reason


def connect_without_trust(port: int) -> None:
    empty = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with socket.create_connection(("127.0.0.1", port)) as sock:
        empty.wrap_socket(sock, server_hostname=HOST)


async def test_program_that_does_not_trust_the_proxy_is_logged(
    authority: Authority,
) -> None:
    policy = Egress(internet=True)
    async with open_proxy(authority, policy, port=443, hello=True, sni=HOST) as proxy:
        with pytest.raises(ssl.SSLError):
            await asyncio.to_thread(connect_without_trust, proxy.port)
        await asyncio.wait(proxy.tasks)
    assert "does not trust" in proxy.events[0].reason


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "10.1.2.3", "169.254.169.254", "::1", "::ffff:127.0.0.1", "fd00::1"]
)
async def test_name_that_resolves_to_a_private_address_is_refused(
    authority: Authority, address: str
) -> None:
    lookups = []

    async def resolve(host: str, port: int) -> list[str]:
        lookups.append(host)
        return ["93.184.216.34", address]

    policy = Egress(internet=True)
    async with open_proxy(authority, policy, resolver=resolve) as proxy:
        status, headers, body = split_response(await proxy.get())
    assert (status, headers["x-smokebox-refused"]) == (403, "private")
    assert b"hosts={'api.test'" in body
    assert lookups == [HOST]


@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.169.254", "10.0.0.1", "::1"])
async def test_private_address_is_refused_with_internet_on(
    authority: Authority, address: str
) -> None:
    shown = f"[{address}]" if ":" in address else address
    async with open_proxy(authority, Egress(internet=True), host=None, address=address) as proxy:
        request = f"GET / HTTP/1.1\r\nHost: {shown}\r\nConnection: close\r\n\r\n"
        status, headers, _ = split_response(await proxy.send(request.encode()))
    assert (status, headers["x-smokebox-refused"]) == (403, "private")


async def test_connection_by_address_is_checked_by_its_server_name(authority: Authority) -> None:
    async with (
        http_server(echo, authority.context_for(HOST)) as address,
        open_proxy(
            authority, allow(address), host=None, address="8.8.8.8", port=443, hello=True, sni=HOST
        ) as proxy,
        proxy.connect(client_tls(authority)) as (reader, writer),
    ):
        writer.write(b"GET / HTTP/1.1\r\nHost: api.test\r\nConnection: close\r\n\r\n")
        assert split_response(await reader.read())[0] == 200


async def test_limits_refuse_requests_and_truncate_responses(authority: Authority) -> None:
    upload = (
        b"POST / HTTP/1.1\r\nHost: api.test\r\nConnection: close\r\nContent-Length: 20\r\n\r\n"
        + b"x" * 20
    )
    async with http_server(echo) as address, open_proxy(authority, allow(address)) as proxy:
        assert split_response(await proxy.get())[0] == 200
        proxy.policy = replace(allow(address), max_requests=1)
        status, headers, body = split_response(await proxy.get())
        assert (status, headers["x-smokebox-refused"]) == (429, "limits")
        assert b"max_requests=1" in body
        proxy.policy = replace(allow(address), max_bytes=10)
        proxy.meter = Meter(lambda: proxy.policy)
        assert split_response(await proxy.send(upload))[0] == 429
        proxy.meter = Meter(lambda: proxy.policy)
        with pytest.raises(ConnectionError):
            await proxy.get()
    assert [event.rule for event in proxy.events[1:]] == ["limits"] * 3


async def test_large_upload_gets_the_reason_of_its_refusal(authority: Authority) -> None:
    size = 600_000
    head = f"POST / HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: {size}\r\n\r\n".encode()
    async with (
        open_proxy(authority, Egress(denied_hosts=[HOST])) as proxy,
        proxy.connect() as (reader, writer),
    ):
        writer.write(head + b"x" * size)
        await writer.drain()
        assert b" 403 " in await reader.readuntil(b"\r\n")
