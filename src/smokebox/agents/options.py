"""Options of an agent: their types for callers, and the checks that turn them into settings."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, TypeVar, cast

from smokebox.agents.approval import as_approval
from smokebox.agents.limits import Budget, Durability
from smokebox.agents.model import THINKING_LEVELS
from smokebox.agents.tools.function import as_tools
from smokebox.agents.tools.mcp import MCPServer
from smokebox.agents.work.compaction import as_compaction
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from smokebox.agents.agent import Agent
    from smokebox.agents.approval import Approval, ApprovalChoice
    from smokebox.agents.log.store import SessionStore
    from smokebox.agents.model import Model, ThinkingLevel
    from smokebox.agents.skills import Skill
    from smokebox.agents.tools.tool import Tool
    from smokebox.agents.work.compaction import Compaction
    from smokebox.sandbox.api import SandboxApi

    ModelChoice = str | Model
    SandboxFactory = Callable[..., SandboxApi | Awaitable[SandboxApi]]
    ToolChoice = Tool | MCPServer | Callable[..., object]
    StoreChoice = bool | str | os.PathLike[str] | SessionStore

T = TypeVar("T")


class Omitted:
    """An option that was left out, where None has a meaning of its own."""

    def __repr__(self) -> str:
        return "omitted"


OMITTED: Final = Omitted()


class AgentOptions(TypedDict, total=False):
    """Keyword options of `create_agent` and `init`, and what an initializer returns.

    Attributes:
        model: `provider/model`, a `Model`, or a list of them. Each entry takes over when the
            one before it fails for good.
        instructions: Text at the start of the system prompt.
        sandbox: Where the agent works. A sandbox object stays yours to close. A function
            that returns one is called at each `init`, and its sandbox is closed with the
            harness. Left out: a virtual sandbox for this harness alone. None: no workspace
            and no workspace tools. A sandbox with a method `agent_tools()` supplies its own
            tools instead of the six built-in ones.
        cwd: Working directory in the sandbox, by default the sandbox's own.
        tools: Functions, `Tool`s and MCP servers.
        skills: Skills besides those in the workspace.
        subagents: Agents that can be given tasks. Left out: a copy of the agent itself.
            None: no `task` tool.
        thinking: How much the model reasons before it answers.
        compaction: When a long conversation is summarized; False for never.
        persist: Where conversations are stored. True: a file in the state directory. False:
            memory. Otherwise a path, a `postgres://` URL or a `SessionStore`.
        approval: Which tool calls need approval.
        budget: Limits of one prompt, as a `Budget` or a dict of its fields.
        durability: Retries and deadlines, as a `Durability` or a dict of its fields.
        checkpoints: Keep the files as they were before each prompt and after each turn that
            changed any. True: the last 50 of a session. A number: so many. The sandbox must have
            snapshots.
    """

    model: ModelChoice | Sequence[ModelChoice] | None
    instructions: str
    sandbox: SandboxApi | SandboxFactory | None
    cwd: str | os.PathLike[str] | None
    tools: Sequence[ToolChoice]
    skills: Sequence[Skill]
    subagents: Sequence[Agent] | None
    thinking: ThinkingLevel | None
    compaction: Compaction | Mapping[str, Any] | bool | None
    persist: StoreChoice
    approval: ApprovalChoice | None
    budget: Budget | Mapping[str, float] | None
    durability: Durability | Mapping[str, float] | None
    checkpoints: bool | int


class PromptOptions(TypedDict, total=False):
    """Options of `Session.prompt` and `Session.skill`.

    Attributes:
        tools: Tools for this prompt, besides those of the agent.
        model: Model for this prompt, or a list of them with fallbacks.
        thinking: How much the model reasons before it answers.
        timeout: The most seconds it may take, by default `Durability.timeout`.
        budget: Limits of this prompt, as a `Budget` or a dict of its fields; by default those
            of the agent.
        key: Idempotency key. Work with a key is done once; a repeated call returns the first
            result, also after a crash.
    """

    tools: Sequence[Tool | Callable[..., object]]
    model: ModelChoice | Sequence[ModelChoice] | None
    thinking: ThinkingLevel | None
    timeout: float | None
    budget: Budget | Mapping[str, float] | None
    key: str | None


KEPT_CHECKPOINTS = 50
OPTION_NAMES = tuple(AgentOptions.__annotations__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """Options of an agent after the checks, with a value for each."""

    model: tuple[ModelChoice, ...]
    instructions: str
    sandbox: SandboxApi | SandboxFactory | Omitted | None
    cwd: str | None
    tools: tuple[Tool | MCPServer, ...]
    skills: tuple[Skill, ...]
    subagents: tuple[Agent, ...] | Omitted | None
    thinking: ThinkingLevel | None
    compaction: Compaction | Literal[False]
    persist: StoreChoice
    approval: Approval | None
    budget: Budget
    durability: Durability
    checkpoints: int = 0
    """Number of checkpoints that are kept; 0 is none."""
    owns_sandbox: bool = False
    """An initializer opened the sandbox for this instance, so it is closed with the harness."""


def check_options(options: Mapping[str, Any]) -> AgentSettings:
    """Check every value and fill in the defaults. Names must have been checked before.

    Raises:
        InvalidOption: A value is wrong; the error names the option.
    """
    instructions, cwd = options.get("instructions", ""), options.get("cwd")
    if not isinstance(instructions, str):
        raise _wrong("instructions", instructions, "a str", "Pass the text itself.")
    if cwd is not None and not (isinstance(cwd, (str, os.PathLike)) and cwd):
        raise _wrong("cwd", cwd, "a path in the sandbox", "Pass for example '/workspace'.")
    subagents = options.get("subagents", OMITTED)
    named = subagents is not OMITTED and subagents is not None
    return AgentSettings(
        model=check_models(options.get("model")),
        instructions=instructions,
        sandbox=check_sandbox(options.get("sandbox", OMITTED)),
        cwd=None if cwd is None else os.fspath(cwd),
        tools=check_tools(options.get("tools", ())),
        skills=check_list("skills", options.get("skills", ())),
        subagents=check_subagents(subagents) if named else subagents,
        thinking=check_thinking(options.get("thinking")),
        compaction=as_compaction(options.get("compaction")) or False,
        persist=_check_persist(options.get("persist", True)),
        approval=as_approval(options.get("approval")),
        budget=check_budget(options.get("budget")),
        durability=_from_fields("durability", Durability, options.get("durability")),
        checkpoints=_check_checkpoints(options.get("checkpoints")),
    )


def check_models(model: object) -> tuple[ModelChoice, ...]:
    """Return the models in order of preference; the rest are fallbacks."""
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
        # Looked up without calling `info`: its first use imports the library of the provider.
        if any(inspect.getattr_static(choice, name, None) is None for name in ("stream", "info")):
            hint = "Pass 'provider/model', an object that is a smokebox.agents.Model, or a list."
            raise _wrong("model", choice, "a model", hint)
    return choices


def check_sandbox(sandbox: object) -> SandboxApi | SandboxFactory | Omitted | None:
    """Return the option if it is a sandbox, a function that returns one, None, or left out."""
    if sandbox is OMITTED or sandbox is None or callable(sandbox) or is_sandbox(sandbox):
        return cast("SandboxApi | SandboxFactory | Omitted | None", sandbox)
    if inspect.isawaitable(sandbox):
        if inspect.iscoroutine(sandbox):
            sandbox.close()
        hint = "Await it first, or pass the function that returns it: sandbox=Sandbox.create."
        raise _wrong("sandbox", sandbox, "a sandbox, or a function that returns one", hint)
    hint = "Pass virtual(), local(), bucket(...), get_sandbox(...), a function, or None."
    raise _wrong("sandbox", sandbox, "a sandbox", hint)


def is_sandbox(value: object) -> bool:
    """Return True if the value has the methods that an agent needs of a sandbox."""
    return not inspect.isclass(value) and all(
        callable(getattr(value, name, None)) for name in ("exec", "read_file", "resolve_path")
    )


def check_list(option: str, value: object) -> tuple[Any, ...]:
    """Return the option as a tuple. Raises `InvalidOption` if it is not a list."""
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return tuple(value)
    raise _wrong(option, value, "a list", f"Write {option}=[...].")


def check_tools(value: object) -> tuple[Tool | MCPServer, ...]:
    """Return tools and MCP servers, functions converted to tools; names must be unique."""
    choices = check_list("tools", value)
    tools = iter(as_tools(each for each in choices if not isinstance(each, MCPServer)))
    return tuple(each if isinstance(each, MCPServer) else next(tools) for each in choices)


def check_subagents(value: object) -> tuple[Agent, ...]:
    """Return the subagents. Raises `InvalidOption` if two have the same name."""
    from smokebox.agents.agent import Agent

    agents = check_list("subagents", value)
    names: set[str] = set()
    for agent in agents:
        if not isinstance(agent, Agent):
            raise _wrong("subagents", agent, "an agent", "Make it with create_agent(name=...).")
        if agent.name in names:
            raise InvalidOption(
                f"two subagents have the name {agent.name!r}.",
                hint="Rename one of them: create_agent(name=...).",
                option="subagents",
                value=agent.name,
            )
        names.add(agent.name)
    return agents


def check_thinking(thinking: object) -> ThinkingLevel | None:
    """Return the option if it is a level of thinking, or None."""
    if thinking is not None and thinking not in THINKING_LEVELS:
        levels = ", ".join(THINKING_LEVELS)
        raise _wrong("thinking", thinking, "a level of thinking", f"It is one of: {levels}.")
    return thinking


def check_budget(budget: object) -> Budget:
    """Return the option as a `Budget`, by default one without limits."""
    return _from_fields("budget", Budget, budget)


def _check_checkpoints(value: object) -> int:
    if value is None or isinstance(value, bool):
        return KEPT_CHECKPOINTS if value else 0
    if isinstance(value, int) and value > 0:
        return value
    hint = "Pass True, or the number of checkpoints to keep."
    raise _wrong("checkpoints", value, "True, False or a positive number", hint)


def _check_persist(persist: object) -> StoreChoice:
    if isinstance(persist, (bool, str, os.PathLike)) or hasattr(persist, "put_blob"):
        return cast("StoreChoice", persist)
    hint = "Pass True, False (memory), a path, 'postgres://...' or a SessionStore."
    raise _wrong("persist", persist, "a place for conversations", hint)


def _from_fields(option: str, kind: type[T], value: object) -> T:
    if value is None:
        return kind()
    if isinstance(value, kind):
        return value
    if isinstance(value, Mapping):
        return kind(**value)
    name = kind.__name__
    raise _wrong(option, value, f"a {name} or a dict", f"Write {option}={name}(...).")


def _wrong(option: str, value: object, expected: str, hint: str) -> InvalidOption:
    return InvalidOption(
        f"{option} must be {expected}, not {value!r}.", hint=hint, option=option, value=value
    )
