"""A session: one conversation with an agent, and the work in it."""

from __future__ import annotations

from secrets import token_hex
from typing import TYPE_CHECKING, Any, TypeVar, overload

from smokebox.agents.budget import Meter
from smokebox.agents.changes import changed
from smokebox.agents.compacting import Compacting
from smokebox.agents.gate import Desk, Verdict
from smokebox.agents.lane import Lane
from smokebox.agents.messages import Text, UserMessage
from smokebox.agents.pictures import check_pictures, keep
from smokebox.agents.prompting import Wishes, new_prompting, revived_prompting
from smokebox.agents.results import ResultSpec
from smokebox.agents.shelling import Shelling
from smokebox.agents.skills import find_skill
from smokebox.agents.tasking import Tasking
from smokebox.agents.tasks import find_subagent
from smokebox.agents.tasktool import MAX_DEPTH, TASK
from smokebox.errors import InvalidOption, NotFound
from smokebox.options import check_env, check_timeout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from smokebox.agents.budget import Budget
    from smokebox.agents.events import ApprovalNeeded, Event
    from smokebox.agents.harness import Harness
    from smokebox.agents.job import Job, WhenBusy
    from smokebox.agents.journal import Journal
    from smokebox.agents.log.records import ResourcesChanged
    from smokebox.agents.log.store import SessionKey
    from smokebox.agents.log.work import Work
    from smokebox.agents.messages import Image, Message, Usage
    from smokebox.agents.model import ThinkingLevel
    from smokebox.agents.operation import Operation
    from smokebox.agents.pictures import Picture
    from smokebox.agents.reply import Reply
    from smokebox.agents.setup import Setup
    from smokebox.agents.tasks import Tasks
    from smokebox.agents.tools.tool import Tool
    from smokebox.types import ExecResult

T = TypeVar("T")


