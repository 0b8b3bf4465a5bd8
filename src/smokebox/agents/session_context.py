"""State of one session that its work shares, and the registry of open sessions of a harness."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from smokebox.agents.approval import ApprovalQueue
from smokebox.agents.limits import UsageMeter
from smokebox.agents.log.event_log import EventLog
from smokebox.agents.log.records import SessionCreated
from smokebox.agents.log.store import SessionKey
from smokebox.agents.messages import Text, UserMessage
from smokebox.agents.options import check_budget
from smokebox.agents.setup import MAX_DEPTH, TASK
from smokebox.agents.system_prompt import changed, digest
from smokebox.agents.work.checkpoint import RestoreItem
from smokebox.agents.work.compaction import CompactionItem
from smokebox.agents.work.prompt import new_prompt, resumed_prompt
from smokebox.agents.work.queue import WorkQueue
from smokebox.agents.work.shell import ShellItem
from smokebox.agents.work.task import PREFIX, TaskItem
from smokebox.errors import Conflict, InvalidOption, NotFound, SmokeboxError, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from smokebox.agents.agent import AgentContext
    from smokebox.agents.events import Event
    from smokebox.agents.harness import Harness
    from smokebox.agents.limits import Budget
    from smokebox.agents.log.conversation import Checkpoint, WorkState
    from smokebox.agents.log.records import ResourcesChanged
    from smokebox.agents.log.store import SessionStore
    from smokebox.agents.messages import ImagePart
    from smokebox.agents.model import Model
    from smokebox.agents.operation import Operation
    from smokebox.agents.options import ModelChoice, PromptOptions
    from smokebox.agents.results import Reply, ResultSpec
    from smokebox.agents.session import Session
    from smokebox.agents.setup import Setup
    from smokebox.agents.tools.tool import Tool
    from smokebox.agents.work.item import WhenBusy, WorkItem
    from smokebox.agents.work.task import TaskRunner


DEFAULT = "default"
MAX_NAME = 200
# Seconds to wait for another process that is creating the same session.
_CREATE_WAIT = 10.0
# Key of the only work item in a session that does a task.
_TASK_KEY = "task"


@dataclass(slots=True, kw_only=True, eq=False)
class SessionContext:
    """One open session: its setup, event log, queue of work and pending approvals.

    `Session` is the handle for callers; `handle` is the one of this session.
    """

    name: str
    setup: Setup
    event_log: EventLog
    registry: SessionRegistry
    meter: UsageMeter | None = None
    """Counts the usage of the task that the session does."""
    deleted: bool = False
    checkpoint_state: str | None = None
    """State of the files at the last checkpoint that this process took."""
    approvals: ApprovalQueue = field(init=False)
    queue: WorkQueue = field(init=False)
    handle: Session = field(init=False)
    _compared: object = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.approvals = ApprovalQueue(self.event_log)
        durability = self.setup.options.durability
        self.queue = WorkQueue(self.event_log, durability, self._resume)

    @property
    def key(self) -> SessionKey:
        """The key of its log in the store."""
        return self.event_log.key

    @property
    def harness(self) -> Harness:
        """The harness that opened it."""
        return self.registry.harness

    @property
    def depth(self) -> int:
        """The number of sessions above it, if it does a task."""
        created = self.event_log.conversation.created
        return 0 if created is None else created.depth

    @property
    def system(self) -> str:
        """The system prompt, which is fixed when the session is created."""
        created = self.event_log.conversation.created
        return "" if created is None else created.system

    def new_meter(self, budget: Budget | Mapping[str, float] | None = None) -> UsageMeter:
        """Return a meter for one work item, which also counts for the session's task."""
        limits = self.setup.options.budget if budget is None else check_budget(budget)
        return UsageMeter(limits, self.meter)

    def tools(self, tasks: TaskRunner) -> dict[str, Tool]:
        """Return the tools of the agent, in the order in which the model knows them."""
        tools = dict(self.setup.tools)
        if self.setup.task is not None and self.depth < MAX_DEPTH:
            tools[TASK] = tasks.tool(self.setup.task)
        resources = self.event_log.conversation.resources
        names = [] if resources is None else [tool["name"] for tool in resources.tools]
        order = {name: place for place, name in enumerate(names)}
        return dict(sorted(tools.items(), key=lambda item: order.get(item[0], len(order))))

    def changes(self) -> list[ResourcesChanged]:
        """Return the changes of tools and instructions to show the model before its next turn."""
        if self._compared is self.event_log.conversation.resources:
            return []
        self._compared = self.event_log.conversation.resources
        change = changed(
            self.event_log.conversation,
            self.setup.schemas(depth=self.depth),
            self.setup.options.instructions,
        )
        return [] if change is None else [change]

    async def load_image(self, image: ImagePart) -> bytes:
        """Return the bytes of an image of the conversation."""
        return await self.event_log.store.get_blob(image.blob)

    def submit(
        self,
        item: WorkItem,
        *,
        when_busy: WhenBusy = "raise",
        listener: Callable[[Event], object] | None = None,
    ) -> Operation[Any]:
        """Queue a work item. If one with its key is in progress, return that operation.

        Raises:
            SessionBusy: This process does other work in the session, and `when_busy` is "raise".
            NotFound: The session was deleted.
            InvalidOption: `when_busy` is something else.
        """
        self.check()
        if when_busy not in ("raise", "queue", "join"):
            raise InvalidOption(
                f"when_busy is 'raise', 'queue' or 'join', not {when_busy!r}.",
                hint="Leave it out to get SessionBusy.",
                option="when_busy",
                value=when_busy,
            )
        known = self.event_log.conversation.keys.get(item.key or "")
        control = None if known is None else self.queue.find(known)
        if control is not None:
            if listener is not None:
                control.listen(listener)
            return control.operation
        return self.queue.submit(item, when_busy=when_busy, listener=listener)

    def run_task(
        self,
        text: str,
        *,
        result: ResultSpec[Any] | None,
        timeout: float | None,
        listener: Callable[[Event], object],
    ) -> Operation[Reply[Any]]:
        """Send the one prompt of a session that does a task, or continue with it."""

        async def compose() -> UserMessage:
            return UserMessage((Text(text),))

        options: PromptOptions = {"timeout": timeout, "key": _TASK_KEY}
        return self.submit(new_prompt(self, "prompt", compose, result, options), listener=listener)

    def check(self) -> None:
        """Raise `NotFound` if the session was deleted."""
        if self.deleted:
            raise NotFound(
                f"the session {self.name!r} was deleted.",
                hint="Open another: await harness.session(...).",
                kind="session",
                name=self.name,
            )

    async def refresh(self) -> None:
        """Read what another process has added to the log."""
        self.check()
        if not self.event_log.acquired:
            await self.event_log.refresh()

    async def recover(self) -> None:
        """Resume work that another process left unfinished, unless that process is alive."""
        if self.event_log.conversation.unfinished:
            await self.queue.recover()

    def _resume(self, work: WorkState) -> WorkItem:
        if work.kind == "shell":
            return ShellItem.resumed(self, work)
        if work.kind == "compact":
            return CompactionItem.resumed(self, work)
        if work.kind == "restore":
            return RestoreItem.resumed(self, work)
        if work.kind == "task":
            return TaskItem.resumed(self, work)
        return resumed_prompt(self, work)


