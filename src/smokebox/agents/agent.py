"""What an agent is: options, checked and frozen, or a function that gives them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

from smokebox.agents.options import OPTION_NAMES, AgentOptions
from smokebox.errors import InvalidOption
from smokebox.options import refuse_unknown

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Options = Mapping[str, Any] | AgentOptions
    Initializer = Callable[["AgentContext"], Options | Awaitable[Options]]

T = TypeVar("T")

DEFAULT_NAME = "agent"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentContext:
    """What an initializer is told of the instance that it makes options for.

    `env` has what the project names (`ctx.env.PyBox`), or what `init` was given as `env`.
    """

    id: str
    env: Any
    payload: Any = None
    name: str = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """An agent as it was defined. `create_agent` makes it, `init` has it work.

    `name` keys its conversations in the store: another name is another agent.
    """

    name: str = DEFAULT_NAME
    description: str = ""
    given: Mapping[str, Any] = field(default_factory=dict, repr=False)
    initializer: Initializer | None = field(default=None, repr=False)

    async def options(self, ctx: AgentContext) -> AgentOptions:
        """Its options for one instance; an initializer is called each time."""
        if self.initializer is None:
            return AgentOptions(**self.given)
        made = self.initializer(ctx)
        if inspect.isawaitable(made):
            made = await made
        return _options(self.name, self.given, made)


def create_agent(initializer: Initializer | None = None, /, **options: Any) -> Agent:
    """An agent, by its options or by a function that gives them.

        reviewer = create_agent(model="anthropic/claude-sonnet-4-6", cwd="/workspace")

        @create_agent
        def coder(ctx):
            return dict(model="...", sandbox=get_sandbox(ctx.env.Sandbox, ctx.id))

    The function may be async, gets `ctx.id`, `ctx.env` and `ctx.payload`, and is called at
    each `init`; options given beside it hold where it gives none. `name` and `description`
    are what a store and other agents know it by. See `AgentOptions` for all others.
    """
    name = options.pop("name", None)
    description = options.pop("description", "")
    if initializer is not None and not callable(initializer):
        raise InvalidOption(
            f"create_agent() takes a function that gives options, not {initializer!r}.",
            hint="Pass options by keyword: create_agent(model=..., sandbox=...).",
            option="initializer",
            value=initializer,
        )
    if name is None:
        name = _named_as(initializer)
    refuse_unknown("create_agent()", options, [*OPTION_NAMES, "name", "description"])
    # Checked here, so that what is wrong shows where it is written.
    checked = AgentOptions(**options)
    return Agent(
        name=check_name("name", name),
        description=description or inspect.getdoc(initializer) or "",
        given={option: getattr(checked, option) for option in options},
        initializer=initializer,
    )


def check_name(option: str, name: object) -> str:
    """`name`, once it is one that an agent or an instance can have."""
    if isinstance(name, str) and _NAME.fullmatch(name):
        return name
    raise InvalidOption(
        f"{option} is letters, digits, '.', '_' and '-', at most 100 of them, not {name!r}.",
        hint=f"Pass for example {option}='reviewer'.",
        option=option,
        value=name,
    )


def _named_as(initializer: Initializer | None) -> str:
    name = getattr(initializer, "__name__", DEFAULT_NAME)
    return name if _NAME.fullmatch(name) else DEFAULT_NAME


def _options(name: str, defaults: Mapping[str, Any], made: object) -> AgentOptions:
    if isinstance(made, AgentOptions):
        return made
    if not isinstance(made, Mapping):
        raise InvalidOption(
            f"the initializer of {name} gave {made!r}, not options.",
            hint="Return dict(model=..., sandbox=...).",
            option="initializer",
            value=made,
        )
    refuse_unknown(f"the initializer of {name}", made, OPTION_NAMES)
    return AgentOptions(**{**defaults, **cast("Mapping[str, Any]", made)})
