"""What handlers do to requests, and what is seen of their secrets."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from engine.egress_web.doors import (
    HOST,
    TOKEN,
    EgressProxy,
    answers,
    echo,
    open_door,
    parts,
    saying,
    serving,
)
from smokebox.egress.handler import Refused
from smokebox.egress.message import MessageBody, Request, Response
from smokebox.egress.policy import Egress
from smokebox.engine.egress.http import handler_call

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from engine.egress_web.doors import Authority
    from smokebox.egress.handler import Handler, HandlerContext

POST = f"POST /p HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello"


def by(handler: Handler, address: str, **options: Any) -> Egress:
    return Egress(outbound_by_host={HOST: handler}, hosts={HOST: address}, **options)


async def inject(request: Request, env: Any, context: HandlerContext) -> Request:
    request.headers["authorization"] = f"Bearer {env['TOKEN']}"
    return request


async def inject_and_forward(request: Request, env: Any, context: HandlerContext) -> Response:
    return await context.forward(await inject(request, env, context))


@pytest.mark.parametrize("handler", [inject, inject_and_forward])
async def test_an_injected_header_is_sent_and_its_echo_scrubbed(
    authority: Authority, handler: Handler
) -> None:
    got = []

    async def remember(request: web.Request) -> web.Response:
        got.append(request.headers.copy())
        answer = await echo(request)
        answer.headers["X-Echo"] = request.headers["authorization"]
        answer.headers["X-Encoded"] = base64.b64encode(TOKEN.encode()).decode()
        return answer

    async with serving(remember) as address, open_door(authority, by(handler, address)) as door:
        answer = await door.get("/", Range="bytes=0-5", **{"Accept-Encoding": "br"})
    status, headers, body = parts(answer)
    assert got[0]["authorization"] == f"Bearer {TOKEN}"
    assert got[0]["accept-encoding"] == "identity"
    assert "range" not in got[0]
    assert status == 200
    assert headers["content-length"] == str(len(body))
    assert TOKEN.encode() not in answer
    assert base64.b64encode(TOKEN.encode()) not in answer
    assert "[redacted]" in dict(json.loads(body)["headers"])["authorization"]
    assert TOKEN not in str(door.audit_log.notes)
    assert door.audit_log.notes[0]["handler"] == handler.__name__
    assert door.audit_log.notes[0]["verdict"] == "forwarded"


@pytest.mark.parametrize("size", [1, 3, 7])
async def test_a_secret_that_a_server_cuts_into_chunks_is_scrubbed(
    authority: Authority, size: int
) -> None:
    text = f"<{TOKEN}>".encode()
    chunks = [text[at : at + size] for at in range(0, len(text), size)]
    said = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    said += b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"

    async def slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for at in range(0, len(said), 11):
            writer.write(said[at : at + 11])
            await writer.drain()

    async with saying(slowly) as address, open_door(authority, by(inject, address)) as door:
        _, _, body = parts(await door.get())
    assert body.startswith(b"<[redacted]") and body.endswith(b"*>")
    assert len(body) == len(text)


async def test_a_compressed_echo_is_unpacked_and_scrubbed(authority: Authority) -> None:
    packed = gzip.compress(f"<{TOKEN}>".encode())
    said = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
    async with (
        saying(answers(said + packed)) as address,
        open_door(authority, by(inject, address)) as door,
    ):
        status, headers, body = parts(await door.get())
    assert status == 200
    assert "content-encoding" not in headers
    assert body.startswith(b"<[redacted]")


async def test_what_cannot_be_unpacked_is_refused(authority: Authority) -> None:
    said = b"HTTP/1.1 200 OK\r\nContent-Encoding: br\r\nContent-Length: 1\r\n\r\nx"
    async with (
        saying(answers(said)) as address,
        open_door(authority, by(inject, address)) as door,
    ):
        status, _, body = parts(await door.get())
        door.policy = by(inject, address, scrub=False)
        passed, _, _ = parts(await door.get())
    assert status == 502
    assert b"scrub=False" in body
    assert passed == 200


async def test_without_scrub_an_echo_comes_back(authority: Authority) -> None:
    async with (
        serving(echo) as address,
        open_door(authority, by(inject, address, scrub=False)) as door,
    ):
        assert TOKEN.encode() in await door.get()


async def test_a_secret_in_the_url_is_scrubbed_too(authority: Authority) -> None:
    async def sign(request: Request, env: Any, context: HandlerContext) -> Request:
        request.url += f"?key={env['TOKEN']}"
        return request

    async def elsewhere(request: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": f"/next?key={request.query['key']}"})

    async with serving(elsewhere) as address, open_door(authority, by(sign, address)) as door:
        status, headers, _ = parts(await door.get("/start"))
    assert status == 302
    assert headers["location"].startswith("/next?key=[redacted]")
    assert door.audit_log.notes[0]["path"] == "/start"


def refuse(request: Request, env: Any, context: HandlerContext) -> Request:
    raise Refused("not on a Monday")


async def fail(request: Request, env: Any, context: HandlerContext) -> Request:
    raise RuntimeError(f"could not use {env['TOKEN']}")


async def forget(request: Request, env: Any, context: HandlerContext) -> None:
    request.headers["x"] = "y"


async def hang(request: Request, env: Any, context: HandlerContext) -> Request:
    await asyncio.Event().wait()
    raise AssertionError


async def split(request: Request, env: Any, context: HandlerContext) -> Request:
    request.headers["x"] = f"{env['TOKEN']}\r\nHost: other.test"
    return request


async def wander(request: Request, env: Any, context: HandlerContext) -> Request:
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
        (forget, 502, "failed with TypeError"),
        (hang, 504, "did not decide"),
        (split, 502, "the value of the header x cannot be sent"),
        (wander, 403, "an address inside"),
        (odd_status, 502, "the status 7 cannot be sent"),
        (half_read, 502, "did not keep it"),
        ("no.such.module:at_all", 502, "failed with InvalidOption"),
    ],
)
async def test_a_handler_that_does_not_decide_lets_nothing_through(
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
    handler: Any,
    status: int,
    reason: str,
) -> None:
    monkeypatch.setattr(handler_call, "DECIDE_SECONDS", 0.3 if handler is hang else 30.0)
    reached = []

    async def remember(request: web.Request) -> web.Response:
        reached.append(request)
        return web.Response()

    async with serving(remember) as address, open_door(authority, by(handler, address)) as door:
        answer = await door.ask(POST.encode())
    found, _, body = parts(answer)
    assert (found, reached) == (status, [])
    assert reason in body.decode()
    assert TOKEN.encode() not in answer
    assert TOKEN not in str(door.audit_log.notes)


async def test_a_handler_may_answer_by_itself(authority: Authority) -> None:
    async def answer(request: Request, env: Any, context: HandlerContext) -> Response:
        return Response.of_json({"box": context.sandbox_id, "rule": context.rule, "u": request.url})

    async with open_door(authority, by(answer, "127.0.0.1:1")) as door:
        status, headers, body = parts(await door.get("/a?b"))
    assert (status, headers["content-type"]) == (200, "application/json")
    assert json.loads(body) == {
        "box": "box",
        "rule": "outbound_by_host['api.test']",
        "u": "http://api.test/a?b",
    }
    assert door.audit_log.notes[0]["verdict"] == "answered"


async def test_a_handler_may_read_and_replace_bodies(authority: Authority) -> None:
    async def shout(request: Request, env: Any, context: HandlerContext) -> Response:
        request.body = MessageBody((await request.text()).upper())
        answer = await context.forward(request)
        seen = await answer.json()
        answer.body = MessageBody(pieces(seen["body"]))
        return answer

    async def pieces(text: str) -> AsyncIterator[bytes]:
        for letter in text:
            yield letter.encode()

    async with serving(echo) as address, open_door(authority, by(shout, address)) as door:
        _, headers, body = parts(await door.ask(POST.encode()))
    assert body == b"HELLO"
    assert headers["transfer-encoding"] == "chunked"


async def test_a_handler_may_send_it_elsewhere(authority: Authority) -> None:
    async with serving(echo) as elsewhere:

        async def redirect(request: Request, env: Any, context: HandlerContext) -> Response:
            return await context.forward(request, to=f"http://{elsewhere}/base/")

        async with open_door(authority, by(redirect, "127.0.0.1:1")) as door:
            _, _, body = parts(await door.ask(POST.encode()))
    seen = json.loads(body)
    assert (seen["path"], seen["body"]) == ("/base/p", "hello")
    assert dict(seen["headers"])["host"] == elsewhere


async def test_a_body_that_is_passed_on_keeps_its_length(authority: Authority) -> None:
    async with serving(echo) as address, open_door(authority, by(inject, address)) as door:
        _, _, body = parts(await door.ask(POST.encode()))
    seen = json.loads(body)
    assert dict(seen["headers"])["content-length"] == "5"
    assert seen["body"] == "hello"


async def test_waiting_for_a_server_does_not_count_against_the_handler(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handler_call, "DECIDE_SECONDS", 0.3)

    async def slow(request: web.Request) -> web.Response:
        await asyncio.sleep(0.6)
        return web.Response(text="late")

    async with (
        serving(slow) as address,
        open_door(authority, by(inject_and_forward, address)) as door,
    ):
        assert parts(await door.get())[2] == b"late"


async def test_an_answer_that_a_handler_breaks_off_is_cut_off(authority: Authority) -> None:
    async def half(request: Request, env: Any, context: HandlerContext) -> Response:
        return Response(pieces())

    async def pieces() -> AsyncIterator[bytes]:
        yield b"some"
        raise RuntimeError(TOKEN)

    async with open_door(authority, by(half, "127.0.0.1:1")) as door:
        with pytest.raises(ConnectionError):
            await door.get()
        await ended(door)
    assert "failed with RuntimeError" in door.audit_log.notes[0]["reason"]


async def test_answers_that_a_handler_does_not_want_are_let_go(authority: Authority) -> None:
    gone = asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"x" * 1000)
                await asyncio.sleep(0.01)
        finally:
            gone.set()

    async def instead(request: Request, env: Any, context: HandlerContext) -> Response:
        await context.forward(request)
        return Response("mine")

    async with serving(endless) as address, open_door(authority, by(instead, address)) as door:
        assert parts(await door.get())[2] == b"mine"
        await asyncio.wait_for(gone.wait(), 10)


async def ended(door: EgressProxy) -> None:
    """Wait until the door is done with every connection."""
    await asyncio.wait(door.served, timeout=10)
