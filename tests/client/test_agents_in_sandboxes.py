"""Agents in Linux sandboxes: built images, snapshots, forks, approvals and subagents together."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from smokebox import create_agent, init
from smokebox.agents.approval import Approval
from smokebox.agents.events import ApprovalNeeded
from smokebox.errors import BuildFailed
from smokebox.testing import ScriptedModel, call, last_returns, serve_project

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from client.server_process import ServerProcess
    from smokebox import Sandbox
    from smokebox.agents.session import Session
    from smokebox.client.client import Client

DOCKERFILE = "FROM host\nRUN echo built > /made\nENV WHO=image\nWORKDIR /app\n"


def dockerfile(folder: Path, text: str = DOCKERFILE) -> str:
    (folder / "Dockerfile").write_text(text)
    return str(folder / "Dockerfile")


@contextlib.asynccontextmanager
async def prepared(client: Client) -> AsyncIterator[Sandbox]:
    """A sandbox with a file and a snapshot `before` of it."""
    async with await client.create() as sandbox:
        await sandbox.write_file("state", "first\n")
        snapshot = await sandbox.snapshot()
        await sandbox.write_file("state", "second\n")
        try:
            yield sandbox
        finally:
            for one in await sandbox.snapshots():
                await client.snapshots.delete(one)
            assert snapshot.id


def outputs(model: ScriptedModel) -> list[str]:
    """Return what the last tools of a model returned."""
    return [one.text for one in last_returns(model.requests[-1])]


async def test_agent_works_in_an_image_that_is_built_for_it(client: Client, tmp_path: Path) -> None:
    model = ScriptedModel(call("bash", command="cat /made; echo $WHO; pwd"), "Done.")
    async with await client.create(image=dockerfile(tmp_path)) as sandbox:
        async with init(create_agent(model=model, sandbox=sandbox)) as harness:
            await (await harness.session()).prompt("Look around.")
        assert "built\nimage\n/app" in outputs(model)[0]
        # A directory of its own, which the image has not.
        model = ScriptedModel(call("bash", command="pwd"), "Done.")
        async with init(create_agent(model=model, sandbox=sandbox, cwd="/work/x")) as harness:
            await (await harness.session()).prompt("Where are you?")
        assert "/work/x" in outputs(model)[0]


async def test_agent_whose_image_does_not_build_says_which_line(
    client: Client, tmp_path: Path
) -> None:
    image = dockerfile(tmp_path, "FROM host\nRUN echo fine\nRUN echo no >&2; exit 3\n")
    model = ScriptedModel("Never.")
    sandbox = client.sandbox("agent-broken", image=image)
    async with init(create_agent(model=model, sandbox=sandbox)) as harness:
        with pytest.raises(BuildFailed, match=r"Dockerfile:3: .*exit code 3"):
            await (await harness.session()).prompt("Look around.")
        assert model.requests == []
        # The same handle works once the Dockerfile is right.
        dockerfile(tmp_path)
        model = ScriptedModel(call("bash", command="cat /made"), "Done.")
    async with init(create_agent(model=model, sandbox=sandbox)) as harness:
        await (await harness.session()).prompt("Look around.")
    assert "built" in outputs(model)[0]
    await sandbox.destroy()


async def test_cancelled_prompt_ends_the_build_of_the_image(client: Client, tmp_path: Path) -> None:
    image = dockerfile(tmp_path, "FROM host\nRUN sleep 1000\n")
    sandbox = client.sandbox("agent-slow", image=image)
    model = ScriptedModel(call("bash", command="cat /made"), "Done.")
    async with init(create_agent(model=model, sandbox=sandbox)) as harness:

        async def prompt() -> None:
            await (await harness.session()).prompt("Look around.")

        work = asyncio.create_task(prompt())
        await asyncio.sleep(1.5)
        work.cancel()
        await asyncio.wait([work], timeout=5)
        assert work.cancelled()
        dockerfile(tmp_path)
        await prompt()
    assert "built" in outputs(model)[0]
    await sandbox.destroy()


async def next_approval(session: Session, message: str) -> tuple[asyncio.Task[object], str]:
    """Prompt, and return the work with the id of the first call that waits for approval."""
    operation = session.prompt(message)
    waiting: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def follow() -> object:
        async for event in operation:
            if isinstance(event, ApprovalNeeded) and not waiting.done():
                waiting.set_result(event.call_id)
        return await operation

    task = asyncio.create_task(follow())
    return task, await waiting


@pytest.mark.parametrize("change", ["restore", "sleep", "fork", "snapshot"])
async def test_call_that_waits_for_approval_runs_in_the_state_of_then(
    client: Client, change: str
) -> None:
    model = ScriptedModel(call("bash", command="cat state; echo ran >> log"), "Done.")
    async with prepared(client) as sandbox:
        agent = create_agent(model=model, sandbox=sandbox, approval=Approval(ask=["bash"]))
        async with init(agent) as harness:
            session = await harness.session()
            work, call_id = await next_approval(session, "Read it.")
            (snapshot,) = await sandbox.snapshots()
            match change:
                case "restore":
                    await sandbox.restore(snapshot, save_as="as-it-was")
                case "sleep":
                    await sandbox.sleep()
                case "fork":
                    (fork,) = await sandbox.fork()
                    assert not await fork.exists("log")
                    await fork.destroy()
                case "snapshot":
                    await sandbox.snapshot()
            await session.approve(call_id)
            await work
        expected = "first" if change == "restore" else "second"
        assert expected in outputs(model)[0]
        assert await sandbox.read_file("log") == "ran\n"


async def test_restore_ends_the_command_of_an_agent_and_the_agent_goes_on(client: Client) -> None:
    model = ScriptedModel(
        call("bash", command="touch begun; sleep 1000"), call("bash", command="cat state"), "Done."
    )
    async with prepared(client) as sandbox:
        async with init(create_agent(model=model, sandbox=sandbox)) as harness:
            work = (await harness.session()).prompt("Wait.")
            while not await sandbox.exists("begun"):
                await asyncio.sleep(0.02)
            await sandbox.restore((await sandbox.snapshots())[0])
            reply = await work
        assert reply.text == "Done."
        stopped = last_returns(model.requests[1])[0].text
        assert "restored to a snapshot" in stopped
        assert "first" in outputs(model)[0]


async def test_subagent_works_in_a_fork_and_its_parent_keeps_its_files(client: Client) -> None:
    async with prepared(client) as sandbox:

        async def fork() -> Sandbox:
            # An ephemeral sandbox: it is destroyed when the subagent is closed.
            snapshot = await sandbox.snapshot()
            return await client.create(snapshot=snapshot.id)

        tried = ScriptedModel(
            call("bash", command="cat state; echo spoilt > state; cat state"), "It breaks."
        )
        trial = create_agent(name="trial", model=tried, sandbox=fork)
        model = ScriptedModel(
            call("task", prompt="Try it.", agent="trial"),
            call("bash", command="cat state"),
            "No change.",
        )
        before = {one.id for one in await client.list()}
        agent = create_agent(model=model, sandbox=sandbox, subagents=[trial])
        async with init(agent) as harness:
            reply = await (await harness.session()).prompt("Should we change it?")
        assert reply.text == "No change."
        assert "second\nspoilt" in outputs(tried)[0]
        assert "second" in outputs(model)[0]
        assert {one.id for one in await client.list()} == before


EXPLORE = """
import asyncio
import os
from smokebox import connect, create_agent
from smokebox.testing import ScriptedModel, call

