"""Sessions over HTTP: made, listed, remembered, deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest_asyncio

from asking import ask

if TYPE_CHECKING:
    import aiohttp

BOX = "/api/sandboxes/box"


@pytest_asyncio.fixture(autouse=True)
async def _box(http: aiohttp.ClientSession) -> None:
    assert (await ask(http.put(BOX, json={}))).status == 200


async def test_a_session_is_made_found_and_listed(http: aiohttp.ClientSession) -> None:
    first = await ask(
        http.post(f"{BOX}/sessions", json={"id": "one", "cwd": "/tmp", "user": "root"})
    )
    second = await ask(http.post(f"{BOX}/sessions"))
    made = first.body
    assert (first.status, second.status) == (201, 201)
    assert (made["id"], made["cwd"], made["user"], made["busy"]) == ("one", "/tmp", "root", False)
    assert (await ask(http.get(f"{BOX}/sessions/one"))).body == made
    listed = (await ask(http.get(f"{BOX}/sessions"))).body["sessions"]
    assert [session["id"] for session in listed] == ["one", second.body["id"]]


async def test_a_session_remembers_what_its_commands_did(http: aiohttp.ClientSession) -> None:
    await ask(http.post(f"{BOX}/sessions", json={"id": "one", "env": {"A": "1"}}))
    await ask(http.post(f"{BOX}/exec", json={"command": "cd /usr; B=2", "session": "one"}))
    answer = await ask(
        http.post(f"{BOX}/exec", json={"command": "echo $PWD $A $B", "session": "one"})
    )
    assert answer.body["stdout"] == "/usr 1 2\n"
    assert (await ask(http.get(f"{BOX}/sessions/one"))).body["cwd"] == "/usr"


async def test_variables_are_exported_and_unset(http: aiohttp.ClientSession) -> None:
    await ask(http.post(f"{BOX}/sessions", json={"id": "one", "env": {"OLD": "x"}}))
    body = {"env": {"NEW": "a b", "OLD": None}}
    assert (await ask(http.post(f"{BOX}/sessions/one/env", json=body))).status == 204
    command = {"command": 'sh -c \'echo "$NEW" "${OLD-none}"\'', "session": "one"}
    answer = await ask(http.post(f"{BOX}/exec", json=command))
    assert answer.body["stdout"] == "a b none\n"


async def test_a_deleted_session_is_gone(http: aiohttp.ClientSession) -> None:
    await ask(http.post(f"{BOX}/sessions", json={"id": "one"}))
    assert (await ask(http.delete(f"{BOX}/sessions/one"))).status == 204
    again = await ask(http.delete(f"{BOX}/sessions/one"))
    assert (again.status, again.code) == (404, "not_found")
    assert (await ask(http.get(f"{BOX}/sessions"))).body == {"sessions": []}


async def test_what_cannot_be_is_refused(http: aiohttp.ClientSession) -> None:
    await ask(http.post(f"{BOX}/sessions", json={"id": "one"}))
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
        answer = await ask(http.post(f"{BOX}/{path}", json=body))
        assert (answer.status, answer.code) == expected, (path, body)


async def test_sessions_of_an_unknown_sandbox_are_not_found(http: aiohttp.ClientSession) -> None:
    for method, path in (("GET", "sessions"), ("POST", "sessions"), ("GET", "sessions/one")):
        answer = await ask(http.request(method, f"/api/sandboxes/ghost/{path}"))
        assert (answer.status, answer.code) == (404, "not_found")
