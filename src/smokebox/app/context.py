"""What a workflow or a handler is given: who asked for what, and how to have agents work."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import msgspec

from smokebox.agents.agent import create_agent
from smokebox.agents.harness import DEFAULT
from smokebox.agents.initializing import Opening, init
from smokebox.agents.options import OMITTED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from smokebox.agents.agent import Agent
    from smokebox.agents.harness import Harness
    from smokebox.agents.log.store import Store
    from smokebox.app.inbox import Inbox
    from smokebox.app.submission import Submission


class Log:
    """Lines that whoever watches a run gets, in order: `ctx.log.info("found", count=3)`."""

    def __init__(self, inbox: Inbox, id: str) -> None:
        self._inbox = inbox
        self._id = id
        self._writing: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    def debug(self, message: str, **fields: object) -> None:
        """Something that matters to who mends it."""
        self._add("debug", message, fields)

    def info(self, message: str, **fields: object) -> None:
        """Something that happened."""
        self._add("info", message, fields)

    def warning(self, message: str, **fields: object) -> None:
        """Something that should not go on like this."""
        self._add("warning", message, fields)

    def error(self, message: str, **fields: object) -> None:
        """Something that went wrong."""
        self._add("error", message, fields)

    def note(self, event: str, **fields: object) -> None:
        """Another kind of event."""
        data = msgspec.json.encode({"event": event, **fields}, enc_hook=repr)
        # They begin in this order, so they are written in it.
        task = asyncio.create_task(self._inbox.note(self._id, data))
        self._writing.add(task)
        task.add_done_callback(self._written)

    async def flush(self) -> None:
        """Return when all lines are written. Raises what kept one from it."""
        while self._writing:
            await asyncio.wait(self._writing)
        if self._failure is not None:
            raise self._failure

    def _add(self, level: str, message: str, fields: dict[str, object]) -> None:
        told: dict[str, object] = {"level": level, "message": str(message)}
        self.note("log", **told, **({"fields": fields} if fields else {}))

    def _written(self, task: asyncio.Task[None]) -> None:
        self._writing.discard(task)
        if not task.cancelled():
            self._failure = self._failure or task.exception()


class Context:
    """`ctx` of a workflow or a handler.

    `id` is the run's, or for a handler the one in the URL. `env` has the project's secrets and
    bindings, `payload` what was sent, and `request` the `method`, `path`, `query` and `headers`
    that it came with, None where nobody asked by HTTP. `attempt` counts from 1.
    """

    def __init__(
        self, submission: Submission, *, inbox: Inbox, store: Store, env: Any, name: str
    ) -> None:
        self.id = submission.target.id
        self.name = name
        self.env = env
        self.payload = submission.body
        self.request = submission.request
        self.attempt = submission.attempts + 1
        self.log = Log(inbox, submission.id)
        self._store = store
        self._opened = AsyncExitStack()

    def init(
        self,
        agent: Agent | None = None,
        /,
        *,
        name: str = DEFAULT,
        tools: Sequence[Any] = (),
        skills: Sequence[Any] = (),
        subagents: Any = OMITTED,
        **options: Any,
    ) -> Opening:
        """Have an agent work: one that was created, or one of these options.

        Its conversations are kept under this id, with those of the app, and it ends with the
        run.
        """
        if agent is None:
            agent = create_agent(**{"name": self.name, **options})
            options = {}
        opening = init(
            agent,
            id=self.id,
            env=self.env,
            payload=self.payload,
            name=name,
            tools=tools,
            skills=skills,
            subagents=subagents,
            store=self._store,
            **options,
        )

        async def make() -> Harness:
            harness = await opening
            self._opened.push_async_callback(harness.aclose)
            self.log.note("agent", agent=harness.agent.name, id=harness.id)
            return harness

        return Opening(make)

    async def aclose(self) -> None:
        """End what was opened, and write what was logged."""
        try:
            await self._opened.aclose()
        finally:
            await self.log.flush()
