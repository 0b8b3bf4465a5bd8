"""The request guard: host names, origins, methods, and errors during a response."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio
from starlette.responses import StreamingResponse
from starlette.routing import Route, WebSocketRoute

from smokebox import __version__
from smokebox.errors import Forbidden
from smokebox.server.guard import RequestGuard
from smokebox.server.hosts import AllowedHosts
from smokebox.server.responses import EventResponse, event
from smokebox.server.server import RunningServer, run_server
from smokebox.server.settings import ServerSettings
from smokebox.tenancy.principal import Principal

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator
    from pathlib import Path

    from starlette.websockets import WebSocket

SITE = "https://app.example"


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[RunningServer]:
    """A server that allows one foreign origin."""
    settings = ServerSettings(
        home=str(tmp_path / "home"), host="127.0.0.1", pool=0, origins=(SITE,)
    )
    async with run_server(settings) as server:
        yield server


async def _raw(server: RunningServer, head: str) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Send a raw request, and return the status, headers and body of the response."""
    assert server.url is not None
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head.replace("\n", "\r\n").encode() + b"connection: close\r\n\r\n")
    async with asyncio.timeout(10):
        response = await reader.read()
    writer.close()
    await writer.wait_closed()
    top, _, body = response.partition(b"\r\n\r\n")
    first, *lines = top.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return int(first.split()[1]), headers, json.loads(body) if body else {}


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost:80", "LOCALHOST", "localhost.", "[::1]:8000", "127.0.0.1:1"]
)
async def test_own_host_names_are_accepted(server: RunningServer, host: str) -> None:
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
async def test_foreign_host_names_are_refused(server: RunningServer, host: str) -> None:
    head = f"GET /api/sandboxes HTTP/1.1\nhost: {host}\n"
    assert (await _raw(server, head))[0] in (400, 403)


async def test_every_host_header_is_checked(server: RunningServer) -> None:
    for first, second in (("evil.example", "localhost"), ("localhost", "evil.example")):
        head = f"GET /api/sandboxes HTTP/1.1\nhost: {first}\nhost: {second}\n"
        assert (await _raw(server, head))[0] in (400, 403)
    assert (await _raw(server, "GET /api/sandboxes HTTP/1.0\n"))[0] == 403


async def test_host_in_the_request_line_is_ignored(server: RunningServer) -> None:
    head = "GET http://localhost/api/sandboxes HTTP/1.1\nhost: evil.example\n"
    assert (await _raw(server, head))[0] == 403
    head = "GET http://localhost/api/sandboxes HTTP/1.1\nhost: localhost\n"
    assert (await _raw(server, head))[0] == 200


def test_server_with_keys_accepts_any_host_unless_configured() -> None:
    AllowedHosts(ServerSettings(home="h", host="0.0.0.0")).check_host(b"box.example")
    configured = AllowedHosts(ServerSettings(home="h", host="0.0.0.0", hosts=("box.example",)))
    configured.check_host(b"box.example:443")
    with pytest.raises(Forbidden, match="does not accept the host name"):
        configured.check_host(b"other.example")


async def test_health_accepts_any_host_name(server: RunningServer) -> None:
    for path in ("/api/health", "/api/ready"):
        status, _, body = await _raw(server, f"GET {path} HTTP/1.1\nhost: 10.1.2.3\n")
        assert (status, body["ok"]) == (200, True)


async def test_cors_headers_for_an_allowed_origin(server: RunningServer) -> None:
    async with aiohttp.ClientSession(server.url, headers={"origin": SITE}) as page:
        async with page.get("/api/sandboxes") as response:
            assert response.status == 200
            assert response.headers["access-control-allow-origin"] == SITE
            assert "x-request-id" in response.headers["access-control-expose-headers"]
            assert response.headers["vary"] == "origin"
        async with page.get("/api/nothing") as response:
            assert (response.status, response.headers["access-control-allow-origin"]) == (404, SITE)
        preflight = {"access-control-request-method": "POST"}
        async with page.options("/api/sandboxes/box/exec", headers=preflight) as response:
            assert response.status == 204
            assert "POST" in response.headers["access-control-allow-methods"]
            assert "authorization" in response.headers["access-control-allow-headers"]


