"""An app: a project that is served, with its inbox, its conversations and its runner."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from smokebox.agents.log.opening import open_store
from smokebox.app.conversations import Conversations
from smokebox.app.inbox import Inbox
from smokebox.app.project import forget_modules, load_project
from smokebox.app.runner import Runner
from smokebox.app.scheduler import Scheduler
from smokebox.app.settings import app_keys
from smokebox.app.streams import Streams
from smokebox.app.submission import Target, check_conversation_id
from smokebox.app.warmth import warm_up
from smokebox.client.bindings import Environment
from smokebox.egress.environment import Secrets
from smokebox.errors import InvalidOption, Unsupported

if TYPE_CHECKING:
    from pathlib import Path

    from smokebox.agents.agent import Agent
    from smokebox.agents.log.store import Store
    from smokebox.app.project import Project
    from smokebox.app.submission import Submission

# The one that was started last in this process, which `dispatch` gives work to.
_current: App | None = None


class App:
    """What serves a folder. Nothing is opened before `start`."""

    inbox: Inbox
    store: Store
    conversations: Conversations
    streams: Streams

    def __init__(
        self, folder: str | Path, *, strict: bool = True, keys: tuple[str, ...] | None = None
    ) -> None:
        self.project: Project = load_project(folder, strict=strict)
        self.env = Environment(self.project.folder)
        self.secrets = Secrets(self.project.folder)
        self.keys = app_keys(self.secrets) if keys is None else keys
        self.started = False
        self._strict = strict
        self._starting: asyncio.Lock | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runner: Runner | None = None
        self._scheduler: Scheduler | None = None
        self._warming: asyncio.Task[None] | None = None

    async def start(self, *, work: bool = True) -> None:
        """Open everything, and go on with accepted work. Safe to repeat.

        Without `work`, what is accepted is left to a process that does it.
        """
        global _current
        if self._loop is not asyncio.get_running_loop():
            await self._move()
        if self.started:
            return
        # Made here: an app that is mounted is made before there is an event loop.
        self._starting = self._starting or asyncio.Lock()
        async with self._starting:
            if self.started:
                return
            settings, folder = self.project.settings, self.project.folder
            state = settings.folder(folder)
            self.inbox = await asyncio.to_thread(Inbox, str(state / "inbox.db"))
            self.store = open_store(settings.conversations(folder))
            self.conversations = Conversations(self.store, self.env, idle=settings.idle)
            self.streams = Streams()
            self._runner = Runner(
                self.inbox, self.store, self.conversations, lambda: self.project, self.env
            )
            self._scheduler = Scheduler(self.inbox, lambda: self.project)
            if work:
                self._warming = asyncio.create_task(asyncio.to_thread(warm_up, self.project))
                self._runner.start()
                self._scheduler.start()
            self.started = True
            _current = self

    async def _move(self) -> None:
        """Have it be at home in this event loop. Another that has ended has taken with it all who
        worked, as that of each request of a test client does; what they held is let go."""
        left = self.started and self._loop is not None and self._loop.is_closed()
        self._loop = asyncio.get_running_loop()
        if left:
            self.started, self._starting = False, None
            await self.store.aclose()
            await self.inbox.aclose()

    async def drain(self, grace: float | None = None) -> None:
        """Begin nothing more, and give what goes on some time. Messages are still accepted,
        for the next start."""
        if self._scheduler is not None:
            await self._scheduler.stop()
        if self._runner is not None:
            await self._runner.drain(self._grace(grace))

    async def stop(self, grace: float | None = None) -> None:
        """Give what goes on some time (by default that of the settings), then leave it to go on
        at the next start."""
        global _current
        if not self.started:
            return
        self.started = False
        if _current is self:
            _current = None
        if self._scheduler is not None:
            await self._scheduler.stop()
        if self._runner is not None:
            await self._runner.stop(self._grace(grace))
        await self.conversations.aclose()
        await self.store.aclose()
        await self.inbox.aclose()

    def _grace(self, given: float | None) -> float:
        return self.project.settings.grace if given is None else given

    def reload(self) -> Project:
        """Take the files in anew; what goes on ends as it was begun."""
        forget_modules(self.project.folder)
        self.project = load_project(self.project.folder, strict=self._strict)
        return self.project

    async def dispatch(
        self, agent: Agent | str, *, id: str, input: str, key: str | None = None
    ) -> Submission:
        """Accept a message for an agent, for whoever does not wait for its answer."""
        target = Target(
            kind="agent", name=self.project.name_of(agent), id=check_conversation_id(id)
        )
        if not isinstance(input, str) or not input.strip():
            raise InvalidOption(
                f"input is what the agent is told, not {input!r:.80}.",
                hint="Pass some text.",
                option="input",
            )
        return await self.inbox.accept(target, {"message": input}, key=key)


async def dispatch(agent: Agent | str, *, id: str, input: str, key: str | None = None) -> str:
    """Give an agent of the app that runs in this process a message; gives its submission's id.

    It returns when the message is durable, and does not wait for the answer. Of messages with
    the same `key` for the same id there is one.
    """
    if _current is None:
        raise Unsupported(
            "no app runs in this process that could take work on.",
            hint="Call dispatch() from an agent, a workflow or a route of an app.",
            operation="dispatch",
        )
    return (await _current.dispatch(agent, id=id, input=input, key=key)).id
