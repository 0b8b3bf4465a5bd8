"""A prompt as a job: everything that the loop needs for one, put together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from smokebox.agents.approval import ApprovalCheck
from smokebox.agents.log.records import MessageAdded, WorkAccepted
from smokebox.agents.messages import AssistantMessage, UserMessage
from smokebox.agents.options import check_models, check_thinking
from smokebox.agents.results import FINISH, GIVE_UP, LoopResult, Reply, ResultCollector, ResultSpec
from smokebox.agents.setup import by_name, specs_of
from smokebox.agents.telemetry import span_agent
from smokebox.agents.tools.function import as_tools
from smokebox.agents.tools.tool import AbortSignal, ToolContext
from smokebox.agents.work.compaction import Compactor
from smokebox.agents.work.item import WorkItem, WorkResult
from smokebox.agents.work.loop import Loop, ModelRequester
from smokebox.agents.work.task import TaskRunner
from smokebox.agents.work.tool_calls import ToolRunner
from smokebox.options import check_timeout

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from smokebox.agents.limits import Budget
    from smokebox.agents.log.records import Record, WorkEnded, WorkKind
    from smokebox.agents.log.work_state import PendingCall, WorkState
    from smokebox.agents.model import Model, ThinkingLevel
    from smokebox.agents.options import ModelChoice
    from smokebox.agents.session_context import SessionContext
    from smokebox.agents.tools.tool import Tool
    from smokebox.agents.work.item import WorkContext


@dataclass(slots=True, kw_only=True)
class PromptItem(WorkItem):
    """Answers a message with the model and tools of a session."""

    compose: Callable[[], Awaitable[UserMessage]]
    options: dict[str, Any]
    result: ResultSpec[Any] | None
    tools: Mapping[str, Tool]
    models: Sequence[ModelChoice]
    thinking: ThinkingLevel | None
    message: UserMessage | None = None
    aborted: AbortSignal = field(default_factory=AbortSignal)

    async def accept(self) -> WorkAccepted:
        """Put the message together, with its images beside the record."""
        self.message = await self.compose()
        return WorkAccepted(self.work_id, self.kind, self.message, self.options, self.key)

    def begin(self) -> list[Record]:
        """What the model is told; before that, what has changed since it was told last."""
        said: list[Record] = list(self.session.changes())
        if self.message is not None:
            said.append(MessageAdded(self.work_id, self.message))
        return said

    def stop(self) -> None:
        """Tell tools that run in threads."""
        self.aborted.set("the work was called off")

    async def run(self, ctx: WorkContext) -> WorkResult:
        """Request the model and run its tool calls until it has answered."""
        session = self.session
        models = await session.registry.models.open_all(self.models)
        collector = None if self.result is None else ResultCollector(self.result, models)
        pending = session.event_log.conversation.pending_calls
        loop = self._loop(ctx, models, collector, pending)
        agent = session.setup.agent.name
        with span_agent(agent, session=str(session.key), model=models[0].name) as span:
            finish = await self._resumed(collector, pending)
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
        return WorkResult(value=reply, text=finish.text, result=finish.result)

    def restore(self, end: WorkEnded) -> WorkResult:
        """What it came to, from the record."""
        data = None if self.result is None else self.result.restore(end.result)
        reply = Reply(text=end.text, data=data, usage=end.usage)
        return WorkResult(value=reply, text=end.text, result=end.result)

    def _loop(
        self,
        ctx: WorkContext,
        models: Sequence[Model],
        collector: ResultCollector[Any] | None,
        pending: Sequence[PendingCall],
    ) -> Loop:
        options = self.session.setup.options
        tools = self._tools(ctx, collector, pending)
        compactor = Compactor(work=ctx, options=options.compaction or None)
        approval = options.approval
        return Loop(
            work=ctx,
            requester=ModelRequester(
                work=ctx,
                models=models,
                tools=specs_of(tools.values()),
                thinking=self.thinking,
                result=None if collector is None else collector.schema,
                shorten=compactor.shorten,
            ),
            calls=ToolRunner(
                work=ctx,
                tools=tools,
                context=self._context(),
                approval=None if approval is None else ApprovalCheck(work=ctx, approval=approval),
            ),
            collector=collector,
            settle=compactor.settle,
        )

    def _tools(
        self,
        ctx: WorkContext,
        collector: ResultCollector[Any] | None,
        pending: Sequence[PendingCall],
    ) -> dict[str, Tool]:
        """Tools of the session first and in their order, so that a provider's cache holds."""
        known = {one.call.id: one.task for one in pending if one.task is not None}
        tools = {**self.session.tools(TaskRunner(work=ctx, known=known)), **self.tools}
        if collector is not None:
            tools.update((tool.name, tool) for tool in collector.tools())
        return tools

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
        self, collector: ResultCollector[Any] | None, pending: Sequence[PendingCall]
    ) -> LoopResult | None:
        """The end that the record already has, for work that was killed right before it."""
        conversation = self.session.event_log.conversation
        work = conversation.work.get(self.work_id)
        reply = None if work is None else work.reply
        if reply is None or pending:
            return None
        last = conversation.messages[-1] if conversation.messages else None
        if collector is not None:
            for call in reply.calls:
                if call.name in (FINISH, GIVE_UP):
                    await collector.replay(call)
            if not reply.calls and isinstance(last, AssistantMessage):
                collector.read(reply.text)
            return collector.finish(reply.text, reply.model)
        if isinstance(last, AssistantMessage) and not reply.calls:
            return LoopResult(text=reply.text, model=reply.model)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSettings:
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
        return self == PromptSettings(timeout=self.timeout, key=self.key)


def new_prompt(
    session: SessionContext,
    kind: WorkKind,
    compose: Callable[[], Awaitable[UserMessage]],
    settings: PromptSettings,
) -> PromptItem:
    """A prompt that was not asked for before."""
    options = session.setup.options
    check_thinking(settings.thinking)
    result = settings.result
    spec = result if result is None or isinstance(result, ResultSpec) else ResultSpec.of(result)
    models = check_models(settings.model)
    kept: dict[str, Any] = {
        "result": None if spec is None else spec.schema,
        "model": [one if isinstance(one, str) else one.name for one in models] or None,
        "thinking": settings.thinking,
        "timeout": check_timeout(settings.timeout),
    }
    return PromptItem(
        session=session,
        kind=kind,
        compose=compose,
        options={name: value for name, value in kept.items() if value is not None},
        key=settings.key,
        result=spec,
        tools=by_name(as_tools(settings.tools)),
        models=models or options.model,
        thinking=settings.thinking or options.thinking,
        timeout=settings.timeout,
        meter=session.new_meter(settings.budget),
    )


def resumed_prompt(session: SessionContext, work: WorkState) -> PromptItem:
    """A prompt that a killed process has left, as far as the record tells what it was.

    Tools that were given with it are gone, and its result is what JSON decodes to.
    """
    options, kept = session.setup.options, work.options
    objects = {one.name: one for one in options.model if not isinstance(one, str)}
    result = kept.get("result")

    async def compose() -> UserMessage:
        return work.message or UserMessage(())

    meter = session.new_meter()
    meter.add(work.usage, turns=work.turns)
    return PromptItem(
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


def _attempts(pending: Sequence[PendingCall]) -> dict[str, int]:
    return {one.call.id: 1 for one in pending if one.started}
