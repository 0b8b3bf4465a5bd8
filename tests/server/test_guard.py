"""The door: names, pages, methods, errors, and answers that go wrong on the way."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio
from starlette.responses import StreamingResponse
from starlette.routing import Route, WebSocketRoute

from smokebox.errors import Forbidden
from smokebox.server.guard import RequestGuard
from smokebox.server.hosts import AllowedHosts
from smokebox.server.keys import Principal
from smokebox.server.responses import EventResponse, event
from smokebox.server.server import RunningServer, run_server
from smokebox.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator
    from pathlib import Path

    from starlette.websockets import WebSocket

SITE = "https://app.example"


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[RunningServer]:
    """A server whose pages are elsewhere."""
    settings = ServerSettings(
        home=str(tmp_path / "home"), host="127.0.0.1", pool=0, origins=(SITE,)
    )
    async with run_server(settings) as server:
        yield server


async def _raw(server: RunningServer, head: str) -> tuple[int, dict[str, str], dict[str, Any]]:
    """What a request that no client would send is answered with."""
    assert server.url is not None
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head.replace("\n", "\r\n").encode() + b"connection: close\r\n\r\n")
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    top, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = top.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (one.partition(": ") for one in lines)}
    return int(first.split()[1]), headers, json.loads(body) if body else {}


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost:80", "LOCALHOST", "localhost.", "[::1]:8000", "127.0.0.1:1"]
)
async def test_a_server_is_asked_by_its_names(server: RunningServer, host: str) -> None:
    assert (await _raw(server, f"GET /api/sandboxes HTTP/1.1\nhost: {host}\n"))[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "",
        "localhost@evil.example",
        "evil.example#localhost",
        "localhost evil.example",
        "127.0.0.1.evil.example",
        "localhost:80:80",
        ":80",
        "[::2]",
        "[::1",
        "\u043b\u043e\u043a\u0430\u043b",
    ],
)
async def test_a_server_is_not_asked_by_other_names(server: RunningServer, host: str) -> None:
    head = f"GET /api/sandboxes HTTP/1.1\nhost: {host}\n"
    assert (await _raw(server, head))[0] in (400, 403)


async def test_each_of_two_names_must_be_the_servers(server: RunningServer) -> None:
    for first, second in (("evil.example", "localhost"), ("localhost", "evil.example")):
        head = f"GET /api/sandboxes HTTP/1.1\nhost: {first}\nhost: {second}\n"
        assert (await _raw(server, head))[0] in (400, 403)
    assert (await _raw(server, "GET /api/sandboxes HTTP/1.0\n"))[0] == 403


async def test_the_name_counts_also_where_the_request_line_has_one(server: RunningServer) -> None:
    head = "GET http://localhost/api/sandboxes HTTP/1.1\nhost: evil.example\n"
    assert (await _raw(server, head))[0] == 403
    head = "GET http://localhost/api/sandboxes HTTP/1.1\nhost: localhost\n"
    assert (await _raw(server, head))[0] == 200


def test_a_server_with_keys_takes_any_name_unless_it_is_told_its_own() -> None:
    AllowedHosts(ServerSettings(home="h", host="0.0.0.0")).check_host(b"box.example")
    told = AllowedHosts(ServerSettings(home="h", host="0.0.0.0", hosts=("box.example",)))
    told.check_host(b"box.example:443")
    with pytest.raises(Forbidden, match="does not accept the host name"):
        told.check_host(b"other.example")


async def test_health_is_answered_by_any_name(server: RunningServer) -> None:
    for path in ("/api/health", "/api/ready"):
        status, _, body = await _raw(server, f"GET {path} HTTP/1.1\nhost: 10.1.2.3\n")
        assert (status, body["ok"]) == (200, True)


async def test_a_page_that_may_ask_gets_what_its_browser_wants(server: RunningServer) -> None:
    async with aiohttp.ClientSession(server.url, headers={"origin": SITE}) as page:
        async with page.get("/api/sandboxes") as answer:
            assert answer.status == 200
            assert answer.headers["access-control-allow-origin"] == SITE
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
            assert answer.headers["vary"] == "origin"
        async with page.get("/api/nothing") as answer:
            assert (answer.status, answer.headers["access-control-allow-origin"]) == (404, SITE)
        asked = {"access-control-request-method": "POST"}
        async with page.options("/api/sandboxes/box/exec", headers=asked) as answer:
            assert answer.status == 204
            assert "POST" in answer.headers["access-control-allow-methods"]
            assert "authorization" in answer.headers["access-control-allow-headers"]


async def test_a_page_of_somebody_else_gets_nothing(server: RunningServer) -> None:
    for origin in ("https://evil.example", "null", f"{SITE}.evil.example", "http://app.example"):
        async with aiohttp.ClientSession(server.url, headers={"origin": origin}) as page:
            for method in ("GET", "OPTIONS"):
                asked = {"access-control-request-method": "GET"}
                async with page.request(method, "/api/sandboxes", headers=asked) as answer:
                    assert answer.status == 403
                    assert "access-control-allow-origin" not in answer.headers


async def test_the_servers_own_page_may_ask(server: RunningServer) -> None:
    async with aiohttp.ClientSession(server.url, headers={"origin": str(server.url)}) as page:
        assert await _status(page, "GET", "/api/sandboxes") == 200


async def test_a_method_that_does_not_go_is_told_which_do(server: RunningServer) -> None:
    async with aiohttp.ClientSession(server.url) as session:
        async with session.patch("/api/sandboxes/box") as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["code"]) == (405, "method_not_allowed")
            assert answer.headers["allow"] == "DELETE, GET, HEAD, PUT"
            assert error["request_id"] == answer.headers["x-request-id"]
        async with session.get("/nothing") as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (404, "not_found")


async def test_a_request_has_the_id_that_it_came_with(server: RunningServer) -> None:
    async with aiohttp.ClientSession(server.url) as session:
        headers = {"x-request-id": "abc.DEF-1"}
        async with session.get("/api/sandboxes", headers=headers) as answer:
            assert answer.headers["x-request-id"] == "abc.DEF-1"
        async with session.get("/api/sandboxes", headers={"x-request-id": "a b"}) as answer:
            assert len(answer.headers["x-request-id"]) == 16


async def _events(call: Any) -> AsyncGenerator[bytes, None]:
    yield event("output", {"n": 1})
    raise RuntimeError("broken")


async def _pieces() -> AsyncIterator[bytes]:
    yield b"half"
    raise RuntimeError("broken")


async def _defect(request: Any) -> Any:
    raise RuntimeError("broken")


async def _breaking_stream(request: Any) -> Any:
    class FakeCall:
        request_id = request.scope["smokebox.request_id"]

    return EventResponse(FakeCall(), _events(request))  # type: ignore[arg-type]


async def _breaking_bytes(request: Any) -> Any:
    return StreamingResponse(_pieces(), media_type="application/octet-stream")


async def _echo(socket: WebSocket) -> None:
    await socket.accept()
    await socket.send_json(socket.scope["query_string"].decode())
    raise RuntimeError("broken")


@pytest.fixture
def broken(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> RunningServer:
    """A server with routes that fail."""
    routes = [
        Route("/defect", _defect),
        Route("/stream", _breaking_stream),
        Route("/bytes", _breaking_bytes),
        WebSocketRoute("/socket", _echo),
    ]
    entered = RequestGuard.__call__

    async def call(self: RequestGuard, scope: Any, receive: Any, send: Any) -> None:
        self.app.routes[:0] = [one for one in routes if one not in self.app.routes]  # type: ignore[attr-defined]
        await entered(self, scope, receive, send)

    monkeypatch.setattr(RequestGuard, "__call__", call)
    return server


async def test_a_defect_is_an_answer_that_names_its_request(
    broken: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with aiohttp.ClientSession(broken.url) as session, session.get("/defect") as answer:
        error = (await answer.json())["error"]
    assert (answer.status, error["code"]) == (500, "internal")
    assert error["request_id"] in caplog.text
    assert "RuntimeError: broken" in caplog.text
    assert "broken" not in json.dumps(error)


async def test_an_error_amid_events_is_the_last_event(broken: RunningServer) -> None:
    async with aiohttp.ClientSession(broken.url) as session, session.get("/stream") as answer:
        text = (await answer.read()).decode()
    assert text.startswith("event: output\n")
    assert 'event: error\ndata: {"code":"internal"' in text


async def test_an_error_amid_bytes_breaks_the_connection(broken: RunningServer) -> None:
    async with aiohttp.ClientSession(broken.url) as session, session.get("/bytes") as answer:
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()


async def test_a_socket_that_fails_is_closed_with_a_reason(broken: RunningServer) -> None:
    async with (
        aiohttp.ClientSession(broken.url) as session,
        session.ws_connect("/socket?a=1&authorization=Bearer%20sbx&b=2") as socket,
    ):
        # What opens something is not handed on, and so never logged.
        assert await socket.receive_json() == "a=1&b=2"
        closed = await socket.receive()
        assert (closed.data, socket.close_code) == (1011, 1011)


async def test_sockets_are_refused_as_requests_are(tmp_path: Path, broken: RunningServer) -> None:
    async with aiohttp.ClientSession(broken.url) as session:
        for headers in ({"origin": "https://evil.example"}, {"host": "evil.example"}):
            with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
                await session.ws_connect("/socket", headers=headers)
            assert caught.value.status == 403
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await session.ws_connect("/nothing")
        assert caught.value.status == 404


def test_a_key_with_a_prefix_makes_ids_of_its_own() -> None:
    principal = Principal(id="k", prefix="alice-")
    assert principal.random_id().startswith("alice-")
    principal.check_sandbox(principal.random_id())


async def _status(session: aiohttp.ClientSession, method: str, path: str) -> int:
    async with session.request(method, path) as answer:
        return answer.status
