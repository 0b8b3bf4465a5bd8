"""Tokens of previews: in URLs, cookies and headers; URLs that expire, and private ports."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiohttp
import pytest
from yarl import URL

from server.preview_site import BROWSER
from smokebox.wire.preview import TOKEN_HEADER
from smokebox.wire.requests import CreateKey

if TYPE_CHECKING:
    from server.preview_site import Response, Site

NAVIGATE = {**BROWSER, "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
COOKIE = "__Host-smokebox-token"


async def visit(site: Site, path: str, **headers: str) -> Response:
    """Request a path without the header for programs."""
    return await site.get(path, headers={TOKEN_HEADER: None, **headers})


async def test_token_of_a_page_becomes_a_cookie_by_redirect(site: Site) -> None:
    first = await visit(site, "/a//b?x=1&token=tok&token=of-the-app", **NAVIGATE)
    place = first.headers["location"]
    assert (first.status, place) == (303, "/a//b?x=1&token=of-the-app")
    assert first.headers["referrer-policy"] == "no-referrer"
    cookies = first.headers.getall("set-cookie")
    assert cookies == [
        f"{COOKIE}=tok; Path=/; Secure; HttpOnly; SameSite=Lax",
        "smokebox-token=tok; Path=/; HttpOnly; SameSite=Lax",
    ]
    for cookie in (one.partition(";")[0] for one in cookies):
        page = await visit(site, place, cookie=f"app=1; {cookie}", **NAVIGATE)
        assert (page.status, page.json["path"]) == (200, place)
        assert page.received_headers["cookie"] == "app=1"
    assert (await visit(site, "/?token=tok", accept="text/html")).status == 303


async def test_frame_of_another_site_gets_a_cookie_that_is_sent_there(site: Site) -> None:
    first = await visit(site, "/?token=tok", **{**NAVIGATE, "sec-fetch-dest": "iframe"})
    [secure, _] = first.headers.getall("set-cookie")
    assert secure.endswith("; Secure; HttpOnly; SameSite=None; Partitioned")


@pytest.mark.parametrize("path", ["//evil.example/x", "/\\evil.example"])
async def test_redirect_never_leads_to_another_host(site: Site, path: str) -> None:
    async with site.raw() as (reader, writer):
        head = f"host: {site.host}\r\naccept: text/html\r\n"
        writer.write(f"GET {path}?token=tok HTTP/1.1\r\n{head}\r\n".encode())
        response = await reader.readuntil(b"\r\n\r\n")
    assert f"location: /.{path}\r\n".encode() in response


async def test_program_sends_the_token_as_a_header_or_a_parameter(site: Site) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        headers = {TOKEN_HEADER: None}
        async with site.request(method, "/x?token=tok&y=1", headers=headers) as response:
            assert response.headers["referrer-policy"] == "no-referrer"
            assert "set-cookie" not in response.headers
            assert (await response.json())["path"] == "/x?y=1"
    page = await visit(site, "/x", **{TOKEN_HEADER: "tok"}, **NAVIGATE)
    assert (page.status, page.json["path"]) == (200, "/x")
    url = f"{site.origin}/ws?token=tok"
    async with site.http.ws_connect(url, headers={"host": site.host}) as socket:
        await socket.send_str("hello")
        assert (await socket.receive()).data == "hello"


async def test_request_without_the_token_is_told_where_to_find_it(site: Site) -> None:
    refused = await visit(site, "/")
    assert (refused.status, refused.json["error"]["code"]) == (401, "unauthorized")
    assert "expose_port()" in refused.json["error"]["hint"]
    assert b"This preview needs a token" in (await visit(site, "/", **NAVIGATE)).body
    for wrong in ({TOKEN_HEADER: "no"}, {"cookie": f"{COOKIE}=no"}):
        assert (await visit(site, "/", **wrong)).status == 404
    assert (await visit(site, "/?token=no", **NAVIGATE)).status == 404
    with_cookie = await visit(site, "/?token=no", cookie=f"{COOKIE}=tok", **NAVIGATE)
    assert with_cookie.json["path"] == "/?token=no"


@pytest.mark.parametrize(
    ("chosen", "sent"),
    [
        ("no-referrer", "no-referrer"),
        ("unsafe-url", "same-origin"),
        ("no-referrer,Unsafe-URL", "same-origin"),
        ("strict-origin,same-origin", "same-origin"),
    ],
)
async def test_no_page_tells_its_address_to_other_sites(site: Site, chosen: str, sent: str) -> None:
    page = await site.get(f"/policy?{chosen}")
    assert page.headers.getall("referrer-policy") == [sent]
    assert (await site.get("/")).headers["referrer-policy"] == "same-origin"
    local = await site.get(f"/p/box/3000/tok/policy?{chosen}", headers={"host": "localhost"})
    assert local.headers.getall("referrer-policy") == ["no-referrer"]


async def test_remembered_headers_keep_no_token_of_an_earlier_url(site: Site) -> None:
    async with site.raw() as (reader, writer):
        for query, status in (("?token=tok", b"200"), ("", b"401"), ("?token=tok", b"200")):
            writer.write(f"GET /policy{query} HTTP/1.1\r\nhost: {site.host}\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.split()[1] == status
            length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
            await reader.readexactly(int(length))


async def test_signed_url_expires(site: Site) -> None:
    made = await site.api("POST", "/3000/url", json={"expires_in": 60})
    url = URL(made["url"])
    token = url.query["token"]
    assert (url.authority, token != site.token) == (site.host, True)
    assert (await site.get("/", headers={TOKEN_HEADER: token})).status == 200
    for wrong in (f"{token[:-1]}{'a' if token[-1] != 'a' else 'b'}", f"z{token[1:]}"):
        assert (await site.get("/", headers={TOKEN_HEADER: wrong})).status == 404
    other = (await site.api("POST", "", json={"port": 3001}))["label"]
    elsewhere = {"host": f"{other}.localhost", TOKEN_HEADER: token}
    assert (await site.get("/", headers=elsewhere)).status == 404
    soon = await site.api("POST", "/3000/url", json={"expires_in": 0.001})
    expired = {TOKEN_HEADER: URL(soon["url"]).query["token"]}
    deadline = asyncio.get_running_loop().time() + 10
    while (await site.get("/", headers=expired)).status != 404:
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.1)
    assert (await site.api("POST", "/3000/url", json={}))["url"] == site.url


async def test_unexposing_revokes_signed_urls_and_the_host_name(site: Site) -> None:
    made = await site.api("POST", "/3000/url", json={"expires_in": 60})
    signed = {TOKEN_HEADER: URL(made["url"]).query["token"]}
    assert (await site.get("/", headers=signed)).status == 200
    await site.api("DELETE", "/3000")
    again = await site.api("POST", "", json={"port": 3000, "token": site.token})
    assert again["label"] != site.label
    assert (await site.get("/")).status == 404
    here = {"host": URL(again["url"]).authority}
    assert (await site.get("/", headers=here)).status == 200
    assert (await site.get("/", headers={**here, **signed})).status == 404


async def test_private_port_needs_a_key_or_a_signed_url(site: Site) -> None:
    key = (await site.server.state.keys.create(_key(""))).key
    other = (await site.server.state.keys.create(_key("other"))).key
    assert (await site.api("POST", "", json={"port": 3000, "private": True}))["private"]
    assert (await site.get("/")).status == 401
    assert (await site.get("/", headers={"authorization": f"Bearer {other}"})).status == 401
    response = await site.get("/", headers={"authorization": f"Bearer {key}"})
    assert response.status == 200
    assert key.encode() not in response.body
    made = await site.api("POST", "/3000/url", json={"expires_in": 60})
    token = URL(made["url"]).query["token"]
    assert (await site.get("/", headers={TOKEN_HEADER: token})).status == 200
    assert (await visit(site, "/?token=tok", **NAVIGATE)).status == 401
    assert (await visit(site, f"/?token={token}", **NAVIGATE)).status == 303
    assert (await visit(site, "/", cookie=f"{COOKIE}={token}", **NAVIGATE)).status == 200


async def test_revoking_a_key_closes_its_private_previews(site: Site) -> None:
    created = await site.server.state.keys.create(_key(""))
    await site.api("POST", "", json={"port": 3000, "private": True})
    headers = {**site.headers, "authorization": f"Bearer {created.key}"}
    async with site.request("GET", "/events", headers=headers) as response:
        assert await response.content.readline() == b"data: 0\n"
        async with site.http.delete(f"{site.origin}/api/keys/{created.id}") as revoked:
            assert revoked.status == 204
        with pytest.raises(aiohttp.ClientError):
            async with asyncio.timeout(5):
                await response.content.read()


def _key(prefix: str) -> CreateKey:
    return CreateKey(name=prefix or "all", prefix=prefix)