class Session:
    """One conversation. `Harness.session` opens it.

    Each call gives an `Operation`: await it for its result, iterate over it for its events.
    There is one at a time: a second raises `SessionBusy`, waits for its turn with
    `when_busy="queue"`, or is told to the model at its next turn with `"join"`.
    """

    def __init__(
        self,
        harness: Harness,
        setup: Setup,
        journal: Journal,
        name: str,
        *,
        meter: Meter | None = None,
    ) -> None:
        self.harness = harness
        self.setup = setup
        self.journal = journal
        self.name = name
        self.meter = meter
        self.desk = Desk(journal)
        self.deleted = False
        self._compared: object = None
        self._lane = Lane(journal, setup.options.durability, self._revive)

    @property
    def key(self) -> SessionKey:
        """Where its record is."""
        return self.journal.key

    @property
    def running(self) -> Operation[Any] | None:
        """What it works on: also what another process had begun, and this one goes on with."""
        return self._lane.running

    @property
    def usage(self) -> Usage:
        """What it took since it began."""
        return self.journal.conversation.usage

    @property
    def depth(self) -> int:
        """How many sessions it is a task of."""
        created = self.journal.conversation.created
        return 0 if created is None else created.depth

    @overload
    def prompt(
        self,
        text: str,
        *,
        result: type[T],
        tools: Sequence[Any] = (),
        model: Any = None,
        thinking: ThinkingLevel | None = None,
        images: Sequence[Picture] = (),
        timeout: float | None = None,
        budget: Budget | None = None,
        when_busy: WhenBusy = "raise",
        key: str | None = None,
    ) -> Operation[Reply[T]]: ...

    @overload
    def prompt(
        self,
        text: str,
        *,
        result: Any = None,
        tools: Sequence[Any] = (),
        model: Any = None,
        thinking: ThinkingLevel | None = None,
        images: Sequence[Picture] = (),
        timeout: float | None = None,
        budget: Budget | None = None,
        when_busy: WhenBusy = "raise",
        key: str | None = None,
    ) -> Operation[Reply[Any]]: ...

    def prompt(
        self,
        text: str,
        *,
        images: Sequence[Picture] = (),
        when_busy: WhenBusy = "raise",
        **wishes: Any,
    ) -> Operation[Reply[Any]]:
        """Say something to the agent, and have it work until it has answered.

        `result` is the type that the answer's `data` is to have. `tools`, `model`, `thinking`
        and `budget` hold for this prompt, the tools beside those of the agent. Work of one
        `key` is done once: asked for again, it gives what it came to.
        """
        if not isinstance(text, str):
            raise InvalidOption(
                f"a prompt is a str, not {type(text).__name__}.",
                hint="Pass images by images=[...].",
                option="text",
            )
        shown = check_pictures(images)
        if not text.strip() and not shown:
            raise InvalidOption(
                "a prompt that says nothing asks for nothing.",
                hint="Say what is to be done, or show an image.",
                option="text",
                value=text,
            )

        async def compose() -> UserMessage:
            kept = await keep(shown, self.journal.store, self.setup.workspace)
            return UserMessage((Text(text), *kept))

        wanted = Wishes(**wishes)
        if when_busy == "join" and not wanted.plain:
            raise InvalidOption(
                "a prompt that joins has no options of its own: those of the first hold.",
                hint="Pass only text and images, or when_busy='queue'.",
                option="when_busy",
                value=when_busy,
            )
        job = new_prompting(self, "prompt", compose, wanted)
        return self._submit(job, when_busy=when_busy)

    def skill(
        self,
        name: str,
        args: Mapping[str, object] | str | None = None,
        *,
        when_busy: WhenBusy = "raise",
        **wishes: Any,
    ) -> Operation[Reply[Any]]:
        """Have the agent do what a skill says. Takes what `prompt` takes, but for images."""
        found = find_skill(self.setup.skills, name)

        async def compose() -> UserMessage:
            return UserMessage((Text(await found.prompt(args)),))

        job = new_prompting(self, "skill", compose, Wishes(**wishes))
        return self._submit(job, when_busy=when_busy)

    def task(
        self,
        text: str,
        *,
        agent: str | None = None,
        cwd: str | None = None,
        result: Any = None,
        timeout: float | None = None,
        budget: Budget | None = None,
        when_busy: WhenBusy = "raise",
        key: str | None = None,
    ) -> Operation[Reply[Any]]:
        """Have a child session do something, which sees nothing of this conversation.

        `agent` is the name of a subagent, by default a copy of this one. It works in the same
        sandbox, unless it has one of its own, and this conversation does not see it.
        """
        if agent is not None:
            find_subagent(self.setup.subagents or {}, agent)
        job = Tasking(
            session=self,
            work_id=token_hex(8),
            prompt=text,
            agent=agent,
            cwd=cwd,
            result=None if result is None else ResultSpec.of(result),
            timeout=check_timeout(timeout),
            meter=Meter(budget or self.setup.options.budget, self.meter),
            key=key,
        )
        return self._submit(job, when_busy=when_busy)

    def shell(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        when_busy: WhenBusy = "raise",
    ) -> Operation[ExecResult]:
        """Run a command in the workspace, and have the model see it and what it came to.

        The values of `env` are in no record, and the model does not see them.
        """
        job = Shelling(
            session=self,
            work_id=token_hex(8),
            command=command,
            cwd=cwd,
            env=check_env(env),
            command_timeout=check_timeout(timeout),
        )
        return self._submit(job, when_busy=when_busy)

    def compact(self, focus: str | None = None, *, when_busy: WhenBusy = "raise") -> Operation[str]:
        """Summarize the conversation, with an eye on `focus`. Gives the summary, which the
        model sees in the place of what it stands for; "" where there was nothing to be gained.
        """
        job = Compacting(
            session=self,
            work_id=token_hex(8),
            focus=focus,
            meter=Meter(None, self.meter),
        )
        return self._submit(job, when_busy=when_busy)

    async def messages(self) -> list[Message]:
        """What the model sees of the conversation, also what another process has added."""
        self._check()
        if not self.journal.held:
            await self.journal.refresh()
        return list(self.journal.conversation.messages)

    async def fork(self, name: str | None = None) -> Session:
        """Another session that begins with what was said in this one up to now."""
        self._check()
        if not self.journal.held:
            await self.journal.refresh()
        return await self.harness.fork(self, name or f"{self.name}-{token_hex(4)}")

    async def delete(self) -> None:
        """Remove it with its record and its tasks; what goes on is called off first."""
        self._check()
        await self.harness.sessions.delete(self.name)

    @property
    def approvals(self) -> list[ApprovalNeeded]:
        """The tool calls that wait for `approve` or `deny`."""
        return self.desk.waiting

    async def approve(self, call_id: str) -> None:
        """Let a tool call run that waits for it."""
        await self.desk.decide(call_id, Verdict(True))

    async def deny(self, call_id: str, reason: str = "") -> None:
        """Do not let it run; the model is told the reason."""
        await self.desk.decide(call_id, Verdict(False, reason))

    async def close(self, reason: str) -> None:
        """Call off what it works on."""
        await self._lane.close(reason)

    async def leave(self) -> None:
        """Stop, and have what it works on go on when it is opened again."""
        await self._lane.leave()

    async def recover(self) -> None:
        """Go on with what another process has left without an outcome, unless it is alive."""
        if self.journal.conversation.unfinished:
            await self._lane.recover()

    def ask(
        self,
        text: str,
        *,
        result: ResultSpec[Any] | None,
        timeout: float | None,
        key: str,
        listener: Callable[[Event], object],
    ) -> Operation[Reply[Any]]:
        """Do the task that this session is for, once, or go on with it."""

        async def compose() -> UserMessage:
            return UserMessage((Text(text),))

        wishes = Wishes(result=result, timeout=timeout, key=key)
        return self._submit(new_prompting(self, "prompt", compose, wishes), listener=listener)

    @property
    def system(self) -> str:
        """The system prompt, which stays as it was when the session began."""
        created = self.journal.conversation.created
        return "" if created is None else created.system

    def tools(self, tasks: Tasks) -> dict[str, Tool]:
        """The tools of the agent, in the order in which the model was told of them."""
        tools = dict(self.setup.tools)
        if self.setup.subagents is not None and self.depth < MAX_DEPTH:
            tools[TASK] = tasks.tool()
        resources = self.journal.conversation.resources
        told = [] if resources is None else [tool["name"] for tool in resources.tools]
        order = {name: place for place, name in enumerate(told)}
        return dict(sorted(tools.items(), key=lambda item: order.get(item[0], len(order))))

    def changes(self) -> list[ResourcesChanged]:
        """What the model has to be told of its tools and instructions before its next turn."""
        if self._compared is self.journal.conversation.resources:
            return []
        self._compared = self.journal.conversation.resources
        found = changed(
            self.journal.conversation,
            self.setup.schemas(depth=self.depth),
            self.setup.options.instructions,
        )
        return [] if found is None else [found]

    async def load_image(self, image: Image) -> bytes:
        """The bytes of an image of the conversation."""
        return await self.journal.store.get_blob(image.blob)

    def _submit(
        self,
        job: Job,
        *,
        when_busy: WhenBusy = "raise",
        listener: Callable[[Event], object] | None = None,
    ) -> Operation[Any]:
        self._check()
        if when_busy not in ("raise", "queue", "join"):
            raise InvalidOption(
                f"when_busy is 'raise', 'queue' or 'join', not {when_busy!r}.",
                hint="Leave it out to get SessionBusy.",
                option="when_busy",
                value=when_busy,
            )
        known = self.journal.conversation.keys.get(job.key or "")
        running = None if known is None else self._lane.find(known)
        if running is not None:
            if listener is not None:
                running.listen(listener)
            return running
        return self._lane.submit(job, when_busy=when_busy, listener=listener)

    def _revive(self, work: Work) -> Job:
        """Work that another process has left, as far as its record tells what it was."""
        options = work.options
        meter = Meter(self.setup.options.budget, self.meter)
        if work.kind == "shell":
            return Shelling(
                session=self,
                work_id=work.id,
                command=options.get("command", ""),
                cwd=options.get("cwd"),
                env={},
                command_timeout=None,
                begun=work.attempts > 0 or "env" in options,
            )
        if work.kind == "compact":
            return Compacting(
                session=self, work_id=work.id, focus=options.get("focus"), meter=meter
            )
        if work.kind == "task":
            result = options.get("result")
            return Tasking(
                session=self,
                work_id=work.id,
                prompt=_text(work.message),
                agent=options.get("agent"),
                cwd=options.get("cwd"),
                result=None if result is None else ResultSpec.of(result),
                timeout=options.get("timeout"),
                meter=meter,
                key=work.key,
            )
        return revived_prompting(self, work)

    def _check(self) -> None:
        if self.deleted:
            raise NotFound(
                f"the session {self.name!r} was deleted.",
                hint="Open another: await harness.session(...).",
                kind="session",
                name=self.name,
            )


def _text(message: UserMessage | None) -> str:
    parts = () if message is None else message.parts
    return "".join(part.text for part in parts if isinstance(part, Text))
