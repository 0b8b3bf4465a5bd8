"""An app: a served project with its inbox, its conversations and its runner."""

from __future__ import annotations

import asyncio
import contextlib
from importlib import import_module
from typing import TYPE_CHECKING

from smokebox.agents.log.persistence import open_store
from smokebox.agents.providers import find_model
from smokebox.app.conversations import OpenConversations
from smokebox.app.definitions import ServedAgent
from smokebox.app.inbox import AppInbox, WorkTarget, check_conversation_id
from smokebox.app.project import load_project, unload_modules
from smokebox.app.runner import Runner
from smokebox.app.schedule import Scheduler
from smokebox.app.settings import app_keys
from smokebox.app.streams import EventStreams
from smokebox.client.bindings import Environment
from smokebox.errors import InvalidOption, SmokeboxError, Unsupported
from smokebox.foundation.endpoint import default_home
from smokebox.project import Secrets, load_config
from smokebox.tenancy.config import open_config
from smokebox.tenancy.keys import Keys
from smokebox.tenancy.rate_limit import RateLimiter
from smokebox.tenancy.running_requests import RunningRequests

if TYPE_CHECKING:
    from pathlib import Path

    from smokebox.agents.agent import Agent
    from smokebox.agents.log.store import SessionStore
    from smokebox.app.inbox import StoredSubmission
    from smokebox.app.project import AppProject

# The app started last in this process, to which `dispatch` sends messages.
_current: App | None = None


class App:
    """Agents and workflows of a folder. Nothing is opened before `start`.

    Args:
        folder: The project.
        strict: Raise the error of a file that cannot be loaded, instead of skipping it.
        keys: Keys of operators, by default those of SMOKEBOX_APP_KEYS.
    """

    inbox: AppInbox
    store: SessionStore
    conversations: OpenConversations
    streams: EventStreams
    _watching: contextlib.AsyncExitStack

    def __init__(
        self, folder: str | Path, *, strict: bool = True, keys: tuple[str, ...] | None = None
    ) -> None:
        self.project: AppProject = load_project(folder, strict=strict)
        self.env = Environment(self.project.folder)
        self.secrets = Secrets(self.project.folder)
        operators = app_keys(self.secrets) if keys is None else keys
        self._operators = operators
        self._profiles = open_config(default_home()).profiles()
        self.keys = self.open_keys(required=bool(operators), checks_peers=False)
        self.rate_limiter = RateLimiter()
        self.running = RunningRequests()
        self.connections = self.project.settings.connections()
        self.started = False
        self._strict = strict
        self._starting: asyncio.Lock | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runner: Runner | None = None
        self._scheduler: Scheduler | None = None
        self._preloading: asyncio.Task[None] | None = None

    @property
    def has_operator_keys(self) -> bool:
        """True if keys of operators were set, so that each request needs a key."""
        return bool(self._operators)

    def open_keys(self, *, required: bool, checks_peers: bool) -> Keys:
        """Return the keys of the user's state directory, and the app's own of operators.

        Args:
            required: Each request needs a key.
            checks_peers: Without a key, only this user and root are served.
        """
        return Keys(
            default_home(),
            self._profiles,
            required=required,
            checks_peers=checks_peers,
            operators=self._operators,
        )

    async def start(self, *, work: bool = True) -> None:
        """Open everything and continue accepted work. Safe to repeat.

        Without `work`, accepted work is left to another process.
        """
        global _current
        if self._loop is not asyncio.get_running_loop():
            await self._bind_loop()
        if self.started:
            return
        # Created here because a mounted app is built before there is an event loop.
        self._starting = self._starting or asyncio.Lock()
        async with self._starting:
            if self.started:
                return
            settings, folder = self.project.settings, self.project.folder
            state = settings.folder(folder)
            self.inbox = await asyncio.to_thread(AppInbox, str(state / "inbox.db"))
            self.store = open_store(settings.conversations(folder))
            self.conversations = OpenConversations(self.store, self.env, idle=settings.idle)
            self.streams = EventStreams()
            self._runner = Runner(
                self.inbox, self.store, self.conversations, lambda: self.project, self.env
            )
            self._scheduler = Scheduler(self.inbox, lambda: self.project)
            self._watching = contextlib.AsyncExitStack()
            await self._watching.enter_async_context(self.running.watch(self.keys))
            if work:
                self._preloading = asyncio.create_task(asyncio.to_thread(preload, self.project))
                self._runner.start()
                self._scheduler.start()
            self.started = True
            _current = self

    async def _bind_loop(self) -> None:
        """Bind to this event loop, and close resources of a previous one that was closed.

        A test client, for example, runs each request in a separate loop.
        """
        abandoned = self.started and self._loop is not None and self._loop.is_closed()
        if self._loop is not None:
            self.running = RunningRequests()
        self._loop = asyncio.get_running_loop()
        if abandoned:
            self.started, self._starting = False, None
            await self.store.aclose()
            await self.inbox.aclose()

    async def drain(self, grace: float | None = None) -> None:
        """Start no more work, and wait for running work.

        Messages are still accepted, for the next start.

        Args:
            grace: Seconds to wait, by default those of the settings.
        """
        if self._scheduler is not None:
            await self._scheduler.stop()
        if self._runner is not None:
            await self._runner.drain(self._grace(grace))

    async def stop(self, grace: float | None = None) -> None:
        """Close the app; work that does not end in time continues at the next start.

        Args:
            grace: Seconds to wait for running work, by default those of the settings.
        """
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
        await self._watching.aclose()
        await self.conversations.aclose()
        await self.store.aclose()
        await self.inbox.aclose()
        await self.keys.aclose()

    def _grace(self, grace: float | None) -> float:
        return self.project.settings.grace if grace is None else grace

    def reload(self) -> AppProject:
        """Reload the project's files. Running work finishes with the old ones."""
        unload_modules(self.project.folder)
        self.project = load_project(self.project.folder, strict=self._strict)
        return self.project

    async def dispatch(
        self, agent: Agent | str, *, id: str, input: str, key: str | None = None
    ) -> StoredSubmission:
        """Accept a message for an agent without waiting for its reply."""
        target = WorkTarget(
            kind="agent", name=self.project.name_of(agent), id=check_conversation_id(id)
        )
        if not isinstance(input, str) or not input.strip():
            raise InvalidOption(
                f"input must be text for the agent, not {input!r:.80}.",
                hint="Pass a non-empty str.",
                option="input",
            )
        return await self.inbox.accept(target, {"message": input}, key=key)


