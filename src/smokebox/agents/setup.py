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
from smokebox.agents.workspace import OpenSandbox, with_cwd
from smokebox.agents.workspace_snapshots import check_snapshots
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from smokebox.agents.agent import Agent
    from smokebox.agents.options import AgentSettings
    from smokebox.agents.skills import Skill
    from smokebox.agents.tools.tool import Tool
    from smokebox.sandbox.api import SandboxApi


TASK = "task"
SKILL = "skill"
MAX_DEPTH = 4
"""Maximum nesting of tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """An agent in a workspace.

    `tools` has every tool but `task`, which each session adds if `task` is not None.
    """

    agent: Agent
    options: AgentSettings
    sandbox: SandboxApi | None
    workspace: SandboxApi | None
    tools: Mapping[str, Tool]
    skills: Sequence[Skill]
    subagents: Mapping[str, Agent]
    task: ToolSpec | None
    _resources: AsyncExitStack

    async def with_cwd(self, cwd: str) -> Setup:
        """Return the setup of the same agent in another directory."""
        opened = None
        if self.sandbox is not None and self.workspace is not None:
            opened = OpenSandbox(self.sandbox, await with_cwd(self.workspace, cwd), owned=False)
        return await make_setup(self.agent, self.options, opened)

    async def with_skills(self) -> Setup:
        """Return the setup with the skills that are in the workspace at this time."""
        skills = list(self.skills)
        if self.workspace is not None:
            found = await discover(self.workspace, self.workspace.cwd, root=self.root)
            skills = merge(found, skills)
        if not skills:
            return self
        return replace(self, skills=skills, tools={**self.tools, SKILL: skill_tool(skills)})

    async def aclose(self) -> None:
        """Disconnect from MCP servers, and close the sandbox if it was opened for this setup."""
        await self._resources.aclose()

    async def system(self) -> str:
        """Build the system prompt of a session that is created."""
        return await system_prompt(
            self.options.instructions, self.workspace, skills=self.skills, root=self.root
        )

    def schemas(self, *, depth: int) -> tuple[dict[str, Any], ...]:
        """Return the tools of a session nested `depth` tasks deep, as the event log stores them."""
        specs: list[ToolSpec] = list(self.tools.values())
        if self.task is not None and depth < MAX_DEPTH:
            specs.append(self.task)
        return tuple(spec.schema for spec in specs)

    @property
    def root(self) -> str | None:
        """Topmost directory in which AGENTS.md and skills are looked for."""
        return None if self.sandbox is None else self.sandbox.cwd


async def make_setup(agent: Agent, options: AgentSettings, opened: OpenSandbox | None) -> Setup:
    """Build the setup of an agent. A sandbox that is `owned` is closed with the setup."""
    sandbox = None if opened is None else opened.sandbox
    workspace = None if opened is None else opened.workspace
    async with AsyncExitStack() as resources:
        if opened is not None and opened.owned:
            resources.push_async_callback(opened.sandbox.aclose)
        if options.checkpoints:
            check_snapshots(sandbox)
        own = await _own_tools(sandbox, workspace)
        tools = by_name(await open_tools([*own, *options.tools], workspace, resources))
        named = options.subagents if isinstance(options.subagents, tuple) else ()
        subagents = {subagent.name: subagent for subagent in named}
        tasks = options.subagents is not None and (named or workspace is not None)
        return Setup(
            agent=agent,
            options=options,
            sandbox=sandbox,
            workspace=workspace,
            tools=tools,
            skills=merge(options.skills),
            subagents=subagents,
            task=_task_spec(subagents.values()) if tasks else None,
            _resources=resources.pop_all(),
        )


async def _own_tools(sandbox: SandboxApi | None, workspace: SandboxApi | None) -> list[Tool]:
    """Return the tools that the sandbox supplies, or the six built-in ones."""
    if workspace is None:
        return []
    supplier = getattr(sandbox, "agent_tools", None)
    if supplier is None:
        return workspace_tools(workspace)
    supplied = supplier()
    return as_tools(await supplied if inspect.isawaitable(supplied) else supplied)


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


def _task_spec(agents: Iterable[Agent]) -> ToolSpec:
    """Return the spec of the `task` tool, for these agents and a copy of the caller."""
    description = (
        "Give a task to another agent, which works on it in a separate conversation and answers "
        "once. It sees nothing of this conversation: write down everything that it needs to "
        "know. Several tasks of one turn run concurrently."
    )
    properties: dict[str, object] = {
        "prompt": {"type": "string", "minLength": 1, "description": "The task, in full."},
        "cwd": {"type": "string", "description": "The directory to work in. Default: this one."},
    }
    known = "\n".join(
        f"- {agent.name}: {' '.join(agent.description.split()) or 'no description'}"
        for agent in agents
    )
    if known:
        description += f"\n\nAgents:\n{known}"
        properties["agent"] = {
            "type": "string",
            "description": "Name of the agent. Default: a copy of yourself.",
        }
    return ToolSpec(
        TASK,
        description,
        {
            "type": "object",
            "properties": properties,
            "required": ["prompt"],
            "additionalProperties": False,
        },
    )
