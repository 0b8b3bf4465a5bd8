"""Agents, approvals, subagents and workflows with Linux sandboxes that are restored and forked."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from smokebox.agents import create_agent, init
from smokebox.testing import ScriptedModel, call

if TYPE_CHECKING:
    from smokebox.agents.messages import ToolCall
    from smokebox.agents.session import Session
    from smokebox.client.client import Client
    from smokebox.client.sandbox import Sandbox


def write(text: str) -> ToolCall:
    return call("bash", command=f"echo {text} > f")


async def remove(client: Client, *sandboxes: Sandbox) -> None:
    """Destroy sandboxes with their snapshots."""
    for sandbox in sandboxes:
        for snapshot in await sandbox.snapshots():
            await client.snapshots.delete(snapshot)
        await sandbox.destroy()


async def pending(session: Session) -> str:
    """Wait for a call that needs approval, and return its id."""
    async with asyncio.timeout(15):
        while not session.approvals:
            await asyncio.sleep(0.02)
    return session.approvals[0].call_id


async def test_turns_of_an_agent_are_snapshots_of_its_sandbox(client: Client) -> None:
    sandbox = await client.create()
    model = ScriptedModel(write("one"), call("bash", command="cat f"), write("two"), "Done.")
    async with init(model=model, sandbox=sandbox, checkpoints=True, persist=False) as harness:
        session = await harness.session()
        await session.prompt("Write f.")
        checkpoints = await session.checkpoints()
        assert [one.turn for one in checkpoints] == [0, 1, 3]
        listed = await sandbox.snapshots()
        assert [one.id for one in listed] == [one.id for one in checkpoints]
        assert {one.origin for one in listed} == {"turn"}
        assert listed[1].description == "default: turn 1 (bash) of 'Write f.'"
        # The snapshots of the user are not counted.
        await sandbox.snapshot(keep_last=1)
        await session.restore(checkpoints[1])
        assert (await sandbox.exec("cat f")).stdout == "one\n"
    assert len(await sandbox.snapshots()) == 4
    await remove(client, sandbox)


async def test_the_last_turns_are_kept(client: Client) -> None:
    sandbox = await client.create()
    model = ScriptedModel(*(write(str(number)) for number in range(4)), "Done.")
    async with init(model=model, sandbox=sandbox, checkpoints=2, persist=False) as harness:
        session = await harness.session()
        await session.prompt("Write f.")
        kept = await session.checkpoints()
        assert [one.turn for one in kept] == [3, 4]
        assert [one.id for one in await sandbox.snapshots()] == [one.id for one in kept]
    await remove(client, sandbox)


async def test_a_sandbox_is_forked_while_a_call_waits_for_approval(client: Client) -> None:
    sandbox = await client.create()
    model = ScriptedModel(write("approved"), "Done.")
    async with init(
        model=model,
        sandbox=sandbox,
        checkpoints=True,
        persist=False,
        approval={"ask": ["bash"]},
    ) as harness:
        session = await harness.session()
        operation = session.prompt("Write f.")
        id = await pending(session)
        (fork,) = await sandbox.fork()
        await session.approve(id)
        assert (await operation).text == "Done."
        assert (await sandbox.exec("cat f")).stdout == "approved\n"
        # A fork is made of what had happened.
        assert not await fork.exists("f")
        assert [one.turn for one in await session.checkpoints()] == [0, 1]
    await remove(client, sandbox, fork)


async def test_a_sandbox_is_restored_while_a_call_waits_for_approval(client: Client) -> None:
    sandbox = await client.create()
    prepared = await sandbox.snapshot()
    await sandbox.write_file("f", "before\n")
    model = ScriptedModel(call("bash", command="ls f; echo on > g"), "Done.")
    async with init(
        model=model, sandbox=sandbox, persist=False, approval={"ask": ["bash"]}
    ) as harness:
        session = await harness.session()
        operation = session.prompt("Go on.")
        id = await pending(session)
        await sandbox.restore(prepared)
        await session.approve(id)
        assert (await operation).text == "Done."
        assert await sandbox.readdir(".") == ["g"]
    await remove(client, sandbox)


async def test_subagents_work_in_forks_of_one_prepared_sandbox(client: Client) -> None:
    sandbox = await client.create()
    await sandbox.write_file("task", "sum\n")
    forks = await sandbox.fork(2)
    agents = [
        create_agent(
            name=f"solver-{number}",
            sandbox=fork,
            checkpoints=True,
            model=ScriptedModel(call("bash", command=f"cat task; echo {number} > answer"), "Ok."),
        )
        for number, fork in enumerate(forks)
    ]
    model = ScriptedModel(
        [call("task", prompt="Solve.", agent=f"solver-{number}") for number in range(2)], "Solved."
    )
    async with init(model=model, sandbox=sandbox, subagents=agents, persist=False) as harness:
        reply = await (await harness.session()).prompt("Solve it in two ways.")
        assert reply.text == "Solved."
    assert not await sandbox.exists("answer")
    for number, fork in enumerate(forks):
        assert await fork.read_file("answer") == f"{number}\n"
        assert [one.origin for one in await fork.snapshots()] == ["turn", "turn"]
    await remove(client, sandbox, *forks)
