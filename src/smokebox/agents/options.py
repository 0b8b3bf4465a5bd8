"""The options of an agent, checked where they are written."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from smokebox.agents.approval import as_approval
from smokebox.agents.budget import Budget
from smokebox.agents.compaction import as_compaction
from smokebox.agents.durability import Durability
from smokebox.agents.model import THINKING_LEVELS
from smokebox.agents.tools.function import as_tools
from smokebox.agents.tools.mcp import MCPServer
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from smokebox.agents.model import Model, ThinkingLevel
    from smokebox.agents.tools.tool import Tool
    from smokebox.sandbox.api import SandboxApi

    ModelChoice = str | Model
    SandboxFactory = Callable[..., SandboxApi | Awaitable[SandboxApi]]

T = TypeVar("T")


class Omitted:
    """An option that was left out, where None says something else."""

    def __repr__(self) -> str:
        return "omitted"


OMITTED: Final = Omitted()


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """What an agent is made of.

    - `model`: `provider/model`, a model object, or a list of them, of which each takes over
      where the one before it fails for good.
    - `instructions`: what it is told before everything else.
    - `sandbox`: where it works: a sandbox, which stays its owner's, or a function that gives
      one, whose sandbox ends with the harness. Left out it is a virtual one of its own, None
      is none: no workspace, and no tools for one. A sandbox that has a method `agent_tools()`
      brings its own tools in the place of the six.
    - `cwd`: the directory that it works in, by default that of the sandbox.
    - `tools`: functions, `Tool`s, MCP servers. `skills`: those that are not in the workspace.
    - `subagents`: agents that it can give tasks to; left out it can give them to a copy of
      itself, None takes the `task` tool away.
    - `thinking`: how hard the model is to think. `compaction`: when a long conversation is
      summarized, False for never. `approval`: which tool calls somebody has to allow.
    - `persist`: where the conversation is kept: True is a file below the state directory,
      False is memory; else a path, a `postgres://` address or a `Store`.
    - `budget` and `durability`: see `Budget` and `Durability`.
    """

    model: Any = None
    instructions: str = ""
    sandbox: Any = OMITTED
    cwd: str | None = None
    tools: Sequence[Any] = ()
    skills: Sequence[Any] = ()
    subagents: Any = OMITTED
    thinking: ThinkingLevel | None = None
    compaction: Any = None
    persist: Any = True
    approval: Any = None
    budget: Any = None
    durability: Any = None

    def __post_init__(self) -> None:
        _set(self, "model", check_models(self.model))
        if not isinstance(self.instructions, str):
            raise _wrong("instructions", self.instructions, "a str", "Pass the text itself.")
        check_sandbox(self.sandbox)
        if self.cwd is not None and not (isinstance(self.cwd, (str, os.PathLike)) and self.cwd):
            raise _wrong("cwd", self.cwd, "a path in the sandbox", "Pass for example '/workspace'.")
        _set(self, "cwd", None if self.cwd is None else os.fspath(self.cwd))
        _set(self, "tools", check_tools(self.tools))
        _set(self, "skills", check_list("skills", self.skills))
        if self.subagents is not OMITTED and self.subagents is not None:
            _set(self, "subagents", check_subagents(self.subagents))
        check_thinking(self.thinking)
        _set(self, "compaction", as_compaction(self.compaction) or False)
        _set(self, "approval", as_approval(self.approval))
        _set(self, "budget", _of_fields("budget", Budget, self.budget))
        _set(self, "durability", _of_fields("durability", Durability, self.durability))
        _check_persist(self.persist)


OPTION_NAMES = tuple(field.name for field in fields(AgentOptions))


def check_models(model: object) -> tuple[ModelChoice, ...]:
    """The models that are asked, the first as long as it answers."""
    if model is None:
        return ()
    many = isinstance(model, Sequence) and not isinstance(model, str)
    choices: tuple[Any, ...] = tuple(cast("Sequence[Any]", model)) if many else (model,)
    if not choices:
        raise _wrong("model", model, "at least one model", "Leave it out to name it per prompt.")
    for choice in choices:
        if isinstance(choice, str):
            provider, _, name = choice.partition("/")
            if provider and name:
                continue
            hint = "Write for example 'anthropic/claude-sonnet-4-6'."
            raise _wrong("model", choice, "'provider/model'", hint)
        if not hasattr(choice, "stream") or not hasattr(choice, "info"):
            hint = "Pass 'provider/model', an object that is a smokebox.agents.Model, or a list."
            raise _wrong("model", choice, "a model", hint)
    return choices


def check_sandbox(sandbox: object) -> None:
    """Raise unless it is a sandbox, a function that gives one, None, or left out."""
    if sandbox is OMITTED or sandbox is None or callable(sandbox) or is_sandbox(sandbox):
        return
    if inspect.isawaitable(sandbox):
        if inspect.iscoroutine(sandbox):
            sandbox.close()
        hint = "Await it first, or pass the function that gives it: sandbox=Sandbox.create."
        raise _wrong("sandbox", sandbox, "a sandbox, or a function that gives one", hint)
    hint = "Pass virtual(), local(), bucket(...), get_sandbox(...), a function, or None."
    raise _wrong("sandbox", sandbox, "a sandbox", hint)


def is_sandbox(value: object) -> bool:
    """Whether it can do what an agent needs of a sandbox."""
    return not inspect.isclass(value) and all(
        callable(getattr(value, name, None)) for name in ("exec", "read_file", "resolve_path")
    )


def check_list(option: str, value: object) -> tuple[Any, ...]:
    """A tuple of it, once it is a list of something."""
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return tuple(value)
    raise _wrong(option, value, "a list", f"Write {option}=[...].")


def check_tools(value: object) -> tuple[Tool | MCPServer, ...]:
    """Tools and servers of tools, functions made to tools; no two of one name."""
    given = check_list("tools", value)
    tools = iter(as_tools(one for one in given if not isinstance(one, MCPServer)))
    return tuple(one if isinstance(one, MCPServer) else next(tools) for one in given)


def check_subagents(value: object) -> tuple[Any, ...]:
    """Agents of different names."""
    from smokebox.agents.agent import Agent

    agents = check_list("subagents", value)
    names: set[str] = set()
    for agent in agents:
        if not isinstance(agent, Agent):
            raise _wrong("subagents", agent, "an agent", "Make it with create_agent(name=...).")
        if agent.name in names:
            raise InvalidOption(
                f"two subagents have the name {agent.name!r}.",
                hint="Give one another: create_agent(name=...).",
                option="subagents",
                value=agent.name,
            )
        names.add(agent.name)
    return agents


def check_thinking(thinking: object) -> None:
    """Raise unless it is a level of thinking, or None."""
    if thinking is not None and thinking not in THINKING_LEVELS:
        levels = ", ".join(THINKING_LEVELS)
        raise _wrong("thinking", thinking, "a level of thinking", f"It is one of: {levels}.")


def _check_persist(persist: object) -> None:
    if isinstance(persist, (bool, str, os.PathLike)) or hasattr(persist, "put_blob"):
        return
    hint = "Pass True, False (memory), a path, 'postgres://...' or a Store."
    raise _wrong("persist", persist, "a place for conversations", hint)


def _of_fields(option: str, kind: type[T], value: object) -> T:
    if value is None:
        return kind()
    if isinstance(value, kind):
        return value
    if isinstance(value, Mapping):
        return kind(**value)
    name = kind.__name__
    raise _wrong(option, value, f"a {name} or a dict", f"Write {option}={name}(...).")


def _set(options: AgentOptions, name: str, value: object) -> None:
    object.__setattr__(options, name, value)


def _wrong(option: str, value: object, wanted: str, hint: str) -> InvalidOption:
    return InvalidOption(
        f"{option} is {wanted}, and {value!r} is not.", hint=hint, option=option, value=value
    )
