"""The `ctx` of a workflow or a handler."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Unpack, overload

import msgspec

from smokebox.agents.agent import create_agent
from smokebox.agents.harness import PendingHarness, init
from smokebox.agents.session_context import DEFAULT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from smokebox.agents.agent import Agent
    from smokebox.agents.harness import Harness
    from smokebox.agents.log.store import SessionStore
    from smokebox.agents.options import AgentOptions, ToolChoice
    from smokebox.agents.skills import Skill
    from smokebox.app.inbox import AppInbox, StoredSubmission


class WorkflowLog:
    """Log lines of a run, sent in order to its followers: `ctx.log.info("found", count=3)`."""

    def __init__(self, inbox: AppInbox, id: str) -> None:
        self._inbox = inbox
        self._id = id
        self._writing: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    def debug(self, message: str, **fields: object) -> None:
        """Log a detail for debugging."""
        self._add("debug", message, fields)

    def info(self, message: str, **fields: object) -> None:
        """Log an event."""
        self._add("info", message, fields)

    def warning(self, message: str, **fields: object) -> None:
        """Log a warning."""
        self._add("warning", message, fields)

    def error(self, message: str, **fields: object) -> None:
        """Log an error."""
        self._add("error", message, fields)

    def event(self, kind: str, /, **fields: object) -> None:
        """Log an event of another kind."""
        data = msgspec.json.encode({"event": kind, **fields}, enc_hook=repr)
        # Tasks start in the order they are created, so lines are written in order.
        task = asyncio.create_task(self._inbox.add_event(self._id, data))
        self._writing.add(task)
        task.add_done_callback(self._written)

    async def flush(self) -> None:
        """Wait until all lines are written, and raise the error of one that was not."""
        while self._writing:
            await asyncio.wait(self._writing)
        if self._failure is not None:
            raise self._failure

    def _add(self, level: str, message: str, fields: dict[str, object]) -> None:
        line: dict[str, object] = {"level": level, "message": str(message)}
        self.event("log", **line, **({"fields": fields} if fields else {}))

    def _written(self, task: asyncio.Task[None]) -> None:
        self._writing.discard(task)
        if not task.cancelled():
            self._failure = self._failure or task.exception()


class WorkflowContext:
    """`ctx` of a workflow or a handler.

    Attributes:
        id: Id of the run; for a handler, the id in the URL.
        name: Name of the workflow or handler.
        env: Secrets and bindings of the project.
        payload: Body of the request.
        request: `method`, `path`, `query` and `headers` of the HTTP request; None without one.
        attempt: Number of the attempt, from 1.
        log: Log of the run.
    """

    def __init__(
        self,
        submission: StoredSubmission,
        *,
        inbox: AppInbox,
        store: SessionStore,
        env: Any,
        name: str,
    ) -> None:
        self.id = submission.target.id
        self.name = name
        self.env = env
        self.payload = submission.body
        self.request = submission.request
        self.attempt = submission.attempts + 1
        self.log = WorkflowLog(inbox, submission.id)
        self._store = store
        self._opened = AsyncExitStack()

    @overload
    def init(
        self,
        agent: Agent,
        /,
        *,
        name: str = DEFAULT,
        tools: Sequence[ToolChoice] = (),
        skills: Sequence[Skill] = (),
        subagents: Sequence[Agent] | None = (),
    ) -> PendingHarness: ...

    @overload
    def init(
        self, /, *, name: str = DEFAULT, **options: Unpack[AgentOptions]
    ) -> PendingHarness: ...

    def init(
        self, agent: Agent | None = None, /, *, name: str = DEFAULT, **options: Any
    ) -> PendingHarness:
        """Start an agent, or define one by its options and start it.

        Its conversations are stored by the app under the id of this run, and it is closed
        when the run ends. Arguments are those of `smokebox.init`.
        """
        if agent is None:
            agent, options = create_agent(name=self.name, **options), {}
        opening = init(
            agent,
            id=self.id,
            env=self.env,
            payload=self.payload,
            name=name,
            store=self._store,
            **options,
        )

        async def open_harness() -> Harness:
            harness = await opening
            self._opened.push_async_callback(harness.aclose)
            self.log.event("agent", agent=harness.agent.name, id=harness.id)
            return harness

        return PendingHarness(open_harness)

    async def aclose(self) -> None:
        """Close the agents that were started, and write pending log lines."""
        try:
            await self._opened.aclose()
        finally:
            await self.log.flush()
