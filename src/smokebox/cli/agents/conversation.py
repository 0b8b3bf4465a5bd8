"""A conversation with an agent in the foreground: options, prompts, approvals, Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import signal
import sys
from typing import TYPE_CHECKING, Any

import typer

from smokebox.agents.agent import AgentContext, override, resolve_settings
from smokebox.agents.events import ApprovalNeeded
from smokebox.agents.harness import init
from smokebox.agents.log.persistence import open_store
from smokebox.cli.output import notice
from smokebox.errors import Aborted, NotFound
from smokebox.foundation.signals import handle_signals

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from smokebox.agents.agent import Agent
    from smokebox.agents.harness import Harness
    from smokebox.agents.operation import Operation
    from smokebox.agents.session import Session
    from smokebox.cli.agents.views import EventView
    from smokebox.sandbox.api import SandboxApi

ABORTED = 130
_PROMPT = "> "


@contextlib.asynccontextmanager
async def open_harness(
    agent: Agent, *, sandbox: str | None, model: str | None, id: str | None, resume: bool
) -> AsyncIterator[Harness]:
    """Open a harness for an agent with the options of the command line."""
    options: dict[str, Any] = {}
    if sandbox is not None:
        options["sandbox"] = _open_sandbox(sandbox)
    if model is not None:
        options["model"] = model
    if resume and id is None:
        id = await _last_id(agent)
    chosen = override(agent, **options) if options else agent
    async with init(chosen, id=id) as harness:
        if id is None:
            notice(f"Conversation {harness.id} (resume it with --id {harness.id} or --continue)")
        yield harness


def _open_sandbox(name: str) -> SandboxApi:
    """Open `virtual`, `local` (this directory, without isolation), or a Linux sandbox by id."""
    if name == "virtual":
        from smokebox.sandbox.virtual import virtual

        return virtual()
    if name == "local":
        from smokebox.sandbox.local import local

        return local()
    from smokebox.client.client import get_sandbox

    return get_sandbox(name)


async def _last_id(agent: Agent) -> str:
    """Return the id of the agent's last conversation. Raises `NotFound`."""
    options = await resolve_settings(agent, AgentContext(id="none", env=None))
    store = open_store(options.persist)
    try:
        sessions = await store.sessions(agent=agent.name, limit=1)
    finally:
        await store.aclose()
    if not sessions:
        raise NotFound(
            f"the agent {agent.name!r} has no conversation to continue.",
            hint="Omit --continue to start one.",
            kind="session",
        )
    return sessions[0].key.id


async def read_line() -> str | None:
    """Read a line; None at the end of the input, "" when Ctrl-C discards what was typed."""
    try:
        return await _read_line()
    except EOFError:
        return None
    except KeyboardInterrupt:
        return ""


async def _read_line() -> str:
    if not sys.stdin.isatty():
        line: str = await asyncio.to_thread(sys.stdin.readline)
        if not line:
            raise EOFError
        return line
    try:
        from prompt_toolkit import PromptSession
    except ImportError:
        return str(await asyncio.to_thread(input, _PROMPT))
    return str(await PromptSession[str]().prompt_async(_PROMPT))


async def watch(session: Session, operation: Operation[Any], view: EventView) -> int:
    """Show an operation until it ends, and return the exit code for it."""
    with abort_on_signals(lambda number: operation.abort(f"received {number.name}")):
        async for event in operation:
            view.show(event)
            if isinstance(event, ApprovalNeeded):
                await _ask_approval(session, event)
        try:
            await operation
        except Aborted as error:
            typer.secho(f"smokebox: {error.message}", err=True, fg="yellow")
            return ABORTED
    return 0


async def resume_unfinished(session: Session, view: EventView) -> None:
    """Finish an operation that a killed process left running."""
    if (unfinished := session.running) is not None:
        notice("Resuming an unfinished operation ...")
        await watch(session, unfinished, view)


@contextlib.contextmanager
def abort_on_signals(abort: Callable[[signal.Signals], object]) -> Iterator[None]:
    """Call `abort` at the first of each signal; a second Ctrl-C ends this program.

    If it returns a coroutine, it runs as a task.
    """
    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[object]] = []

    def stop(number: signal.Signals) -> None:
        loop.remove_signal_handler(number)
        if inspect.iscoroutine(work := abort(number)):
            tasks.append(loop.create_task(work))

    with handle_signals((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), stop):
        yield


async def _ask_approval(session: Session, event: ApprovalNeeded) -> None:
    """Ask for approval in the terminal; without one the call is denied."""
    allowed = False
    if sys.stdin.isatty():
        question = f"Allow {event.name}?"
        with contextlib.suppress(typer.Abort):
            allowed = await asyncio.to_thread(typer.confirm, question, err=True)
    if allowed:
        await session.approve(event.call_id)
    else:
        await session.deny(event.call_id, "the user did not allow it")
