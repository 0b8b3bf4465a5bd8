"""Tests of definitions of agents, whose options are checked at once."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from smokebox import create_agent, init, local, tool, virtual
from smokebox.agents import Agent, AgentContext, Budget, Durability
from smokebox.agents.agent import resolve_settings
from smokebox.errors import InvalidOption
from smokebox.testing import ScriptedModel

if TYPE_CHECKING:
    from smokebox.agents.model import ModelInfo

CTX = AgentContext(id="one", env=None)


async def test_keywords_define_an_agent() -> None:
    agent = create_agent(model="anthropic/claude-sonnet-4-6", cwd="/workspace")
    options = await resolve_settings(agent, CTX)
    assert (agent.name, options.model) == ("agent", ("anthropic/claude-sonnet-4-6",))
    assert options.cwd == "/workspace"


async def test_initializer_returns_options_of_an_instance() -> None:
    @create_agent
    def coder(ctx: AgentContext) -> dict[str, Any]:
        """Writes code."""
        return {"model": "openai/gpt-5", "instructions": f"You are {ctx.id}: {ctx.payload}"}

    assert isinstance(coder, Agent)
    assert (coder.name, coder.description) == ("coder", "Writes code.")
    options = await resolve_settings(coder, AgentContext(id="one", env=None, payload="hello"))
    assert options.instructions == "You are one: hello"


async def test_async_initializer_overrides_keyword_options() -> None:
    async def later(ctx: AgentContext) -> dict[str, Any]:
        return {"instructions": "mine"}

    agent = create_agent(later, name="other", model="openai/gpt-5", instructions="default")
    options = await resolve_settings(agent, CTX)
    assert agent.name == "other"
    assert (options.instructions, options.model) == ("mine", ("openai/gpt-5",))


def test_unknown_option_suggests_the_nearest() -> None:
    with pytest.raises(InvalidOption, match="Did you mean 'instructions'"):
        create_agent(model="openai/gpt-5", instruction="x")  # type: ignore[call-arg]


async def test_unknown_option_of_initializer_suggests_the_nearest() -> None:
    agent = create_agent(lambda ctx: {"modell": "openai/gpt-5"})
    with pytest.raises(InvalidOption, match="Did you mean 'model'"):
        await resolve_settings(agent, CTX)


async def test_initializer_must_return_options() -> None:
    agent = create_agent(lambda ctx: "gpt-5")  # type: ignore[arg-type, return-value]
    with pytest.raises(InvalidOption, match="not options"):
        await resolve_settings(agent, CTX)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("model", "gpt-5"),
        ("model", []),
        ("model", 5),
        ("instructions", 5),
        ("sandbox", "virtual"),
        ("cwd", 5),
        ("tools", "bash"),
        ("skills", 5),
        ("subagents", ["coder"]),
        ("thinking", "very"),
        ("compaction", 5),
        ("persist", 5),
        ("approval", 5),
        ("budget", 5),
        ("budget", {"turns": 0}),
        ("budget", {"turn": 1}),
        ("durability", {"max_attempts": 0}),
        ("durability", {"timeout": "long"}),
        ("name", "no spaces"),
    ],
)
def test_wrong_value_is_refused_at_the_definition(option: str, value: Any) -> None:
    with pytest.raises(InvalidOption):
        create_agent(**{option: value})


def test_checking_a_model_does_not_call_info() -> None:
    """The first use of `info` imports the library of the provider, which takes a second."""

    class LazyModel(ScriptedModel):
        @property
        def info(self) -> ModelInfo:
            raise AssertionError("info was used")

    create_agent(model=LazyModel("hi"))


def test_sandbox_that_was_not_awaited_is_refused() -> None:
    async def make() -> object:
        return virtual()

    with pytest.raises(InvalidOption, match="Await it first"):
        create_agent(sandbox=make())  # type: ignore[arg-type]


def test_subagents_with_the_same_name_are_refused() -> None:
    with pytest.raises(InvalidOption, match="two subagents have the name 'one'"):
        create_agent(subagents=[create_agent(name="one"), create_agent(name="one")])


def test_tools_with_the_same_name_are_refused() -> None:
    @tool(name="same")
    def one() -> str:
        """One."""
        return ""

    @tool(name="same")
    def two() -> str:
        """Two."""
        return ""

    with pytest.raises(Exception, match="two tools have the name 'same'"):
        create_agent(tools=[one, two])


async def test_agent_and_its_options_are_frozen() -> None:
    tools: list[Any] = []
    agent = create_agent(model="openai/gpt-5", tools=tools)
    tools.append(print)
    assert (await resolve_settings(agent, CTX)).tools == ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        agent.name = "other"  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        (await resolve_settings(agent, CTX)).cwd = "/"  # type: ignore[misc]


async def test_limits_can_be_dicts() -> None:
    agent = create_agent(budget={"turns": 3}, durability={"max_attempts": 2})
    options = await resolve_settings(agent, CTX)
    assert options.budget == Budget(turns=3)
    assert options.durability == Durability(max_attempts=2)


def test_init_of_an_agent_refuses_its_options() -> None:
    with pytest.raises(InvalidOption, match="Pass it to create_agent"):
        init(create_agent(), model="openai/gpt-5")  # type: ignore[call-overload]
    with pytest.raises(InvalidOption, match="takes an agent"):
        init("agent")  # type: ignore[call-overload]
    with pytest.raises(InvalidOption, match="id is"):
        init(create_agent(), id="a/b")


async def test_harness_does_not_close_a_sandbox_object() -> None:
    sandbox = local()
    agent = create_agent(model=ScriptedModel("hi"), sandbox=sandbox, persist=False)
    async with init(agent) as harness:
        assert harness.sandbox is sandbox
    assert (await sandbox.exec("echo still")).stdout == "still\n"
    await sandbox.aclose()
