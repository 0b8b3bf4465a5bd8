"""The sandbox that an agent works in: which one it is, and who ends it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smokebox.agents.options import OMITTED, is_sandbox
from smokebox.agents.view import View
from smokebox.errors import InvalidOption, PathNotFound, Unsupported
from smokebox.sandbox.paths import resolve

if TYPE_CHECKING:
    from smokebox.agents.agent import AgentContext
    from smokebox.sandbox.api import SandboxApi


@dataclass(frozen=True, slots=True)
class Opened:
    """A sandbox, the same seen from the agent's directory, and whether it is ours to end."""

    sandbox: SandboxApi
    workspace: SandboxApi
    owned: bool


async def open_sandbox(
    choice: Any, cwd: str | None, ctx: AgentContext, *, made_for_it: bool
) -> Opened | None:
    """The sandbox that an agent's options name; `made_for_it` where an initializer made it."""
    if choice is None:
        return None
    if choice is OMITTED:
        from smokebox.sandbox.virtual import virtual

        made: SandboxApi = virtual() if cwd is None else virtual(cwd=resolve(cwd, "/workspace"))
        return Opened(made, made, owned=True)
    if is_sandbox(choice):
        return Opened(choice, await seen_from(choice, cwd), owned=made_for_it)
    made = await _call(choice, ctx)
    return Opened(made, await seen_from(made, cwd), owned=True)


async def seen_from(sandbox: SandboxApi, cwd: str | None) -> SandboxApi:
    """`sandbox` with `cwd` as its directory, which is made unless it would be the host's."""
    if cwd is None or sandbox.resolve_path(cwd) == sandbox.cwd:
        return sandbox
    at = sandbox.resolve_path(cwd)
    if not await sandbox.exists(at):
        if (await sandbox.capabilities()).isolation == "none":
            raise PathNotFound(at, f"cwd: there is no directory {at}.", hint="Make it first.")
        await sandbox.mkdir(at, recursive=True)
    return View(sandbox, at)


def no_workspace(operation: str) -> Unsupported:
    """The error of an agent that was given no sandbox."""
    return Unsupported(
        f"{operation}: the agent has sandbox=None, so there is no workspace.",
        hint="Leave sandbox= out for a virtual one, or pass one.",
        operation=operation,
        sandbox=None,
    )


async def _call(factory: Any, ctx: AgentContext) -> SandboxApi:
    made = factory(ctx) if _takes_context(factory) else factory()
    if inspect.isawaitable(made):
        made = await made
    if not is_sandbox(made):
        raise InvalidOption(
            f"sandbox: {factory!r} gave {made!r}, which is not a sandbox.",
            hint="Return virtual(), local(), bucket(...) or get_sandbox(...).",
            option="sandbox",
            value=made,
        )
    sandbox: SandboxApi = made
    return sandbox


def _takes_context(factory: Any) -> bool:
    try:
        wanted = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(one.kind in positional and one.default is one.empty for one in wanted)
