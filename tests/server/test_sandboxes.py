"""Sandboxes over HTTP: made by PUT, found by GET, never made by anything else."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import aiohttp


async def test_put_makes_a_sandbox_and_put_again_finds_it(http: aiohttp.ClientSession) -> None:
    first = await http.put("/api/sandboxes/box", json={"labels": {"team": "search"}})
    again = await http.put("/api/sandboxes/box", json={})
    assert (first.status, again.status) == (200, 200)
    made, found = await first.json(), await again.json()
    assert (made["id"], made["labels"]) == ("box", {"team": "search"})
    assert found["created_at"] == made["created_at"]
    assert found["labels"] == {"team": "search"}


async def test_an_unknown_sandbox_is_not_found_and_not_made(http: aiohttp.ClientSession) -> None:
    for method, path in (
        ("GET", "/api/sandboxes/ghost"),
        ("POST", "/api/sandboxes/ghost/exec"),
        ("GET", "/api/sandboxes/ghost/stats"),
        ("POST", "/api/sandboxes/ghost/wake"),
    ):
        body = {"command": "true"} if path.endswith("exec") else None
        answer = await http.request(method, path, json=body)
        assert (answer.status, (await answer.json())["error"]["code"]) == (404, "not_found")
    assert await (await http.get("/api/sandboxes")).json() == {"sandboxes": []}


async def test_a_field_that_nobody_knows_is_refused_with_the_nearest(
    http: aiohttp.ClientSession,
) -> None:
    answer = await http.put("/api/sandboxes/box", json={"imag": "host"})
    error = (await answer.json())["error"]
    assert (answer.status, error["code"], error["hint"]) == (
        400,
        "invalid_option",
        "Did you mean 'image'?",
    )
    assert error["retryable"] is False
    assert error["request_id"] == answer.headers["x-request-id"]


async def test_another_name_of_the_server_is_refused(
    http: aiohttp.ClientSession, server_url: str
) -> None:
    async with (
        http.get("/api/sandboxes", headers={"host": "evil.example"}) as by_socket,
        _tcp() as session,
        session.get(f"{server_url}/api/sandboxes", headers={"host": "evil.example"}) as by_tcp,
    ):
        assert (by_socket.status, by_tcp.status) == (200, 403)


def _tcp() -> aiohttp.ClientSession:
    import aiohttp

    return aiohttp.ClientSession()


async def test_what_could_not_be_had_is_not_asked_for_again(http: aiohttp.ClientSession) -> None:
    refused = await http.put("/api/sandboxes/box", json={"image": "dir:/no/such/root"})
    assert refused.status == 404
    made = await http.put("/api/sandboxes/box", json={})
    assert (made.status, (await made.json())["image"]) == (200, "host")
