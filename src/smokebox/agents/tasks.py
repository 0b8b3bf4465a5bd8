"""Tasks: work that an agent gives to another, or to a copy of itself, in a session of its own."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
from dataclasses import dataclass, field, replace
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from smokebox.agents.budget import Meter
from smokebox.agents.events import TaskEnd, TaskEvent, TaskStart
from smokebox.agents.log.records import TaskEnded, TaskStarted
from smokebox.agents.messages import Usage
from smokebox.agents.options import OMITTED
from smokebox.agents.sandboxes import open_sandbox, seen_from
from smokebox.agents.setup import make_setup
from smokebox.agents.tasktool import MAX_DEPTH, task_spec
from smokebox.agents.tools.tool import Tool, ToolResult, failure
from smokebox.errors import Aborted, LimitReached, NotFound, SmokeboxError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from smokebox.agents.agent import Agent
    from smokebox.agents.events import Event, Outcome
    from smokebox.agents.reply import Reply
    from smokebox.agents.session import Session
    from smokebox.agents.setup import Setup
    from smokebox.agents.tools.toolcontext import ToolContext
    from smokebox.sandbox.api import SandboxApi

PREFIX = "task:"
# The one piece of work that a child session has.
_KEY = "task"


@dataclass(slots=True, kw_only=True)
class Tasks:
    """The tasks of one piece of work. `known` are child sessions of before a crash, by call."""

    session: Session
    work_id: str
    emit: Callable[[Event], None]
    meter: Meter
    known: dict[str, str] = field(default_factory=dict)

    async def do(
        self,
        prompt: str,
        *,
        agent: str | None = None,
        cwd: str | None = None,
        result: Any = None,
        call_id: str | None = None,
        timeout: float | None = None,
    ) -> Reply[Any]:
        """Have a child session answer `prompt`, or go on where one was killed."""
        session = self.session
        depth = session.depth + 1
        if depth > MAX_DEPTH:
            raise LimitReached(
                f"this task would be {depth} deep, and {MAX_DEPTH} is the most.",
                hint="Do the work here instead of giving it away once more.",
                limit="depth",
            )
        named = None if agent is None else find_subagent(session.setup.subagents or {}, agent)
        name = self.known.get(call_id or "") or f"{PREFIX}{session.name}:{token_hex(4)}"
        await session.journal.append(TaskStarted(self.work_id, name, call_id, agent))
        self.emit(TaskStart(name, agent, prompt))
        outcome: Outcome = "failed"
        meter = Meter(None, self.meter)
        try:
            async with child_session(session, name, named, cwd, meter) as child:
                reply = await child.ask(
                    prompt,
                    result=result,
                    timeout=timeout,
                    key=_KEY,
                    listener=lambda event: self.emit(TaskEvent(name, event)),
                )
            if meter.usage == Usage():
                # Done before this process was there.
                meter.add(reply.usage)
            outcome = "completed"
            return reply
        except (Aborted, asyncio.CancelledError):
            outcome = "aborted"
            raise
        finally:
            session.journal.add(TaskEnded(name, outcome, meter.usage))
            self.emit(TaskEnd(name, outcome))

    def tool(self) -> Tool:
        """`task`, for the model."""

        async def task(
            ctx: ToolContext, prompt: str, agent: str | None = None, cwd: str | None = None
        ) -> ToolResult:
            try:
                reply = await self.do(prompt, agent=agent, cwd=cwd, call_id=ctx.call_id)
            except SmokeboxError as error:
                return failure(f"The task failed: {error}")
            stopped = f"\n\n[It was stopped: {reply.stopped}.]" if reply.stopped else ""
            return ToolResult(text=(reply.text or "(no answer)") + stopped)

        spec = task_spec(self.session.setup.subagents or {})
        return Tool(
            name=spec.name,
            description=spec.description,
            parameters=spec.parameters,
            function=task,
            context="ctx",
            # The child session is named in the record before it begins: a second run goes on
            # with it, or is the first.
            durable=True,
        )


@contextlib.asynccontextmanager
async def child_session(
    parent: Session, name: str, agent: Agent | None, cwd: str | None, meter: Meter
) -> AsyncIterator[Session]:
    """The session of a task, in the sandbox of its parent unless its agent has its own."""
    made = await _child_setup(parent, agent, cwd)
    try:
        child = await parent.harness.open(name, made.setup, parent=parent, meter=meter)
        try:
            yield child
        finally:
            parent.harness.forget(child)
    finally:
        if made.setup.opened is not parent.setup.opened:
            await made.setup.aclose()
        if made.owned is not None:
            await made.owned.aclose()


@dataclass(frozen=True, slots=True)
class _ChildSetup:
    setup: Setup
    owned: SandboxApi | None = None


async def _child_setup(parent: Session, agent: Agent | None, cwd: str | None) -> _ChildSetup:
    setup = parent.setup
    if agent is None:
        return _ChildSetup(setup if cwd is None else await setup.seen_from(cwd))
    ctx = parent.harness.ctx
    options = await agent.options(ctx)
    options = replace(
        options,
        model=options.model or setup.options.model,
        approval=options.approval or setup.options.approval,
    )
    at = cwd or options.cwd
    if options.sandbox is not OMITTED:
        made_for_it = agent.initializer is not None
        opened = await open_sandbox(options.sandbox, at, ctx, made_for_it=made_for_it)
        sandbox = None if opened is None else opened.sandbox
        workspace = None if opened is None else opened.workspace
        owned = sandbox if opened is not None and opened.owned else None
        own = await make_setup(agent, options, sandbox=sandbox, workspace=workspace)
        return _ChildSetup(own, owned)
    shared = setup.workspace if setup.workspace is None else await seen_from(setup.workspace, at)
    return _ChildSetup(await make_setup(agent, options, sandbox=setup.sandbox, workspace=shared))


def find_subagent(agents: Mapping[str, Agent], name: str) -> Agent:
    """The agent of that name. Raises `NotFound` with the nearest."""
    if name in agents:
        return agents[name]
    near = difflib.get_close_matches(name, agents, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(agents) or 'none'}."
    raise NotFound(f"there is no subagent {name!r}.", hint=hint, kind="agent", name=name)
