"""Requests of the transport: which of them are retried, and how errors are decoded."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import msgspec
import pytest

from client.scripted_server import DROP, response, scripted_server
from smokebox import __version__, wire
from smokebox.client.address import Address
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
from smokebox.wire.failure import FailureResponse, failure_of, status_of
from smokebox.wire.requests import SetEnv
from smokebox.wire.responses import Count, Written

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

OK = response(200, b'{"count":1}')
WRITTEN = response(200, b'{"bytes":2}')
BODY = SetEnv(env={})


def error_response(error: SmokeboxError, **headers: str) -> bytes:
    body = msgspec.json.encode(FailureResponse(failure_of(error, "r1")))
    return response(status_of(type(error)), body, **headers)


def transport(path: Path) -> Transport:
    return Transport(Address.parse(f"unix:{path}"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s"


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
async def test_safe_request_is_retried_after_a_lost_connection(path: Path, method: str) -> None:
    async with scripted_server(str(path), DROP, DROP, OK) as server:
        result = await transport(path).request(Count, method, "/x")
    assert result.count == 1
    assert server.requests == [f"{method} /api/x"] * 3


async def test_unsafe_request_is_sent_once(path: Path) -> None:
    async with scripted_server(str(path), DROP, OK) as server:
        with pytest.raises(SandboxGone) as caught:
            await transport(path).request(Count, "POST", "/x", body=BODY)
    assert (server.requests, caught.value.reason) == (["POST /api/x"], "connection lost")


async def test_request_with_idempotency_key_is_retried_with_the_same_key(path: Path) -> None:
    async with scripted_server(str(path), DROP, OK) as server:
        await transport(path).request(Count, "POST", "/x", body=BODY, idempotency_key="k1")
    assert [headers["idempotency-key"] for headers in server.headers] == ["k1", "k1"]
    assert server.bodies[0] == server.bodies[1]


async def test_retry_after_is_honoured_for_any_request(path: Path) -> None:
    busy = error_response(LimitReached("too many."), retry_after="0")
    async with scripted_server(str(path), busy, busy, OK) as server:
        await transport(path).request(Count, "POST", "/x", body=BODY)
    assert len(server.requests) == 3


async def test_limit_without_retry_after_is_not_retried(path: Path) -> None:
    busy = error_response(LimitReached("too many.", limit="x"))
    async with scripted_server(str(path), busy, OK) as server:
        with pytest.raises(LimitReached):
            await transport(path).request(Count, "PUT", "/x")
    assert len(server.requests) == 1


async def test_long_retry_after_is_not_waited_for(path: Path) -> None:
    later = error_response(LimitReached("later."), retry_after="3600")
    async with scripted_server(str(path), later):
        with pytest.raises(LimitReached):
            await transport(path).request(Count, "GET", "/x")


async def test_unavailable_server_is_retried_only_if_safe(path: Path) -> None:
    unavailable = error_response(ServiceUnavailable("overloaded."))
    async with scripted_server(str(path), unavailable, OK) as server:
        await transport(path).request(Count, "GET", "/x")
        assert len(server.requests) == 2
    async with scripted_server(str(path), unavailable, OK) as server:
        with pytest.raises(ServiceUnavailable, match="overloaded"):
            await transport(path).request(Count, "POST", "/x", body=BODY)
        assert len(server.requests) == 1


async def test_bytes_are_retried_and_streams_are_not(path: Path) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"ab"

    async with scripted_server(str(path), DROP, WRITTEN) as server:
        await transport(path).request(Written, "PUT", "/x", data=b"ab")
        assert server.bodies == [b"ab", b"ab"]
    async with scripted_server(str(path), DROP, WRITTEN) as server:
        with pytest.raises(SandboxGone):
            await transport(path).request(Written, "PUT", "/x", data=pieces())
        assert len(server.requests) == 1


async def test_request_without_retry_is_sent_once(path: Path) -> None:
    async with scripted_server(str(path), DROP, WRITTEN) as server:
        with pytest.raises(SandboxGone):
            await transport(path).request(Written, "PUT", "/x", data=b"ab", retry=False)
        assert len(server.requests) == 1


async def test_large_bytes_are_sent_in_pieces_with_a_length(path: Path) -> None:
    data = bytes(range(256)) * 2000
    async with scripted_server(str(path), WRITTEN) as server:
        await transport(path).request(Written, "PUT", "/x", data=data)
    assert server.headers[0]["content-length"] == str(len(data))
    assert server.bodies == [data]


async def test_refused_connection_is_retried(path: Path) -> None:
    request = asyncio.create_task(transport(path).request(Count, "POST", "/x", body=BODY))
    await asyncio.sleep(0)
    async with scripted_server(str(path), OK):
        assert (await request).count == 1


async def test_missing_server_is_reported_with_its_address(path: Path) -> None:
    with pytest.raises(ServiceUnavailable, match=f"no server responds at {path}"):
        await transport(path).request(Count, "GET", "/x")


async def test_missing_server_is_started_once(path: Path) -> None:
    started = []

    async def start_server() -> None:
        started.append(True)

    client = Transport(Address.parse(f"unix:{path}"), start_server=start_server)
    with pytest.raises(ServiceUnavailable):
        await client.request(Count, "GET", "/x")
    assert started == [True]


async def test_error_is_raised_as_its_class_with_its_fields(path: Path) -> None:
    missing = NotFound("no such.", hint="Look.", kind="process", name="p")
    async with scripted_server(str(path), error_response(missing)):
        with pytest.raises(NotFound) as caught:
            await transport(path).request(Count, "POST", "/x")
    error = caught.value
    assert (error.message, error.hint, error.kind, error.name) == (
        "no such.",
        "Look.",
        "process",
        "p",
    )
    assert error.fields["request_id"] == "r1"


async def test_error_after_heartbeats_is_raised(path: Path) -> None:
    body = msgspec.json.encode(FailureResponse(failure_of(PathNotFound("/x"))))
    async with scripted_server(str(path), response(200, b"\n" * 300 + body)):
        with pytest.raises(PathNotFound) as caught:
            await transport(path).request(Count, "POST", "/x")
    assert caught.value.path == "/x"


async def test_connections_are_reused_unless_the_server_closes_them(path: Path) -> None:
    closing = response(200, b'{"count":1}', connection="close")
    for data, connections in ((OK, 1), (closing, 3)):
        client = transport(path)
        async with scripted_server(str(path), data) as server:
            for _ in range(3):
                await client.request(Count, "POST", "/x", body=BODY)
        assert server.connections == connections


@pytest.mark.parametrize("data", [b"SSH-2.0-Other\r\n", b"SSH-2.0-Other\r\n\r\n"])
async def test_response_that_is_not_http_is_a_lost_connection(
    path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "SILENCE", 0.5)
    async with scripted_server(str(path), data):
        with pytest.raises(SandboxGone):
            await transport(path).request(Count, "POST", "/x", body=BODY)


async def test_cancelled_request_closes_its_connection(path: Path) -> None:
    async with scripted_server(str(path), b"HTTP/1.1 200 OK\r\n") as server:
        request = asyncio.create_task(transport(path).request(Count, "POST", "/x", body=BODY))
        async with asyncio.timeout(5):
            while not server.requests:
                await asyncio.sleep(0.005)
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
            while server.closed < 1:
                await asyncio.sleep(0.005)


@pytest.mark.parametrize("data", [response(200, b"<html>"), response(502, b"Bad gateway")])
async def test_response_of_another_program_is_reported(path: Path, data: bytes) -> None:
    async with scripted_server(str(path), data):
        with pytest.raises(ServiceUnavailable, match=r"cannot decode|not that of a Smokebox"):
            await transport(path).request(Count, "POST", "/x")


@pytest.mark.parametrize(
    ("error", "is_said"),
    [
        (InvalidOption("the body has no option 'new'.", hint="It takes: env."), True),
        (NotFound("there is nothing at /api/new.", hint="See the paths.", kind="path"), True),
        (NotFound("there is no sandbox 'x'.", hint="Create it.", kind="sandbox"), False),
        (InvalidOption("a port is from 1 to 65535.", hint="Use one."), False),
    ],
)
async def test_unknown_path_or_field_of_another_version_is_explained(
    path: Path, error: SmokeboxError, is_said: bool
) -> None:
    versions = f"The server is version 0.0.1, and this client {__version__}"
    for version, expected in (("0.0.1", is_said), (__version__, False)):
        data = error_response(error, x_smokebox_version=version)
        async with scripted_server(str(path), data):
            with pytest.raises(type(error)) as caught:
                await transport(path).request(Count, "POST", "/x")
        assert (versions in caught.value.hint) == expected
        assert caught.value.hint.startswith(error.hint)


async def test_timeout_covers_all_attempts(path: Path) -> None:
    async with scripted_server(str(path), DROP):
        with pytest.raises(DeadlineExceeded, match=r"GET /x timed out after 0\.3 s") as caught:
            await transport(path).request(Count, "GET", "/x", timeout=0.3)
    assert caught.value.timeout == 0.3


async def test_server_that_does_not_read_the_body_is_given_up(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "SILENCE", 0.5)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        with pytest.raises(SandboxGone, match="was lost during POST /api/x"):
            await transport(path).request(Written, "POST", "/x", data=bytes(8 << 20))


async def test_slow_source_of_a_body_does_not_count_as_silence(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "SILENCE", 0.2)

    async def slow() -> AsyncIterator[bytes]:
        yield b"a"
        await asyncio.sleep(0.5)
        yield b"b"

    async with scripted_server(str(path), WRITTEN) as server:
        await transport(path).request(Written, "PUT", "/x", data=slow())
    assert server.bodies == [b"ab"]


async def test_unix_socket_may_have_a_long_path(tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 120)
    folder.mkdir()
    (tmp_path / "short").symlink_to(folder)
    async with scripted_server(str(tmp_path / "short" / "s"), OK):
        assert (await transport(folder / "s").request(Count, "GET", "/x")).count == 1


def test_transport_works_on_several_event_loops_in_turn(path: Path) -> None:
    client = transport(path)

    async def request() -> int:
        async with scripted_server(str(path), OK):
            return (await client.request(Count, "GET", "/x")).count

    assert [asyncio.run(request()) for _ in range(3)] == [1, 1, 1]
    assert client.http_clients._clients == {}


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
def test_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidOption, match="not the address of a server"):
        Address.parse(url)
