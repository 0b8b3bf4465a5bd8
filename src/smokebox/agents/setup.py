"""Setup of a session: its workspace, tools, skills and subagents."""

from __future__ import annotations

import inspect
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from smokebox.agents.model import ToolSpec
from smokebox.agents.results import FINISH, GIVE_UP
from smokebox.agents.skills import discover, merge, skill_tool
from smokebox.agents.system_prompt import system_prompt
from smokebox.agents.tools import workspace_tools
from smokebox.agents.tools.function import as_tools
from smokebox.agents.tools.mcp import open_tools
from smokebox.agents.workspace import with_cwd
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from smokebox.agents.agent import Agent
    from smokebox.agents.options import AgentSettings
    from smokebox.agents.skills import Skill
    from smokebox.agents.tools.tool import Tool
    from smokebox.sandbox.api import SandboxApi


TASK = "task"
MAX_DEPTH = 4
"""Maximum nesting of tasks."""


def task_spec(agents: Mapping[str, Agent]) -> ToolSpec:
    """Return the spec of the `task` tool, for these agents and a copy of the caller."""
    return ToolSpec(TASK, _description(agents), _parameters(agents))


def _description(agents: Mapping[str, Agent]) -> str:
    said = (
        "Give a task to another agent, which works on it in a conversation of its own and "
        "answers once. It sees nothing of this conversation: write down all that it needs to "
        "know. Several tasks of one turn are worked on side by side."
    )
    if not agents:
        return said
    known = "\n".join(
        f"- {agent.name}: {' '.join(agent.description.split()) or 'no description'}"
        for agent in agents.values()
    )
    return f"{said}\n\nAgents:\n{known}"


def _parameters(agents: Mapping[str, Agent]) -> dict[str, object]:
    properties: dict[str, object] = {
        "prompt": {"type": "string", "minLength": 1, "description": "The task, in full."},
        "cwd": {"type": "string", "description": "The directory to work in. Default: this one."},
    }
    if agents:
        told = "Which agent. Default: one like you."
        properties["agent"] = {"type": "string", "description": told}
    return {
        "type": "object",
        "properties": properties,
        "required": ["prompt"],
        "additionalProperties": False,
    }


SKILL = "skill"


@dataclass(frozen=True, slots=True, kw_only=True)
class Additions:
    """Tools, skills and subagents that `init` adds to an agent's own."""

    tools: Sequence[Any] = ()
    skills: Sequence[Skill] = ()
    subagents: Sequence[Agent] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """An agent in a workspace.

    `tools` has every tool but `task`, which each session adds for `subagents`; None means no
    `task` tool.
    """

    agent: Agent
    options: AgentSettings
    sandbox: SandboxApi | None
    workspace: SandboxApi | None
    tools: Mapping[str, Tool]
    skills: Sequence[Skill]
    subagents: Mapping[str, Agent] | None
    additions: Additions
    opened: AsyncExitStack

    async def with_cwd(self, cwd: str) -> Setup:
        """Return the setup of the same agent in another directory."""
        workspace = None if self.workspace is None else await with_cwd(self.workspace, cwd)
        return await make_setup(
            self.agent,
            self.options,
            sandbox=self.sandbox,
            workspace=workspace,
            additions=self.additions,
        )

    async def with_skills(self) -> Setup:
        """Return the setup with the skills that are in the workspace at this time."""
        known = list(self.skills)
        if self.workspace is not None:
            found = await discover(self.workspace, self.workspace.cwd, root=self.root)
            known = merge(found, known)
        if not known:
            return self
        return replace(self, skills=known, tools={**self.tools, SKILL: skill_tool(known)})

    async def aclose(self) -> None:
        """Disconnect from MCP servers."""
        await self.opened.aclose()

    async def system(self) -> str:
        """Build the system prompt of a session that is created."""
        return await system_prompt(
            self.options.instructions, self.workspace, skills=self.skills, root=self.root
        )

    def schemas(self, *, depth: int) -> tuple[dict[str, Any], ...]:
        """Return the tools of a session nested `depth` tasks deep, as the event log stores them."""
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
        """Topmost directory in which AGENTS.md and skills are looked for."""
        return None if self.sandbox is None else self.sandbox.cwd


async def make_setup(
    agent: Agent,
    options: AgentSettings,
    *,
    sandbox: SandboxApi | None,
    workspace: SandboxApi | None,
    additions: Additions | None = None,
) -> Setup:
    """Build the setup from an agent's options and the additions of `init`."""
    additions = additions or Additions()
    own = await _own_tools(sandbox, workspace)
    opened = AsyncExitStack()
    try:
        tools = await open_tools([*own, *options.tools, *additions.tools], workspace, opened)
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
        skills=merge([*options.skills, *additions.skills]),
        subagents=_subagents(options, additions.subagents, offered=workspace is not None),
        additions=additions,
        opened=opened,
    )


async def _own_tools(sandbox: SandboxApi | None, workspace: SandboxApi | None) -> list[Tool]:
    """Return the tools that the sandbox supplies, or the six built-in ones."""
    if workspace is None:
        return []
    bring = getattr(sandbox, "agent_tools", None)
    if bring is None:
        return workspace_tools(workspace)
    brought = bring()
    return as_tools(await brought if inspect.isawaitable(brought) else brought)


def by_name(tools: Iterable[Tool]) -> dict[str, Tool]:
    """Return tools by name. Raises `InvalidOption` for a name that the harness reserves."""
    found = {tool.name: tool for tool in tools}
    for name in (TASK, SKILL, FINISH, GIVE_UP):
        if name in found:
            raise InvalidOption(
                f"a tool cannot be named {name!r}: the harness has one of that name.",
                hint="Rename it: @tool(name=...).",
                option="tools",
                value=name,
            )
    return found


def _subagents(
    options: AgentSettings, additions: Sequence[Agent], *, offered: bool
) -> dict[str, Agent] | None:
    if options.subagents is None and not additions:
        return None
    named = options.subagents if isinstance(options.subagents, tuple) else ()
    found: dict[str, Agent] = {}
    for agent in (*named, *additions):
        if agent.name in found:
            raise InvalidOption(
                f"two subagents have the name {agent.name!r}.",
                hint="Rename one of them: create_agent(name=...).",
                option="subagents",
                value=agent.name,
            )
        found[agent.name] = agent
    return found if found or offered else None


def specs_of(tools: Iterable[Tool]) -> list[ToolSpec]:
    """Return the specs of tools."""
    return [ToolSpec(tool.name, tool.description, tool.parameters) for tool in tools]
