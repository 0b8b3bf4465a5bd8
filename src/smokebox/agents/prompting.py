"""A prompt as a job: everything that the loop needs for one, put together."""

from __future__ import annotations

from dataclasses import dataclass, field
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from smokebox.agents.budget import Budget, Meter
from smokebox.agents.calls import Calls
from smokebox.agents.compactor import Compactor
from smokebox.agents.finish import Finish
from smokebox.agents.gate import Gate
from smokebox.agents.handin import HandIn
from smokebox.agents.job import Ending
from smokebox.agents.log.records import UserSaid, WorkAccepted
from smokebox.agents.loop import Loop
from smokebox.agents.messages import AssistantMessage, UserMessage
from smokebox.agents.options import check_models, check_thinking
from smokebox.agents.reply import Reply
from smokebox.agents.results import FINISH, GIVE_UP, ResultSpec
from smokebox.agents.setup import by_name, specs_of
from smokebox.agents.tasks import Tasks
from smokebox.agents.telemetry import span_agent
from smokebox.agents.tools.abort import AbortSignal
from smokebox.agents.tools.function import as_tools
from smokebox.agents.tools.toolcontext import ToolContext
from smokebox.agents.turn import Asking
from smokebox.options import check_timeout

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from smokebox.agents.log.records import Record, WorkEnded, WorkKind
    from smokebox.agents.log.work import PendingCall, Work
    from smokebox.agents.messages import Usage
    from smokebox.agents.model import Model, ThinkingLevel
    from smokebox.agents.operation import Operation
    from smokebox.agents.options import ModelChoice
    from smokebox.agents.session import Session
    from smokebox.agents.tools.tool import Tool


