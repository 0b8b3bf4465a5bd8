"""Agents, handlers and workflows of an app, as their files define them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from smokebox.agents.agent import Agent
from smokebox.agents.agent_file import NAME, pick_agent
from smokebox.app.schedule import Schedule, parse_schedule
from smokebox.app.source_file import source_location
from smokebox.app.webhook import Signature, parse_signature
from smokebox.errors import InvalidOption
from smokebox.options import refuse_unknown

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

    from smokebox.app.context import WorkflowContext

    Handler: TypeAlias = Callable[[WorkflowContext], Awaitable[Any]]

HANDLER, RUN = "handler", "run"
TIMEOUT = 3600.0
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*(?:[-_][A-Za-z0-9]+)*")
_TRIGGERS = ("webhook",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trigger:
    """Clients that may start it by HTTP.

    If `open`, any authorized client; with a `signature`, any client that signs its request.
    """

    open: bool
    signature: Signature | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAgent:
    """An agent named after its file. `defined` is the object in the file."""

    name: str
    file: Path
    agent: Agent
    defined: Agent
    trigger: Trigger


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedFunction:
    """A workflow, or a handler among the agents.

    `attempts` is how often it may be started, `timeout` the seconds that it may take.
    """

    name: str
    file: Path
    function: Handler
    trigger: Trigger
    schedule: Schedule | None = None
    attempts: int = 1
    timeout: float = TIMEOUT


def define_agent(module: ModuleType, file: Path) -> ServedAgent | ServedFunction:
    """Return the agent of a file in `agents/`, or its handler if it has triggers."""
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


def define_workflow(module: ModuleType, file: Path) -> ServedFunction:
    """Return the workflow that a file in `workflows/` defines: `async def run(ctx)`."""
    name = check_served_name(file)
    function = getattr(module, RUN, None)
    if not inspect.iscoroutinefunction(function):
        raise InvalidOption(
            f"{file} has no `async def run(ctx)`.",
            hint="Define it; its return value is the result of the workflow.",
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
    """Return the name of a file if it is valid in a URL."""
    if _NAME.fullmatch(file.stem) and len(file.stem) <= 64:
        return file.stem
    raise InvalidOption(
        f"{file}: the file name must be letters and digits, separated by single - or _.",
        hint="Rename the file, or start its name with _ to exclude it.",
        option=str(file),
    )


def _handler(module: ModuleType, file: Path) -> Handler | None:
    """Return the function named `handler`, or else the only coroutine function of the file.

    None if the file has several, or an agent named `agent`.
    """
    function: Handler | None = getattr(module, HANDLER, None)
    if function is not None:
        if not inspect.iscoroutinefunction(function):
            raise InvalidOption(
                f"{source_location(file, HANDLER)}: {HANDLER} is not an async function.",
                hint=f"Write `async def {HANDLER}(ctx)`.",
                option=HANDLER,
            )
        _check_takes_context(function, file)
        return function
    if isinstance(getattr(module, NAME, None), Agent):
        return None
    functions = [
        one
        for name, one in vars(module).items()
        if inspect.iscoroutinefunction(one)
        and one.__module__ == module.__name__
        and not name.startswith("_")
    ]
    return functions[0] if len(functions) == 1 else None


def _trigger(module: ModuleType, file: Path, *, default: bool) -> Trigger:
    triggers = getattr(module, "triggers", None)
    if triggers is None:
        return Trigger(open=default)
    if not isinstance(triggers, Mapping):
        raise InvalidOption(
            f"{source_location(file, 'triggers')}: triggers must be a dict, not {triggers!r:.80}.",
            hint='Write triggers = {"webhook": True}.',
            option="triggers",
            value=triggers,
        )
    refuse_unknown(f"{source_location(file, 'triggers')}: triggers", triggers, _TRIGGERS)
    webhook = triggers.get("webhook", default)
    if isinstance(webhook, bool):
        return Trigger(open=webhook)
    return Trigger(open=True, signature=parse_signature(webhook, source_location(file, "triggers")))


def _attempts(module: ModuleType, file: Path) -> int:
    attempts = getattr(module, "attempts", 1)
    if isinstance(attempts, int) and not isinstance(attempts, bool) and attempts >= 1:
        return attempts
    raise InvalidOption(
        f"{source_location(file, 'attempts')}: attempts must be a positive integer, "
        f"not {attempts!r:.80}.",
        hint="It limits how often a run that a crash interrupted may be started.",
        option="attempts",
        value=attempts,
    )


def _timeout(module: ModuleType, file: Path) -> float:
    timeout = getattr(module, "timeout", TIMEOUT)
    if isinstance(timeout, (int, float)) and not isinstance(timeout, bool) and timeout > 0:
        return float(timeout)
    raise InvalidOption(
        f"{source_location(file, 'timeout')}: timeout must be a positive number of "
        f"seconds, not {timeout!r:.80}.",
        hint=f"The default is {TIMEOUT:g}.",
        option="timeout",
        value=timeout,
    )


def _check_takes_context(function: Handler, file: Path) -> None:
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        raise InvalidOption(
            f"{source_location(file, function.__name__)}: {function.__name__} must take "
            "one argument, the context.",
            hint=f"Write `async def {function.__name__}(ctx)`.",
            option=str(file),
        ) from None
