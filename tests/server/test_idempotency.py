"""Requests that are repeated with their key make one thing, whatever happens in between."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from typing import TYPE_CHECKING

import aiohttp
import pytest

from asking import ask
from killable_server import killable, new_home
from smokebox.server import idempotency
from smokebox.server.server import RunningServer, run_server
from smokebox.server.settings import ServerSettings
from smokebox.wire.requests import CreateKey

if TYPE_CHECKING:
    from pathlib import Path

BOX = "/api/sandboxes/box"
KEY = {"idempotency-key": "a key"}
RUN_ONCE = {"command": "echo x >> /workspace/ran; sleep 60"}


async def test_a_repeated_request_answers_with_what_it_made(http: aiohttp.ClientSession) -> None:
    made = await ask(
        http.post("/api/sandboxes", json={"labels": {"a": "1", "b": "2"}}, headers=KEY)
    )
    # The same, as another program writes it.
    text, json = '{"labels":  {"b": "2", "a": "1"}}', {"content-type": "application/json"}
    again = await ask(http.post("/api/sandboxes", data=text, headers={**KEY, **json}))
    assert (made.status, again.status) == (201, 201)
    assert made.body["id"] == again.body["id"]
    assert len((await ask(http.get("/api/sandboxes"))).body["sandboxes"]) == 1


async def test_everything_that_is_made_takes_a_key(http: aiohttp.ClientSession) -> None:
    await ask(http.put(BOX, json={}))
    for noun, body in (
        ("sessions", {}),
        ("processes", {"command": "sleep 60"}),
        ("terminals", {}),
        ("backups", {}),
    ):
        headers = {"idempotency-key": noun}
        answers = [
            await ask(http.post(f"{BOX}/{noun}", json=body, headers=headers)) for _ in range(3)
        ]
        assert [answer.status for answer in answers] == [201] * 3
        assert len({answer.body["id"] for answer in answers}) == 1
        listing = "/api/backups" if noun == "backups" else f"{BOX}/{noun}"
        assert len((await ask(http.get(listing))).body[noun]) == 1


async def test_requests_at_the_same_time_are_one(http: aiohttp.ClientSession) -> None:
    await ask(http.put(BOX, json={}))
    answers = await asyncio.gather(
        *(ask(http.post(f"{BOX}/processes", json=RUN_ONCE, headers=KEY)) for _ in range(20))
    )
    assert {answer.status for answer in answers} == {201}
    assert len((await ask(http.get(f"{BOX}/processes"))).body["processes"]) == 1


async def test_a_key_of_another_request_is_refused(http: aiohttp.ClientSession) -> None:
    await ask(http.put(BOX, json={}))
    await ask(http.post(f"{BOX}/sessions", json={}, headers=KEY))
    for path, body in (("sessions", {"cwd": "/tmp"}), ("terminals", {})):
        answer = await ask(http.post(f"{BOX}/{path}", json=body, headers=KEY))
        error = answer.body["error"]
        assert (answer.status, error["code"]) == (409, "conflict")
        assert "'a key'" in error["message"]


async def test_a_name_that_was_taken_before_stays_a_conflict(http: aiohttp.ClientSession) -> None:
    await ask(http.put(BOX, json={}))
    await ask(http.post(f"{BOX}/sessions", json={"id": "one"}))
    for _ in range(2):
        for path, body in (("/api/sandboxes", {"id": "box"}), (f"{BOX}/sessions", {"id": "one"})):
            key = {"idempotency-key": path}
            answer = await ask(http.post(path, json=body, headers=key))
            assert (answer.status, answer.code) == (409, "conflict")


async def test_of_two_who_want_a_name_one_gets_it(http: aiohttp.ClientSession) -> None:
    for id, keys in (("plain", [""] * 5), ("keyed", list("abcde"))):
        answers = await asyncio.gather(
            *(
                ask(http.post("/api/sandboxes", json={"id": id}, headers=_header(key)))
                for key in keys
            )
        )
        assert sorted(answer.status for answer in answers) == [201, 409, 409, 409, 409]


async def test_what_was_made_and_removed_is_not_made_again(http: aiohttp.ClientSession) -> None:
    await ask(http.put(BOX, json={}))
    body = {"id": "one"}
    await ask(http.post(f"{BOX}/sessions", json=body, headers=KEY))
    await ask(http.delete(f"{BOX}/sessions/one"))
    answer = await ask(http.post(f"{BOX}/sessions", json=body, headers=KEY))
    assert (answer.status, answer.code) == (404, "not_found")
    # Nor is what another makes under that name taken for it.
    other = await ask(http.post(f"{BOX}/sessions", json=body, headers={"idempotency-key": "b"}))
    assert other.status == 201
    answer = await ask(http.post(f"{BOX}/sessions", json=body, headers=KEY))
    assert (answer.status, answer.code) == (409, "conflict")


async def test_a_request_that_failed_leaves_its_key_free(http: aiohttp.ClientSession) -> None:
    await ask(http.put(BOX, json={}))
    bad = await ask(http.post(f"{BOX}/processes", json={"command": ["nope"]}, headers=KEY))
    good = await ask(http.post(f"{BOX}/processes", json={"command": ["true"]}, headers=KEY))
    assert (bad.status, good.status) == (404, 201)


@pytest.mark.parametrize("key", ["", "x" * 256, "tab\there", "ümlaut"])
async def test_a_key_that_cannot_be_is_refused(http: aiohttp.ClientSession, key: str) -> None:
    answer = await ask(http.post("/api/sandboxes", json={}, headers={"idempotency-key": key}))
    assert (answer.status, answer.code) == (400, "invalid_option")


async def test_a_sandbox_that_is_there_is_not_created(
    http: aiohttp.ClientSession, server: RunningServer
) -> None:
    first = await ask(http.post("/api/sandboxes", json={"id": "box", "labels": {"a": "b"}}))
    again = await ask(http.post("/api/sandboxes", json={"id": "box", "labels": {}}))
    assert (first.status, again.status, again.code) == (201, 409, "conflict")
    for body in ({"id": "Not An Id"}, {"id": 1}, {"idd": "x"}, {"limits": {"nope": 1}}):
        answer = await ask(http.post("/api/sandboxes", json=body))
        assert (answer.status, answer.code) == (400, "invalid_option")
    missing = await ask(http.post("/api/sandboxes", json={"image": "/no/such/image"}))
    assert missing.status in (400, 404)
    assert not any(one.life.asked for one in server.state.host._asked)
    listed = (await ask(http.get("/api/sandboxes"))).body["sandboxes"]
    assert [(one["id"], one["labels"]) for one in listed] == [("box", {"a": "b"})]


async def test_the_keys_of_two_who_ask_do_not_meet(tmp_path: Path) -> None:
    settings = ServerSettings(home=str(tmp_path / "keyed"), host="127.0.0.1", keys=True, pool=0)
    async with run_server(settings) as server, aiohttp.ClientSession(server.url) as http:
        made = []
        for name in ("a", "b"):
            key = await server.state.keys.create(CreateKey(name=name, prefix=f"{name}-"))
            headers = {**KEY, "authorization": f"Bearer {key.key}"}
            made += [await ask(http.post("/api/sandboxes", headers=headers)) for _ in range(2)]
            taken = await ask(http.post("/api/sandboxes", json={"id": "x"}, headers=headers))
            assert (taken.status, taken.code) == (403, "forbidden")
    ids = [answer.body["id"] for answer in made]
    assert (ids[0], ids[2]) == (ids[1], ids[3])
    assert [id[:2] for id in ids] == ["a-", "a-", "b-", "b-"]


async def test_old_requests_and_too_many_are_forgotten(
    http: aiohttp.ClientSession, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency, "MOST_KEPT", 10)
    monkeypatch.setattr(idempotency, "_PRUNE_EVERY", 1)
    await ask(http.put(BOX, json={}))
    for number in range(20):
        headers = {"idempotency-key": str(number)}
        await ask(http.post(f"{BOX}/sessions", json={"id": f"s{number}"}, headers=headers))
    count = server.state.idempotency._connection.execute("SELECT count(*) FROM requests").fetchone()
    assert count[0] <= 11
    newest = await ask(
        http.post(f"{BOX}/sessions", json={"id": "s19"}, headers={"idempotency-key": "19"})
    )
    assert newest.status == 201
    monkeypatch.setattr(idempotency, "KEPT_SECONDS", -1.0)
    await ask(
        http.post(f"{BOX}/sessions", json={"id": "last"}, headers={"idempotency-key": "last"})
    )
    count = server.state.idempotency._connection.execute("SELECT count(*) FROM requests").fetchone()
    assert count[0] == 1


@pytest.mark.timeout(90)
async def test_a_server_killed_while_it_starts_a_process_starts_one() -> None:
    line = _some_line(130)
    with new_home() as home:
        async with killable(home) as http:
            await ask(http.put(BOX, json={}))
        async with killable(home, kill_at=line) as http:
            await _try(http, f"{BOX}/processes", RUN_ONCE)
        async with killable(home) as http:
            answers = [
                await ask(http.post(f"{BOX}/processes", json=RUN_ONCE, headers=KEY))
                for _ in range(2)
            ]
            ids = {answer.body["id"] for answer in answers}
            assert {answer.status for answer in answers} == {201}, line
            listed = (await ask(http.get(f"{BOX}/processes"))).body["processes"]
            assert [one["id"] for one in listed] == list(ids), line
            wait = "while [ ! -s ran ]; do sleep 0.01; done; cat ran; pgrep -c sleep"
            ran = await ask(http.post(f"{BOX}/exec", json={"command": wait, "timeout": 10}))
            assert ran.body["stdout"] == "x\n1\n", line
            await ask(http.delete(BOX))


@pytest.mark.timeout(90)
async def test_a_server_killed_while_it_makes_a_sandbox_makes_one() -> None:
    line = _some_line(170)
    with new_home() as home:
        async with killable(home, kill_at=line) as http:
            await _try(http, "/api/sandboxes", {})
        async with killable(home) as http:
            answer = await ask(http.post("/api/sandboxes", json={}, headers=KEY))
            made = answer.body["id"]
            listed = (await ask(http.get("/api/sandboxes"))).body["sandboxes"]
            assert (answer.status, [one["id"] for one in listed]) == (201, [made]), line
            await ask(http.delete(f"/api/sandboxes/{made}"))


async def _try(http: aiohttp.ClientSession, path: str, body: dict[str, str]) -> None:
    """Ask a server that may die of it."""
    with contextlib.suppress(aiohttp.ClientError):
        async with http.post(path, json=body, headers=KEY) as answer:
            assert answer.status == 201
            await answer.read()


def _some_line(most: int) -> int:
    """Another one in each run; SMOKEBOX_KILL_AT has one tried that failed."""
    return int(os.environ.get("SMOKEBOX_KILL_AT", "0")) or random.randrange(1, most)


def _header(key: str) -> dict[str, str]:
    return {"idempotency-key": key} if key else {}
