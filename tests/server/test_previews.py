"""Previews of a server in a sandbox, requested over real sockets."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import re
from typing import TYPE_CHECKING

import aiohttp
import pytest
from yarl import URL

from server.boxes import eventually
from server.preview_site import BROWSER, Site, listen
from smokebox.server.server import run_server
from smokebox.server.settings import ServerSettings
from smokebox.wire.preview import TOKEN_HEADER

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from smokebox.server.server import RunningServer


async def test_exposed_port_is_reached_at_a_subdomain_of_localhost(site: Site) -> None:
    port = site.origin.rpartition(":")[2]
    assert re.fullmatch(rf"http://3000-box-[a-z0-9]{{8}}\.localhost:{port}/\?token=tok", site.url)
    response = await site.get("/a%20b/c?q=%2F&x")
    assert response.status == 200
    assert (response.json["method"], response.json["path"]) == ("GET", "/a%20b/c?q=%2F&x")
    assert response.received_headers["host"] == site.host
    assert TOKEN_HEADER not in response.received_headers


async def test_forwarded_headers_of_a_client_are_replaced(site: Site) -> None:
    forged = {
        "X-Forwarded-For": "6.6.6.6",
        "X_Forwarded_For": "6.6.6.7",
        "X-Forwarded-Host": "evil",
        "X-Forwarded-Proto": "https",
        "X-Real-IP": "6.6.6.8",
        "Forwarded": "for=6.6.6.9",
        "X-Forwarded-Prefix": "/evil",
        "X-Other": "kept",
    }
    response = await site.get("/", headers=forged)
    got = response.received_headers
    assert (got["x-forwarded-for"], got["x-forwarded-proto"]) == ("127.0.0.1", "http")
    assert got["x-forwarded-host"] == site.host
    assert got["forwarded"] == f'for=127.0.0.1;host="{site.host}";proto=http'
    assert got["x-other"] == "kept"
    assert b"6.6.6" not in response.body
    assert b"evil" not in response.body


async def test_hop_by_hop_headers_are_not_forwarded(site: Site) -> None:
    told = {
        "Connection": "x-mine, keep-alive",
        "X-Mine": "1",
        "TE": "trailers",
        "Proxy-Authorization": "Basic x",
        "Keep-Alive": "5",
    }
    got = (await site.get("/", headers=told)).received_headers
    assert not {"connection", "x-mine", "te", "proxy-authorization", "keep-alive"} & set(got)
    headers = (await site.get("/hops")).headers
    assert not {"connection", "x-secret", "keep-alive", "alt-svc"} & {
        one.lower() for one in headers
    }
    assert headers["x-kept"] == "1"


async def test_api_keys_and_own_cookies_never_reach_a_sandbox(site: Site) -> None:
    told = {
        "Authorization": f"Bearer sbx_{'0' * 12}_{'0' * 64}",
        "Cookie": "a=1; smokebox_session=secret; b=2",
    }
    got = (await site.get("/", headers=told)).received_headers
    assert ("authorization" in got, got["cookie"]) == (False, "a=1; b=2")
    own = {"Authorization": "Bearer of-the-app", "Cookie": "smokebox=1"}
    got = (await site.get("/", headers=own)).received_headers
    assert (got["authorization"], "cookie" in got) == ("Bearer of-the-app", False)


async def test_cookies_are_confined_to_the_host_of_the_preview(site: Site) -> None:
    headers = (await site.get("/cookies")).headers
    assert headers.getall("set-cookie") == ["a=1; Path=/x; HttpOnly", "b=2", "c=3; Secure"]


async def test_redirects_are_forwarded_unchanged(site: Site) -> None:
    for place in ("/there?x=1", "https://elsewhere.example/"):
        response = await site.get(f"/redirect?{place}")
        assert (response.status, response.headers["location"]) == (302, place)


async def test_bodies_of_known_and_unknown_length_arrive_whole(site: Site) -> None:
    data = bytes(range(256)) * 20_000

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(data), 99_991):
            yield data[start : start + 99_991]

    whole = {"size": len(data), "hash": hashlib.sha256(data).hexdigest(), "method": "POST"}
    for body in (io.BytesIO(data), pieces()):
        assert whole.items() <= (await site.post("/", body)).items()
    assert (await site.post("/", b""))["size"] == 0
    waiting = await site.post("/", io.BytesIO(data), expect100=True)
    assert waiting["size"] == len(data)


async def test_long_download_arrives_whole(site: Site) -> None:
    size = 64 << 20
    async with asyncio.timeout(20), site.request("GET", f"/big?{size}") as response:
        assert response.headers["content-length"] == str(size)
        left = size
        async for piece in response.content.iter_any():
            left -= len(piece)
    assert left == 0


async def test_events_are_streamed_and_the_app_sees_the_client_disconnect(site: Site) -> None:
    [process] = await site.sandbox.processes.list()
    async with site.request("GET", "/events") as response:
        assert await response.content.readline() == b"data: 0\n"
        response.close()
    await process.wait_for_log("the client left", 20)


async def test_body_that_ends_with_the_connection_ends_for_the_client_too(site: Site) -> None:
    assert (await site.get("/endless")).body == b"until the end"
    with pytest.raises(aiohttp.ClientPayloadError):
        await site.get("/broken")


async def test_responses_without_a_body_keep_the_connection_usable(site: Site) -> None:
    for _ in range(3):
        async with site.request("HEAD", "/big?1000") as response:
            assert (response.status, response.headers["content-length"]) == (200, "1000")
        assert (await site.get("/interim")).body == b"done"


async def test_response_before_the_end_of_the_request_arrives(site: Site) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield bytes(1 << 16)

    async with asyncio.timeout(10), site.request("POST", "/early", data=pieces()) as response:
        assert (response.status, await response.read()) == (413, b"too much")


async def test_http_1_0_client_gets_no_chunks(
    site: Site,
) -> None:
    async with site.raw() as (reader, writer):
        writer.write(f"GET /endless HTTP/1.0\r\n{site.head}\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert body == b"until the end"
    assert b"chunked" not in head


async def test_pipelined_requests_get_responses_in_order(site: Site) -> None:
    async with site.raw() as (reader, writer):
        paths = [f"/{number}" for number in range(50)]
        requests = (f"GET {path} HTTP/1.1\r\n{site.head}\r\n" for path in paths)
        writer.write("".join(requests).encode())
        found: list[str] = []
        while len(found) < len(paths):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            found.append(json.loads(await reader.readexactly(length))["path"])
    assert found == paths


async def test_connections_to_the_app_are_reused(site: Site) -> None:
    for _ in range(10):
        response = await site.get("/")
    assert response.json["connections"] == 1


async def test_one_connection_serves_the_api_and_previews(site: Site) -> None:
    async with site.raw() as (reader, writer):
        for host, path, expected in (
            ("localhost", "/api/health", b'"version"'),
            (site.host, "/x", b'"path": "/x"'),
            ("localhost", "/api/health", b'"version"'),
            ("localhost", "/p/box/3000/tok/y", b'"path": "/y"'),
            (site.host, "/z", b'"path": "/z"'),
        ):
            # In pieces, as a slow network would.
            token = f"{TOKEN_HEADER}: {site.token}"
            for piece in (f"GET {path} HTTP/1.1\r\nho", f"st: {host}\r\n{token}\r\n\r", "\n"):
                writer.write(piece.encode())
                await asyncio.sleep(0.01)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            assert expected in await reader.readexactly(length)


async def test_preview_hosts_do_not_serve_the_api(site: Site) -> None:
    response = await site.get("/api/sandboxes")
    assert response.json["path"] == "/api/sandboxes"
    other = await site.get("/api/sandboxes", headers={"host": "nothing.localhost"})
    assert other.status == 404
    # Right behind a request to the API, in the same segment.
    async with site.raw() as (reader, writer):
        both = "GET /api/health HTTP/1.1\r\nhost: localhost\r\n\r\nGET /api/sandboxes HTTP/1.1\r\n"
        writer.write(f"{both}host: {site.host}\r\nconnection: close\r\n\r\n".encode())
        assert b"403 Forbidden" in await reader.read()


async def test_websocket_is_relayed_both_ways(site: Site) -> None:
    async with (
        asyncio.timeout(10),
        site.http.ws_connect(f"{site.origin}/ws", headers=site.headers) as socket,
    ):
        for number in range(20):
            await socket.send_str(f"hello {number}")
            assert (await socket.receive()).data == f"hello {number}"
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await site.http.ws_connect(f"{site.origin}/", headers=site.headers)
    assert refused.value.status == 200


@pytest.mark.parametrize(
    "label", ["3000-box-wrong", "3001-box-{}", "3000-other-{}", "3000-box", "x", "3000-www-{}"]
)
async def test_wrong_preview_names_are_not_found(site: Site, label: str) -> None:
    label = label.format(site.label.rpartition("-")[2])
    response = await site.get("/", headers={"host": f"{label}.localhost"})
    assert (response.status, response.json["error"]["code"]) == (404, "not_found")
    page = await site.get("/", headers={"host": f"{label}.localhost", **BROWSER})
    assert b"Preview not found" in page.body
    assert [info.id for info in await site.server.state.host.list()] == ["box"]


async def test_preview_of_an_earlier_run_is_gone_until_exposed_again(site: Site) -> None:
    assert (await site.get("/")).status == 200
    await site.sandbox.sleep()
    response = await site.get("/")
    assert (response.status, response.json["error"]["code"]) == (410, "sandbox_gone")
    assert site.sandbox.lifecycle.run is None
    await listen(site.sandbox)
    assert (await site.get("/", headers=BROWSER)).status == 410
    assert (await site.api("GET", ""))["ports"][0]["status"] == "stale"
    assert (await site.api("POST", "", json={"port": 3000}))["url"] == site.url
    assert (await site.get("/")).status == 200


async def test_page_for_a_port_without_a_listener_reloads(site: Site) -> None:
    await site.api("POST", "", json={"port": 4000, "token": "four"})
    [_, exposed] = (await site.api("GET", ""))["ports"]
    host = {"host": URL(exposed["url"]).authority, TOKEN_HEADER: "four"}
    response = await site.get("/", headers={**host, **BROWSER})
    assert response.status == 502
    assert b"nothing listens on port 4000 of sandbox box" in response.body
    assert b'http-equiv="refresh"' in response.body
    assert (await site.get("/", headers=host)).json["error"]["code"] == "service_unavailable"
    async with site.request("HEAD", "/", headers=host) as response:
        assert response.status == 502
    await listen(site.sandbox, 4000)
    assert (await site.get("/", headers=host)).status == 200


@pytest.mark.parametrize("path", ["/nothing", "/nonsense", "/two-lengths"])
async def test_program_that_does_not_speak_http_is_a_bad_gateway(site: Site, path: str) -> None:
    assert (await site.get(path)).status == 502
    assert (await site.get("/")).status == 200


async def test_unexposing_closes_connections_and_refuses_new_ones(site: Site) -> None:
    async with site.http.ws_connect(f"{site.origin}/ws", headers=site.headers) as socket:
        await socket.send_str("hello")
        await socket.receive()
        await site.api("DELETE", "/3000")
        assert (await socket.receive()).type in (
            aiohttp.WSMsgType.CLOSED,
            aiohttp.WSMsgType.CLOSE,
            aiohttp.WSMsgType.ERROR,
        )
    assert (await site.get("/")).status == 404
    assert (await site.api("GET", ""))["ports"] == []


async def test_open_connection_keeps_the_sandbox_awake(server: RunningServer, site: Site) -> None:
    server.state.host.sandbox("box", sleep_after=0.2)
    await site.sandbox.info()
    async with site.http.ws_connect(f"{site.origin}/ws", headers=site.headers) as socket:
        await asyncio.sleep(0.8)
        await socket.send_str("still here")
        assert (await socket.receive()).data == "still here"
    await eventually(lambda: site.sandbox.lifecycle.run is None)
    assert (await site.get("/")).status == 410


async def test_path_form_rewrites_paths_cookies_and_redirects(site: Site) -> None:
    local = {"host": "localhost"}
    response = await site.get("/p/box/3000/tok/a/b?c=1", headers=local)
    assert (response.json["path"], response.received_headers["x-forwarded-prefix"]) == (
        "/a/b?c=1",
        "/p/box/3000/tok/",
    )
    cookies = (await site.get("/p/box/3000/tok/cookies", headers=local)).headers
    assert cookies.getall("set-cookie") == [
        "a=1; HttpOnly; Path=/p/box/3000/tok/",
        "b=2; Path=/p/box/3000/tok/",
        "c=3; Secure; Path=/p/box/3000/tok/",
    ]
    for place, expected in (
        ("/there?x=1", "/p/box/3000/tok/there?x=1"),
        ("http://localhost/there", "/p/box/3000/tok/there"),
        ("https://elsewhere.example/", "https://elsewhere.example/"),
        ("there", "there"),
    ):
        response = await site.get(f"/p/box/3000/tok/redirect?{place}", headers=local)
        assert response.headers["location"] == expected
    for wrong in ("/p/box/3000/no/", "/p/box/3000/tok", "/p/box/3000/", "/p/other/3000/tok/"):
        assert (await site.get(wrong, headers=local)).status == 404


async def test_page_in_the_path_form_has_an_opaque_origin(site: Site) -> None:
    """It shares its host with the API, which a user's own server serves without a key."""
    headers = (await site.get("/p/box/3000/tok/", headers={"host": "localhost"})).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("sandbox ")
    assert "allow-same-origin" not in policy
    url = f"{site.origin}/api/sandboxes"
    async with site.http.get(url, headers={"origin": "null"}) as response:
        assert response.status == 403


