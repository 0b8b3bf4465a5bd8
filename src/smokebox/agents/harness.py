"""The harness: a running agent with its sandbox, sessions and store; `init` starts it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self, Unpack, overload

from smokebox.agents.agent import Agent, AgentContext, check_name, create_agent, resolve_settings
from smokebox.agents.log.persistence import open_store
from smokebox.agents.options import OMITTED, check_list, check_subagents, check_tools
from smokebox.agents.session_context import DEFAULT, SessionRegistry, check_session_name
from smokebox.agents.setup import SKILL, TASK, make_setup
from smokebox.agents.workspace import WorkspaceFiles, no_workspace, open_sandbox
from smokebox.errors import Conflict, InvalidOption, NotAwaited, NotFound
from smokebox.foundation.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator, Sequence

    from smokebox.agents.log.store import SessionStore, SessionSummary
    from smokebox.agents.options import AgentOptions, AgentSettings, ToolChoice
    from smokebox.agents.session import Session
    from smokebox.agents.setup import Setup
    from smokebox.agents.skills import Skill
    from smokebox.agents.tools.tool import Tool
    from smokebox.sandbox.api import SandboxApi
    from smokebox.types import ExecResult


class Harness:
    """A running agent. `init` starts it; leaving `async with` closes what it opened.

    The store holds its conversations, the sandbox its files. Neither holds the other.
    """

    def __init__(
        self, setup: Setup, ctx: AgentContext, store: SessionStore, *, owns_store: bool
    ) -> None:
        self._setup = setup
        self._ctx = ctx
        self._store = store
        self._owns_store = owns_store
        self._registry = SessionRegistry(self, setup, ctx, store)
        self._closed = False

    @property
    def id(self) -> str:
        """The id of this instance of the agent."""
        return self._ctx.id

    @property
    def env(self) -> Any:
        """The bindings of the project, or the option `env` of `init`."""
        return self._ctx.env

    @property
    def agent(self) -> Agent:
        """The definition of the agent."""
        return self._setup.agent

    @property
    def tools(self) -> list[Tool]:
        """Tools of the agent, without those that the harness adds to each session."""
        return list(self._setup.tools.values())

    @property
    def sessions(self) -> HarnessSessions:
        """Lists, creates and deletes sessions by name."""
        return HarnessSessions(self, self._registry)

    @property
    def sandbox(self) -> SandboxApi:
        """The sandbox that the agent works in. Raises `Unsupported` if it has none."""
        if self._setup.sandbox is None:
            raise no_workspace("harness.sandbox")
        return self._setup.sandbox

    @property
    def fs(self) -> WorkspaceFiles:
        """The files of the workspace. Raises `Unsupported` if the agent has none."""
        if self._setup.workspace is None:
            raise no_workspace("harness.fs")
        return WorkspaceFiles(self._setup.workspace)

    async def shell(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        stdin: str | bytes | None = None,
    ) -> ExecResult:
        """Run a command in the workspace without showing it to the model.

        `Session.shell` shows it. Arguments are those of `SandboxApi.exec`.

        Raises:
            Unsupported: The agent has no workspace.
        """
        workspace = self._setup.workspace
        if workspace is None:
            raise no_workspace("harness.shell")
        return await workspace.exec(command, cwd=cwd, env=env, timeout=timeout, stdin=stdin)

    async def session(self, name: str = DEFAULT) -> Session:
        """Open a session by name, created if there is none.

        Work that was interrupted when its process was killed is resumed: see
        `Session.running`.

        Raises:
            InvalidOption: The name is too long, not printable, or reserved.
            Unsupported: The harness is closed.
        """
        if (session := self._registry.find(name)) is not None:
            return session.handle
        return (await self._registry.open(check_session_name(name), self._setup)).handle

    async def aclose(self) -> None:
        """Abort the work in progress, and close what `init` opened. Safe to repeat."""
        if not self._closed:
            await self._registry.abort("the harness was closed")
            await suspend(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


async def suspend(harness: Harness) -> None:
    """Close a harness without aborting its work, which resumes when its session is opened again."""
    if harness._closed:
        return
    harness._closed = True
    await harness._registry.suspend()
    await harness._setup.aclose()
    if harness._owns_store:
        await harness._store.aclose()


class HarnessSessions:
    """Sessions of one harness: `harness.sessions`."""

    def __init__(self, harness: Harness, registry: SessionRegistry) -> None:
        self._harness = harness
        self._registry = registry

    async def list(self, *, tasks: bool = False) -> list[SessionSummary]:
        """List the sessions of this instance, the one that changed last first.

        Args:
            tasks: Include the child sessions of tasks.
        """
        registry = self._registry
        summaries = await registry.store.sessions(
            agent=self._harness.agent.name, id=registry.ctx.id
        )
        return [
            summary
            for summary in summaries
            if registry.owns(summary.key.session) and (tasks or summary.parent is None)
        ]

    async def get(self, name: str) -> Session:
        """Open a session that exists.

        Raises:
            NotFound: There is no session of that name.
        """
        if not await self._registry.exists(name):
            raise NotFound(
                f"there is no session {name!r}.",
                hint="Create it with sessions.create(name), or use harness.session(name).",
                kind="session",
                name=name,
            )
        return await self._harness.session(name)

    async def create(self, name: str) -> Session:
        """Create a session.

        Raises:
            Conflict: There is a session of that name.
        """
        if await self._registry.exists(name):
            raise Conflict(
                f"there is a session {name!r} already.",
                hint="Open it with harness.session(name), or choose another name.",
                kind="session",
                name=name,
            )
        return await self._harness.session(name)

    async def delete(self, name: str) -> bool:
        """Delete a session with its event log and its tasks; return False if there is none.

        Its work in this process is aborted first.
        """
        return await self._registry.delete(name)


class PendingHarness:
    """Return value of `init`: await it, or use it with `async with`."""

    def __init__(self, start: Callable[[], Coroutine[Any, Any, Harness]]) -> None:
        self._start = start
        self._harness: Harness | None = None

    def __await__(self) -> Generator[Any, None, Harness]:
        return self._start().__await__()

    async def __aenter__(self) -> Harness:
        self._harness = await self._start()
        return self._harness

    async def __aexit__(self, *_: object) -> None:
        if self._harness is not None:
            await self._harness.aclose()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            raise NotAwaited(
                f"init() was not awaited: there is no {name!r} before the harness has started.",
                hint="Write `harness = await init(...)` or `async with init(...) as harness:`.",
                attribute=name,
            )


@overload
def init(
    agent: Agent,
    /,
    *,
    id: str | None = None,
    env: Any = None,
    payload: Any = None,
    name: str = DEFAULT,
    store: SessionStore | None = None,
    tools: Sequence[ToolChoice] = (),
    skills: Sequence[Skill] = (),
    subagents: Sequence[Agent] | None = (),
) -> PendingHarness: ...


@overload
def init(
    *,
    id: str | None = None,
    env: Any = None,
    payload: Any = None,
    name: str = DEFAULT,
    store: SessionStore | None = None,
    **options: Unpack[AgentOptions],
) -> PendingHarness: ...


def init(
    agent: Agent | None = None,
    /,
    *,
    id: str | None = None,
    env: Any = None,
    payload: Any = None,
    name: str = DEFAULT,
    store: SessionStore | None = None,
    **options: Any,
) -> PendingHarness:
    """Start an agent: `harness = await init(agent)`, or `async with init(agent) as harness`.

    `init(model=..., sandbox=...)` defines the agent on the spot, with the options of
    `create_agent`. With an agent only `tools`, `skills` and `subagents` may be passed, which
    are added to its own.

    Args:
        agent: The agent to start.
        id: Id of the instance, which finds its conversations again. By default a fresh one.
        env: `ctx.env` of the initializer, by default the bindings of the project.
        payload: `ctx.payload` of the initializer.
        name: Name of this harness, where one instance has several.
        store: Store for its conversations, instead of what `persist` says. It stays open.
        options: See `AgentOptions`.

    Raises:
        InvalidOption: An option is unknown or has a wrong value.
    """
    additions: dict[str, Any] = {}
    if agent is None:
        agent = create_agent(**options)
    else:
        additions = _check_additions(agent, options)
    ctx = AgentContext(
        id=new_id() if id is None else check_name("id", id),
        env=_environment(env),
        payload=payload,
        name=check_name("name", name),
    )
    return PendingHarness(lambda: _start(agent, ctx, additions, store))


async def _start(
    agent: Agent, ctx: AgentContext, additions: Mapping[str, Any], store: SessionStore | None
) -> Harness:
    options = _with_additions(await resolve_settings(agent, ctx), additions)
    setup = await make_setup(agent, options, await open_sandbox(options, options.cwd, ctx))
    persist = options.persist if store is None else store
    try:
        if options.approval is not None:
            options.approval.check_names([*setup.tools, SKILL, TASK])
        opened = open_store(persist)
    except BaseException:
        await setup.aclose()
        raise
    owns_store = isinstance(persist, (bool, str, os.PathLike))
    return Harness(setup, ctx, opened, owns_store=owns_store)


def _with_additions(options: AgentSettings, additions: Mapping[str, Any]) -> AgentSettings:
    subagents = options.subagents
    if added := additions.get("subagents"):
        named = subagents if isinstance(subagents, tuple) else ()
        subagents = check_subagents([*named, *added])
    return replace(
        options,
        tools=(*options.tools, *additions.get("tools", ())),
        skills=(*options.skills, *additions.get("skills", ())),
        subagents=subagents,
    )


def _check_additions(agent: object, options: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(agent, Agent):
        raise InvalidOption(
            f"init() takes an agent, not {agent!r:.80}.",
            hint="Make one with create_agent(...), or pass its options by keyword.",
            option="agent",
        )
    for option in options:
        if option not in ("tools", "skills", "subagents"):
            raise InvalidOption(
                f"init() of an agent has no option {option!r}.",
                hint="Pass it to create_agent().",
                option=option,
            )
    subagents = options.get("subagents", ())
    return {
        "tools": check_tools(options.get("tools", ())),
        "skills": check_list("skills", options.get("skills", ())),
        "subagents": () if subagents is OMITTED else check_subagents(subagents or ()),
    }


def _environment(env: Any) -> Any:
    """Return `ctx.env`: the bindings of the project, or `env` with mapping keys as attributes."""
    if env is None:
        from smokebox.client.bindings import env as bindings

        return bindings
    return SimpleNamespace(**env) if isinstance(env, Mapping) else env
