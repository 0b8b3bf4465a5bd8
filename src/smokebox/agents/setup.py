"""What one session of an agent works with: its workspace, its tools, its skills."""

from __future__ import annotations

import inspect
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from smokebox.agents.context import system_prompt
from smokebox.agents.model import ToolSpec
from smokebox.agents.options import OMITTED
from smokebox.agents.results import FINISH, GIVE_UP
from smokebox.agents.sandboxes import seen_from
from smokebox.agents.skills import discover, merge, skill_tool
from smokebox.agents.tasktool import MAX_DEPTH, TASK, task_spec
from smokebox.agents.tools import workspace_tools
from smokebox.agents.tools.function import as_tools
from smokebox.agents.tools.mcp import open_tools
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from smokebox.agents.agent import Agent
    from smokebox.agents.options import AgentOptions
    from smokebox.agents.skills import Skill
    from smokebox.agents.tools.tool import Tool
    from smokebox.sandbox.api import SandboxApi

SKILL = "skill"


@dataclass(frozen=True, slots=True, kw_only=True)
class More:
    """What `init` adds to an agent."""

    tools: Sequence[Any] = ()
    skills: Sequence[Skill] = ()
    subagents: Sequence[Agent] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """An agent in a workspace. `tools` are those that every session of it has, but for `task`,
    which `subagents` are for: those by name, or None where the model is to give no tasks."""

    agent: Agent
    options: AgentOptions
    sandbox: SandboxApi | None
    workspace: SandboxApi | None
    tools: Mapping[str, Tool]
    skills: Sequence[Skill]
    subagents: Mapping[str, Agent] | None
    more: More
    opened: AsyncExitStack

    async def seen_from(self, cwd: str) -> Setup:
        """The same agent in another directory."""
        workspace = None if self.workspace is None else await seen_from(self.workspace, cwd)
        return await make_setup(
            self.agent, self.options, sandbox=self.sandbox, workspace=workspace, more=self.more
        )

    async def with_skills(self) -> Setup:
        """What a session has that begins now, with the skills that are in the workspace."""
        known = list(self.skills)
        if self.workspace is not None:
            found = await discover(self.workspace, self.workspace.cwd, root=self.root)
            known = merge(found, known)
        if not known:
            return self
        return replace(self, skills=known, tools={**self.tools, SKILL: skill_tool(known)})

    async def aclose(self) -> None:
        """Let go of servers of tools."""
        await self.opened.aclose()

    async def system(self) -> str:
        """The system prompt of a session that begins."""
        return await system_prompt(
            self.options.instructions, self.workspace, skills=self.skills, root=self.root
        )

    def schemas(self, *, depth: int) -> tuple[dict[str, Any], ...]:
        """The tools of a session that is so many tasks deep, as the record has them."""
        specs = specs_of(self.tools.values())
        if self.subagents is not None and depth < MAX_DEPTH:
            specs.append(task_spec(self.subagents))
        return tuple(
            {
                "name": spec.name,
                "description": spec.description,
                "parameters": dict(spec.parameters),
            }
            for spec in specs
        )

    @property
    def root(self) -> str | None:
        """The directory above which nothing speaks to the agent."""
        return None if self.sandbox is None else self.sandbox.cwd


async def make_setup(
    agent: Agent,
    options: AgentOptions,
    *,
    sandbox: SandboxApi | None,
    workspace: SandboxApi | None,
    more: More | None = None,
) -> Setup:
    """Put together what an agent's options name, and what is given besides."""
    more = more or More()
    own = await _own_tools(sandbox, workspace)
    opened = AsyncExitStack()
    try:
        tools = await open_tools([*own, *options.tools, *more.tools], workspace, opened)
        named = by_name(tools)
    except BaseException:
        await opened.aclose()
        raise
    return Setup(
        agent=agent,
        options=options,
        sandbox=sandbox,
        workspace=workspace,
        tools=named,
        skills=merge([*options.skills, *more.skills]),
        subagents=_subagents(options, more.subagents, offered=workspace is not None),
        more=more,
        opened=opened,
    )


async def _own_tools(sandbox: SandboxApi | None, workspace: SandboxApi | None) -> list[Tool]:
    """The six tools of a workspace, or those that its sandbox brings in their place."""
    if workspace is None:
        return []
    bring = getattr(sandbox, "agent_tools", None)
    if bring is None:
        return workspace_tools(workspace)
    brought = bring()
    return as_tools(await brought if inspect.isawaitable(brought) else brought)


def by_name(tools: Iterable[Tool]) -> dict[str, Tool]:
    """Tools by their names, none of which may be one that the harness itself needs."""
    found = {tool.name: tool for tool in tools}
    for name in (TASK, SKILL, FINISH, GIVE_UP):
        if name in found:
            raise InvalidOption(
                f"a tool cannot be called {name!r}: the harness has one of that name.",
                hint="Give it another: @tool(name=...).",
                option="tools",
                value=name,
            )
    return found


def _subagents(
    options: AgentOptions, more: Sequence[Agent], *, offered: bool
) -> dict[str, Agent] | None:
    if options.subagents is None and not more:
        return None
    named = () if options.subagents in (OMITTED, None) else options.subagents
    found: dict[str, Agent] = {}
    for agent in (*named, *more):
        if agent.name in found:
            raise InvalidOption(
                f"two subagents have the name {agent.name!r}.",
                hint="Give one another: create_agent(name=...).",
                option="subagents",
                value=agent.name,
            )
        found[agent.name] = agent
    return found if found or offered else None


def specs_of(tools: Iterable[Tool]) -> list[ToolSpec]:
    """Tools as models are told of them."""
    return [ToolSpec(tool.name, tool.description, tool.parameters) for tool in tools]
