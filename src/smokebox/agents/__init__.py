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
    from smokebox.agents.budget import Budget as Budget
    from smokebox.agents.durability import Durability as Durability
    from smokebox.agents.harness import Harness as Harness
    from smokebox.agents.initializing import init as init
    from smokebox.agents.model import Model as Model
    from smokebox.agents.operation import Operation as Operation
    from smokebox.agents.options import AgentOptions as AgentOptions
    from smokebox.agents.reply import Reply as Reply
    from smokebox.agents.session import Session as Session
    from smokebox.agents.skills import Skill as Skill
    from smokebox.agents.tools.function import tool as tool
    from smokebox.agents.tools.tool import Tool as Tool
    from smokebox.agents.tools.tool import ToolResult as ToolResult
    from smokebox.agents.tools.toolcontext import ToolContext as ToolContext

_HOME = {
    "Agent": "agent",
    "AgentContext": "agent",
    "AgentOptions": "options",
    "Budget": "budget",
    "Durability": "durability",
    "Harness": "harness",
    "Model": "model",
    "Operation": "operation",
    "Reply": "reply",
    "Session": "session",
    "Skill": "skills",
    "Tool": "tools.tool",
    "ToolContext": "tools.toolcontext",
    "ToolResult": "tools.tool",
    "create_agent": "agent",
    "init": "initializing",
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
