"""The `task` tool as a model is told of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.agents.model import ToolSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smokebox.agents.agent import Agent

TASK = "task"
MAX_DEPTH = 4
"""How deep tasks of tasks can be."""


def task_spec(agents: Mapping[str, Agent]) -> ToolSpec:
    """`task` over these agents, and one like the model itself."""
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
