"""How much one key may ask: a rate, and a number at a time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiohttp
import pytest

from smokebox.errors import LimitReached
from smokebox.server.keys import LOCAL, Principal
from smokebox.server.rate_limit import RateLimiter
from smokebox.server.server import run_server
from smokebox.server.settings import ServerSettings

if TYPE_CHECKING:
    from pathlib import Path

ALICE, BOB = Principal(id="alice"), Principal(id="bob")


class Clock:
    """A clock that goes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _limits(clock: Clock, **settings: float) -> RateLimiter:
    return RateLimiter(ServerSettings(home="h", **settings), clock)  # type: ignore[arg-type]


def test_a_second_of_requests_may_come_at_once_and_then_at_the_rate() -> None:
    clock = Clock()
    limits = _limits(clock, rate=4.0)
    for _ in range(4):
        limits.enter(ALICE, by_socket=False)
    with pytest.raises(LimitReached) as caught:
        limits.enter(ALICE, by_socket=False)
    assert caught.value.fields["retry_after"] == 0.25
    clock.now += 0.25
    limits.enter(ALICE, by_socket=False)
    with pytest.raises(LimitReached):
        limits.enter(ALICE, by_socket=False)


def test_a_rate_below_one_lets_one_through_at_a_time() -> None:
    clock = Clock()
    limits = _limits(clock, rate=0.1)
    limits.enter(ALICE, by_socket=False)
    with pytest.raises(LimitReached) as caught:
        limits.enter(ALICE, by_socket=False)
    assert caught.value.fields["retry_after"] == 10.0


def test_one_key_does_not_use_up_what_another_has() -> None:
    limits = _limits(Clock(), rate=1.0, concurrency=1)
    limits.enter(ALICE, by_socket=False)
    limits.enter(BOB, by_socket=False)


def test_a_request_that_ended_makes_room() -> None:
    limits = _limits(Clock(), concurrency=1)
    account = limits.enter(ALICE, by_socket=False)
    assert account is not None
    with pytest.raises(LimitReached):
        limits.enter(ALICE, by_socket=False)
    limits.leave(account)
    limits.enter(ALICE, by_socket=False)


def test_the_unix_socket_has_no_limit_unless_asked_for() -> None:
    limits = _limits(Clock(), rate=1.0)
    assert [limits.enter(LOCAL, by_socket=True) for _ in range(9)] == [None] * 9
    limits = _limits(Clock(), rate=1.0, limit_socket=True)
    limits.enter(LOCAL, by_socket=True)
    with pytest.raises(LimitReached):
        limits.enter(LOCAL, by_socket=True)


def test_accounts_of_those_who_left_are_forgotten() -> None:
    clock = Clock()
    limits = _limits(clock, rate=1.0)
    for number in range(1024):
        account = limits.enter(Principal(id=str(number)), by_socket=False)
        assert account is not None
        if number:
            limits.leave(account)
    clock.now += 60
    limits.enter(BOB, by_socket=False)
    assert list(limits._accounts) == ["0", "bob"]


async def test_too_many_requests_are_told_when_to_come_again(tmp_path: Path) -> None:
    settings = ServerSettings(home=str(tmp_path / "home"), host="127.0.0.1", pool=0, rate=0.01)
    async with run_server(settings) as server, aiohttp.ClientSession(server.url) as session:
        assert await _status(session, "/api/sandboxes") == 200
        answer = await session.get("/api/sandboxes")
        error = (await answer.json())["error"]
        assert (answer.status, error["code"], error["retryable"]) == (429, "limit_reached", True)
        assert 90 < error["fields"]["retry_after"] <= int(answer.headers["retry-after"]) <= 100
        # Whoever minds the server is not held back.
        assert await _status(session, "/api/health") == 200


async def test_a_stream_counts_for_as_long_as_it_runs(tmp_path: Path) -> None:
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
    async with session.get(path) as answer:
        return answer.status
