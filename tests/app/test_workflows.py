"""Workflows over HTTP: a run by its id, its events and its result."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from app.site import Site, app_of, project, serve, serve_asgi
from smokebox.app import create_app

if TYPE_CHECKING:
    from pathlib import Path


async def test_run_returns_json(site: Site) -> None:
    accepted = await site.post("/workflows/add", [1, 2])
    assert accepted.status == 202
    run = accepted.body["id"]
    assert accepted.body["stream_url"] == f"/runs/{run}"
    done = (await site.get(f"/runs/{run}?wait=20")).body
    assert (done["outcome"], done["result"]) == ("completed", {"sum": 3})
    [listed] = (await site.get("/workflows/add")).body["runs"]
    assert listed["id"] == run


async def test_events_of_a_run_resume_after_an_offset(site: Site) -> None:
    run = (await site.post("/workflows/add?wait=result", [1])).body["id"]
    found = [one async for one in site.events(f"/runs/{run}")]
    assert [one.kind for one in found] == ["submission", "started", "log", "ended", "outcome"]
    assert found[2].data["fields"] == {"count": 1}
    rest = [one.kind async for one in site.events(f"/runs/{run}", last=2)]
    assert rest == ["submission", "ended", "outcome"]
    plain = (await site.get(f"/runs/{run}/events?offset=1")).body
    assert [one["type"] for one in plain["events"]] == ["log", "ended"]


async def test_workflow_prompts_agents(tmp_path: Path) -> None:
    text = """
    from smokebox import create_agent
    from smokebox.testing import ScriptedModel, call

    reviewer = create_agent(
        model=ScriptedModel(call("write", path="review.md", content="fine\\n"), "done"),
        cwd="/workspace",
    )

    async def run(ctx):
        harness = await ctx.init(reviewer)
        await harness.fs.write_file("document.md", ctx.payload["document"])
        session = await harness.session()
        await session.prompt("Review document.md and write your findings to review.md.")
        return {"review": await harness.fs.read_file("review.md")}
    """
    async with serve(project(tmp_path / "p", workflows__review=text)) as site:
        done = await site.post("/workflows/review?wait=result", {"document": "text"})
        assert done.body["result"] == {"review": "fine\n"}


async def test_same_key_is_the_same_run(site: Site) -> None:
    key = {"Idempotency-Key": "k"}
    first = await site.post("/workflows/add", [1], headers=key)
    again = await site.post("/workflows/add", [1], headers=key)
    assert first.body == again.body
    other = await site.post("/workflows/add", [2], headers=key)
    assert (other.status, other.code) == (409, "conflict")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("raise ValueError('no luck')", "ValueError: no luck"),
        ("return object()", "cannot be encoded as JSON"),
        ("return {1: {2, 3}, 'x': float('nan')}", None),
        ("import sys; sys.exit(4)", "sys.exit(4)"),
        ("import asyncio; await asyncio.sleep(60)", "timeout of 0.2 seconds"),
        ("raise BaseException('odd')", "odd"),
    ],
)
async def test_every_run_has_an_outcome(tmp_path: Path, body: str, expected: str | None) -> None:
    text = f"timeout = 0.2\nasync def run(ctx):\n    {body}\n"
    async with serve(project(tmp_path / "p", workflows__odd=text)) as site:
        done = (await site.post("/workflows/odd?wait=result")).body
        assert done["outcome"] == ("failed" if expected else "completed")
        assert expected is None or expected in done["failure"]["message"]
        assert (await site.get("/health")).status == 200


async def test_run_that_ignores_cancellation_is_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("smokebox.app.runner._CANCEL_SECONDS", 0.1)
    text = """
    import asyncio
    timeout = 0.1
    stop = False

    async def run(ctx):
        while not stop:
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                pass
    """
    asgi = create_app(project(tmp_path / "p", workflows__stubborn=text))
    async with serve_asgi(asgi) as site:
        done = (await site.post("/workflows/stubborn?wait=result")).body
        assert done["failure"]["code"] == "deadline_exceeded"
        function = app_of(asgi).project.workflows["stubborn"].function
        function.__globals__["stop"] = True
    assert "did not end after it was cancelled" in caplog.text


async def test_run_is_aborted(tmp_path: Path) -> None:
    text = "import asyncio\nasync def run(ctx):\n    await asyncio.Event().wait()\n"
    async with serve(project(tmp_path / "p", workflows__hang=text)) as site:
        accepted = (await site.post("/workflows/hang")).body
        await site.wait_until_running(accepted["submission_id"])
        assert (await site.post(f"/runs/{accepted['id']}/abort")).body["aborted"]
        assert (await site.outcome(accepted["submission_id"]))["outcome"] == "aborted"


@pytest.mark.parametrize("body", [b"{", b"[" * 100_000, b"\xff", b"1e999999", b"9" * 5000])
async def test_invalid_json_payload_is_refused(site: Site, body: bytes) -> None:
    found = await site.post("/workflows/add", data=body)
    assert (found.status, found.code) == (400, "invalid_option")


async def test_payload_over_the_limit_is_refused(tmp_path: Path) -> None:
    folder = project(tmp_path / "p")
    (folder / "smokebox.toml").write_text("[app]\nmax_body = 1000\n")
    async with serve(folder) as site:
        found = await site.post("/workflows/add", list(range(1000)))
        assert (found.status, found.code) == (413, "request_too_large")
        assert (await site.post("/workflows/add?wait=result", [1])).status == 200


async def test_interrupted_run_is_started_again_if_attempts_allow(tmp_path: Path) -> None:
    text = """
    import asyncio
    attempts = 2

    async def run(ctx):
        if ctx.attempt == 1:
            await asyncio.Event().wait()
        return ctx.attempt
    """
    folder = project(
        tmp_path / "p", workflows__twice=text, workflows__once=text.replace("attempts = 2", "")
    )
    asgi = create_app(folder)
    async with serve_asgi(asgi) as site:
        sent = [await site.post(f"/workflows/{name}") for name in ("twice", "once")]
        for one in sent:
            await site.wait_until_running(one.body["submission_id"])
        await app_of(asgi).stop(grace=0)
    async with serve(folder) as site:
        twice, once = [await site.outcome(one.body["submission_id"]) for one in sent]
        assert (twice["outcome"], twice["result"]) == ("completed", 2)
        assert once["outcome"] == "failed"
        assert "attempts = 2" in once["failure"]["hint"]


async def test_workflow_forks_the_sandbox_of_an_agent(tmp_path: Path) -> None:
    text = """
    from smokebox import create_agent, virtual
    from smokebox.testing import ScriptedModel, call

    def writer(sandbox, text):
        model = ScriptedModel(call("write", path="answer", content=text), "done")
        return create_agent(model=model, sandbox=sandbox, checkpoints=True)

    async def run(ctx):
        prepared = virtual(files={"task": "sum"})
        harness = await ctx.init(writer(prepared, "0"), name="first")
        session = await harness.session()
        await session.prompt("Answer.")
        found = []
        for number, fork in enumerate(await prepared.fork(2), 1):
            own = await ctx.init(writer(fork, str(number)), name=f"fork-{number}")
            prompt = await own.session()
            await prompt.prompt("Answer otherwise.")
            found.append(await fork.read_file("answer"))
            await prompt.restore((await prompt.checkpoints())[0])
            found.append(await fork.read_file("answer"))
        return [await prepared.read_file("answer"), *found]
    """
    async with serve(project(tmp_path / "p", workflows__explore=text)) as site:
        done = await site.post("/workflows/explore?wait=result", {})
        assert done.body["result"] == ["0", "1", "0", "2", "0"]
