"""Fuzzing of stream cursors and WebSocket frames."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from server.boxes import create_sandbox_client

if TYPE_CHECKING:
    from server.boxes import SandboxClient
    from smokebox.server.server import RunningServer

SEEDS = [1, 2]
CURSORS = 120
CONNECTIONS = 12
FRAMES = 25
TIMEOUT = 30.0

pytestmark = pytest.mark.timeout(120)

PIECES = [
    *("0", "-", ":", "0-0", "1-1", "-1--1", "9" * 19, "9" * 25, "0x10", "1e3", " ", "", "null"),
    *("é", "٣", "\t", "%00", "\u202e", "a", "..", "/", "0-0-0", "18446744073709551616-0"),
]
VALUES: list[Any] = [None, True, 0, -1, 80, 1 << 40, 1.5, "", "80", [], {}, "x" * 1000, [[]] * 50]
TYPES = ["resize", "close_stdin", "ready", "exit", "output", "error", "", "RESIZE", "\0"]


def cursor(rng: random.Random) -> str:
    """Return a random string that may resemble a cursor."""
    return "".join(rng.choices(PIECES, k=rng.randrange(4)))


def frame(rng: random.Random) -> str | bytes:
    """Return a random frame: bytes, text, JSON, or similar to a frame of the protocol."""
    kind = rng.randrange(5)
    if kind == 0:
        return rng.randbytes(rng.choice([0, 1, 100, 70_000]))
    if kind == 1:
        return "".join(rng.choices(["{", "}", '"', "[", "\\", "é", "\0", "1", ","], k=20))
    if kind == 2:
        return json.dumps(rng.choice(VALUES))
    names = rng.sample(["type", "cols", "rows", "data", "cursor", "stream"], k=3)
    message = {name: rng.choice(VALUES) for name in names}
    return json.dumps({**message, "type": rng.choice([*TYPES, *VALUES])})


async def check_alive(sandbox: SandboxClient) -> None:
    """Assert that the server and the sandbox still run commands."""
    response = await sandbox.request("POST", "exec", json={"command": "echo alive"})
    assert (response.status, response.json["stdout"]) == (200, "alive\n")


@pytest.mark.parametrize("seed", SEEDS)
async def test_random_cursors_never_crash_or_hang_the_server(
    server: RunningServer, http: aiohttp.ClientSession, seed: int
) -> None:
    rng = random.Random(seed)
    sandbox = await create_sandbox_client(server, http)
    started = await sandbox.request("POST", "processes", json={"command": "seq 1000", "id": "p"})
    assert started.status == 201
    await sandbox.request("GET", "processes/p/wait")
    routes = {"processes/p/logs/stream": {}, "watch": {"path": "/workspace"}}
    for _ in range(CURSORS):
        route, query = rng.choice(list(routes.items()))
        value, headers = cursor(rng), {}
        if rng.random() < 0.5 and value.isascii() and value.isprintable():
            headers["last-event-id"] = value
        else:
            query = {**query, "cursor": value}
        async with (
            asyncio.timeout(TIMEOUT),
            http.get(sandbox.url(route), params=query, headers=headers) as response,
        ):
            assert response.status in (200, 400, 429), (route, value, response.status)
            # A log ends by itself; a watch does not.
            body = await (response.read() if "logs" in route else response.content.readany())
            assert body, (route, value)
    await check_alive(sandbox)


@pytest.mark.parametrize("seed", SEEDS)
async def test_random_frames_never_crash_or_hang_the_server(
    server: RunningServer, http: aiohttp.ClientSession, seed: int
) -> None:
    rng = random.Random(seed)
    sandbox = await create_sandbox_client(server, http)
    for number in range(CONNECTIONS):
        process = await sandbox.request(
            "POST",
            "processes",
            json={"command": "cat >/dev/null", "id": f"p{number}", "stdin": True},
        )
        assert process.status == 201
        for route in ("terminal", f"processes/p{number}/stdio"):
            async with asyncio.timeout(TIMEOUT):
                await send_frames(http, sandbox.url(route), rng)
    await check_alive(sandbox)
    assert (await sandbox.request("POST", "processes/kill", json={})).status == 200


async def send_frames(http: aiohttp.ClientSession, url: str, rng: random.Random) -> None:
    """Send random frames, and check the close code of the server."""
    async with http.ws_connect(url, max_msg_size=0) as socket:
        for _ in range(FRAMES):
            data = frame(rng)
            with contextlib.suppress(ConnectionError, aiohttp.ClientError):
                await (
                    socket.send_bytes(data) if isinstance(data, bytes) else socket.send_str(data)
                )
            if socket.closed:
                break
        await socket.close()
        assert socket.close_code in (1000, 1003, 1006, 1007, 1008, 1009), socket.close_code
