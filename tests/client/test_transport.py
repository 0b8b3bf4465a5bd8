"""Requests: repeated where that is safe, and never where it is not."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import msgspec
import pytest

from client.scripted import DROP, answer, scripted
from smokebox import wire
from smokebox.client.connection import Address
from smokebox.client.transport import Transport
from smokebox.errors import (
    DeadlineExceeded,
    InvalidOption,
    LimitReached,
    NotFound,
    PathNotFound,
    SandboxGone,
    ServiceUnavailable,
    SmokeboxError,
)
from smokebox.wire.failure import FailureAnswer, failure_of, status_of
from smokebox.wire.requests import SetEnv
from smokebox.wire.responses import Count, Written

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

OK = answer(200, b'{"count":1}')
BODY = SetEnv(env={})


def refusal(error: SmokeboxError, **headers: str) -> bytes:
    body = msgspec.json.encode(FailureAnswer(failure_of(error, "r1")))
    return answer(status_of(type(error)), body, **headers)


def transport(path: Path) -> Transport:
    return Transport(Address.parse(f"unix:{path}"))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
async def test_what_is_safe_is_sent_again_after_a_lost_connection(place: Path, method: str) -> None:
    async with scripted(str(place), DROP, DROP, OK) as server:
        found = await transport(place).ask(Count, method, "/x")
    assert (found.count, set(server.asked)) == (1, {f"{method} /api/x"})
    assert len(server.asked) == 3


async def test_what_changes_something_is_sent_once(place: Path) -> None:
    async with scripted(str(place), DROP, OK) as server:
        with pytest.raises(SandboxGone) as caught:
            await transport(place).ask(Count, "POST", "/x", body=BODY)
    assert (server.asked, caught.value.reason) == (["POST /api/x"], "connection lost")


async def test_with_a_key_it_is_sent_again_with_the_same_key(place: Path) -> None:
    async with scripted(str(place), DROP, OK) as server:
        await transport(place).ask(Count, "POST", "/x", body=BODY, repeat_key="k1")
    assert [headers["idempotency-key"] for headers in server.headers] == ["k1", "k1"]
    assert server.bodies[0] == server.bodies[1]


async def test_who_says_when_to_come_back_is_asked_again_then(place: Path) -> None:
    busy = refusal(LimitReached("too many."), retry_after="0")
    async with scripted(str(place), busy, busy, OK) as server:
        await transport(place).ask(Count, "POST", "/x", body=BODY)
    assert len(server.asked) == 3


async def test_a_limit_without_a_time_is_an_answer(place: Path) -> None:
    async with scripted(str(place), refusal(LimitReached("too many.", limit="x")), OK) as server:
        with pytest.raises(LimitReached):
            await transport(place).ask(Count, "PUT", "/x")
    assert len(server.asked) == 1


async def test_nobody_is_made_to_wait_for_an_hour(place: Path) -> None:
    async with scripted(str(place), refusal(LimitReached("later."), retry_after="3600")):
        with pytest.raises(LimitReached):
            await transport(place).ask(Count, "GET", "/x")


async def test_an_unavailable_server_is_asked_again_where_that_is_safe(place: Path) -> None:
    ill = refusal(ServiceUnavailable("ill."))
    async with scripted(str(place), ill, OK) as server:
        await transport(place).ask(Count, "GET", "/x")
        assert len(server.asked) == 2
    async with scripted(str(place), ill, OK) as server:
        with pytest.raises(ServiceUnavailable, match="ill"):
            await transport(place).ask(Count, "POST", "/x", body=BODY)
        assert len(server.asked) == 1


async def test_bytes_are_sent_again_and_streams_are_not(place: Path) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"ab"

    done = answer(200, b'{"bytes":2}')
    async with scripted(str(place), DROP, done) as server:
        await transport(place).upload(Written, "PUT", "/x", b"ab")
        assert server.bodies == [b"ab", b"ab"]
    async with scripted(str(place), DROP, done) as server:
        with pytest.raises(SandboxGone):
            await transport(place).upload(Written, "PUT", "/x", pieces())
        assert len(server.asked) == 1


async def test_large_bytes_go_in_pieces_with_their_length(place: Path) -> None:
    data = bytes(range(256)) * 2000
    async with scripted(str(place), answer(200, b'{"bytes":2}')) as server:
        await transport(place).upload(Written, "PUT", "/x", data)
    assert server.headers[0]["content-length"] == str(len(data))
    assert server.bodies == [data]


async def test_a_connection_that_was_refused_is_tried_again(place: Path) -> None:
    asking = asyncio.create_task(transport(place).ask(Count, "POST", "/x", body=BODY))
    await asyncio.sleep(0)
    async with scripted(str(place), OK):
        assert (await asking).count == 1


async def test_nobody_at_all_is_said_with_the_address(place: Path) -> None:
    with pytest.raises(ServiceUnavailable, match=f"no server answers at {place}"):
        await transport(place).ask(Count, "GET", "/x")


async def test_whoever_is_missing_is_revived_once(place: Path) -> None:
    revived = []

    async def revive() -> None:
        revived.append(True)

    with pytest.raises(ServiceUnavailable):
        await Transport(Address.parse(f"unix:{place}"), revive=revive).ask(Count, "GET", "/x")
    assert revived == [True]


async def test_an_error_arrives_as_its_class_with_its_fields(place: Path) -> None:
    missing = NotFound("no such.", hint="Look.", kind="process", name="p")
    async with scripted(str(place), refusal(missing)):
        with pytest.raises(NotFound) as caught:
            await transport(place).ask(Count, "POST", "/x")
    error = caught.value
    assert (error.message, error.hint, error.kind, error.name) == (
        "no such.",
        "Look.",
        "process",
        "p",
    )
    assert error.fields["request_id"] == "r1"


async def test_an_error_after_the_answer_began_is_raised_too(place: Path) -> None:
    body = msgspec.json.encode(FailureAnswer(failure_of(PathNotFound("/x"))))
    async with scripted(str(place), answer(200, b"\n" * 300 + body)):
        with pytest.raises(PathNotFound) as caught:
            await transport(place).ask(Count, "POST", "/x")
    assert caught.value.path == "/x"


async def test_connections_are_used_again_unless_the_server_ends_them(place: Path) -> None:
    for last, connections in ((OK, 1), (answer(200, b'{"count":1}', connection="close"), 3)):
        once = transport(place)
        async with scripted(str(place), last) as server:
            for _ in range(3):
                await once.ask(Count, "POST", "/x", body=BODY)
        assert server.connections == connections


async def test_what_speaks_no_http_is_no_answer(place: Path) -> None:
    async with scripted(str(place), b"SSH-2.0-Other\r\n"):
        with pytest.raises(SandboxGone):
            await transport(place).ask(Count, "POST", "/x", body=BODY)


async def test_a_request_that_is_cancelled_ends_its_connection(place: Path) -> None:
    async with scripted(str(place), b"HTTP/1.1 200 OK\r\n") as server:
        asking = asyncio.create_task(transport(place).ask(Count, "POST", "/x", body=BODY))
        async with asyncio.timeout(5):
            while not server.asked:
                await asyncio.sleep(0.005)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            while server.ended < 1:
                await asyncio.sleep(0.005)


@pytest.mark.parametrize("odd", [answer(200, b"<html>"), answer(502, b"Bad gateway")])
async def test_an_answer_of_somebody_else_is_said_to_be_one(place: Path, odd: bytes) -> None:
    async with scripted(str(place), odd):
        with pytest.raises(ServiceUnavailable, match=r"does not understand|not as a Smokebox"):
            await transport(place).ask(Count, "POST", "/x")


async def test_a_deadline_is_for_all_attempts(place: Path) -> None:
    async with scripted(str(place), DROP):
        with pytest.raises(DeadlineExceeded) as caught:
            await transport(place).ask(Count, "GET", "/x", timeout=0.3)
    assert caught.value.timeout == 0.3


async def test_a_body_that_nobody_takes_is_given_up(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "SILENCE", 0.5)
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(place))
        deaf.listen()
        with pytest.raises(SandboxGone, match="went away"):
            await transport(place).upload(Written, "POST", "/x", bytes(8 << 20))


async def test_a_slow_source_is_not_a_silent_server(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "SILENCE", 0.2)

    async def slow() -> AsyncIterator[bytes]:
        yield b"a"
        await asyncio.sleep(0.5)
        yield b"b"

    async with scripted(str(place), answer(200, b'{"bytes":2}')) as server:
        await transport(place).upload(Written, "PUT", "/x", slow())
    assert server.bodies == [b"ab"]


async def test_a_socket_may_have_a_long_path(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 120)
    folder.mkdir()
    (tmp_path / "short").symlink_to(folder)
    async with scripted(str(tmp_path / "short" / "s"), OK):
        assert (await transport(folder / "s").ask(Count, "GET", "/x")).count == 1


def test_a_handle_serves_one_event_loop_after_the_other(place: Path) -> None:
    once = transport(place)

    async def ask() -> int:
        async with scripted(str(place), OK):
            return (await once.ask(Count, "GET", "/x")).count

    assert [asyncio.run(ask()) for _ in range(3)] == [1, 1, 1]
    assert once.connections._pools == {}


@pytest.mark.parametrize(
    "url",
    [
        "",
        "ftp://x",
        "unix:",
        "http://",
        "localhost:8700",
        "http://x:99999",
        "http://x:y",
        "http://[",
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidOption, match="not the address of a server"):
        Address.parse(url)
