"""A session: one conversation with an agent, and the work in it."""

from __future__ import annotations

from secrets import token_hex
from typing import TYPE_CHECKING, Any, TypeVar, overload

from smokebox.agents.budget import Budget, Meter
from smokebox.agents.lane import Lane
from smokebox.agents.messages import Text, UserMessage
from smokebox.agents.options import check_models, check_thinking
from smokebox.agents.pictures import check_pictures, keep
from smokebox.agents.prompting import Prompting
from smokebox.agents.results import ResultSpec
from smokebox.agents.setup import by_name
from smokebox.agents.tools.function import as_tools
from smokebox.errors import InvalidOption, NotFound
from smokebox.options import check_timeout

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from smokebox.agents.events import Event
    from smokebox.agents.gate import Gate
    from smokebox.agents.harness import Harness
    from smokebox.agents.job import Job, WhenBusy
    from smokebox.agents.journal import Journal
    from smokebox.agents.log.records import WorkKind
    from smokebox.agents.log.store import SessionKey
    from smokebox.agents.log.work import Work
    from smokebox.agents.messages import Image, Message
    from smokebox.agents.model import ThinkingLevel
    from smokebox.agents.operation import Operation
    from smokebox.agents.pictures import Picture
    from smokebox.agents.reply import Reply
    from smokebox.agents.setup import Setup
    from smokebox.agents.tools.tool import Tool

T = TypeVar("T")


class Session:
    """One conversation. `Harness.session` opens it.

    Each call gives an `Operation`: await it for its result, iterate over it for its events.
    There is one at a time; `when_busy` says what becomes of a second.
    """

    def __init__(self, harness: Harness, setup: Setup, journal: Journal, name: str) -> None:
        self.harness = harness
        self.setup = setup
        self.journal = journal
        self.name = name
        self.meter: Meter | None = None
        self.deleted = False
        self._lane = Lane(journal, setup.options.durability, self._revive)

    @property
    def key(self) -> SessionKey:
        """Where its record is."""
        return self.journal.key

    @property
    def running(self) -> Operation[Any] | None:
        """What it works on: also what another process had begun, and this one goes on with."""
        return self._lane.running

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
        result: Any = None,
        tools: Sequence[Any] = (),
        model: Any = None,
        thinking: ThinkingLevel | None = None,
        images: Sequence[Picture] = (),
        timeout: float | None = None,
        budget: Budget | None = None,
        when_busy: WhenBusy = "raise",
        key: str | None = None,
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

        async def compose() -> UserMessage:
            kept = await keep(shown, self.journal.store, self.setup.workspace)
            return UserMessage((Text(text), *kept))

        job = self._prompting(
            "prompt", compose, result, tools, model, thinking, timeout, budget, key
        )
        if when_busy == "join" and (result is not None or tools or model or thinking or budget):
            raise InvalidOption(
                "a prompt that joins has no options of its own: those of the first hold.",
                hint="Pass only text and images, or when_busy='queue'.",
                option="when_busy",
                value=when_busy,
            )
        return self.submit(job, when_busy=when_busy)

    async def messages(self) -> list[Message]:
        """What the model sees of the conversation, also what another process has added."""
        self._check()
        if not self.journal.held:
            await self.journal.refresh()
        return list(self.journal.conversation.messages)

    def submit(
        self,
        job: Job,
        *,
        when_busy: WhenBusy = "raise",
        listener: Callable[[Event], object] | None = None,
    ) -> Operation[Any]:
        """Have a job done in this session."""
        self._check()
        if when_busy not in ("raise", "queue", "join"):
            raise InvalidOption(
                f"when_busy is 'raise', 'queue' or 'join', not {when_busy!r}.",
                hint="Leave it out to get SessionBusy.",
                option="when_busy",
                value=when_busy,
            )
        return self._lane.submit(job, when_busy=when_busy, listener=listener)

    async def recover(self) -> None:
        """Go on with what another process has left."""
        if self.journal.conversation.unfinished:
            await self._lane.recover()

    async def close(self, reason: str) -> None:
        """Call off what it works on."""
        await self._lane.close(reason)

    def _prompting(
        self,
        kind: WorkKind,
        compose: Callable[[], Awaitable[UserMessage]],
        result: Any,
        tools: Sequence[Any],
        model: Any,
        thinking: ThinkingLevel | None,
        timeout: float | None,
        budget: Budget | None,
        key: str | None,
    ) -> Prompting:
        check_thinking(thinking)
        spec = None if result is None else ResultSpec.of(result)
        given = by_name(as_tools(tools))
        models = check_models(model) or self.setup.options.model
        kept: dict[str, Any] = {}
        if spec is not None:
            kept["result"] = spec.schema
        if model is not None:
            kept["model"] = [one if isinstance(one, str) else one.name for one in models]
        if thinking is not None:
            kept["thinking"] = thinking
        if timeout is not None:
            kept["timeout"] = check_timeout(timeout)
        return Prompting(
            session=self,
            work_id=token_hex(8),
            kind=kind,
            compose=compose,
            options=kept,
            key=key,
            result=spec,
            tools=given,
            models=models,
            thinking=thinking or self.setup.options.thinking,
            timeout=timeout,
            meter=Meter(budget or self.setup.options.budget, self.meter),
        )

    def _revive(self, work: Work) -> Job:
        """Work that another process has left, as far as its record tells what it was."""
        options = work.options
        named = {one.name: one for one in self.setup.options.model if not isinstance(one, str)}
        models = [named.get(name, name) for name in options.get("model", ())]
        result = options.get("result")

        async def compose() -> UserMessage:
            return work.message or UserMessage(())

        meter = Meter(self.setup.options.budget, self.meter)
        meter.add(work.usage, turns=work.turns)
        return Prompting(
            session=self,
            work_id=work.id,
            kind=work.kind,
            compose=compose,
            options=options,
            key=work.key,
            result=None if result is None else ResultSpec.of(result),
            tools={},
            models=models or self.setup.options.model,
            thinking=options.get("thinking") or self.setup.options.thinking,
            timeout=options.get("timeout"),
            meter=meter,
            message=work.message,
        )

    def _check(self) -> None:
        if self.deleted:
            raise NotFound(
                f"the session {self.name!r} was deleted.",
                hint="Open it again: await harness.session(...).",
                kind="session",
                name=self.name,
            )

    @property
    def system(self) -> str:
        """The system prompt, which stays as it was when the session began."""
        created = self.journal.conversation.created
        return "" if created is None else created.system

    def tools(self, job: Prompting, operation: Operation[Any]) -> Mapping[str, Tool]:
        """The tools of the agent, in the order that the session began with."""
        return self.setup.tools

    def gate(self, work_id: str, operation: Operation[Any]) -> Gate | None:
        """What calls have to pass; None where all may run."""
        return None

    async def load_image(self, image: Image) -> bytes:
        """The bytes of an image of the conversation."""
        return await self.journal.store.get_blob(image.blob)

    async def shorten(self) -> bool:
        return False

    async def settle(self) -> None:
        return None