@pytest.mark.parametrize(
    "request_",
    [
        "GET / HTTP/1.1\r\n\r\n",
        "GET / HTTP/1.1\r\nhost: {host}\r\nhost: {host}\r\n\r\n",
        "GET http://{host}/ HTTP/1.1\r\nhost: {host}\r\n\r\n",
        "POST / HTTP/1.1\r\nhost: {host}\r\ncontent-length: 3\r\n"
        "transfer-encoding: chunked\r\n\r\n",
        "POST / HTTP/1.1\r\nhost: {host}\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nx",
        "CONNECT {host}:80 HTTP/1.1\r\nhost: {host}\r\n\r\n",
        "POST / HTTP/1.1\r\nhost: {host}\r\nconnection: upgrade\r\nupgrade: h2c\r\n"
        "content-length: 3\r\n\r\nabc",
        "GET / HTTP/1.1\r\nhost: {host}\r\nx: " + "y" * 70_000 + "\r\n\r\n",
        "GET / HTTP/1.1\r\nhost: {host}\r\n broken: 1\r\n\r\n",
    ],
)
async def test_ambiguous_requests_are_refused(site: Site, request_: str) -> None:
    async with site.raw() as (reader, writer):
        writer.write(request_.replace("{host}", site.host).encode())
        response = await reader.read(4096)
    assert response.split(b" ")[1] in (b"400", b"403", b"404", b"405", b"431")
    assert (await site.get("/")).status == 200


