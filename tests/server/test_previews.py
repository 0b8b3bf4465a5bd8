"""Previews: what listens in a sandbox, seen from outside through real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio
from yarl import URL

from server import preview_app
from server.boxes import eventually
from smokebox.server.server import run_server
from smokebox.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox.engine import Sandbox
    from smokebox.server.server import RunningServer

APP = Path(preview_app.__file__).read_text()
BROWSER = {"accept": "text/html,application/xhtml+xml"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A preview, by a client that is not ours; `url` is the one that the server gave."""

    server: RunningServer
    sandbox: Sandbox
    http: aiohttp.ClientSession
    url: str

    @property
    def host(self) -> str:
        return self.url.removeprefix("http://").rstrip("/")

    @property
    def origin(self) -> str:
        """Where its names lead, which not every resolver knows."""
        assert self.server.url is not None
        return self.server.url

    def ask(self, method: str, path: str, **options: Any) -> Any:
        headers = {"host": self.host, **options.pop("headers", {})}
        options.setdefault("allow_redirects", False)
        url = URL(self.origin + path, encoded=True)
        return self.http.request(method, url, headers=headers, **options)

    async def get(self, path: str, **options: Any) -> Shown:
        async with asyncio.timeout(10), self.ask("GET", path, **options) as answer:
            return Shown(answer.status, answer.headers, await answer.read())

    async def post(self, path: str, data: Any, **options: Any) -> Any:
        async with asyncio.timeout(10), self.ask("POST", path, data=data, **options) as answer:
            return json.loads(await answer.read())

    async def api(self, method: str, path: str, **options: Any) -> Any:
        url = f"{self.origin}/api/sandboxes/box/ports{path}"
        async with self.http.request(method, url, **options) as answer:
            data = await answer.read()
            assert answer.status < 300, data
            return json.loads(data) if data else None

    @contextlib.asynccontextmanager
    async def raw(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        port = self.server.state.previews.port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            async with asyncio.timeout(10):
                yield reader, writer
        finally:
            writer.transport.abort()


@dataclass(frozen=True, slots=True)
class Shown:
    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def got(self) -> dict[str, str]:
        """The headers that the app got."""
        return dict(self.json["headers"])


async def listen(sandbox: Sandbox, port: int = 3000) -> None:
    app = await sandbox.start_process(["python3", "-c", APP, str(port)])
    await app.wait_for_log("listening", 20)


@pytest_asyncio.fixture
async def site(server: RunningServer) -> AsyncIterator[Site]:
    """An app in a sandbox, exposed."""
    sandbox = server.state.host.sandbox("box")
    await listen(sandbox)
    jar = aiohttp.DummyCookieJar()
    async with aiohttp.ClientSession(cookie_jar=jar, auto_decompress=False) as http:
        site = Site(server=server, sandbox=sandbox, http=http, url="")
        exposed = await site.api("POST", "", json={"port": 3000, "token": "tok"})
        yield Site(server=server, sandbox=sandbox, http=http, url=exposed["url"])


async def test_a_port_is_seen_below_localhost_at_the_port_of_the_server(site: Site) -> None:
    assert site.url == f"http://3000-box-tok.localhost:{site.origin.rpartition(':')[2]}/"
    shown = await site.get("/a%20b/c?q=%2F&x")
    assert shown.status == 200
    assert (shown.json["method"], shown.json["path"]) == ("GET", "/a%20b/c?q=%2F&x")
    assert shown.got["host"] == site.host


async def test_who_asks_is_told_by_us_and_nobody_else(site: Site) -> None:
    lies = {
        "X-Forwarded-For": "6.6.6.6",
        "X_Forwarded_For": "6.6.6.7",
        "X-Forwarded-Host": "evil",
        "X-Forwarded-Proto": "https",
        "X-Real-IP": "6.6.6.8",
        "Forwarded": "for=6.6.6.9",
        "X-Forwarded-Prefix": "/evil",
        "X-Other": "kept",
    }
    shown = await site.get("/", headers=lies)
    got = shown.got
    assert (got["x-forwarded-for"], got["x-forwarded-proto"]) == ("127.0.0.1", "http")
    assert got["x-forwarded-host"] == site.host
    assert got["forwarded"] == f'for=127.0.0.1;host="{site.host}";proto=http'
    assert got["x-other"] == "kept"
    assert b"6.6.6" not in shown.body
    assert b"evil" not in shown.body


async def test_what_is_for_one_hop_goes_no_further(site: Site) -> None:
    told = {
        "Connection": "x-mine, keep-alive",
        "X-Mine": "1",
        "TE": "trailers",
        "Proxy-Authorization": "Basic x",
        "Keep-Alive": "5",
    }
    got = (await site.get("/", headers=told)).got
    assert not {"connection", "x-mine", "te", "proxy-authorization", "keep-alive"} & set(got)
    headers = (await site.get("/hops")).headers
    assert not {"connection", "x-secret", "keep-alive", "alt-svc"} & {
        one.lower() for one in headers
    }
    assert headers["x-kept"] == "1"


async def test_a_key_of_the_server_and_its_cookies_never_reach_a_sandbox(site: Site) -> None:
    told = {
        "Authorization": f"Bearer sbx_{'0' * 12}_{'0' * 64}",
        "Cookie": "a=1; smokebox_session=secret; b=2",
    }
    got = (await site.get("/", headers=told)).got
    assert ("authorization" in got, got["cookie"]) == (False, "a=1; b=2")
    own = {"Authorization": "Bearer of-the-app", "Cookie": "smokebox=1"}
    got = (await site.get("/", headers=own)).got
    assert (got["authorization"], "cookie" in got) == ("Bearer of-the-app", False)


async def test_cookies_are_of_the_host_of_the_preview_only(site: Site) -> None:
    headers = (await site.get("/cookies")).headers
    assert headers.getall("set-cookie") == ["a=1; Path=/x; HttpOnly", "b=2"]


async def test_redirects_are_passed_as_they_are(site: Site) -> None:
    for place in ("/there?x=1", "https://elsewhere.example/"):
        shown = await site.get(f"/redirect?{place}")
        assert (shown.status, shown.headers["location"]) == (302, place)


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


async def test_a_long_download_arrives_whole_and_a_slow_reader_holds_it_up(site: Site) -> None:
    size = 64 << 20
    async with asyncio.timeout(20), site.ask("GET", f"/big?{size}") as answer:
        assert answer.headers["content-length"] == str(size)
        left = size
        async for piece in answer.content.iter_any():
            left -= len(piece)
    assert left == 0


async def test_events_come_as_they_are_sent_and_the_app_sees_the_reader_leave(site: Site) -> None:
    [process] = await site.sandbox.processes.list()
    async with site.ask("GET", "/events") as answer:
        assert await answer.content.readline() == b"data: 0\n"
        answer.close()
    await process.wait_for_log("the reader left", 20)


async def test_bodies_that_end_with_the_connection_end_for_visitors_too(site: Site) -> None:
    assert (await site.get("/endless")).body == b"until the end"
    with pytest.raises(aiohttp.ClientPayloadError):
        await site.get("/broken")


async def test_an_answer_without_a_body_is_the_end_of_it(site: Site) -> None:
    for _ in range(3):
        async with site.ask("HEAD", "/big?1000") as answer:
            assert (answer.status, answer.headers["content-length"]) == (200, "1000")
        assert (await site.get("/interim")).body == b"done"


async def test_an_answer_that_comes_early_is_seen(site: Site) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield bytes(1 << 16)

    async with asyncio.timeout(10), site.ask("POST", "/early", data=pieces()) as answer:
        assert (answer.status, await answer.read()) == (413, b"too much")


async def test_a_visitor_of_http_1_0_gets_an_answer_that_ends_with_the_connection(
    site: Site,
) -> None:
    async with site.raw() as (reader, writer):
        writer.write(f"GET /endless HTTP/1.0\r\nhost: {site.host}\r\n\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert body == b"until the end"
    assert b"chunked" not in head


async def test_requests_that_come_at_once_are_answered_in_their_order(site: Site) -> None:
    async with site.raw() as (reader, writer):
        paths = [f"/{number}" for number in range(50)]
        asked = (f"GET {path} HTTP/1.1\r\nhost: {site.host}\r\n\r\n" for path in paths)
        writer.write("".join(asked).encode())
        found: list[str] = []
        while len(found) < len(paths):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            found.append(json.loads(await reader.readexactly(length))["path"])
    assert found == paths


async def test_connections_to_the_sandbox_are_kept_for_the_next_request(site: Site) -> None:
    for _ in range(10):
        shown = await site.get("/")
    assert shown.json["connections"] == 1


async def test_one_connection_may_ask_for_the_api_and_for_previews(site: Site) -> None:
    async with site.raw() as (reader, writer):
        for host, path, expected in (
            ("localhost", "/api/health", b'"version"'),
            (site.host, "/x", b'"path": "/x"'),
            ("localhost", "/api/health", b'"version"'),
            ("localhost", "/p/box/3000/tok/y", b'"path": "/y"'),
            (site.host, "/z", b'"path": "/z"'),
        ):
            # In pieces, as a slow network would.
            for piece in (f"GET {path} HTTP/1.1\r\nho", f"st: {host}\r\n\r", "\n"):
                writer.write(piece.encode())
                await asyncio.sleep(0.01)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            assert expected in await reader.readexactly(length)


async def test_the_api_is_not_at_the_names_of_previews(site: Site) -> None:
    shown = await site.get("/api/sandboxes")
    assert shown.json["path"] == "/api/sandboxes"
    other = await site.get("/api/sandboxes", headers={"host": "nothing.localhost"})
    assert other.status == 404
    # Right behind a request to the API, where nobody looks for it.
    async with site.raw() as (reader, writer):
        both = "GET /api/health HTTP/1.1\r\nhost: localhost\r\n\r\nGET /api/sandboxes HTTP/1.1\r\n"
        writer.write(f"{both}host: {site.host}\r\nconnection: close\r\n\r\n".encode())
        assert b"403 Forbidden" in await reader.read()


async def test_a_websocket_passes_both_ways(site: Site) -> None:
    async with (
        asyncio.timeout(10),
        site.http.ws_connect(f"{site.origin}/ws", headers={"host": site.host}) as socket,
    ):
        for number in range(20):
            await socket.send_str(f"hello {number}")
            assert (await socket.receive()).data == f"hello {number}"
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await site.http.ws_connect(f"{site.origin}/", headers={"host": site.host})
    assert refused.value.status == 200


@pytest.mark.parametrize(
    "label", ["3000-box-wrong", "3001-box-tok", "3000-other-tok", "3000-box", "x", "3000-www-tok"]
)
async def test_a_wrong_name_is_not_found_whatever_is_wrong_with_it(site: Site, label: str) -> None:
    shown = await site.get("/", headers={"host": f"{label}.localhost"})
    assert (shown.status, shown.json["error"]["code"]) == (404, "not_found")
    page = await site.get("/", headers={"host": f"{label}.localhost", **BROWSER})
    assert b"There is no such preview" in page.body
    assert [info.id for info in await site.server.state.host.list()] == ["box"]


async def test_a_preview_of_a_former_run_is_gone_until_it_is_exposed_again(site: Site) -> None:
    assert (await site.get("/")).status == 200
    await site.sandbox.sleep()
    shown = await site.get("/")
    assert (shown.status, shown.json["error"]["code"]) == (410, "sandbox_gone")
    assert site.sandbox.life.run is None
    await listen(site.sandbox)
    assert (await site.get("/", headers=BROWSER)).status == 410
    assert (await site.api("GET", ""))["ports"][0]["status"] == "stale"
    assert (await site.api("POST", "", json={"port": 3000}))["url"] == site.url
    assert (await site.get("/")).status == 200


async def test_where_nothing_listens_a_page_says_so_and_tries_again(site: Site) -> None:
    await site.api("POST", "", json={"port": 4000, "token": "four"})
    host = site.host.replace("3000", "4000").replace("tok", "four")
    shown = await site.get("/", headers={"host": host, **BROWSER})
    assert shown.status == 502
    assert b"nothing listens on port 4000 of sandbox box" in shown.body
    assert b'http-equiv="refresh"' in shown.body
    assert (await site.get("/", headers={"host": host})).json["error"]["code"] == (
        "service_unavailable"
    )
    async with site.ask("HEAD", "/", headers={"host": host}) as answer:
        assert answer.status == 502
    await listen(site.sandbox, 4000)
    assert (await site.get("/", headers={"host": host})).status == 200


@pytest.mark.parametrize("path", ["/nothing", "/nonsense"])
async def test_what_does_not_speak_http_is_a_bad_gateway(site: Site, path: str) -> None:
    assert (await site.get(path)).status == 502
    assert (await site.get("/")).status == 200


async def test_unexposing_ends_what_goes_on_and_what_would_come(site: Site) -> None:
    async with site.http.ws_connect(f"{site.origin}/ws", headers={"host": site.host}) as socket:
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


async def test_an_open_preview_keeps_a_sandbox_awake(server: RunningServer, site: Site) -> None:
    server.state.host.sandbox("box", sleep_after=0.2)
    await site.sandbox.info()
    async with site.http.ws_connect(f"{site.origin}/ws", headers={"host": site.host}) as socket:
        await asyncio.sleep(0.8)
        await socket.send_str("still here")
        assert (await socket.receive()).data == "still here"
    await eventually(lambda: site.sandbox.life.run is None)
    assert (await site.get("/")).status == 410


async def test_the_path_form_serves_hosts_without_wildcards(site: Site) -> None:
    local = {"host": "localhost"}
    shown = await site.get("/p/box/3000/tok/a/b?c=1", headers=local)
    assert (shown.json["path"], shown.got["x-forwarded-prefix"]) == (
        "/a/b?c=1",
        "/p/box/3000/tok/",
    )
    cookies = (await site.get("/p/box/3000/tok/cookies", headers=local)).headers
    assert cookies.getall("set-cookie") == [
        "a=1; HttpOnly; Path=/p/box/3000/tok/",
        "b=2; Path=/p/box/3000/tok/",
    ]
    for place, expected in (
        ("/there?x=1", "/p/box/3000/tok/there?x=1"),
        ("http://localhost/there", "/p/box/3000/tok/there"),
        ("https://elsewhere.example/", "https://elsewhere.example/"),
        ("there", "there"),
    ):
        shown = await site.get(f"/p/box/3000/tok/redirect?{place}", headers=local)
        assert shown.headers["location"] == expected
    for wrong in ("/p/box/3000/no/", "/p/box/3000/tok", "/p/box/3000/", "/p/other/3000/tok/"):
        assert (await site.get(wrong, headers=local)).status == 404


async def test_a_page_in_the_path_form_is_of_no_origin(site: Site) -> None:
    """It is beside the API, which one user's own server answers without a key."""
    headers = (await site.get("/p/box/3000/tok/", headers={"host": "localhost"})).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("sandbox ")
    assert "allow-same-origin" not in policy
    url = f"{site.origin}/api/sandboxes"
    async with site.http.get(url, headers={"origin": "null"}) as answer:
        assert answer.status == 403


async def test_a_url_that_expires_does(site: Site) -> None:
    made = await site.api("POST", "/3000/url", json={"expires_in": 60})
    host = made["url"].removeprefix("http://").rstrip("/")
    assert "-tok." not in host
    assert (await site.get("/", headers={"host": host})).status == 200
    label, _, rest = host.partition(".")
    token = label.rpartition("-")[2]
    for wrong in (
        f"{label[:-1]}{'a' if label[-1] != 'a' else 'b'}",
        label.replace(token, "z" + token[1:]),
        label.replace("3000-", "3001-"),
    ):
        assert (await site.get("/", headers={"host": f"{wrong}.{rest}"})).status == 404
    soon = await site.api("POST", "/3000/url", json={"expires_in": 0.001})
    host = soon["url"].removeprefix("http://").rstrip("/")
    deadline = asyncio.get_running_loop().time() + 10
    while (await site.get("/", headers={"host": host})).status != 404:
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.1)
    assert (await site.api("POST", "/3000/url", json={}))["url"] == site.url


async def test_what_was_signed_ends_with_the_token_of_the_port(site: Site) -> None:
    made = await site.api("POST", "/3000/url", json={"expires_in": 60})
    host = made["url"].removeprefix("http://").rstrip("/")
    await site.api("DELETE", "/3000")
    await site.api("POST", "", json={"port": 3000})
    assert (await site.get("/", headers={"host": host})).status == 404


async def test_a_private_port_is_for_who_has_a_key_or_a_url_that_expires(site: Site) -> None:
    key = (await site.server.state.keys.create(_key("box"))).key
    other = (await site.server.state.keys.create(_key("other"))).key
    assert (await site.api("POST", "", json={"port": 3000, "private": True}))["private"]
    assert (await site.get("/")).status == 401
    assert (await site.get("/", headers={"authorization": f"Bearer {other}"})).status == 401
    shown = await site.get("/", headers={"authorization": f"Bearer {key}"})
    assert shown.status == 200
    assert key.encode() not in shown.body
    made = await site.api("POST", "/3000/url", json={"expires_in": 60})
    host = made["url"].removeprefix("http://").rstrip("/")
    assert (await site.get("/", headers={"host": host})).status == 200


def _key(prefix: str) -> Any:
    from smokebox.wire.requests import CreateKey

    return CreateKey(name=prefix, prefix=prefix)


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
async def test_requests_that_could_be_read_in_two_ways_are_refused(
    site: Site, request_: str
) -> None:
    async with site.raw() as (reader, writer):
        writer.write(request_.replace("{host}", site.host).encode())
        answer = await reader.read(4096)
    assert answer.split(b" ")[1] in (b"400", b"403", b"404", b"405", b"431")
    assert (await site.get("/")).status == 200


async def test_a_second_request_in_a_chunk_is_checked_as_the_first(site: Site) -> None:
    async with site.raw() as (reader, writer):
        first = f"GET /1 HTTP/1.1\r\nhost: {site.host}\r\n\r\n"
        second = "GET /2 HTTP/1.1\r\nhost: 3000-box-wrong.localhost\r\nconnection: close\r\n\r\n"
        writer.write((first + second).encode())
        answers = await reader.read()
    assert b'"path": "/1"' in answers
    assert b"404 Not Found" in answers
    assert b'"/2"' not in answers


async def test_a_server_without_a_port_opens_one_for_previews_and_finds_it_again(
    tmp_path: Path,
) -> None:
    settings = ServerSettings(home=str(tmp_path / "home"), pool=0)
    urls = []
    for _ in range(2):
        async with run_server(settings) as server:
            connector = aiohttp.UnixConnector(server.socket)
            async with aiohttp.ClientSession("http://localhost", connector=connector) as http:
                async with http.put("/api/sandboxes/box", json={}) as answer:
                    assert answer.status == 200
                async with http.post("/api/sandboxes/box/ports", json={"port": 3000}) as answer:
                    urls.append((await answer.json())["url"])
            port = server.state.previews.port
            async with (
                aiohttp.ClientSession() as outside,
                outside.get(f"http://127.0.0.1:{port}/api/sandboxes") as answer,
            ):
                # Previews are there, and nothing else.
                assert answer.status == 404
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
async def test_a_place_where_no_previews_can_be_is_refused(tmp_path: Path, url: str) -> None:
    from smokebox.errors import InvalidOption

    with pytest.raises(InvalidOption, match="is not where previews can be"):
        async with run_server(ServerSettings(home=str(tmp_path / "home"), pool=0, preview_url=url)):
            pass


async def test_previews_are_below_a_domain_that_was_set(tmp_path: Path) -> None:
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
        assert made["url"] == "https://3000-box-tok.preview.example.com/"
        shown = await site.get("/", headers={"host": "3000-Box-tok.Preview.example.com"})
        assert shown.got["x-forwarded-proto"] == "https"
        assert (await site.get("/", headers={"host": "api.preview.example.com"})).status == 404
        direct = await site.get("/", headers={"host": "preview.example.com"})
        assert direct.status == 403


async def test_a_server_that_is_asked_from_elsewhere_gives_the_path_form(tmp_path: Path) -> None:
    settings = ServerSettings(
        home=str(tmp_path / "home"), host="127.0.0.1", pool=0, hosts=("box.example",)
    )
    async with run_server(settings) as server, aiohttp.ClientSession() as http:
        async with http.put(f"{server.url}/api/sandboxes/box", json={}) as answer:
            assert answer.status == 200
        url = f"{server.url}/api/sandboxes/box/ports"
        body = {"port": 3000, "token": "tok"}
        async with http.post(url, json=body, headers={"host": "box.example:99"}) as answer:
            assert (await answer.json())["url"] == "http://box.example:99/p/box/3000/tok/"


async def test_a_request_on_its_way_is_answered_before_the_server_ends(tmp_path: Path) -> None:
    settings = ServerSettings(home=str(tmp_path / "home"), host="127.0.0.1", pool=0)
    async with aiohttp.ClientSession() as http:
        async with run_server(settings) as server:
            sandbox = server.state.host.sandbox("box")
            await listen(sandbox)
            site = Site(server=server, sandbox=sandbox, http=http, url="")
            made = await site.api("POST", "", json={"port": 3000})
            site = Site(server=server, sandbox=sandbox, http=http, url=made["url"])
            size = 32 << 20
            answer = await site.ask("GET", f"/big?{size}").__aenter__()
            reading = asyncio.create_task(answer.read())
            server.state.drain.begin(keep=False)
        assert len(await reading) == size
