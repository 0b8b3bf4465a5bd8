"""Sandboxes over HTTP: creation, settings and errors."""

from __future__ import annotations

import aiohttp


async def test_put_creates_a_sandbox_once(http: aiohttp.ClientSession) -> None:
    first = await http.put("/api/sandboxes/box", json={"labels": {"team": "search"}})
    again = await http.put("/api/sandboxes/box", json={})
    assert (first.status, again.status) == (200, 200)
    created, found = await first.json(), await again.json()
    assert (created["id"], created["labels"]) == ("box", {"team": "search"})
    assert found["created_at"] == created["created_at"]
    assert found["labels"] == {"team": "search"}


async def test_unknown_sandbox_is_not_found_and_not_created(http: aiohttp.ClientSession) -> None:
    for method, path in (
        ("GET", "/api/sandboxes/ghost"),
        ("POST", "/api/sandboxes/ghost/exec"),
        ("GET", "/api/sandboxes/ghost/stats"),
        ("POST", "/api/sandboxes/ghost/wake"),
    ):
        body = {"command": "true"} if path.endswith("exec") else None
        response = await http.request(method, path, json=body)
        assert (response.status, (await response.json())["error"]["code"]) == (404, "not_found")
    assert await (await http.get("/api/sandboxes")).json() == {"sandboxes": []}


async def test_unknown_field_is_refused_with_a_suggestion(
    http: aiohttp.ClientSession,
) -> None:
    response = await http.put("/api/sandboxes/box", json={"imag": "host"})
    error = (await response.json())["error"]
    assert (response.status, error["code"], error["hint"]) == (
        400,
        "invalid_option",
        "Did you mean 'image'?",
    )
    assert error["retryable"] is False
    assert error["request_id"] == response.headers["x-request-id"]


async def test_foreign_host_name_is_refused_over_tcp(
    http: aiohttp.ClientSession, server_url: str
) -> None:
    async with (
        http.get("/api/sandboxes", headers={"host": "evil.example"}) as by_socket,
        aiohttp.ClientSession() as session,
        session.get(f"{server_url}/api/sandboxes", headers={"host": "evil.example"}) as by_tcp,
    ):
        assert (by_socket.status, by_tcp.status) == (200, 403)


async def test_settings_of_a_failed_request_are_not_kept(http: aiohttp.ClientSession) -> None:
    refused = await http.put("/api/sandboxes/box", json={"image": "dir:missing"})
    assert refused.status == 404
    created = await http.put("/api/sandboxes/box", json={})
    assert (created.status, (await created.json())["image"]) == (200, "host")