async def test_second_request_of_a_connection_is_checked_too(site: Site) -> None:
    async with site.raw() as (reader, writer):
        first = f"GET /1 HTTP/1.1\r\n{site.head}\r\n"
        second = "GET /2 HTTP/1.1\r\nhost: 3000-box-wrong.localhost\r\nconnection: close\r\n\r\n"
        writer.write((first + second).encode())
        responses = await reader.read()
    assert b'"path": "/1"' in responses
    assert b"404 Not Found" in responses
    assert b'"/2"' not in responses


async def test_server_without_tcp_listens_for_previews_on_the_same_port_again(
    tmp_path: Path,
) -> None:
    settings = ServerSettings(home=str(tmp_path / "home"), pool=0)
    urls = []
    for _ in range(2):
        async with run_server(settings) as server:
            connector = aiohttp.UnixConnector(server.socket)
            async with aiohttp.ClientSession("http://localhost", connector=connector) as http:
                async with http.put("/api/sandboxes/box", json={}) as response:
                    assert response.status == 200
                async with http.post("/api/sandboxes/box/ports", json={"port": 3000}) as response:
                    urls.append((await response.json())["url"])
            port = server.state.previews.port
            async with (
                aiohttp.ClientSession() as outside,
                outside.get(f"http://127.0.0.1:{port}/api/sandboxes") as response,
            ):
                # Previews are there, and nothing else.
                assert response.status == 404
    assert urls[0] == urls[1]


