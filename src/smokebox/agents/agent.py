"""Definitions of agents: checked options, or a function that returns them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Unpack

from smokebox.agents.options import OPTION_NAMES, AgentOptions, check_options
from smokebox.errors import InvalidOption
from smokebox.options import refuse_unknown

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from smokebox.agents.options import AgentSettings

    Options = Mapping[str, Any] | AgentOptions
    Initializer = Callable[["AgentContext"], Options | Awaitable[Options]]

DEFAULT_NAME = "agent"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentContext:
    """Argument of an initializer: the instance that it returns options for.

    `env` has the bindings of the project (`ctx.env.PyBox`), or the option `env` of `init`.
    """

    id: str
    env: Any
    payload: Any = None
    name: str = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """Definition of an agent. `create_agent` makes it, `init` starts it.

    `name` keys its conversations in the store: another name is another agent.
    """

    name: str = DEFAULT_NAME
    description: str = ""
    _defaults: Mapping[str, Any] = field(default_factory=dict, repr=False)
    _initializer: Initializer | None = field(default=None, repr=False)
    _overrides: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models in its definition; those that an initializer chooses are not."""
        return tuple(one for one in self._defaults.get("model", ()) if isinstance(one, str))


def create_agent(
    initializer: Initializer | None = None,
    /,
    *,
    name: str | None = None,
    description: str = "",
    **options: Unpack[AgentOptions],
) -> Agent:
    """Define an agent by its options, or by a function that returns them.

        reviewer = create_agent(model="anthropic/claude-sonnet-4-6", cwd="/workspace")

        @create_agent
        def coder(ctx):
            return dict(model="...", sandbox=get_sandbox(ctx.env.Sandbox, ctx.id))

    Args:
        initializer: Called at each `init` with an `AgentContext`; may be async. What it
            returns overrides `options`.
        name: Name in the store and for other agents, by default that of the initializer.
        description: What other agents read before they give it a task, by default the
            docstring of the initializer.
        options: See `AgentOptions`.

    Raises:
        InvalidOption: An option is unknown or has a wrong value.
    """
    if initializer is not None and not callable(initializer):
        raise InvalidOption(
            f"create_agent() takes a function that returns options, not {initializer!r}.",
            hint="Pass options by keyword: create_agent(model=..., sandbox=...).",
            option="initializer",
            value=initializer,
        )
    refuse_unknown("create_agent()", options, [*OPTION_NAMES, "name", "description"])
    # Checked here as well, so that the traceback leads to the definition.
    settings = check_options(options)
    return Agent(
        name=check_name("name", _name_of(initializer) if name is None else name),
        description=description or inspect.getdoc(initializer) or "",
        _defaults={option: getattr(settings, option) for option in options},
        _initializer=initializer,
    )


def override(agent: Agent, **options: Unpack[AgentOptions]) -> Agent:
    """Return the agent with options that take precedence over its own and its initializer's.

    Its sandbox is closed with the harness.
    """
    return replace(agent, _overrides={**agent._overrides, **options})


async def resolve_settings(agent: Agent, ctx: AgentContext) -> AgentSettings:
    """Return the checked options of an agent for one instance; calls its initializer.

    Raises:
        InvalidOption: The initializer returned an unknown option or a wrong value.
    """
    options: object = {}
    if agent._initializer is not None:
        options = agent._initializer(ctx)
        options = await options if inspect.isawaitable(options) else options
    if not isinstance(options, Mapping):
        raise InvalidOption(
            f"the initializer of {agent.name} returned {options!r}, not options.",
            hint="Return dict(model=..., sandbox=...).",
            option="initializer",
            value=options,
        )
    refuse_unknown(f"the initializer of {agent.name}", options, OPTION_NAMES)
    settings = check_options({**agent._defaults, **options, **agent._overrides})
    owned = agent._initializer is not None or bool(agent._overrides)
    return replace(settings, owns_sandbox=owned)


def check_name(option: str, name: object) -> str:
    """Return `name` if an agent or an instance can have it. Raises `InvalidOption`."""
    if isinstance(name, str) and _NAME.fullmatch(name):
        return name
    raise InvalidOption(
        f"{option} is letters, digits, '.', '_' and '-', at most 100 of them, not {name!r}.",
        hint=f"Pass for example {option}='reviewer'.",
        option=option,
        value=name,
    )


def _name_of(initializer: Initializer | None) -> str:
    name = getattr(initializer, "__name__", DEFAULT_NAME)
    return name if _NAME.fullmatch(name) else DEFAULT_NAME
