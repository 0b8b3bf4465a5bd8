"""Shell sessions over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest_asyncio

from http_response import fetch

if TYPE_CHECKING:
    import aiohttp

SANDBOX = "/api/sandboxes/box"


@pytest_asyncio.fixture(autouse=True)
async def _sandbox(http: aiohttp.ClientSession) -> None:
    assert (await fetch(http.put(SANDBOX, json={}))).status == 200


async def test_session_is_created_and_listed(http: aiohttp.ClientSession) -> None:
    first = await fetch(
        http.post(f"{SANDBOX}/sessions", json={"id": "one", "cwd": "/tmp", "user": "root"})
    )
    second = await fetch(http.post(f"{SANDBOX}/sessions"))
    created = first.body
    assert (first.status, second.status) == (201, 201)
    assert (created["id"], created["cwd"], created["user"], created["busy"]) == (
        "one",
        "/tmp",
        "root",
        False,
    )
    assert (await fetch(http.get(f"{SANDBOX}/sessions/one"))).body == created
    listed = (await fetch(http.get(f"{SANDBOX}/sessions"))).body["sessions"]
    assert [session["id"] for session in listed] == ["one", second.body["id"]]


async def test_session_keeps_state_between_commands(http: aiohttp.ClientSession) -> None:
    await fetch(http.post(f"{SANDBOX}/sessions", json={"id": "one", "env": {"A": "1"}}))
    await fetch(http.post(f"{SANDBOX}/exec", json={"command": "cd /usr; B=2", "session": "one"}))
    response = await fetch(
        http.post(f"{SANDBOX}/exec", json={"command": "echo $PWD $A $B", "session": "one"})
    )
    assert response.body["stdout"] == "/usr 1 2\n"
    assert (await fetch(http.get(f"{SANDBOX}/sessions/one"))).body["cwd"] == "/usr"


async def test_set_env_sets_and_unsets_variables(http: aiohttp.ClientSession) -> None:
    await fetch(http.post(f"{SANDBOX}/sessions", json={"id": "one", "env": {"OLD": "x"}}))
    body = {"env": {"NEW": "a b", "OLD": None}}
    assert (await fetch(http.post(f"{SANDBOX}/sessions/one/env", json=body))).status == 204
    command = {"command": 'sh -c \'echo "$NEW" "${OLD-none}"\'', "session": "one"}
    response = await fetch(http.post(f"{SANDBOX}/exec", json=command))
    assert response.body["stdout"] == "a b none\n"


async def test_deleted_session_is_not_found(http: aiohttp.ClientSession) -> None:
    await fetch(http.post(f"{SANDBOX}/sessions", json={"id": "one"}))
    assert (await fetch(http.delete(f"{SANDBOX}/sessions/one"))).status == 204
    again = await fetch(http.delete(f"{SANDBOX}/sessions/one"))
    assert (again.status, again.code) == (404, "not_found")
    assert (await fetch(http.get(f"{SANDBOX}/sessions"))).body == {"sessions": []}


async def test_invalid_requests_are_refused(http: aiohttp.ClientSession) -> None:
    await fetch(http.post(f"{SANDBOX}/sessions", json={"id": "one"}))
    for path, body, expected in (
        ("sessions", {"id": "one"}, (409, "conflict")),
        ("sessions", {"id": "../x"}, (400, "invalid_option")),
        ("sessions", {"id": ""}, (400, "invalid_option")),
        ("sessions", {"name": "x"}, (400, "invalid_option")),
        ("sessions", {"env": {"A=B": "x"}}, (400, "invalid_option")),
        ("sessions", {"cwd": "a\0b"}, (400, "invalid_path")),
        ("sessions/one/env", {}, (400, "invalid_option")),
        ("sessions/one/env", {"env": {"A": 1}}, (400, "invalid_option")),
        ("sessions/ghost/env", {"env": {"A": "1"}}, (404, "not_found")),
    ):
        response = await fetch(http.post(f"{SANDBOX}/{path}", json=body))
        assert (response.status, response.code) == expected, (path, body)


async def test_sessions_of_an_unknown_sandbox_are_not_found(http: aiohttp.ClientSession) -> None:
    for method, path in (("GET", "sessions"), ("POST", "sessions"), ("GET", "sessions/one")):
        response = await fetch(http.request(method, f"/api/sandboxes/ghost/{path}"))
        assert (response.status, response.code) == (404, "not_found")