@pytest.mark.parametrize(
    "url",
    [
        "preview.example.com",
        "ftp://a.b",
        "https://a.b/c",
        "https://",
        "https://1.2.3.4",
        "http://a b",
    ],
)
async def test_invalid_preview_url_is_refused(tmp_path: Path, url: str) -> None:
    from smokebox.errors import InvalidOption

    with pytest.raises(InvalidOption, match="cannot be the base URL of previews"):
        async with run_server(ServerSettings(home=str(tmp_path / "home"), pool=0, preview_url=url)):
            pass


async def test_previews_are_subdomains_of_the_configured_url(tmp_path: Path) -> None:
    settings = ServerSettings(
        home=str(tmp_path / "home"),
        host="127.0.0.1",
        pool=0,
        preview_url="https://preview.example.com",
    )
    async with run_server(settings) as server, aiohttp.ClientSession() as http:
        sandbox = server.state.host.sandbox("box")
        await listen(sandbox)
        site = Site(server=server, sandbox=sandbox, http=http, url="")
        made = await site.api("POST", "", json={"port": 3000, "token": "tok"})
        label = made["label"]
        assert made["url"] == f"https://{label}.preview.example.com/?token=tok"
        host = {"host": f"{label.title()}.Preview.example.com", TOKEN_HEADER: "tok"}
        response = await site.get("/", headers=host)
        assert response.received_headers["x-forwarded-proto"] == "https"
        page = await site.get("/?token=tok", headers={**host, **BROWSER})
        [cookie] = page.headers.getall("set-cookie")
        assert cookie.startswith("__Host-smokebox-token=tok; Path=/; Secure; HttpOnly")
        assert (await site.get("/", headers={"host": "api.preview.example.com"})).status == 404
        direct = await site.get("/", headers={"host": "preview.example.com"})
        assert direct.status == 403


