"""Several processes on one folder, and retention."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from app.site import ECHO, app_of, project, serve, serve_asgi
from smokebox.app import create_app
from smokebox.app.inbox import SubmissionOutcome

if TYPE_CHECKING:
    from pathlib import Path

    from app.site import Site

# The agent creates a directory while it runs, which fails if two run in one conversation.
WATCHED = ECHO.replace(
    "    text = last_text(request)\n",
    "    text = last_text(request)\n"
    "    with (FOLDER / 'order').open('a') as file:\n"
    "        file.write(text + chr(10))\n"
    "    lock = FOLDER / text.split()[-1]\n"
    "    lock.mkdir()\n"
    "    await asyncio.sleep(0.002)\n"
    "    lock.rmdir()\n",
)


async def test_two_processes_share_work_and_keep_each_conversation_in_order(tmp_path: Path) -> None:
    folder = project(tmp_path / "p", agents__echo=WATCHED)
    async with serve(folder) as one, serve(folder) as two:
        sent: list[str] = []
        for number in range(20):
            for index, id in enumerate(("a", "b", "c", "d")):
                site = (one, two)[(number + index) % 2]
                accepted = await site.send(f"echo/{id}", f"{number} of {id}")
                sent.append(accepted.body["submission_id"])
        ends = [await two.outcome(id) for id in sent]
    assert [one["outcome"] for one in ends] == ["completed"] * 80
    lines = (folder / "order").read_text().splitlines()
    for id in "abcd":
        messages = [line for line in lines if line.endswith(id)]
        assert messages == [f"{number} of {id}" for number in range(20)]


async def test_work_is_aborted_from_another_process(folder: Path) -> None:
    async with serve(folder) as one:
        id = (await one.send("echo/one", "wait never")).body["submission_id"]
        await one.wait_until_running(id)
        async with serve(folder) as two:
            assert (await two.post("/agents/echo/one/abort")).body["aborted"] == [id]
            assert (await two.outcome(id))["outcome"] == "aborted"


async def test_work_aborted_while_no_app_ran_is_not_resumed(folder: Path) -> None:
    """The app that started the work is gone; the next one must not resume it."""
    first = create_app(folder)
    async with serve_asgi(first) as site:
        id = (await site.send("echo/one", "wait go")).body["submission_id"]
        while "work_started" not in await recorded_types(site):
            await asyncio.sleep(0.01)
        await app_of(first).stop(grace=0)
    waiting = app_of(create_app(folder))
    await waiting.start(work=False)
    assert await waiting.inbox.abort(id, SubmissionOutcome("aborted"))
    await waiting.stop()
    (folder / "go").touch()
    async with serve(folder) as site:
        assert (await site.outcome(id))["outcome"] == "aborted"
        done = await site.send("echo/one?wait=result", "hello")
        assert done.body["result"]["text"] == "echo: hello"
        history = (await site.get("/agents/echo/one")).body["events"]
        ends = [one["outcome"] for one in history if one["type"] == "work_ended"]
        assert ends == ["aborted", "completed"]


async def recorded_types(site: Site) -> list[str]:
    events = (await site.get("/agents/echo/one")).body["events"]
    return [one["type"] for one in events]


async def test_conversations_beyond_the_concurrency_limit_wait(tmp_path: Path) -> None:
    """A free slot is taken at once, not at the next poll."""
    folder = project(tmp_path / "p")
    (folder / "smokebox.toml").write_text("[app]\nconcurrency = 2\n")
    async with serve(folder) as site:
        sent = [await site.send(f"echo/c{number}", "hello") for number in range(60)]
        ends = [await site.outcome(one.body["submission_id"]) for one in sent]
        assert [one["outcome"] for one in ends] == ["completed"] * 60


async def test_work_past_its_retention_is_deleted(tmp_path: Path) -> None:
    text = """
    from smokebox.testing import ScriptedModel

    async def run(ctx):
        harness = await ctx.init(model=ScriptedModel(then="yes"))
        return (await (await harness.session()).prompt("hello")).text
    """
    folder = project(tmp_path / "p", agents__echo=ECHO, workflows__ask=text)
    (folder / "smokebox.toml").write_text('[app]\nretention = "0.01s"\n')
    asgi = create_app(folder)
    async with serve_asgi(asgi) as site:
        run = (await site.post("/workflows/ask?wait=result")).body
        sent = [await site.send(f"echo/c{number}?wait=result", "hello") for number in range(3)]
        busy = (await site.send("echo/busy", "wait go")).body["submission_id"]
        await site.wait_until_running(busy)
        runner = app_of(asgi)._runner
        assert runner is not None and len(await app_of(asgi).store.sessions()) == 5
        await asyncio.sleep(0.02)
        await runner._delete_expired()
        assert [one.key.id for one in await app_of(asgi).store.sessions()] == ["busy"]
        for gone in (run, *(one.body for one in sent)):
            assert (await site.get(f"/submissions/{gone['submission_id']}")).status == 404
        (folder / "go").touch()
        assert (await site.outcome(busy))["outcome"] == "completed"