class SessionRegistry:
    """Sessions of one harness: opens, forks and deletes them, and keeps those that are open."""

    def __init__(
        self, harness: Harness, setup: Setup, ctx: AgentContext, store: SessionStore
    ) -> None:
        self.harness = harness
        self.setup = setup
        self.ctx = ctx
        self.store = store
        self.models = ModelPool()
        self._open: dict[str, SessionContext] = {}
        self._opening = asyncio.Lock()
        self._closed = False

    def find(self, name: str) -> SessionContext | None:
        """Return a session that is open."""
        return self._open.get(name)

    async def open(
        self,
        name: str,
        setup: Setup,
        *,
        parent: SessionContext | None = None,
        meter: UsageMeter | None = None,
        first: SessionCreated | None = None,
    ) -> SessionContext:
        """Open a session, created if there is none, and resume its unfinished work."""
        from smokebox.agents.session import Session

        if self._closed:
            raise Unsupported(
                "the harness is closed.", hint="Start another with init().", operation="session"
            )
        async with self._opening:
            if name in self._open:
                return self._open[name]
            setup = await setup.with_skills()
            log = EventLog(self.store, self.key(name))
            await log.refresh()
            if log.conversation.head == 0:
                await self._create(log, setup, parent, first)
            session = SessionContext(
                name=name, setup=setup, event_log=log, registry=self, meter=meter
            )
            session.handle = Session(session)
            self._open[name] = session
        await session.recover()
        return session

    async def fork(
        self, origin: SessionContext, name: str, at: Checkpoint | None = None
    ) -> SessionContext:
        """Create a session that starts with the conversation of another. Raises `Conflict`."""
        if await self.exists(check_session_name(name)):
            raise Conflict(
                f"there is a session {name!r} already.",
                hint="Fork under another name.",
                kind="session",
                name=name,
            )
        first = replace(
            _first_record(origin.setup, origin.system, origin.depth),
            forked_from=origin.key.session if at is None else at.session or origin.key.session,
            forked_at=origin.event_log.conversation.head if at is None else at.offset,
        )
        return await self.open(name, origin.setup, first=first)

    async def exists(self, name: str) -> bool:
        """Return True if the store has a session of that name."""
        return bool(await self.store.read(self.key(name), limit=1))

    def release(self, session: SessionContext) -> None:
        """Drop a session from those that are open."""
        if self._open.get(session.name) is session:
            del self._open[session.name]

    async def delete(self, name: str) -> bool:
        """Abort the work of a session, then delete its log and its tasks; False if none."""
        if (session := self._open.pop(name, None)) is not None:
            await session.queue.close("the session was deleted")
            session.deleted = True
        return await self.store.delete(self.key(name))

    async def abort(self, reason: str) -> None:
        """Abort the work of all open sessions."""
        for session in list(self._open.values()):
            await session.queue.close(reason)

    async def suspend(self) -> None:
        """Stop all work without an outcome, and close the models."""
        self._closed = True
        for session in list(self._open.values()):
            await session.queue.suspend()
        await self.models.aclose()

    def key(self, session: str) -> SessionKey:
        """Return the key of a session in the store."""
        return SessionKey(self.setup.agent.name, self.ctx.id, self._prefix + session)

    def owns(self, session: str) -> bool:
        """Return True if a session in the store belongs to this harness, not to a sibling."""
        if self._prefix:
            return session.startswith(self._prefix)
        return "/" not in session

    @property
    def _prefix(self) -> str:
        return "" if self.ctx.name == DEFAULT else f"{self.ctx.name}/"

    async def _create(
        self,
        log: EventLog,
        setup: Setup,
        parent: SessionContext | None,
        first: SessionCreated | None,
    ) -> None:
        if first is None:
            depth = 0 if parent is None else parent.depth + 1
            first = _first_record(setup, await setup.system(), depth)
            if parent is not None:
                first = replace(first, parent=parent.key.session)
        await log.acquire(wait=_CREATE_WAIT)
        try:
            if log.conversation.head == 0:
                await log.append(first)
                await log.reload()
        finally:
            await log.release()