async def test_server_reached_by_another_name_gives_the_path_form(tmp_path: Path) -> None:
    settings = ServerSettings(
        home=str(tmp_path / "home"), host="127.0.0.1", pool=0, hosts=("box.example",)
    )
    async with run_server(settings) as server, aiohttp.ClientSession() as http:
        async with http.put(f"{server.url}/api/sandboxes/box", json={}) as response:
            assert response.status == 200
        url = f"{server.url}/api/sandboxes/box/ports"
        body = {"port": 3000, "token": "tok"}
        async with http.post(url, json=body, headers={"host": "box.example:99"}) as response:
            assert (await response.json())["url"] == "http://box.example:99/p/box/3000/tok/"


async def test_request_in_progress_finishes_before_the_server_stops(tmp_path: Path) -> None:
    settings = ServerSettings(home=str(tmp_path / "home"), host="127.0.0.1", pool=0)
    async with aiohttp.ClientSession() as http:
        async with run_server(settings) as server:
            sandbox = server.state.host.sandbox("box")
            await listen(sandbox)
            site = Site(server=server, sandbox=sandbox, http=http, url="")
            made = await site.api("POST", "", json={"port": 3000})
            site = Site(server=server, sandbox=sandbox, http=http, url=made["url"])
            size = 32 << 20
            response = await site.request("GET", f"/big?{size}").__aenter__()
            reading = asyncio.create_task(response.read())
            server.state.drain.begin(keep=False)
        assert len(await reading) == size