async def test_foreign_origins_are_refused(server: RunningServer) -> None:
    for origin in ("https://evil.example", "null", f"{SITE}.evil.example", "http://app.example"):
        async with aiohttp.ClientSession(server.url, headers={"origin": origin}) as page:
            for method in ("GET", "OPTIONS"):
                preflight = {"access-control-request-method": "GET"}
                async with page.request(method, "/api/sandboxes", headers=preflight) as response:
                    assert response.status == 403
                    assert "access-control-allow-origin" not in response.headers


async def test_same_origin_is_accepted(server: RunningServer) -> None:
    async with aiohttp.ClientSession(server.url, headers={"origin": str(server.url)}) as page:
        assert await _status(page, "GET", "/api/sandboxes") == 200


@pytest.mark.parametrize(
    ("site", "origin", "status"),
    [
        ("cross-site", None, 403),
        ("same-site", None, 403),
        ("cross-site", SITE, 200),
        ("same-origin", None, 200),
        ("none", None, 200),
    ],
)
async def test_image_or_link_of_another_site_wakes_no_sandbox(
    server: RunningServer, site: str, origin: str | None, status: int
) -> None:
    sandbox = await server.state.host.create("box")
    await sandbox.sleep()
    headers = {"sec-fetch-site": site} | ({"origin": origin} if origin else {})
    async with aiohttp.ClientSession(server.url, headers=headers) as session:
        path = "/api/sandboxes/box/files?path=/etc/hosts"
        assert await _status(session, "GET", path) == status
        assert (sandbox.lifecycle.run is None) == (status == 403)
        # Nothing to protect: links to the documentation work.
        assert await _status(session, "GET", "/api/docs") == 200


@pytest.mark.parametrize("depth", [200, 900, 100_000])
@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/sandboxes/new", '{"limits": %s}'),
        ("PUT", "/sandboxes/new", '{"limits": {"memory": %s}}'),
        ("PUT", "/sandboxes/new", '{"env": %s}'),
        ("PUT", "/sandboxes/new", '{"egress": %s}'),
        ("POST", "/sandboxes/box/exec", '{"command": "true", "limits": {"memory": %s}}'),
        ("POST", "/sandboxes/box/processes", '{"command": "true", "limits": %s}'),
        ("POST", "/sandboxes/box/egress/changes", '{"allowed_hosts": %s}'),
        ("POST", "/keys", "%s"),
        ("POST", "/v1/sandbox/box/exec", '{"argv": %s}'),
    ],
)
async def test_deep_json_is_refused(
    server: RunningServer, method: str, path: str, body: str, depth: int
) -> None:
    await server.state.host.create("box")
    path = path if path.startswith("/v1") else f"/api{path}"
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        deep = opening * depth + "1" + closing * depth
        headers = {"content-type": "application/json"}
        data = body.replace("%s", deep)
        async with (
            aiohttp.ClientSession(server.url, headers=headers) as session,
            session.request(method, path, data=data) as response,
        ):
            assert response.status == 400, await response.read()
    assert [one.id for one in await server.state.host.list()] == ["box"]


async def test_every_response_has_the_version_of_the_server(server: RunningServer) -> None:
    for path in ("/api/health", "/api/sandboxes/none", "/nothing", "/v1/nothing"):
        _, headers, _ = await _raw(server, f"GET {path} HTTP/1.1\nhost: localhost\n")
        assert headers["x-smokebox-version"] == __version__


async def test_unsupported_method_lists_the_supported_ones(server: RunningServer) -> None:
    async with aiohttp.ClientSession(server.url) as session:
        async with session.patch("/api/sandboxes/box") as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"]) == (405, "method_not_allowed")
            assert response.headers["allow"] == "DELETE, GET, HEAD, PUT"
            assert error["request_id"] == response.headers["x-request-id"]
        async with session.get("/nothing") as response:
            assert (response.status, (await response.json())["error"]["code"]) == (404, "not_found")


