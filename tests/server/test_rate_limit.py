"""Rate limiter: requests per second, and concurrent requests."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiohttp
import pytest

from smokebox.errors import LimitReached
from smokebox.server.server import run_server
from smokebox.server.settings import ServerSettings
from smokebox.tenancy.principal import LOCAL, Principal
from smokebox.tenancy.rate_limit import RateLimiter

if TYPE_CHECKING:
    from pathlib import Path

ALICE, BOB = Principal(id="alice"), Principal(id="bob")


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _limiter(clock: Clock, **settings: float) -> RateLimiter:
    return RateLimiter(clock=clock, **settings)  # type: ignore[arg-type]


def test_burst_of_one_second_then_the_rate() -> None:
    clock = Clock()
    limiter = _limiter(clock, rate=4.0)
    for _ in range(4):
        limiter.acquire(ALICE, by_socket=False)
    with pytest.raises(LimitReached) as caught:
        limiter.acquire(ALICE, by_socket=False)
    assert caught.value.fields["retry_after"] == 0.25
    clock.now += 0.25
    limiter.acquire(ALICE, by_socket=False)
    with pytest.raises(LimitReached):
        limiter.acquire(ALICE, by_socket=False)


def test_rate_below_one_allows_single_requests() -> None:
    clock = Clock()
    limiter = _limiter(clock, rate=0.1)
    limiter.acquire(ALICE, by_socket=False)
    with pytest.raises(LimitReached) as caught:
        limiter.acquire(ALICE, by_socket=False)
    assert caught.value.fields["retry_after"] == 10.0


def test_limits_are_separate_per_principal() -> None:
    limiter = _limiter(Clock(), rate=1.0, concurrency=1)
    limiter.acquire(ALICE, by_socket=False)
    limiter.acquire(BOB, by_socket=False)


def test_finished_request_no_longer_counts() -> None:
    limiter = _limiter(Clock(), concurrency=1)
    usage = limiter.acquire(ALICE, by_socket=False)
    assert usage is not None
    with pytest.raises(LimitReached):
        limiter.acquire(ALICE, by_socket=False)
    usage.running -= 1
    limiter.acquire(ALICE, by_socket=False)


def test_unix_socket_is_only_limited_if_configured() -> None:
    limiter = _limiter(Clock(), rate=1.0)
    assert [limiter.acquire(LOCAL, by_socket=True) for _ in range(9)] == [None] * 9
    limiter = _limiter(Clock(), rate=1.0, socket_too=True)
    limiter.acquire(LOCAL, by_socket=True)
    with pytest.raises(LimitReached):
        limiter.acquire(LOCAL, by_socket=True)


def test_inactive_principals_are_removed() -> None:
    clock = Clock()
    limiter = _limiter(clock, rate=1.0)
    for number in range(1024):
        usage = limiter.acquire(Principal(id=str(number)), by_socket=False)
        assert usage is not None
        if number:
            usage.running -= 1
    clock.now += 60
    limiter.acquire(BOB, by_socket=False)
    assert list(limiter._usage) == ["0", "bob"]


async def test_excess_requests_get_429_with_retry_after(tmp_path: Path) -> None:
    settings = ServerSettings(home=str(tmp_path / "home"), host="127.0.0.1", pool=0, rate=0.01)
    async with run_server(settings) as server, aiohttp.ClientSession(server.url) as session:
        assert await _status(session, "/api/sandboxes") == 200
        response = await session.get("/api/sandboxes")
        error = (await response.json())["error"]
        assert (response.status, error["code"], error["retryable"]) == (429, "limit_reached", True)
        assert 90 < error["fields"]["retry_after"] <= int(response.headers["retry-after"]) <= 100
        # Health checks are not limited.
        assert await _status(session, "/api/health") == 200


async def test_running_stream_counts_as_a_request(tmp_path: Path) -> None:
    settings = ServerSettings(home=str(tmp_path / "home"), host="127.0.0.1", pool=0, concurrency=1)
    async with run_server(settings) as server, aiohttp.ClientSession(server.url) as session:
        await (await session.put("/api/sandboxes/box", json={})).read()
        path = "/api/sandboxes/box/exec/stream"
        async with session.post(path, json={"command": "echo hi; sleep 60"}) as stream:
            assert b"hi" in await stream.content.readuntil(b"\n\n")
            assert await _status(session, "/api/sandboxes") == 429
        async with asyncio.timeout(10):
            while await _status(session, "/api/sandboxes") != 200:
                await asyncio.sleep(0.01)


async def _status(session: aiohttp.ClientSession, path: str) -> int:
    async with session.get(path) as response:
        return response.status
