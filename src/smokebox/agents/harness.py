"""The harness: an agent at work, with its sandbox, its sessions and its store."""

from __future__ import annotations

from secrets import token_hex
from typing import TYPE_CHECKING, Any, Self

from smokebox.agents.agent import Agent, AgentContext, check_name, create_agent
from smokebox.agents.journal import Journal
from smokebox.agents.log.opening import open_store
from smokebox.agents.log.records import SessionCreated
from smokebox.agents.log.store import SessionKey
from smokebox.agents.sandboxes import no_workspace, open_sandbox
from smokebox.agents.session import Session
from smokebox.agents.setup import make_setup
from smokebox.agents.view import Files
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from smokebox.agents.log.store import Store
    from smokebox.agents.model import Model
    from smokebox.agents.options import ModelChoice
    from smokebox.agents.sandboxes import Opened
    from smokebox.agents.setup import Setup
    from smokebox.agents.skills import Skill
    from smokebox.sandbox.api import SandboxApi
    from smokebox.types import ExecResult


class Harness:
    """An agent at work. `init` makes it; `async with` ends what it made."""

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
        self.id = ctx.id
        self.env = ctx.env
        self.ctx = ctx
        self.store = store
        self._opened = opened
        self._owns_store = owns_store
        self._models: dict[str, Model] = {}
        self._sessions: dict[str, Session] = {}
        self._closed = False

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

    async def session(self, name: str = "default") -> Session:
        """The session of that name, made if it is not there.

        Work that a process left without an outcome when it was killed goes on: see
        `Session.running`.
        """
        found = self._sessions.get(name)
        if found is None:
            found = await self._open(name)
            self._sessions[name] = found
        return found

    async def _open(self, name: str) -> Session:
        journal = Journal(self.store, self._key(name))
        await journal.refresh()
        session = Session(self, self.setup, journal, name)
        if journal.head == 0:
            await journal.acquire(wait=5.0)
            if journal.head == 0:
                tools = tuple(tool.schema for tool in self.setup.tools.values())
                await journal.append(SessionCreated(await self.setup.system(), tools))
            await journal.release()
        await session.recover()
        return session

    def _key(self, session: str) -> SessionKey:
        inner = session if self.ctx.name == "default" else f"{self.ctx.name}/{session}"
        return SessionKey(self.agent.name, self.id, inner)

    async def model(self, choice: ModelChoice) -> Model:
        """A model by its name, opened once."""
        if not isinstance(choice, str):
            return choice
        if choice not in self._models:
            from smokebox.agents.models import open_model

            self._models[choice] = open_model(choice)
        return self._models[choice]

    async def aclose(self) -> None:
        """Call off what goes on, and end what was made for this harness. Safe to repeat."""
        if self._closed:
            return
        self._closed = True
        for session in list(self._sessions.values()):
            await session.close("the harness was closed")
        for model in self._models.values():
            await model.aclose()
        if self._opened is not None and self._opened.owned:
            await self._opened.sandbox.aclose()
        if self._owns_store:
            await self.store.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Opening:
    """A harness that is about to be: `await` it, or use it with `async with`."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self._made: Harness | None = None

    def __await__(self) -> Generator[Any, None, Harness]:
        made: Generator[Any, None, Harness] = self._make().__await__()
        return made

    async def __aenter__(self) -> Harness:
        self._made = await self
        return self._made

    async def __aexit__(self, *_: object) -> None:
        if self._made is not None:
            await self._made.aclose()


def init(
    agent: Agent | None = None,
    /,
    *,
    id: str | None = None,
    env: Any = None,
    payload: Any = None,
    name: str = "default",
    tools: Sequence[Any] = (),
    skills: Sequence[Skill] = (),
    subagents: Sequence[Agent] = (),
    store: Store | None = None,
    **options: Any,
) -> Opening:
    """Have an agent work: `harness = await init(agent)`, or `async with init(agent) as harness`.

    Without an `id` it is a fresh instance each time; the same id finds its conversations
    again. `name` keeps several harnesses of one instance apart. `tools`, `skills` and
    `subagents` come to those of the agent. `init(model=..., sandbox=...)` makes the agent on
    the spot.
    """
    if agent is None:
        agent = create_agent(**options)
    elif not isinstance(agent, Agent):
        raise InvalidOption(
            f"init() takes an agent, not {agent!r:.80}.",
            hint="Make one with create_agent(...), or pass its options by keyword.",
            option="agent",
        )
    elif options:
        raise InvalidOption(
            f"init() of an agent has no option {next(iter(options))!r}.",
            hint="Give it to create_agent().",
            option=next(iter(options)),
        )
    ctx = AgentContext(
        id=token_hex(8) if id is None else check_name("id", id),
        env=env,
        payload=payload,
        name=check_name("name", name),
    )

    async def make() -> Harness:
        return await _make(agent, ctx, tools, skills, subagents, store)

    return Opening(make)


async def _make(
    agent: Agent,
    ctx: AgentContext,
    tools: Sequence[Any],
    skills: Sequence[Skill],
    subagents: Sequence[Agent],
    store: Store | None,
) -> Harness:
    options = await agent.options(ctx)
    opened = await open_sandbox(
        options.sandbox, options.cwd, ctx, made_for_it=agent.initializer is not None
    )
    try:
        setup = await make_setup(
            agent,
            options,
            sandbox=None if opened is None else opened.sandbox,
            workspace=None if opened is None else opened.workspace,
            tools=tools,
            skills=skills,
            subagents=subagents,
        )
    except BaseException:
        if opened is not None and opened.owned:
            await opened.sandbox.aclose()
        raise
    given = store if store is not None else options.persist
    owns = isinstance(given, (bool, str)) or hasattr(given, "__fspath__")
    return Harness(setup, ctx, opened, open_store(given), owns_store=owns)
