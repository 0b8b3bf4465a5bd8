"""The harness: where an agent works, what it has there, and when that ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from agents.working import at_work
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


async def test_an_agent_without_a_sandbox_option_works_in_a_virtual_one() -> None:
    model = ScriptedModel(call("bash", command="cat a.txt; pwd"), "ok")
    async with init(model=model, persist=False) as harness:
        await harness.fs.write_file("a.txt", "hello ")
        await (await harness.session()).prompt("go")
        assert (await harness.shell("cat a.txt")).stdout == "hello "
    assert last_returns(model.requests[1])[0].text == "hello /workspace"
    assert [spec.name for spec in model.requests[0].tools] == [*SIX, "task"]
    assert "virtual sandbox" in model.requests[0].system


async def test_no_sandbox_is_no_workspace_and_no_tools_for_one() -> None:
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


async def test_cwd_is_where_files_tools_and_commands_start(tmp_path: Path) -> None:
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


async def test_a_cwd_that_is_not_there_is_made_but_not_on_the_host(tmp_path: Path) -> None:
    sandbox = virtual()
    async with init(sandbox=sandbox, cwd="/deep/in/it", persist=False) as harness:
        assert (await harness.shell("pwd")).stdout == "/deep/in/it\n"
    with pytest.raises(PathNotFound, match="Create it first"):
        await init(sandbox=local(), cwd=str(tmp_path / "none"), persist=False)


async def test_a_factory_gets_the_context_if_it_wants_it_and_its_sandbox_ends() -> None:
    made: list[VirtualSandbox] = []

    async def factory(ctx: AgentContext) -> VirtualSandbox:
        made.append(virtual(files={"/workspace/id": ctx.id}))
        return made[0]

    async with await init(create_agent(sandbox=factory, persist=False), id="seven") as harness:
        assert await harness.fs.read_file("id") == "seven"
    assert len(made) == 1
    with pytest.raises(Exception, match="closed"):
        await made[0].exec("ls")


async def test_a_factory_that_gives_no_sandbox_is_told() -> None:
    with pytest.raises(InvalidOption, match="not a sandbox"):
        await init(sandbox=lambda: "virtual", persist=False)  # type: ignore[arg-type, return-value]


async def test_a_sandbox_may_bring_its_own_tools() -> None:
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


async def test_one_id_finds_its_conversation_again_and_none_is_fresh(tmp_path: Path) -> None:
    model = ScriptedModel(then="yes")
    agent = create_agent(model=model, sandbox=None, persist=tmp_path / "agents.db")
    for _ in range(2):
        async with init(agent, id="one") as harness:
            await (await harness.session()).prompt("Do you remember?")
    assert len(model.requests[-1].messages) == 3
    async with init(agent) as harness:
        await (await harness.session()).prompt("And you?")
    assert len(model.requests[-1].messages) == 1


async def test_a_kept_conversation_does_not_keep_a_virtual_workspace(tmp_path: Path) -> None:
    """Seed 002: what is said and what is in the workspace are kept apart."""
    agent = create_agent(model=ScriptedModel(then="ok"), persist=tmp_path / "agents.db")
    async with init(agent, id="one") as harness:
        await harness.fs.write_file("a.txt", "a")
        await (await harness.session()).prompt("hello")
    async with init(agent, id="one") as harness:
        assert not await harness.fs.exists("a.txt")
        assert len(await (await harness.session()).messages()) == 2


async def test_sessions_are_listed_got_made_and_deleted() -> None:
    async with at_work() as session:
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


async def test_harnesses_of_other_names_have_sessions_of_their_own() -> None:
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
async def test_a_bad_name_for_a_session_is_refused(name: Any) -> None:
    async with at_work() as session:
        with pytest.raises(InvalidOption):
            await session.harness.session(name)


async def test_init_adds_tools_and_skills_to_those_of_the_agent() -> None:
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


async def test_two_tools_of_one_name_are_a_conflict() -> None:
    @tool
    def bash() -> str:
        """Mine."""
        return ""

    with pytest.raises(Conflict, match="'bash'"):
        await init(tools=[bash], persist=False)


async def test_a_tool_cannot_take_a_name_of_the_harness() -> None:
    @tool
    def task() -> str:
        """Mine."""
        return ""

    with pytest.raises(InvalidOption, match="the harness has one"):
        await init(tools=[task], persist=False)


async def test_agents_md_of_the_workspace_is_part_of_the_system_prompt() -> None:
    model = ScriptedModel("ok")
    sandbox = virtual(files={"/workspace/AGENTS.md": "Use tabs."})
    async with init(
        model=model, sandbox=sandbox, instructions="Be kind.", persist=False
    ) as harness:
        await (await harness.session()).prompt("go")
    system = model.requests[0].system
    assert system.index("Be kind.") < system.index("Use tabs.")


async def test_an_initializer_gets_env_by_attribute() -> None:
    @create_agent
    def agent(ctx: AgentContext) -> dict[str, Any]:
        return {"model": ScriptedModel("ok"), "sandbox": ctx.env.box, "persist": False}

    async with init(agent, env={"box": virtual(files={"/workspace/x": "y"})}) as harness:
        assert await harness.fs.read_file("x") == "y"
        assert harness.env.box is harness.sandbox


async def test_a_closed_harness_opens_no_session() -> None:
    async with at_work() as session:
        harness = session.harness
    with pytest.raises(Unsupported, match="closed"):
        await harness.session("more")
    await harness.aclose()


async def test_a_tool_gets_its_context() -> None:
    @tool
    def where(ctx: ToolContext) -> str:
        """Where am I?"""
        return f"{ctx.session} {ctx.tool} {ctx.env.place}"

    model = ScriptedModel(call("where"), "ok")
    agent = create_agent(model=model, sandbox=None, persist=False, tools=[where])
    async with init(agent, id="one", env={"place": "here"}) as harness:
        await (await harness.session()).prompt("go")
    assert last_returns(model.requests[1])[0].text == "agent/one/default where here"
