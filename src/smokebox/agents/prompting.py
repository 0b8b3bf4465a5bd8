"""A prompt as a job: everything that the loop needs for one, put together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from smokebox.agents.calls import Calls
from smokebox.agents.finish import Finish
from smokebox.agents.handin import HandIn
from smokebox.agents.job import Ending
from smokebox.agents.log.records import UserSaid, WorkAccepted
from smokebox.agents.loop import Loop
from smokebox.agents.messages import AssistantMessage
from smokebox.agents.reply import Reply
from smokebox.agents.results import FINISH, GIVE_UP
from smokebox.agents.setup import specs_of
from smokebox.agents.telemetry import span_agent
from smokebox.agents.tools.abort import AbortSignal
from smokebox.agents.tools.toolcontext import ToolContext
from smokebox.agents.turn import Asking
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from smokebox.agents.budget import Meter
    from smokebox.agents.log.records import Record, WorkEnded, WorkKind
    from smokebox.agents.log.work import PendingCall
    from smokebox.agents.messages import Usage, UserMessage
    from smokebox.agents.model import Model, ThinkingLevel
    from smokebox.agents.operation import Operation
    from smokebox.agents.options import ModelChoice
    from smokebox.agents.results import ResultSpec
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
        """What the model is told."""
        return [] if self.message is None else [UserSaid(self.work_id, self.message)]

    def stop(self) -> None:
        """Tell tools that run in threads."""
        self.aborted.set("the work was called off")

    async def run(self, operation: Operation[Any], joins: Callable[[], bool]) -> Ending:
        """Take turns to the end."""
        session = self.session
        models = [await session.harness.model(choice) for choice in self.models]
        if not models:
            raise InvalidOption(
                "the agent has no model, and the prompt names none.",
                hint="Write create_agent(model='anthropic/claude-sonnet-4-6'), or model=.",
                option="model",
            )
        hand_in = None if self.result is None else HandIn(self.result, models)
        loop = self._loop(operation, joins, models, hand_in)
        pending = session.journal.conversation.pending_calls
        with span_agent(
            session.setup.agent.name, session=str(session.key), model=models[0].name
        ) as span:
            finish = await self._resumed(hand_in, pending)
            if finish is None:
                finish = await loop.run([one.call for one in pending], _attempts(pending))
            span.used(self.usage)
        return self._ending(finish)

    def restore(self, end: WorkEnded) -> Ending:
        """What it came to, from the record."""
        data = None
        if self.result is not None and end.result is not None:
            data = self.result.restore(end.result)
        reply = Reply(text=end.text, data=data, usage=end.usage)
        return Ending(value=reply, text=end.text, result=end.result)

    def _ending(self, finish: Finish) -> Ending:
        reply = Reply(
            text=finish.text,
            data=finish.data,
            model=finish.model,
            usage=self.usage,
            stopped=finish.stopped,
        )
        return Ending(value=reply, text=finish.text, result=finish.result)

    def _loop(
        self,
        operation: Operation[Any],
        joins: Callable[[], bool],
        models: list[Model],
        hand_in: HandIn[Any] | None,
    ) -> Loop:
        session, work_id = self.session, self.work_id
        tools = {**session.tools(self, operation), **self.tools}
        if hand_in is not None:
            tools.update((tool.name, tool) for tool in hand_in.tools())
        asking = Asking(
            work_id=work_id,
            journal=session.journal,
            emit=operation.emit,
            models=models,
            system=session.system,
            tools=specs_of(tools.values()),
            thinking=self.thinking,
            result=None if hand_in is None else hand_in.schema,
            durability=session.setup.options.durability,
            load=session.load_image,
            shorten=session.shorten,
        )
        calls = Calls(
            work_id=work_id,
            journal=session.journal,
            emit=operation.emit,
            tools=tools,
            context=self._context(),
            gate=session.gate(work_id, operation),
        )
        return Loop(
            work_id=work_id,
            journal=session.journal,
            emit=operation.emit,
            asking=asking,
            calls=calls,
            meter=self.meter,
            hand_in=hand_in,
            joins=joins,
            settle=session.settle,
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
        if hand_in is not None:
            for call in reply.calls:
                if call.name in (FINISH, GIVE_UP):
                    await hand_in.replay(call)
            if hand_in.done or hand_in.given_up or hand_in.read(reply.text):
                return hand_in.finish(reply.text, reply.model)
            return None
        if isinstance(conversation.messages[-1], AssistantMessage) and not reply.calls:
            return Finish(text=reply.text, model=reply.model)
        return None


def _attempts(pending: Sequence[PendingCall]) -> dict[str, int]:
    return {one.call.id: 1 for one in pending if one.started}