@dataclass(slots=True, kw_only=True)
class Prompting:
    """Answers a message of a session."""

    session: Session
    work_id: str
    kind: WorkKind
    compose: Callable[[], Awaitable[UserMessage]]
    options: dict[str, Any]
    key: str | None
    result: ResultSpec[Any] | None
    tools: Mapping[str, Tool]
    models: Sequence[ModelChoice]
    thinking: ThinkingLevel | None
    timeout: float | None
    meter: Meter
    message: UserMessage | None = None
    aborted: AbortSignal = field(default_factory=AbortSignal)

    @property
    def usage(self) -> Usage:
        """What it took up to now."""
        return self.meter.usage

    async def accept(self) -> WorkAccepted:
        """Put the message together, with its images beside the record."""
        self.message = await self.compose()
        return WorkAccepted(self.work_id, self.kind, self.message, self.options, self.key)

    def begin(self) -> list[Record]:
        """What the model is told; before that, what has changed since it was told last."""
        said: list[Record] = list(self.session.changes())
        if self.message is not None:
            said.append(UserSaid(self.work_id, self.message))
        return said

    def stop(self) -> None:
        """Tell tools that run in threads."""
        self.aborted.set("the work was called off")

    async def run(self, operation: Operation[Any], joins: Callable[[], bool]) -> Ending:
        """Take turns to the end."""
        session = self.session
        models = await session.harness.models(self.models)
        hand_in = None if self.result is None else HandIn(self.result, models)
        pending = session.journal.conversation.pending_calls
        loop = self._loop(operation, joins, models, hand_in, pending)
        agent = session.setup.agent.name
        with span_agent(agent, session=str(session.key), model=models[0].name) as span:
            finish = await self._resumed(hand_in, pending)
            if finish is None:
                finish = await loop.run([one.call for one in pending], _attempts(pending))
            span.used(self.usage)
        reply = Reply(
            text=finish.text,
            data=finish.data,
            model=finish.model,
            usage=self.usage,
            stopped=finish.stopped,
        )
        return Ending(value=reply, text=finish.text, result=finish.result)

    def restore(self, end: WorkEnded) -> Ending:
        """What it came to, from the record."""
        data = None if self.result is None else restored_data(self.result, end.result)
        reply = Reply(text=end.text, data=data, usage=end.usage)
        return Ending(value=reply, text=end.text, result=end.result)

    def _loop(
        self,
        operation: Operation[Any],
        joins: Callable[[], bool],
        models: Sequence[Model],
        hand_in: HandIn[Any] | None,
        pending: Sequence[PendingCall],
    ) -> Loop:
        session, options = self.session, self.session.setup.options
        tools = self._tools(operation, hand_in, pending)
        compactor = Compactor(
            work_id=self.work_id,
            journal=session.journal,
            emit=operation.emit,
            meter=self.meter,
            options=options.compaction or None,
            open=session.harness.model,
        )
        asking = Asking(
            work_id=self.work_id,
            journal=session.journal,
            emit=operation.emit,
            models=models,
            system=session.system,
            tools=specs_of(tools.values()),
            thinking=self.thinking,
            result=None if hand_in is None else hand_in.schema,
            durability=options.durability,
            load=session.load_image,
            shorten=compactor.shorten,
        )
        calls = Calls(
            work_id=self.work_id,
            journal=session.journal,
            emit=operation.emit,
            tools=tools,
            context=self._context(),
            gate=self._gate(operation),
        )
        return Loop(
            work_id=self.work_id,
            journal=session.journal,
            emit=operation.emit,
            asking=asking,
            calls=calls,
            meter=self.meter,
            hand_in=hand_in,
            joins=joins,
            settle=compactor.settle,
        )

    def _tools(
        self,
        operation: Operation[Any],
        hand_in: HandIn[Any] | None,
        pending: Sequence[PendingCall],
    ) -> dict[str, Tool]:
        """Those of the session first and in their order, so that a provider's cache holds."""
        session = self.session
        tasks = Tasks(
            session=session,
            work_id=self.work_id,
            emit=operation.emit,
            meter=self.meter,
            known={one.call.id: one.task for one in pending if one.task is not None},
        )
        tools = {**session.tools(tasks), **self.tools}
        if hand_in is not None:
            tools.update((tool.name, tool) for tool in hand_in.tools())
        return tools

    def _gate(self, operation: Operation[Any]) -> Gate | None:
        session, approval = self.session, self.session.setup.options.approval
        if approval is None:
            return None
        return Gate(
            work_id=self.work_id,
            approval=approval,
            desk=session.desk,
            journal=session.journal,
            emit=operation.emit,
        )

    def _context(self) -> ToolContext:
        session = self.session
        return ToolContext(
            session=str(session.key),
            sandbox=session.setup.workspace,
            env=session.harness.env,
            harness=session.harness,
            aborted=self.aborted,
        )

    async def _resumed(
        self, hand_in: HandIn[Any] | None, pending: Sequence[PendingCall]
    ) -> Finish | None:
        """The end that the record already has, for work that was killed right before it."""
        conversation = self.session.journal.conversation
        work = conversation.work.get(self.work_id)
        reply = None if work is None else work.reply
        if reply is None or pending:
            return None
        last = conversation.messages[-1] if conversation.messages else None
        if hand_in is not None:
            for call in reply.calls:
                if call.name in (FINISH, GIVE_UP):
                    await hand_in.replay(call)
            if not reply.calls and isinstance(last, AssistantMessage):
                hand_in.read(reply.text)
            return hand_in.finish(reply.text, reply.model)
        if isinstance(last, AssistantMessage) and not reply.calls:
            return Finish(text=reply.text, model=reply.model)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a prompt asks for besides its text."""

    result: Any = None
    tools: Sequence[Any] = ()
    model: Any = None
    thinking: ThinkingLevel | None = None
    timeout: float | None = None
    budget: Budget | None = None
    key: str | None = None

    @property
    def plain(self) -> bool:
        """Whether it asks for nothing of that."""
        return self == Wishes(timeout=self.timeout, key=self.key)


def new_prompting(
    session: Session,
    kind: WorkKind,
    compose: Callable[[], Awaitable[UserMessage]],
    wishes: Wishes,
) -> Prompting:
    """A prompt that was not asked for before."""
    options = session.setup.options
    check_thinking(wishes.thinking)
    result = wishes.result
    spec = result if result is None or isinstance(result, ResultSpec) else ResultSpec.of(result)
    models = check_models(wishes.model)
    kept: dict[str, Any] = {
        "result": None if spec is None else spec.schema,
        "model": [one if isinstance(one, str) else one.name for one in models] or None,
        "thinking": wishes.thinking,
        "timeout": check_timeout(wishes.timeout),
    }
    return Prompting(
        session=session,
        work_id=token_hex(8),
        kind=kind,
        compose=compose,
        options={name: value for name, value in kept.items() if value is not None},
        key=wishes.key,
        result=spec,
        tools=by_name(as_tools(wishes.tools)),
        models=models or options.model,
        thinking=wishes.thinking or options.thinking,
        timeout=wishes.timeout,
        meter=Meter(wishes.budget or options.budget, session.meter),
    )


def revived_prompting(session: Session, work: Work) -> Prompting:
    """A prompt that a killed process has left, as far as the record tells what it was.

    Tools that were given with it are gone, and its result is what JSON decodes to.
    """
    options, kept = session.setup.options, work.options
    objects = {one.name: one for one in options.model if not isinstance(one, str)}
    result = kept.get("result")

    async def compose() -> UserMessage:
        return work.message or UserMessage(())

    meter = Meter(options.budget, session.meter)
    meter.add(work.usage, turns=work.turns)
    return Prompting(
        session=session,
        work_id=work.id,
        kind=work.kind,
        compose=compose,
        options=kept,
        key=work.key,
        result=None if result is None else ResultSpec.of(result),
        tools={},
        models=[objects.get(name, name) for name in kept.get("model", ())] or options.model,
        thinking=kept.get("thinking") or options.thinking,
        timeout=kept.get("timeout"),
        meter=meter,
        message=work.message,
    )


def restored_data(spec: ResultSpec[Any], kept: Any) -> Any:
    """The result that the record has. One of revived work is still in its wrapper."""
    try:
        return spec.restore(kept)
    except ValueError:
        if isinstance(kept, dict) and set(kept) == {"result"}:
            return spec.restore(kept["result"])
        raise


def _attempts(pending: Sequence[PendingCall]) -> dict[str, int]:
    return {one.call.id: 1 for one in pending if one.started}
