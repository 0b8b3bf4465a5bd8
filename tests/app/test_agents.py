"""Agents over HTTP: messages are accepted, worked on in order, and have one outcome."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from app.site import ECHO, project, serve

if TYPE_CHECKING:
    from pathlib import Path

    from app.site import Site


async def test_accepted_message_returns_the_url_of_its_work(site: Site) -> None:
    accepted = await site.send("echo/one", "hello")
    assert accepted.status == 202
    id = accepted.body["submission_id"]
    assert accepted.headers["location"] == accepted.body["url"] == f"/submissions/{id}"
    assert accepted.body["stream_url"] == "/agents/echo/one"
    done = await site.outcome(id)
    assert (done["outcome"], done["result"]["text"]) == ("completed", "echo: hello")


async def test_wait_result_returns_the_outcome(site: Site) -> None:
    done = await site.send("echo/one?wait=result", "hello")
    assert (done.status, done.body["result"]["text"]) == (200, "echo: hello")


async def test_event_stream_shows_the_work_live(site: Site) -> None:
    found = [
        one
        async for one in site.events("/agents/echo/one", method="POST", body={"message": "hello"})
    ]
    kinds = [one.kind for one in found]
    assert (kinds[0], kinds[-2:]) == ("submission", ["work_ended", "outcome"])
    assert "".join(one.data["text"] for one in found if one.kind == "reply_delta")
    assert found[-1].data["result"]["text"] == "echo: hello"


async def test_conversation_keeps_its_history(site: Site) -> None:
    for text in ("first", "second"):
        await site.send("echo/one?wait=result", text)
    history = (await site.get("/agents/echo/one")).body
    messages = [
        one["message"]["parts"][0]["text"]
        for one in history["events"]
        if one["type"] == "message_added"
    ]
    assert messages == ["first", "second"]
    assert [one["offset"] for one in history["events"]] == list(range(1, history["offset"] + 1))


async def test_messages_of_one_conversation_are_answered_in_order(site: Site, folder: Path) -> None:
    first = await site.send("echo/one", "wait go")
    others = [await site.send("echo/one", f"number {n}") for n in range(5)]
    assert (await site.send("echo/two?wait=result", "me")).status == 200
    assert (await site.get(f"/submissions/{others[0].body['submission_id']}")).body["state"] == (
        "waiting"
    )
    (folder / "go").touch()
    ends = [await site.outcome(one.body["submission_id"]) for one in (first, *others)]
    assert [one["ended_at"] for one in ends] == sorted(one["ended_at"] for one in ends)
    assert ends[-1]["result"]["text"] == "echo: number 4"


async def test_client_disconnect_does_not_stop_work(site: Site, folder: Path) -> None:
    stream = site.events("/agents/echo/one", method="POST", body={"message": "wait go"})
    id = (await anext(stream)).data["submission_id"]
    await stream.aclose()  # type: ignore[attr-defined]
    waiting = asyncio.create_task(site.send("echo/two?wait=result", "wait go"))
    while not (await site.get("/agents/echo/two")).body["events"]:
        await asyncio.sleep(0.01)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    (folder / "go").touch()
    assert (await site.outcome(id))["outcome"] == "completed"
    history = (await site.get("/agents/echo/two?wait=20&offset=4")).body
    assert history["events"]


async def test_same_idempotency_key_is_the_same_message(site: Site) -> None:
    key = {"Idempotency-Key": "k1"}
    first = await site.send("echo/one", "hello", headers=key)
    again = await site.send("echo/one", "hello", headers=key)
    assert first.body["submission_id"] == again.body["submission_id"]
    other = await site.send("echo/one", "another", headers=key)
    assert (other.status, other.code) == (409, "conflict")
    elsewhere = await site.send("echo/two", "another", headers=key)
    assert elsewhere.status == 202


async def test_work_is_aborted(site: Site) -> None:
    running = (await site.send("echo/one", "wait never")).body["submission_id"]
    queued = (await site.send("echo/one", "hello")).body["submission_id"]
    await site.wait_until_running(running)
    response = await site.post("/agents/echo/one/abort")
    assert response.body["aborted"] == [running, queued]
    assert [(await site.outcome(id))["outcome"] for id in (running, queued)] == ["aborted"] * 2
    assert (await site.send("echo/one?wait=result", "on")).body["result"]["text"] == "echo: on"


async def test_one_submission_is_aborted_alone(site: Site, folder: Path) -> None:
    running = (await site.send("echo/one", "wait go")).body["submission_id"]
    queued = (await site.send("echo/one", "hello")).body["submission_id"]
    await site.post("/agents/echo/one/abort", {"submission_id": queued})
    (folder / "go").touch()
    assert (await site.outcome(running))["outcome"] == "completed"
    assert (await site.outcome(queued))["outcome"] == "aborted"
    foreign = await site.post("/agents/echo/two/abort", {"submission_id": running})
    assert (foreign.status, foreign.code) == (404, "not_found")


async def test_conversations_are_listed_and_deleted(site: Site, folder: Path) -> None:
    for id in ("one", "two"):
        await site.send(f"echo/{id}?wait=result", "hello")
    listed = (await site.get("/agents/echo")).body["conversations"]
    assert [one["id"] for one in listed] == ["two", "one"]
    assert (await site.delete("/agents/echo/one")).status == 200
    assert (await site.get("/agents/echo/one")).body == {"events": [], "offset": 0}
    assert (await site.delete("/agents/echo/one")).status == 404
    busy = (await site.send("echo/two", "wait go")).body["submission_id"]
    refused = await site.delete("/agents/echo/two")
    assert (refused.status, refused.code) == (409, "conflict")
    (folder / "go").touch()
    await site.outcome(busy)
    assert (await site.delete("/agents/echo/two")).status == 200


async def test_failed_agent_reports_the_reason(tmp_path: Path) -> None:
    text = ECHO.replace('Turn(f"echo: {text}", pace=0.001)', 'RuntimeError("no luck")')
    async with serve(project(tmp_path / "p", agents__bad=text)) as site:
        done = await site.send("bad/one?wait=result", "hello")
        assert (done.status, done.body["outcome"]) == (500, "failed")
        assert "no luck" in str(done.body["failure"])


@pytest.mark.parametrize(
    "id", ["%20", "a b", "-a", ".hidden", "a%00b", "ä", "a%0Ab", "x" * 101, "a%2Fb", "..%2F..%2Fx"]
)
async def test_invalid_conversation_id_is_refused(site: Site, id: str) -> None:
    found = await site.send(f"echo/{id}", "hello")
    assert found.status in (400, 404)
    assert found.code in ("invalid_option", "not_found")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"hello"',
        b'{"message": 1}',
        b'{"message": ""}',
        b'{"message": "a", "more": 1}',
        b'{"message": "a", "attachments": {}}',
        b'{"message": "\xff"}',
        b'{"message": "\\ud800"}',
        b"[" * 100_000,
    ],
)
async def test_invalid_body_is_refused(site: Site, body: bytes) -> None:
    found = await site.post("/agents/echo/one", data=body)
    assert (found.status, found.code) == (400, "invalid_option")
    assert (await site.get("/health")).body["open"] == 0


@pytest.mark.parametrize(
    "path",
    [
        "/agents/echo/one?offset=-1",
        "/agents/echo/one?offset=x",
        f"/agents/echo/one?offset={'9' * 5000}",
        "/agents/echo/one?limit=0",
        f"/agents/echo/one?limit={'9' * 5000}",
        "/agents/echo/one?wait=-1",
        "/agents/echo/one?wait=nan",
        "/agents/echo/one?wait=3600",
    ],
)
async def test_invalid_query_is_refused(site: Site, path: str) -> None:
    found = await site.get(path)
    assert (found.status, found.code) == (400, "invalid_option")


async def test_unknown_path_is_a_json_404(site: Site) -> None:
    for path in ("/agents/unknown", "/submissions/none", "/runs/none", "/nothing/here"):
        found = await site.get(path)
        assert (found.status, found.code) == (404, "not_found"), path
    assert "echo" in (await site.send("unknown/one", "hello")).body["error"]["hint"]
