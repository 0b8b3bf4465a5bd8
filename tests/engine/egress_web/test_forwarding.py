"""Requests that the policy lets through, and their answers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from engine.egress_web.doors import HOST, echo, open_door, parts, serving
from smokebox.egress.policy import Egress

if TYPE_CHECKING:
    from engine.egress_web.doors import Authority


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
    names = [name.lower() for name, _ in seen["headers"]]
    assert (status, seen["method"], seen["path"], seen["body"]) == (
        200,
        "POST",
        "/a/b?c=d",
        "hello",
    )
    assert [value for name, value in seen["headers"] if name.lower() == "x-one"] == ["1", "2"]
    assert not {"connection", "x-hop", "keep-alive", "te", "proxy-authorization"} & set(names)
    assert headers["connection"] == "close"
    assert door.journal.notes[0]["rule"] == "allowed_hosts['api.test']"
    assert door.journal.notes[0]["verdict"] == "forwarded"


async def test_tls_is_opened_with_the_certificate_of_the_name_and_verified_outside(
    authority: Authority,
) -> None:
    async with (
        serving(echo, authority.context_for(HOST)) as address,
        open_door(authority, to(address), port=443, hello=True, sni=HOST) as door,
        door.connected(authority.trusting()) as (reader, writer),
    ):
        writer.write(f"GET / HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n".encode())
        status, _, _ = parts(await reader.read())
    assert status == 200
    assert door.journal.notes[0]["protocol"] == "https"
