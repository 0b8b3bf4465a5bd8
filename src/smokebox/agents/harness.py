"""The harness: an agent at work, with its sandbox, its sessions and its store."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Self

from smokebox.agents.changes import digest
from smokebox.agents.journal import Journal
from smokebox.agents.log.records import SessionCreated
from smokebox.agents.log.store import SessionKey
from smokebox.agents.sandboxes import no_workspace
from smokebox.agents.session import Session
from smokebox.agents.sessions import Sessions, check_session_name
from smokebox.agents.view import Files
from smokebox.errors import Conflict, InvalidOption, SmokeboxError, Unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from smokebox.agents.agent import Agent, AgentContext
    from smokebox.agents.budget import Meter
    from smokebox.agents.log.store import Store
    from smokebox.agents.model import Model
    from smokebox.agents.options import ModelChoice
    from smokebox.agents.sandboxes import Opened
    from smokebox.agents.setup import Setup
    from smokebox.sandbox.api import SandboxApi
    from smokebox.types import ExecResult

DEFAULT = "default"
# How long to wait for another process that makes the same session at this moment.
_PATIENCE = 10.0


class Harness:
    """An agent at work. `init` makes it; `async with` ends what it made.

    The conversation is kept in the store, and the files are in the sandbox: neither keeps the
    other.
    """

    def __init__(
        self,
        setup: Setup,
        ctx: AgentContext,
        opened: Opened | None,
        store: Store,
        *,
        owns_store: bool,
    ) -> None:
        self.setup = setup
        self.ctx = ctx
        self.store = store
        self.sessions = Sessions(self)
        self._opened = opened
        self._owns_store = owns_store
        self._models: dict[str, Model] = {}
        self._open: dict[str, Session] = {}
        self._opening = asyncio.Lock()
        self._closed = False

    @property
    def id(self) -> str:
        """Which instance of the agent it is."""
        return self.ctx.id

    @property
    def env(self) -> Any:
        """What the agent was initialized with."""
        return self.ctx.env

    @property
    def agent(self) -> Agent:
        """Who works here."""
        return self.setup.agent

    @property
    def sandbox(self) -> SandboxApi:
        """Where the agent works. Raises `Unsupported` where it has no workspace."""
        if self._opened is None:
            raise no_workspace("harness.sandbox")
        return self._opened.sandbox

    @property
    def fs(self) -> Files:
        """The files of the workspace. Raises `Unsupported` where there is none."""
        if self._opened is None:
            raise no_workspace("harness.fs")
        return Files(self._opened.workspace)

    async def shell(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: str | bytes | None = None,
    ) -> ExecResult:
        """Run a command in the workspace. The model does not see it; `Session.shell` shows it."""
        if self._opened is None:
            raise no_workspace("harness.shell")
        return await self._opened.workspace.exec(
            command, cwd=cwd, env=env, timeout=timeout, stdin=stdin
        )

    async def session(self, name: str = DEFAULT) -> Session:
        """The session of that name, made if it is not there.

        Work that a process left without an outcome when it was killed goes on: see
        `Session.running`.
        """
        if name in self._open:
            return self._open[name]
        return await self.open(check_session_name(name), self.setup)

    async def fork(self, origin: Session, name: str) -> Session:
        """A session that begins with what another has said. Raises `Conflict`."""
        key = self.key(check_session_name(name))
        if await self.store.read(key, limit=1):
            raise Conflict(
                f"there is a session {name!r} already.",
                hint="Fork under another name.",
                kind="session",
                name=name,
            )
        created = origin.journal.conversation.created
        system = "" if created is None else created.system
        first = self._first(origin.setup, system, origin.depth)
        return await self.open(
            name,
            origin.setup,
            first=SessionCreated(
                first.system,
                first.tools,
                forked_from=origin.key.session,
                forked_at=origin.journal.head,
                depth=first.depth,
                instructions=first.instructions,
            ),
        )

    async def open(
        self,
        name: str,
        setup: Setup,
        *,
        parent: Session | None = None,
        meter: Meter | None = None,
        first: SessionCreated | None = None,
    ) -> Session:
        """Open a session, and go on with what it was at."""
        if self._closed:
            raise Unsupported(
                "the harness is closed.", hint="Make another with init().", operation="session"
            )
        async with self._opening:
            if name in self._open:
                return self._open[name]
            setup = await setup.with_skills()
            journal = Journal(self.store, self.key(name))
            await journal.refresh()
            if journal.head == 0:
                await self._create(journal, setup, parent, first)
            session = Session(self, setup, journal, name, meter=meter)
            self._open[name] = session
        await session.recover()
        return session

    async def _create(
        self,
        journal: Journal,
        setup: Setup,
        parent: Session | None,
        first: SessionCreated | None,
    ) -> None:
        depth = 0 if parent is None else parent.depth + 1
        if first is None:
            made = self._first(setup, await setup.system(), depth)
            above = None if parent is None else parent.key.session
            first = SessionCreated(
                made.system,
                made.tools,
                parent=above,
                depth=depth,
                instructions=made.instructions,
            )
        await journal.acquire(wait=_PATIENCE)
        try:
            if journal.head == 0:
                await journal.append(first)
                await journal.reload()
        finally:
            await journal.release()

    def _first(self, setup: Setup, system: str, depth: int) -> SessionCreated:
        return SessionCreated(
            system,
            setup.schemas(depth=depth),
            depth=depth,
            instructions=digest(setup.options.instructions),
        )

    def forget(self, session: Session) -> None:
        """Hold on to a session no longer."""
        if self._open.get(session.name) is session:
            del self._open[session.name]

    async def let_go(self, name: str) -> None:
        """Call off what a session works on, and hold on to it no longer."""
        if (session := self._open.pop(name, None)) is not None:
            await session.close("the session was deleted")
            session.deleted = True

    def key(self, session: str) -> SessionKey:
        """Where the record of a session is."""
        return SessionKey(self.agent.name, self.id, self._prefix + session)

    def owns(self, session: str) -> bool:
        """Whether a session in the store is one of this harness, not of another of its id."""
        if self._prefix:
            return session.startswith(self._prefix)
        return "/" not in session

    @property
    def _prefix(self) -> str:
        return "" if self.ctx.name == DEFAULT else f"{self.ctx.name}/"

    async def models(self, choices: Sequence[ModelChoice]) -> list[Model]:
        """Models by their names. Raises `InvalidOption` where there are none."""
        if not choices:
            raise InvalidOption(
                "the agent has no model, and the prompt names none.",
                hint="Write create_agent(model='anthropic/claude-sonnet-4-6'), or pass model=.",
                option="model",
            )
        return [await self.model(choice) for choice in choices]

    async def model(self, choice: ModelChoice) -> Model:
        """A model by its name, opened once; one that was given stays whoever's it was."""
        if not isinstance(choice, str):
            return choice
        if choice not in self._models:
            from smokebox.agents.models import open_model

            self._models[choice] = model = open_model(choice)
            # It imports what it needs when it is first asked, which takes a second or so: others
            # on the loop need not wait for that. What is missing shows when the model is used.
            with contextlib.suppress(SmokeboxError):
                await asyncio.to_thread(getattr, model, "info")
        return self._models[choice]

    async def aclose(self) -> None:
        """Call off what goes on, and end what was made for this harness. Safe to repeat."""
        if not self._closed:
            for session in list(self._open.values()):
                await session.close("the harness was closed")
            await self.leave()

    async def leave(self) -> None:
        """As `aclose`, but what goes on is not called off: it continues when its session is
        opened again, by whoever does."""
        if self._closed:
            return
        self._closed = True
        for session in list(self._open.values()):
            await session.leave()
        for model in self._models.values():
            await model.aclose()
        await self.setup.aclose()
        if self._opened is not None and self._opened.owned:
            await self._opened.sandbox.aclose()
        if self._owns_store:
            await self.store.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
