"""Agents over the sandbox contract. The tools that a model calls are in `agents.tools`.

Names are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from smokebox.agents.agent import Agent as Agent
    from smokebox.agents.agent import AgentContext as AgentContext
    from smokebox.agents.agent import create_agent as create_agent
    from smokebox.agents.harness import Harness as Harness
    from smokebox.agents.harness import init as init
    from smokebox.agents.limits import Budget as Budget
    from smokebox.agents.limits import Durability as Durability
    from smokebox.agents.model import Model as Model
    from smokebox.agents.operation import Operation as Operation
    from smokebox.agents.options import AgentOptions as AgentOptions
    from smokebox.agents.results import Reply as Reply
    from smokebox.agents.session import Session as Session
    from smokebox.agents.skills import Skill as Skill
    from smokebox.agents.tools.function import tool as tool
    from smokebox.agents.tools.tool import Tool as Tool
    from smokebox.agents.tools.tool import ToolContext as ToolContext
    from smokebox.agents.tools.tool import ToolResult as ToolResult

_HOME = {
    "Agent": "agent",
    "AgentContext": "agent",
    "AgentOptions": "options",
    "Budget": "limits",
    "Durability": "limits",
    "Harness": "harness",
    "Model": "model",
    "Operation": "operation",
    "Reply": "results",
    "Session": "session",
    "Skill": "skills",
    "Tool": "tools.tool",
    "ToolContext": "tools.tool",
    "ToolResult": "tools.tool",
    "create_agent": "agent",
    "init": "harness",
    "tool": "tools.function",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'smokebox.agents' has no attribute {name!r}")
    value: object = getattr(import_module(f"smokebox.agents.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
