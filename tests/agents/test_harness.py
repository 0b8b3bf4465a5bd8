"""Tests of the harness: its workspace, tools, sessions and lifetime."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from agents.scripted_session import scripted_session
from smokebox import create_agent, init, local, tool, virtual
from smokebox.agents import ToolContext  # noqa: TC001
from smokebox.agents.log.memory import MemoryStore
from smokebox.agents.tools import Tool
from smokebox.errors import Conflict, InvalidOption, NotFound, PathNotFound, Unsupported
from smokebox.testing import ScriptedModel, call, last_returns

if TYPE_CHECKING:
    from pathlib import Path

    from smokebox.agents import AgentContext
    from smokebox.sandbox.virtual import VirtualSandbox

SIX = ["read", "write", "edit", "bash", "grep", "glob"]


async def test_default_sandbox_is_virtual() -> None:
    model = ScriptedModel(call("bash", command="cat a.txt; pwd"), "ok")
    async with init(model=model, persist=False) as harness:
        await harness.fs.write_file("a.txt", "hello ")
        await (await harness.session()).prompt("go")
        assert (await harness.shell("cat a.txt")).stdout == "hello "
    assert last_returns(model.requests[1])[0].text == "hello /workspace"
    assert [spec.name for spec in model.requests[0].tools] == [*SIX, "task"]
    assert "virtual sandbox" in model.requests[0].system


async def test_agent_without_sandbox_has_no_workspace_tools() -> None:
    model = ScriptedModel("ok")
    async with init(model=model, sandbox=None, persist=False) as harness:
        await (await harness.session()).prompt("go")
        assert not model.requests[0].tools
        for use in (lambda: harness.fs, lambda: harness.sandbox):
            with pytest.raises(Unsupported, match="no workspace"):
                use()
        with pytest.raises(Unsupported, match="no workspace"):
            await harness.shell("ls")
        with pytest.raises(Unsupported, match="no workspace"):
            await (await harness.session()).shell("ls")


async def test_cwd_applies_to_files_tools_and_commands(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    at = str(tmp_path / "project")
    model = ScriptedModel(
        [call("bash", command="pwd"), call("write", path="b.txt", content="b")], "ok"
    )
    async with (
        local(cwd=str(tmp_path)) as sandbox,
        init(model=model, sandbox=sandbox, cwd=at, persist=False) as harness,
    ):
        await harness.fs.write_file("a.txt", "a")
        await (await harness.session()).prompt("go")
        assert (await harness.shell("cat b.txt")).stdout == "b"
        assert await harness.fs.glob("*.txt") == [f"{at}/a.txt", f"{at}/b.txt"]
    assert last_returns(model.requests[1])[0].text == at


async def test_missing_cwd_is_created_except_on_the_host(tmp_path: Path) -> None:
    sandbox = virtual()
    async with init(sandbox=sandbox, cwd="/deep/in/it", persist=False) as harness:
        assert (await harness.shell("pwd")).stdout == "/deep/in/it\n"
    with pytest.raises(PathNotFound, match="Create it first"):
        await init(sandbox=local(), cwd=str(tmp_path / "none"), persist=False)


async def test_sandbox_factory_gets_context_and_its_sandbox_is_closed() -> None:
    opened: list[VirtualSandbox] = []

    async def factory(ctx: AgentContext) -> VirtualSandbox:
        opened.append(virtual(files={"/workspace/id": ctx.id}))
        return opened[0]

    async with await init(create_agent(sandbox=factory, persist=False), id="seven") as harness:
        assert await harness.fs.read_file("id") == "seven"
    assert len(opened) == 1
    with pytest.raises(Exception, match="closed"):
        await opened[0].exec("ls")


async def test_factory_must_return_a_sandbox() -> None:
    with pytest.raises(InvalidOption, match="not a sandbox"):
        await init(sandbox=lambda: "virtual", persist=False)  # type: ignore[arg-type, return-value]


async def test_sandbox_can_supply_its_own_tools() -> None:
    async def search(query: str) -> str:
        return f"found {query}"

    class Library:
        """A sandbox whose integration exposes other capabilities."""

        def __init__(self) -> None:
            self._inner = virtual()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def agent_tools(self) -> list[Tool]:
            schema = {"type": "object", "properties": {"query": {"type": "string"}}}
            return [Tool(name="search", description="Find.", parameters=schema, function=search)]

    model = ScriptedModel(call("search", query="books"), "ok")
    async with init(model=model, sandbox=Library(), persist=False) as harness:
        await (await harness.session()).prompt("go")
    assert [spec.name for spec in model.requests[0].tools] == ["search", "task"]
    assert last_returns(model.requests[1])[0].text == "found books"


async def test_same_id_continues_the_conversation(tmp_path: Path) -> None:
    model = ScriptedModel(then="yes")
    agent = create_agent(model=model, sandbox=None, persist=tmp_path / "agents.db")
    for _ in range(2):
        async with init(agent, id="one") as harness:
            await (await harness.session()).prompt("Do you remember?")
    assert len(model.requests[-1].messages) == 3
    async with init(agent) as harness:
        await (await harness.session()).prompt("And you?")
    assert len(model.requests[-1].messages) == 1


async def test_stored_conversation_does_not_store_the_workspace(tmp_path: Path) -> None:
    """Seed 002: conversation and workspace are stored separately."""
    agent = create_agent(model=ScriptedModel(then="ok"), persist=tmp_path / "agents.db")
    async with init(agent, id="one") as harness:
        await harness.fs.write_file("a.txt", "a")
        await (await harness.session()).prompt("hello")
    async with init(agent, id="one") as harness:
        assert not await harness.fs.exists("a.txt")
        assert len(await (await harness.session()).messages()) == 2


async def test_sessions_list_get_create_delete() -> None:
    async with scripted_session() as session:
        sessions = session.harness.sessions
        other = await sessions.create("other")
        assert [one.key.session for one in await sessions.list()] == ["other", "default"]
        assert await sessions.get("other") is other
        with pytest.raises(Conflict, match="already"):
            await sessions.create("other")
        with pytest.raises(NotFound, match="no session 'third'"):
            await sessions.get("third")
        assert await sessions.delete("other")
        assert not await sessions.delete("other")
        with pytest.raises(NotFound, match="was deleted"):
            other.prompt("hello?")


async def test_harness_names_separate_sessions() -> None:
    store = MemoryStore()
    agent = create_agent(model=ScriptedModel(then="ok"), sandbox=None)
    async with (
        init(agent, id="x", store=store) as one,
        init(agent, id="x", name="b", store=store) as two,
    ):
        await (await one.session()).prompt("hello")
        assert len(await (await two.session()).messages()) == 0
        assert [one.key.session for one in await one.sessions.list()] == ["default"]
        assert [two.key.session for two in await two.sessions.list()] == ["b/default"]


@pytest.mark.parametrize("name", ["", "task:x", "a/b", "two\nlines", "x" * 300, 5])
async def test_invalid_session_name_is_refused(name: Any) -> None:
    async with scripted_session() as session:
        with pytest.raises(InvalidOption):
            await session.harness.session(name)


async def test_init_adds_tools_and_skills() -> None:
    from smokebox import Skill

    @tool
    def one() -> str:
        """One."""
        return "1"

    model = ScriptedModel(call("skill", name="greet"), "ok")
    agent = create_agent(model=model, sandbox=None, persist=False)
    skill = Skill(name="greet", description="Greets people.", instructions="Say hello.")
    async with init(agent, tools=[one], skills=[skill]) as harness:
        await (await harness.session()).prompt("go")
    assert [spec.name for spec in model.requests[0].tools] == ["one", "skill"]
    assert "greet: Greets people." in model.requests[0].system
    assert "Say hello." in last_returns(model.requests[1])[0].text


async def test_tools_with_the_same_name_conflict() -> None:
    @tool
    def bash() -> str:
        """Mine."""
        return ""

    with pytest.raises(Conflict, match="'bash'"):
        await init(tools=[bash], persist=False)


async def test_reserved_tool_name_is_refused() -> None:
    @tool
    def task() -> str:
        """Mine."""
        return ""

    with pytest.raises(InvalidOption, match="the harness has one"):
        await init(tools=[task], persist=False)


async def test_agents_md_is_part_of_the_system_prompt() -> None:
    model = ScriptedModel("ok")
    sandbox = virtual(files={"/workspace/AGENTS.md": "Use tabs."})
    async with init(
        model=model, sandbox=sandbox, instructions="Be kind.", persist=False
    ) as harness:
        await (await harness.session()).prompt("go")
    system = model.requests[0].system
    assert system.index("Be kind.") < system.index("Use tabs.")


async def test_initializer_reads_env_by_attribute() -> None:
    @create_agent
    def agent(ctx: AgentContext) -> dict[str, Any]:
        return {"model": ScriptedModel("ok"), "sandbox": ctx.env.box, "persist": False}

    async with init(agent, env={"box": virtual(files={"/workspace/x": "y"})}) as harness:
        assert await harness.fs.read_file("x") == "y"
        assert harness.env.box is harness.sandbox


async def test_closed_harness_opens_no_session() -> None:
    async with scripted_session() as session:
        harness = session.harness
    with pytest.raises(Unsupported, match="closed"):
        await harness.session("more")
    await harness.aclose()


async def test_tool_gets_its_context() -> None:
    @tool
    def where(ctx: ToolContext) -> str:
        """Where am I?"""
        return f"{ctx.session} {ctx.tool} {ctx.env.place}"

    model = ScriptedModel(call("where"), "ok")
    agent = create_agent(model=model, sandbox=None, persist=False, tools=[where])
    async with init(agent, id="one", env={"place": "here"}) as harness:
        await (await harness.session()).prompt("go")
    assert last_returns(model.requests[1])[0].text == "agent/one/default where here"
