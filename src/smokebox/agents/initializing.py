"""`init`: from an agent to a harness."""

from __future__ import annotations

import os
from collections.abc import Mapping
from secrets import token_hex
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from smokebox.agents.agent import Agent, AgentContext, check_name, create_agent
from smokebox.agents.harness import DEFAULT, Harness
from smokebox.agents.log.opening import open_store
from smokebox.agents.options import OMITTED, Omitted, check_list, check_subagents, check_tools
from smokebox.agents.sandboxes import open_sandbox
from smokebox.agents.setup import SKILL, More, make_setup
from smokebox.agents.tasktool import TASK
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator, Sequence

    from smokebox.agents.log.store import Store
    from smokebox.agents.skills import Skill


class Opening:
    """A harness that is about to be: `await` it, or use it with `async with`."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, Harness]]) -> None:
        self._make = make
        self._made: Harness | None = None

    def __await__(self) -> Generator[Any, None, Harness]:
        return self._make().__await__()

    async def __aenter__(self) -> Harness:
        self._made = await self._make()
        return self._made

    async def __aexit__(self, *_: object) -> None:
        if self._made is not None:
            await self._made.aclose()


def init(
    agent: Agent | None = None,
    /,
    *,
    id: str | None = None,
    env: Any = None,
    payload: Any = None,
    name: str = DEFAULT,
    tools: Sequence[Any] = (),
    skills: Sequence[Skill] = (),
    subagents: Sequence[Agent] | Omitted | None = OMITTED,
    store: Store | None = None,
    **options: Any,
) -> Opening:
    """Have an agent work: `harness = await init(agent)`, or `async with init(agent) as harness`.

    Without an `id` it is a fresh instance each time; the same id finds its conversations
    again. `name` keeps several harnesses of one instance apart. `tools`, `skills` and
    `subagents` come to those of the agent. `init(model=..., sandbox=...)` makes the agent on
    the spot.
    """
    if agent is None:
        if tools:
            options["tools"] = tools
        if skills:
            options["skills"] = skills
        if subagents is not OMITTED:
            options["subagents"] = subagents
        agent, more = create_agent(**options), More()
    else:
        _check_agent(agent, options)
        more = More(
            tools=check_tools(tools),
            skills=check_list("skills", skills),
            subagents=() if subagents is OMITTED else check_subagents(subagents or ()),
        )
    ctx = AgentContext(
        id=token_hex(8) if id is None else check_name("id", id),
        env=_environment(env),
        payload=payload,
        name=check_name("name", name),
    )
    return Opening(lambda: _make(agent, ctx, more, store))


async def _make(agent: Agent, ctx: AgentContext, more: More, store: Store | None) -> Harness:
    options = await agent.options(ctx)
    made_for_it = agent.initializer is not None
    opened = await open_sandbox(options.sandbox, options.cwd, ctx, made_for_it=made_for_it)
    persist = options.persist if store is None else store
    try:
        setup = await make_setup(
            agent,
            options,
            sandbox=None if opened is None else opened.sandbox,
            workspace=None if opened is None else opened.workspace,
            more=more,
        )
        if options.approval is not None:
            options.approval.check_names([*setup.tools, SKILL, TASK])
        kept = open_store(persist)
    except BaseException:
        if opened is not None and opened.owned:
            await opened.sandbox.aclose()
        raise
    ours = isinstance(persist, (bool, str, os.PathLike))
    return Harness(setup, ctx, opened, kept, owns_store=ours)


def _check_agent(agent: object, options: Mapping[str, Any]) -> None:
    if not isinstance(agent, Agent):
        raise InvalidOption(
            f"init() takes an agent, not {agent!r:.80}.",
            hint="Make one with create_agent(...), or pass its options by keyword.",
            option="agent",
        )
    for option in options:
        raise InvalidOption(
            f"init() of an agent has no option {option!r}.",
            hint="Give it to create_agent().",
            option=option,
        )


def _environment(env: Any) -> Any:
    """What `ctx.env` is: the project's bindings, or what was given, by attribute."""
    if env is None:
        from smokebox.client.bindings import env as bindings

        return bindings
    return SimpleNamespace(**env) if isinstance(env, Mapping) else env
