"""Tasks: work that an agent hands to a subagent, or to a copy of itself, in a child session."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from smokebox.agents.agent import resolve_settings
from smokebox.agents.events import TaskEnd, TaskEvent, TaskStart
from smokebox.agents.limits import UsageMeter
from smokebox.agents.log.records import TaskEnded, TaskStarted, WorkAccepted
from smokebox.agents.messages import Text, Usage, UserMessage
from smokebox.agents.options import OMITTED
from smokebox.agents.results import Reply, ResultSpec
from smokebox.agents.setup import MAX_DEPTH, make_setup
from smokebox.agents.tools.tool import Tool, ToolResult, failure
from smokebox.agents.work.item import WorkItem, WorkResult
from smokebox.agents.workspace import OpenSandbox, open_sandbox, with_cwd
from smokebox.errors import Aborted, LimitReached, NotFound, SmokeboxError
from smokebox.foundation.ids import new_id
from smokebox.options import nearest_hint

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from smokebox.agents.agent import Agent
    from smokebox.agents.events import Outcome
    from smokebox.agents.log.conversation import WorkState
    from smokebox.agents.log.records import WorkEnded, WorkKind
    from smokebox.agents.model import ToolSpec
    from smokebox.agents.session_context import SessionContext
    from smokebox.agents.setup import Setup
    from smokebox.agents.tools.tool import ToolContext
    from smokebox.agents.work.item import WorkContext


PREFIX = "task:"
"""Prefix of the names of child sessions."""


@dataclass(slots=True, kw_only=True)
class TaskRunner:
    """Runs the tasks of one work item. `known` has child sessions from before a crash, by call."""

    work: WorkContext
    known: dict[str, str] = field(default_factory=dict)

    async def run(
        self,
        prompt: str,
        *,
        agent: str | None = None,
        cwd: str | None = None,
        result: Any = None,
        call_id: str | None = None,
        timeout: float | None = None,
    ) -> Reply[Any]:
        """Send `prompt` to a child session, or resume one, and return its reply."""
        session, work = self.work.session, self.work
        depth = session.depth + 1
        if depth > MAX_DEPTH:
            raise LimitReached(
                f"tasks can be nested {MAX_DEPTH} deep, not {depth}.",
                hint="Do the work here instead of starting another task.",
                limit="depth",
            )
        subagent = None if agent is None else find_subagent(session.setup.subagents, agent)
        name = self.known.get(call_id or "") or f"{PREFIX}{session.name}:{new_id()}"
        await session.event_log.append(TaskStarted(work.work_id, name, call_id, agent))
        work.emit(TaskStart(name, agent, prompt))
        outcome: Outcome = "failed"
        meter = UsageMeter(None, work.meter)
        try:
            async with child_session(session, name, subagent, cwd, meter) as child:
                reply = await child.run_task(
                    prompt,
                    result=result,
                    timeout=timeout,
                    listener=lambda event: work.emit(TaskEvent(name, event)),
                )
            if meter.usage == Usage():
                # Another process had already done the task.
                meter.add(reply.usage)
            outcome = "completed"
            return reply
        except (Aborted, asyncio.CancelledError):
            outcome = "aborted"
            raise
        finally:
            session.event_log.add(TaskEnded(name, outcome, meter.usage))
            work.emit(TaskEnd(name, outcome))

    def tool(self, spec: ToolSpec) -> Tool:
        """Return the `task` tool."""

        async def task(
            ctx: ToolContext, prompt: str, agent: str | None = None, cwd: str | None = None
        ) -> ToolResult:
            try:
                reply = await self.run(prompt, agent=agent, cwd=cwd, call_id=ctx.call_id)
            except SmokeboxError as error:
                return failure(f"The task failed: {error}")
            stopped = f"\n\n[It was stopped: {reply.stopped}.]" if reply.stopped else ""
            return ToolResult(text=(reply.text or "(no answer)") + stopped)

        return Tool(
            name=spec.name,
            description=spec.description,
            parameters=spec.parameters,
            function=task,
            context="ctx",
            # The log names the child session before it starts, so that a second run resumes it.
            durable=True,
        )


@contextlib.asynccontextmanager
async def child_session(
    parent: SessionContext, name: str, agent: Agent | None, cwd: str | None, meter: UsageMeter
) -> AsyncIterator[SessionContext]:
    """Open the session of a task, in the sandbox of its parent unless its agent has its own."""
    setup = await _child_setup(parent, agent, cwd)
    try:
        child = await parent.registry.open(name, setup, parent=parent, meter=meter)
        try:
            yield child
        finally:
            parent.registry.release(child)
    finally:
        if setup is not parent.setup:
            await setup.aclose()


async def _child_setup(parent: SessionContext, agent: Agent | None, cwd: str | None) -> Setup:
    setup = parent.setup
    if agent is None:
        return setup if cwd is None else await setup.with_cwd(cwd)
    ctx = parent.registry.ctx
    options = await resolve_settings(agent, ctx)
    options = replace(
        options,
        model=options.model or setup.options.model,
        approval=options.approval or setup.options.approval,
    )
    cwd = cwd or options.cwd
    opened = None
    if options.sandbox is not OMITTED:
        opened = await open_sandbox(options, cwd, ctx)
    elif setup.sandbox is not None and setup.workspace is not None:
        opened = OpenSandbox(setup.sandbox, await with_cwd(setup.workspace, cwd), owned=False)
    return await make_setup(agent, options, opened)


def find_subagent(agents: Mapping[str, Agent], name: str) -> Agent:
    """Return an agent by name. Raises `NotFound`, whose hint has the nearest name."""
    if name in agents:
        return agents[name]
    hint = nearest_hint(name, agents)
    raise NotFound(f"there is no subagent {name!r}.", hint=hint, kind="agent", name=name)


@dataclass(slots=True, kw_only=True)
class TaskItem(WorkItem):
    """Runs a task in a child session; this conversation does not see it."""

    kind: WorkKind = "task"
    prompt: str
    agent: str | None
    cwd: str | None
    result: ResultSpec[Any] | None

    @classmethod
    def resumed(cls, session: SessionContext, work: WorkState) -> TaskItem:
        """Return a task that a killed process left unfinished."""
        options, message = work.options, work.message
        parts = () if message is None else message.parts
        schema = options.get("result")
        return cls(
            session=session,
            work_id=work.id,
            prompt="".join(part.text for part in parts if isinstance(part, Text)),
            agent=options.get("agent"),
            cwd=options.get("cwd"),
            result=None if schema is None else ResultSpec.of(schema),
            timeout=options.get("timeout"),
            meter=session.new_meter(),
            key=work.key,
        )

    async def accept(self) -> WorkAccepted:
        """Return the record, with everything that resuming it takes."""
        options: dict[str, Any] = {"agent": self.agent, "cwd": self.cwd, "timeout": self.timeout}
        if self.result is not None:
            options["result"] = self.result.schema
        stored = {name: value for name, value in options.items() if value is not None}
        return WorkAccepted(
            self.work_id, self.kind, UserMessage((Text(self.prompt),)), stored, self.key
        )

    async def run(self, ctx: WorkContext) -> WorkResult:
        """Run the child session, or resume the one that a killed process started."""
        tasks = ctx.event_log.conversation.tasks.values()
        started = [task.session for task in tasks if task.work_id == self.work_id]
        runner = TaskRunner(work=ctx, known={"": started[0]} if started else {})
        reply = await runner.run(
            self.prompt, agent=self.agent, cwd=self.cwd, result=self.result, timeout=self.timeout
        )
        dumped = None if self.result is None else self.result.dump(reply.data)
        return WorkResult(value=reply, text=reply.text, result=dumped)

    def restore(self, end: WorkEnded) -> WorkResult:
        """Return the reply that the log has."""
        data = None if self.result is None else self.result.restore(end.result)
        return WorkResult(value=Reply(text=end.text, data=data, usage=end.usage), text=end.text)
