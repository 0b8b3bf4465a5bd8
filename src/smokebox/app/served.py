"""What an app serves: agents, handlers and workflows, as their files define them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from smokebox.agents.agent import Agent
from smokebox.agents.loading import NAME, pick_agent
from smokebox.app.cron import Schedule, parse_schedule
from smokebox.app.located import place_of
from smokebox.app.signature import Signature, parse_signature
from smokebox.errors import InvalidOption
from smokebox.options import refuse_unknown

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

    from smokebox.app.context import Context

    Handler: TypeAlias = Callable[[Context], Awaitable[Any]]

HANDLER, RUN = "handler", "run"
TIMEOUT = 3600.0
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*(?:[-_][A-Za-z0-9]+)*")
_TRIGGERS = ("webhook",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trigger:
    """Who may start it from outside: `open` is anybody whom the app lets in, and with a
    `signature` whoever can sign."""

    open: bool
    signature: Signature | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAgent:
    """An agent by the name of its file. `defined` is the object in that file."""

    name: str
    file: Path
    agent: Agent
    defined: Agent
    trigger: Trigger


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedFunction:
    """A workflow, or a handler among the agents. `attempts` is how often it may be begun, and
    `timeout` how many seconds it may take."""

    name: str
    file: Path
    function: Handler
    trigger: Trigger
    schedule: Schedule | None = None
    attempts: int = 1
    timeout: float = TIMEOUT


def served_agent(module: ModuleType, file: Path) -> ServedAgent | ServedFunction:
    """What a file in `agents/` defines: an agent, or a handler with triggers."""
    name = check_served_name(file)
    if hasattr(module, "triggers") and (function := _handler(module, file)) is not None:
        trigger = _trigger(module, file, default=False)
        return ServedFunction(
            name=name,
            file=file,
            function=function,
            trigger=trigger,
            attempts=_attempts(module, file),
            timeout=_timeout(module, file),
        )
    defined = pick_agent(module, file)
    trigger = _trigger(module, file, default=True)
    agent = replace(defined, name=name)
    return ServedAgent(name=name, file=file, agent=agent, defined=defined, trigger=trigger)


def served_workflow(module: ModuleType, file: Path) -> ServedFunction:
    """What a file in `workflows/` defines: `async def run(ctx)`."""
    name = check_served_name(file)
    function = getattr(module, RUN, None)
    if not inspect.iscoroutinefunction(function):
        raise InvalidOption(
            f"{file} has no `async def run(ctx)`.",
            hint="Write one: what it returns is the result of the workflow.",
            option=str(file),
        )
    _check_takes_context(function, file)
    return ServedFunction(
        name=name,
        file=file,
        function=function,
        trigger=_trigger(module, file, default=True),
        schedule=parse_schedule(module, file),
        attempts=_attempts(module, file),
        timeout=_timeout(module, file),
    )


def check_served_name(file: Path) -> str:
    """The name of a file, once it is one that a URL can have."""
    if _NAME.fullmatch(file.stem) and len(file.stem) <= 64:
        return file.stem
    raise InvalidOption(
        f"{file}: what is served has letters and digits in its name, with single - or _ between.",
        hint="Rename the file, or begin its name with _ to have it left alone.",
        option=str(file),
    )


def _handler(module: ModuleType, file: Path) -> Handler | None:
    """The function named `handler`, or the only coroutine function of a file whose own agents
    are not for serving: none is named `agent`."""
    function: Handler | None = getattr(module, HANDLER, None)
    if function is not None:
        if not inspect.iscoroutinefunction(function):
            raise InvalidOption(
                f"{place_of(file, HANDLER)}: {HANDLER} is not a coroutine function.",
                hint=f"Write `async def {HANDLER}(ctx)`.",
                option=HANDLER,
            )
        _check_takes_context(function, file)
        return function
    if isinstance(getattr(module, NAME, None), Agent):
        return None
    own = [
        one
        for name, one in vars(module).items()
        if inspect.iscoroutinefunction(one)
        and one.__module__ == module.__name__
        and not name.startswith("_")
    ]
    return own[0] if len(own) == 1 else None


def _trigger(module: ModuleType, file: Path, *, default: bool) -> Trigger:
    given = getattr(module, "triggers", None)
    if given is None:
        return Trigger(open=default)
    if not isinstance(given, Mapping):
        raise InvalidOption(
            f"{place_of(file, 'triggers')}: triggers is a dict, not {given!r:.80}.",
            hint='Write triggers = {"webhook": True}.',
            option="triggers",
            value=given,
        )
    refuse_unknown(f"{place_of(file, 'triggers')}: triggers", given, _TRIGGERS)
    webhook = given.get("webhook", default)
    if isinstance(webhook, bool):
        return Trigger(open=webhook)
    return Trigger(open=True, signature=parse_signature(webhook, place_of(file, "triggers")))


def _attempts(module: ModuleType, file: Path) -> int:
    attempts = getattr(module, "attempts", 1)
    if isinstance(attempts, int) and not isinstance(attempts, bool) and attempts >= 1:
        return attempts
    raise InvalidOption(
        f"{place_of(file, 'attempts')}: attempts is a whole number above 0, not {attempts!r:.80}.",
        hint="It says how often a run may be begun that a crash has interrupted.",
        option="attempts",
        value=attempts,
    )


def _timeout(module: ModuleType, file: Path) -> float:
    timeout = getattr(module, "timeout", TIMEOUT)
    if isinstance(timeout, (int, float)) and not isinstance(timeout, bool) and timeout > 0:
        return float(timeout)
    raise InvalidOption(
        f"{place_of(file, 'timeout')}: timeout is seconds, not {timeout!r:.80}.",
        hint=f"Leave it out for {TIMEOUT:g}.",
        option="timeout",
        value=timeout,
    )


def _check_takes_context(function: Handler, file: Path) -> None:
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        raise InvalidOption(
            f"{place_of(file, function.__name__)}: {function.__name__} takes one argument, "
            "the context.",
            hint=f"Write `async def {function.__name__}(ctx)`.",
            option=str(file),
        ) from None
