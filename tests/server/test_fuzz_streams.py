"""Cursors and frames that nobody would mean: no stream hangs, fails the server, or tells lies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from server.boxes import make_box

if TYPE_CHECKING:
    from server.boxes import Box
    from smokebox.server.server import RunningServer

SEEDS = [1, 2]
CURSORS = 120
CONVERSATIONS = 12
FRAMES = 25
HANGS = 30.0

pytestmark = pytest.mark.timeout(120)

PIECES = [
    *("0", "-", ":", "0-0", "1-1", "-1--1", "9" * 19, "9" * 25, "0x10", "1e3", " ", "", "null"),
    *("é", "٣", "\t", "%00", "\u202e", "a", "..", "/", "0-0-0", "18446744073709551616-0"),
]
VALUES: list[Any] = [None, True, 0, -1, 80, 1 << 40, 1.5, "", "80", [], {}, "x" * 1000, [[]] * 50]
TYPES = ["resize", "close_stdin", "ready", "exit", "output", "error", "", "RESIZE", "\0"]


def cursor(chance: random.Random) -> str:
    """Something like a cursor, or like nothing."""
    return "".join(chance.choices(PIECES, k=chance.randrange(4)))


def frame(chance: random.Random) -> str | bytes:
    """A frame of any kind: bytes, text, JSON, and what looks like ours."""
    kind = chance.randrange(5)
    if kind == 0:
        return chance.randbytes(chance.choice([0, 1, 100, 70_000]))
    if kind == 1:
        return "".join(chance.choices(["{", "}", '"', "[", "\\", "é", "\0", "1", ","], k=20))
    if kind == 2:
        return json.dumps(chance.choice(VALUES))
    names = chance.sample(["type", "cols", "rows", "data", "cursor", "stream"], k=3)
    message = {name: chance.choice(VALUES) for name in names}
    return json.dumps({**message, "type": chance.choice([*TYPES, *VALUES])})


async def living(box: Box) -> None:
    """Assert that the server and the sandbox answer as ever."""
    answer = await box.ask("POST", "exec", json={"command": "echo alive"})
    assert (answer.status, answer.json["stdout"]) == (200, "alive\n")


@pytest.mark.parametrize("seed", SEEDS)
async def test_cursors(server: RunningServer, http: aiohttp.ClientSession, seed: int) -> None:
    chance = random.Random(seed)
    box = await make_box(server, http)
    started = await box.ask("POST", "processes", json={"command": "seq 1000", "id": "p"})
    assert started.status == 201
    await box.ask("GET", "processes/p/wait")
    routes = {"processes/p/logs/stream": {}, "watch": {"path": "/workspace"}}
    for _ in range(CURSORS):
        route, query = chance.choice(list(routes.items()))
        given, headers = cursor(chance), {}
        if chance.random() < 0.5 and given.isascii() and given.isprintable():
            headers["last-event-id"] = given
        else:
            query = {**query, "cursor": given}
        async with (
            asyncio.timeout(HANGS),
            http.get(box.url(route), params=query, headers=headers) as answer,
        ):
            assert answer.status in (200, 400, 429), (route, given, answer.status)
            # A log ends by itself; of a watch the first event is enough.
            body = await (answer.read() if "logs" in route else answer.content.readany())
            assert body, (route, given)
    await living(box)


@pytest.mark.parametrize("seed", SEEDS)
async def test_frames(server: RunningServer, http: aiohttp.ClientSession, seed: int) -> None:
    chance = random.Random(seed)
    box = await make_box(server, http)
    for number in range(CONVERSATIONS):
        process = await box.ask(
            "POST",
            "processes",
            json={"command": "cat >/dev/null", "id": f"p{number}", "stdin": True},
        )
        assert process.status == 201
        for route in ("terminal", f"processes/p{number}/stdio"):
            async with asyncio.timeout(HANGS):
                await converse(http, box.url(route), chance)
    await living(box)
    assert (await box.ask("POST", "processes/kill", json={})).status == 200


async def converse(http: aiohttp.ClientSession, url: str, chance: random.Random) -> None:
    """Send frames until the server has had enough, and hear it out."""
    async with http.ws_connect(url, max_msg_size=0) as line:
        for _ in range(FRAMES):
            data = frame(chance)
            with contextlib.suppress(ConnectionError, aiohttp.ClientError):
                await (line.send_bytes(data) if isinstance(data, bytes) else line.send_str(data))
            if line.closed:
                break
        await line.close()
        assert line.close_code in (1000, 1003, 1006, 1007, 1008, 1009), line.close_code
