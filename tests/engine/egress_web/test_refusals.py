"""What does not pass: by the policy, by its names, or by how it is written."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from typing import TYPE_CHECKING

import pytest

from engine.egress_web.doors import HOST, answers, echo, open_door, parts, saying, serving
from smokebox.egress.policy import Egress

if TYPE_CHECKING:
    from aiohttp import web

    from engine.egress_web.doors import Authority

PAGE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


def to(address: str) -> Egress:
    return Egress(allowed_hosts=[HOST], hosts={HOST: address})


async def test_a_refusal_names_the_setting_that_would_open_it(authority: Authority) -> None:
    async with open_door(authority, Egress(outbound_by_host={"x.test": "a:b"})) as door:
        status, headers, body = parts(await door.get())
        _, _, as_json = parts(await door.get(Accept="application/json"))
    assert (status, headers["x-smokebox-refused"]) == (403, "internet")
    assert b"allowed_hosts=['api.test'] would open it" in body
    assert json.loads(as_json)["error"]["rule"] == "internet"
    assert [note["verdict"] for note in door.audit_log.notes] == ["refused"] * 2


async def test_the_policy_is_asked_for_each_request(authority: Authority) -> None:
    async with (
        serving(echo) as address,
        open_door(authority, to(address)) as door,
        door.connected() as (reader, writer),
    ):
        for status in (b"200", b"403", b"200"):
            door.policy = to(address) if status == b"200" else Egress(denied_hosts=[HOST])
            writer.write(f"GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.split(b" ")[1] == status
            size = int(parts(head)[1]["content-length"])
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
async def test_a_request_whose_names_or_form_are_wrong_reaches_no_server(
    authority: Authority, request_: bytes, status: int
) -> None:
    async with saying(answers(PAGE)) as address, open_door(authority, to(address)) as door:
        found, headers, _ = parts(await door.ask(request_))
    assert (found, headers["connection"]) == (status, "close")
    assert door.audit_log.notes[0]["verdict"] == "refused"
    assert door.audit_log.notes[0]["reason"]


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
async def test_a_second_request_cannot_hide_in_the_first(
    authority: Authority, smuggled: bytes
) -> None:
    seen = []

    async def count(request: web.Request) -> web.Response:
        seen.append(request.path)
        return await echo(request)

    async with serving(count) as address, open_door(authority, to(address)) as door:
        answer = await door.ask(
            b"POST /first HTTP/1.1\r\nHost: api.test\r\n"
            + smuggled
            + b"GET /hidden HTTP/1.1\r\nHost: api.test\r\n\r\n"
        )
    assert parts(answer)[0] == 400
    assert answer.count(b"HTTP/1.1 400") == 1
    assert "/hidden" not in seen


@pytest.mark.parametrize(
    ("hello", "sni", "reason"),
    [
        (False, None, "not TLS"),
        (True, None, "without a server name"),
        (True, "other.test", "goes to api.test"),
    ],
)
async def test_what_comes_to_443_is_tls_with_the_name_that_was_asked_for(
    authority: Authority, hello: bool, sni: str | None, reason: str
) -> None:
    policy = Egress(internet=True)
    async with open_door(authority, policy, port=443, hello=hello, sni=sni) as door:
        assert await door.ask(b"") == b""
    assert reason in door.audit_log.notes[0]["reason"]


def trust_nobody(port: int) -> None:
    empty = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with socket.create_connection(("127.0.0.1", port)) as sock:
        empty.wrap_socket(sock, server_hostname=HOST)


async def test_a_program_that_does_not_trust_the_door_is_written_down(
    authority: Authority,
) -> None:
    policy = Egress(internet=True)
    async with open_door(authority, policy, port=443, hello=True, sni=HOST) as door:
        with pytest.raises(ssl.SSLError):
            await asyncio.to_thread(trust_nobody, door.port)
        await asyncio.wait(door.served)
    assert "does not trust" in door.audit_log.notes[0]["reason"]


@pytest.mark.parametrize(
    "inside", ["127.0.0.1", "10.1.2.3", "169.254.169.254", "::1", "::ffff:127.0.0.1", "fd00::1"]
)
async def test_a_name_that_leads_inside_is_refused(authority: Authority, inside: str) -> None:
    asked = []

    async def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["93.184.216.34", inside]

    policy = Egress(internet=True)
    async with open_door(authority, policy, resolver=resolve) as door:
        status, headers, body = parts(await door.get())
    assert (status, headers["x-smokebox-refused"]) == (403, "private")
    assert b"hosts={'api.test'" in body
    assert asked == [HOST]


@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.169.254", "10.0.0.1", "::1"])
async def test_an_address_inside_is_refused_though_the_internet_is_open(
    authority: Authority, address: str
) -> None:
    shown = f"[{address}]" if ":" in address else address
    async with open_door(authority, Egress(internet=True), host=None, address=address) as door:
        request = f"GET / HTTP/1.1\r\nHost: {shown}\r\nConnection: close\r\n\r\n"
        status, headers, _ = parts(await door.ask(request.encode()))
    assert (status, headers["x-smokebox-refused"]) == (403, "private")


async def test_an_address_is_judged_by_the_name_that_tls_gives(authority: Authority) -> None:
    async with (
        serving(echo, authority.context_for(HOST)) as address,
        open_door(
            authority, to(address), host=None, address="8.8.8.8", port=443, hello=True, sni=HOST
        ) as door,
        door.connected(authority.trusting()) as (reader, writer),
    ):
        writer.write(b"GET / HTTP/1.1\r\nHost: api.test\r\nConnection: close\r\n\r\n")
        assert parts(await reader.read())[0] == 200


async def test_limits_are_answered_with_429_and_cut_what_is_too_long(authority: Authority) -> None:
    async with serving(echo) as address, open_door(authority, to(address)) as door:
        door.meter.over = "max_requests=5 is reached"
        status, headers, body = parts(await door.get())
        assert (status, headers["x-smokebox-refused"]) == (429, "limits")
        assert b"max_requests=5" in body
        door.meter.over, door.meter.most = "", 10
        upload = (
            b"POST / HTTP/1.1\r\nHost: api.test\r\nConnection: close\r\nContent-Length: 20\r\n\r\n"
            + b"x" * 20
        )
        assert parts(await door.ask(upload))[0] == 429
        with pytest.raises(ConnectionError):
            await door.get()
    assert [note["rule"] for note in door.audit_log.notes] == ["limits"] * 3


async def test_a_refused_upload_hears_why_though_it_is_large(authority: Authority) -> None:
    size = 600_000
    head = f"POST / HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: {size}\r\n\r\n".encode()
    async with (
        open_door(authority, Egress(denied_hosts=[HOST])) as door,
        door.connected() as (reader, writer),
    ):
        writer.write(head + b"x" * size)
        await writer.drain()
        assert b" 403 " in await reader.readuntil(b"\r\n")