async def test_valid_request_id_is_kept(server: RunningServer) -> None:
    async with aiohttp.ClientSession(server.url) as session:
        headers = {"x-request-id": "abc.DEF-1"}
        async with session.get("/api/sandboxes", headers=headers) as response:
            assert response.headers["x-request-id"] == "abc.DEF-1"
        async with session.get("/api/sandboxes", headers={"x-request-id": "a b"}) as response:
            assert len(response.headers["x-request-id"]) == 16


async def _events(call: Any) -> AsyncGenerator[bytes, None]:
    yield event("output", {"n": 1})
    raise RuntimeError("broken")


async def _pieces() -> AsyncIterator[bytes]:
    yield b"half"
    raise RuntimeError("broken")


async def _fail(request: Any) -> Any:
    raise RuntimeError("broken")


async def _failing_stream(request: Any) -> Any:
    class FakeCall:
        request_id = request.scope["smokebox.request_id"]

    return EventResponse(FakeCall(), _events(request))  # type: ignore[arg-type]


async def _failing_bytes(request: Any) -> Any:
    return StreamingResponse(_pieces(), media_type="application/octet-stream")


async def _send_query_and_fail(socket: WebSocket) -> None:
    await socket.accept()
    await socket.send_json(socket.scope["query_string"].decode())
    raise RuntimeError("broken")


@pytest.fixture
def failing_server(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> RunningServer:
    """A server with additional routes that fail."""
    routes = [
        Route("/error", _fail),
        Route("/stream", _failing_stream),
        Route("/bytes", _failing_bytes),
        WebSocketRoute("/socket", _send_query_and_fail),
    ]
    original = RequestGuard.__call__

    async def call(self: RequestGuard, scope: Any, receive: Any, send: Any) -> None:
        self.app.routes[:0] = [route for route in routes if route not in self.app.routes]  # type: ignore[attr-defined]
        await original(self, scope, receive, send)

    monkeypatch.setattr(RequestGuard, "__call__", call)
    return server


async def test_internal_error_has_the_request_id_and_no_details(
    failing_server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        aiohttp.ClientSession(failing_server.url) as session,
        session.get("/error") as response,
    ):
        error = (await response.json())["error"]
    assert (response.status, error["code"]) == (500, "internal")
    assert error["request_id"] in caplog.text
    assert "RuntimeError: broken" in caplog.text
    assert "broken" not in json.dumps(error)


async def test_error_during_a_stream_is_its_last_event(failing_server: RunningServer) -> None:
    async with (
        aiohttp.ClientSession(failing_server.url) as session,
        session.get("/stream") as response,
    ):
        text = (await response.read()).decode()
    assert text.startswith("event: output\n")
    assert 'event: error\ndata: {"code":"internal"' in text


async def test_error_during_a_byte_response_closes_the_connection(
    failing_server: RunningServer,
) -> None:
    async with (
        aiohttp.ClientSession(failing_server.url) as session,
        session.get("/bytes") as response,
    ):
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()


async def test_websocket_that_fails_is_closed_with_1011(failing_server: RunningServer) -> None:
    async with (
        aiohttp.ClientSession(failing_server.url) as session,
        session.ws_connect("/socket?a=1&authorization=Bearer%20sbx&b=2") as socket,
    ):
        # The key is removed from the query, so that it is never logged.
        assert await socket.receive_json() == "a=1&b=2"
        closed = await socket.receive()
        assert (closed.data, socket.close_code) == (1011, 1011)


async def test_websockets_are_checked_like_requests(
    tmp_path: Path, failing_server: RunningServer
) -> None:
    async with aiohttp.ClientSession(failing_server.url) as session:
        for headers in ({"origin": "https://evil.example"}, {"host": "evil.example"}):
            with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
                await session.ws_connect("/socket", headers=headers)
            assert caught.value.status == 403
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await session.ws_connect("/nothing")
        assert caught.value.status == 404


def test_random_id_of_a_principal_has_its_prefix() -> None:
    principal = Principal(id="k", prefix="alice-")
    principal.check_sandbox("alice-1")


async def _status(session: aiohttp.ClientSession, method: str, path: str) -> int:
    async with session.request(method, path) as response:
        return response.status
