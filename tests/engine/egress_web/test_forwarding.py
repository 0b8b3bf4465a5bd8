"""Requests that the policy lets through, and their answers."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from engine.egress_web.doors import HOST, answers, echo, open_door, parts, saying, serving
from smokebox.egress.policy import Egress

if TYPE_CHECKING:
    from engine.egress_web.doors import Authority

GET = f"GET / HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()
LAST = f"GET / HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n".encode()


def to(address: str) -> Egress:
    return Egress(allowed_hosts=[HOST], hosts={HOST: address})


async def test_a_request_is_written_anew_and_its_answer_passed(authority: Authority) -> None:
    async with serving(echo) as address, open_door(authority, to(address)) as door:
        status, headers, body = parts(
            await door.ask(
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
    note = door.audit_log.notes[0]
    assert (note["verdict"], note["rule"]) == ("forwarded", "allowed_hosts['api.test']")
    assert (note["sent"], note["received"]) == (5, len(body))


async def test_tls_is_opened_with_the_certificate_of_the_name_and_verified_outside(
    authority: Authority,
) -> None:
    async with (
        serving(echo, authority.context_for(HOST)) as address,
        open_door(authority, to(address), port=443, hello=True, sni=HOST) as door,
        door.connected(authority.trusting()) as (reader, writer),
    ):
        writer.write(LAST)
        status, _, _ = parts(await reader.read())
    assert status == 200
    assert door.audit_log.notes[0]["protocol"] == "https"


async def test_a_server_with_another_name_in_its_certificate_is_not_spoken_to(
    authority: Authority,
) -> None:
    async with (
        serving(echo, authority.context_for("other.test")) as address,
        open_door(authority, to(address), port=443, hello=True, sni=HOST) as door,
        door.connected(authority.trusting()) as (reader, writer),
    ):
        writer.write(LAST)
        status, _, body = parts(await reader.read())
    assert status == 502
    assert b"certificate of api.test is not trusted" in body


async def test_requests_that_are_sent_at_once_are_answered_in_their_order(
    authority: Authority,
) -> None:
    async with serving(echo) as address, open_door(authority, to(address)) as door:
        asked = b"".join(GET.replace(b" / ", b" /%d " % number) for number in range(9))
        answer = await door.ask(asked + LAST)
    found = [answer.find(b'"path": "/%d"' % number) for number in range(9)]
    assert -1 not in found
    assert found == sorted(found)
    assert answer.count(b"HTTP/1.1 200") == 10


async def test_a_connection_to_the_server_is_used_again(authority: Authority) -> None:
    peers = set()

    async def remember(request: web.Request) -> web.Response:
        assert request.transport is not None
        peers.add(request.transport.get_extra_info("peername"))
        return web.Response(text="x")

    async with serving(remember) as address, open_door(authority, to(address)) as door:
        for _ in range(3):
            assert parts(await door.ask(GET + GET + LAST))[0] == 200
    assert len(peers) == 1


async def test_a_kept_connection_that_the_server_closed_is_not_used(authority: Authority) -> None:
    closed: list[asyncio.StreamWriter] = []

    async def one_each(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx")
        await writer.drain()
        if len(closed) < 2:
            # Without a word: the next request may find it closing.
            closed.append(writer)
            writer.close()
        else:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\ny")

    async with saying(one_each) as address, open_door(authority, to(address)) as door:
        answer = await door.ask(GET + GET + GET + LAST)
    assert answer.count(b"HTTP/1.1 200") == 4


@pytest.mark.parametrize(
    ("said", "status", "body"),
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
async def test_answers_of_servers_are_passed_or_explained(
    authority: Authority, said: bytes, status: int, body: bytes | None
) -> None:
    async with saying(answers(said)) as address, open_door(authority, to(address)) as door:
        found, headers, content = parts(await door.get())
    assert found == status
    if body is None:
        assert content.startswith(b"smokebox: api.test")
        assert door.audit_log.notes[0]["verdict"] == "failed"
    else:
        assert content == body
        assert "trailer" not in headers


async def test_head_has_the_length_and_no_body(authority: Authority) -> None:
    said = b"HTTP/1.1 200 OK\r\nContent-Length: 1234\r\n\r\n"
    async with saying(answers(said)) as address, open_door(authority, to(address)) as door:
        answer = await door.ask(LAST.replace(b"GET", b"HEAD"))
    status, headers, body = parts(answer)
    assert (status, headers["content-length"], body) == (200, "1234", b"")


async def test_an_answer_that_is_cut_off_is_cut_off_for_the_program(authority: Authority) -> None:
    said = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhal"
    async with (
        saying(answers(said)) as address,
        open_door(authority, to(address)) as door,
        door.connected() as (reader, writer),
    ):
        writer.write(GET)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(10)
    assert door.audit_log.notes[0]["verdict"] == "failed"
    assert "cut off" in door.audit_log.notes[0]["reason"]


async def test_an_old_client_is_answered_without_chunks(authority: Authority) -> None:
    said = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"
    async with saying(answers(said)) as address, open_door(authority, to(address)) as door:
        answer = await door.ask(f"GET / HTTP/1.0\r\nHost: {HOST}\r\n\r\n".encode())
    assert answer.endswith(b"\r\n\r\nhi")
    assert b"transfer-encoding" not in answer.lower()


async def test_a_url_as_the_target_is_taken_for_its_path(authority: Authority) -> None:
    async with serving(echo) as address, open_door(authority, to(address)) as door:
        answer = await door.ask(LAST.replace(b" / ", b" http://API.test/x?y "))
    assert json.loads(parts(answer)[2])["path"] == "/x?y"


async def test_a_server_that_is_not_there_is_explained(authority: Authority) -> None:
    async with saying(answers(b"")) as gone:
        pass
    async with open_door(authority, to(gone)) as door:
        status, _, body = parts(await door.get())
    assert status == 502
    assert b"Connect" in body or b"refused" in body
