"""Checkpoints of the workspace by turn: when they are taken, and how to go back to one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from smokebox import local, virtual
from smokebox.agents import create_agent, init
from smokebox.agents.events import CheckpointEnd
from smokebox.agents.log.memory import MemoryStore
from smokebox.agents.log.sqlite import SqliteStore
from smokebox.agents.messages import ToolCall, UserMessage
from smokebox.errors import InvalidOption, NotFound, Unsupported
from smokebox.testing import ScriptedModel, call

if TYPE_CHECKING:
    from pathlib import Path

    from smokebox.agents.harness import Harness
    from smokebox.agents.session import Session


def write(text: str) -> ToolCall:
    return call("bash", command=f"echo {text} > f")


async def turns_of(session: Session) -> list[int]:
    return [one.turn for one in await session.checkpoints()]


async def read(harness: Harness) -> str:
    return (await harness.fs.read_file("f")).strip()


async def test_a_turn_that_changed_files_has_a_checkpoint() -> None:
    model = ScriptedModel(write("one"), call("bash", command="cat f"), write("two"), "Done.")
    async with init(model=model, checkpoints=True, persist=False) as harness:
        session = await harness.session()
        operation = session.prompt("Write f.")
        events = [event async for event in operation]
        checkpoints = await session.checkpoints()
        assert [one.turn for one in checkpoints] == [0, 1, 3]
        assert [event.turn for event in events if isinstance(event, CheckpointEnd)] == [0, 1, 3]
        assert checkpoints[0].description == "default: before 'Write f.'"
        assert checkpoints[2].description == "default: turn 3 (bash) of 'Write f.'"
        await session.restore(checkpoints[1])
        assert await read(harness) == "one"
        await session.restore(checkpoints[0].id)
        assert not await harness.fs.exists("f")


async def test_the_model_is_told_about_a_restore() -> None:
    model = ScriptedModel(write("one"), "Done.", "I see.")
    async with init(model=model, checkpoints=True, persist=False) as harness:
        session = await harness.session()
        await session.prompt("Write f.")
        first = (await session.checkpoints())[0]
        await session.restore(first)
        await session.prompt("And now?")
        told = [one for one in await session.messages() if isinstance(one, UserMessage)]
        assert "restored the files of the workspace" in str(told[1].parts[0])
        # It begins where the files are as they were.
        earlier = await session.fork("earlier", at=first)
        assert [str(one) for one in await earlier.messages()] == [
            str(one) for one in (await session.messages())[:1]
        ]


async def test_nothing_is_kept_without_the_option() -> None:
    async with init(model=ScriptedModel(write("one"), "Done."), persist=False) as harness:
        session = await harness.session()
        await session.prompt("Write f.")
        assert await session.checkpoints() == []


async def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    store = MemoryStore()
    model = ScriptedModel(*(write(str(number)) for number in range(5)), "Done.")
    async with init(model=model, checkpoints=2, store=store) as harness:
        session = await harness.session()
        await session.prompt("Write f.")
        assert await turns_of(session) == [4, 5]
        assert len(store._blobs) == 2
        with pytest.raises(NotFound, match="no checkpoint 'x'"):
            await session.restore("x")


async def test_checkpoints_outlive_the_process(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    agent = create_agent(model=ScriptedModel(write("one"), "Done."), checkpoints=True, persist=path)
    async with init(agent, id="a") as harness:
        await (await harness.session()).prompt("Write f.")
    async with init(agent, id="a") as harness:
        session = await harness.session()
        assert not await harness.fs.exists("f")
        await session.restore((await session.checkpoints())[-1])
        assert await read(harness) == "one"


async def test_dropped_checkpoints_are_removed_from_the_store(tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path / "sessions.db"))
    model = ScriptedModel(*(write(str(number)) for number in range(3)), "Done.")
    async with init(model=model, checkpoints=1, store=store) as harness:
        session = await harness.session()
        await session.prompt("Write f.")
        used = await store._select("SELECT blob FROM uses", ())
        assert used == [((await session.checkpoints())[0].id,)]
    await store.aclose()


async def test_a_fork_can_begin_at_a_checkpoint_of_its_origin() -> None:
    model = ScriptedModel(write("one"), "Done.", write("two"), "Done.")
    async with init(model=model, checkpoints=True, persist=False) as harness:
        session = await harness.session()
        await session.prompt("Write one.")
        await session.prompt("Write two.")
        fork = await session.fork("fork")
        inherited = await fork.checkpoints()
        assert [one.session for one in inherited] == ["default"] * len(inherited)
        again = await fork.fork("again", at=inherited[1])
        assert len(await again.messages()) == 3
        await again.restore(inherited[1])
        assert await read(harness) == "one"


async def test_a_task_is_a_part_of_the_turn_that_starts_it() -> None:
    model = ScriptedModel(call("task", prompt="Write f."), write("one"), "Written.", "Done.")
    async with init(model=model, checkpoints=True, persist=False) as harness:
        session = await harness.session()
        await session.prompt("Delegate.")
        assert await turns_of(session) == [0, 1]
        assert (await session.checkpoints())[1].description.startswith("default: turn 1 (task)")


async def test_a_subagent_with_its_own_sandbox_has_its_own_checkpoints() -> None:
    own = virtual()
    writer = create_agent(
        name="writer", model=ScriptedModel(write("one"), "Written."), sandbox=own, checkpoints=True
    )
    model = ScriptedModel(call("task", prompt="Write f.", agent="writer"), "Done.")
    async with init(model=model, subagents=[writer], persist=False) as harness:
        session = await harness.session()
        await session.prompt("Delegate.")
        assert await session.checkpoints() == []
        (child,) = [one for one in await harness.sessions.list(tasks=True) if one.parent]
        records = await harness._store.read(child.key)
        taken = [one.record for one in records if type(one.record).__name__ == "CheckpointTaken"]
        assert len(taken) == 2
    await own.aclose()


async def test_a_denied_call_makes_no_checkpoint() -> None:
    model = ScriptedModel(write("one"), "Denied.")
    async with init(
        model=model, checkpoints=True, persist=False, approval={"deny": ["bash"]}
    ) as harness:
        session = await harness.session()
        await session.prompt("Write f.")
        assert await turns_of(session) == [0]


async def test_a_failing_checkpoint_breaks_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(_: object) -> bytes:
        raise OSError("the disk is full")

    sandbox = virtual()
    model = ScriptedModel(write("one"), "Done.")
    async with init(model=model, sandbox=sandbox, checkpoints=True, persist=False) as harness:
        monkeypatch.setattr(type(sandbox), "snapshot", full)
        session = await harness.session()
        operation = session.prompt("Write f.")
        events = [event async for event in operation]
        errors = [event.error for event in events if isinstance(event, CheckpointEnd)]
        assert errors == ["the disk is full"] * 2
        assert (await operation).text == "Done."
        assert await session.checkpoints() == []
    await sandbox.aclose()


async def test_a_sandbox_without_snapshots_is_refused(tmp_path: Path) -> None:
    for sandbox in (local(cwd=tmp_path), None):
        with pytest.raises(Unsupported, match="has no snapshots"):
            await init(model=ScriptedModel(), sandbox=sandbox, checkpoints=True, persist=False)
    for value in (-1, 0.5, "often"):
        with pytest.raises(InvalidOption, match="checkpoints must be"):
            create_agent(checkpoints=value)  # type: ignore[arg-type]