async def run(ctx):
    async with await connect(os.environ["SERVER"]).create() as sandbox:
        await sandbox.write_file("base", "1")
        forks = await sandbox.fork(3)

        async def explore(number, fork):
            command = f"echo $(( $(cat base) + {number} )) > found"
            model = ScriptedModel(call("bash", command=command), "Done.")
            agent = create_agent(name=f"explorer-{number}", model=model, sandbox=fork)
            harness = await ctx.init(agent)
            await (await harness.session()).prompt("Find a number.")
            return int(await fork.read_file("found"))

        try:
            found = await asyncio.gather(*(explore(n, one) for n, one in enumerate(forks)))
            best = forks[found.index(max(found))]
            kept = await best.snapshot()
            await sandbox.restore(kept)
            await sandbox.delete_snapshot(kept)
        finally:
            await asyncio.gather(*(one.destroy() for one in forks))
        return {"found": found, "kept": await sandbox.read_file("found")}
"""


async def test_workflow_explores_in_forks_and_keeps_the_best(
    client: Client, server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER", server.url)
    (tmp_path / "workflows").mkdir()
    (tmp_path / "workflows" / "explore.py").write_text(EXPLORE)
    before = {one.id for one in await client.list()}
    from smokebox import AgentClient

    with serve_project(tmp_path) as url:
        async with AgentClient(url) as agents:
            done = await (await agents.run("explore", {})).wait()
    assert done.result == {"found": [1, 2, 3], "kept": "3\n"}
    assert {one.id for one in await client.list()} == before
    assert [one for one in await client.snapshots.list() if one.name is None] == []