class ModelPool:
    """Models by name, each opened once."""

    def __init__(self) -> None:
        self._models: dict[str, Model] = {}

    async def open(self, choice: ModelChoice) -> Model:
        """Return a model by its name. A model object is returned as it is, and not closed here."""
        if not isinstance(choice, str):
            return choice
        if choice not in self._models:
            from smokebox.agents.models import open_model

            self._models[choice] = model = open_model(choice)
            # The first use imports the provider's library, which takes about a second: do that
            # outside the event loop. What is missing is reported when the model is used.
            with contextlib.suppress(SmokeboxError):
                await asyncio.to_thread(getattr, model, "info")
        return self._models[choice]

    async def open_all(self, choices: Sequence[ModelChoice]) -> list[Model]:
        """Return models by their names. Raises `InvalidOption` if there are none."""
        if not choices:
            raise InvalidOption(
                "the agent has no model, and the prompt names none.",
                hint="Write create_agent(model='anthropic/claude-sonnet-4-6'), or pass model=.",
                option="model",
            )
        return [await self.open(choice) for choice in choices]

    async def aclose(self) -> None:
        """Close the models that were opened here."""
        for model in self._models.values():
            await model.aclose()


def check_session_name(name: object) -> str:
    """Return `name` if a program may give it to a session. Raises `InvalidOption`."""
    if isinstance(name, str) and 0 < len(name) <= MAX_NAME and name.isprintable():
        if not name.startswith(PREFIX) and "/" not in name:
            return name
        reason = (
            f"the session name {name!r} is reserved: {PREFIX!r} starts the names of tasks, and "
            "'/' separates harnesses."
        )
    else:
        reason = f"a session's name is up to {MAX_NAME} characters in one line, not {name!r:.80}."
    raise InvalidOption(reason, hint="Pass for example 'default'.", option="name", value=name)


def _first_record(setup: Setup, system: str, depth: int) -> SessionCreated:
    return SessionCreated(
        system,
        setup.schemas(depth=depth),
        depth=depth,
        instructions=digest(setup.options.instructions),
    )