async def dispatch(agent: Agent | str, *, id: str, input: str, key: str | None = None) -> str:
    """Send a message to an agent of the app in this process, without waiting for the reply.

    Args:
        agent: The agent or its name.
        id: Id of the conversation.
        input: Text of the message.
        key: Idempotency key: messages with the same key for the same id are accepted once.

    Returns:
        The id of the submission, which is durable.

    Raises:
        NotFound: The app does not serve the agent.
        Unsupported: No app runs in this process.
    """
    if _current is None:
        raise Unsupported(
            "no app is running in this process.",
            hint="Call dispatch() from an agent, a workflow or a route of an app.",
            operation="dispatch",
        )
    return (await _current.dispatch(agent, id=id, input=input, key=key)).id


_MODEL_MODULES = {
    "anthropic": "pydantic_ai.models.anthropic",
    "google": "pydantic_ai.models.google",
}
_DEFAULT_MODULE = "pydantic_ai.models.openai"


def preload(project: AppProject) -> None:
    """Import the SDKs of the models in use, which takes seconds: call it in a thread.

    A missing library is an error of the request that needs it.
    """
    config = load_config(project.folder).models
    served = [one.agent for one in project.agents.values() if isinstance(one, ServedAgent)]
    for spec in {spec for agent in served for spec in agent.models}:
        with contextlib.suppress(SmokeboxError, ImportError):
            provider = find_model(spec, config).provider
            import_module(_MODEL_MODULES.get(provider.api, _DEFAULT_MODULE))
