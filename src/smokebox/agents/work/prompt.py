"""The work item of a prompt: composes the message, and sets up the loop that answers it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from smokebox.agents.log.records import MessageAdded, WorkAccepted
from smokebox.agents.messages import AssistantMessage, Text, UserMessage
from smokebox.agents.options import check_models, check_thinking
from smokebox.agents.results import FINISH, GIVE_UP, Reply, ResultCollector, ResultSpec
from smokebox.agents.setup import by_name
from smokebox.agents.telemetry import span_agent
from smokebox.agents.tools.function import as_tools
from smokebox.agents.tools.tool import AbortSignal, ToolContext
from smokebox.agents.work.checkpoint import Checkpointer
from smokebox.agents.work.compaction import Compactor
from smokebox.agents.work.item import WorkItem, WorkResult
from smokebox.agents.work.loop import Loop, ModelRequester
from smokebox.agents.work.task import TaskRunner
from smokebox.agents.work.tool_calls import ToolRunner
from smokebox.options import check_timeout

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from smokebox.agents.log.conversation import PendingCall, WorkState
    from smokebox.agents.log.records import Record, WorkEnded, WorkKind
    from smokebox.agents.model import Model, ThinkingLevel
    from smokebox.agents.options import ModelChoice, PromptOptions
    from smokebox.agents.session_context import SessionContext
    from smokebox.agents.tools.tool import Tool
    from smokebox.agents.work.item import WorkContext


@dataclass(slots=True, kw_only=True)
class PromptItem(WorkItem):
    """Answers a message with the models and tools of a session."""

    compose: Callable[[], Awaitable[UserMessage]]
    options: dict[str, Any]
    result: ResultSpec[Any] | None
    tools: Mapping[str, Tool]
    models: Sequence[ModelChoice]
    thinking: ThinkingLevel | None
    message: UserMessage | None = None
    aborted: AbortSignal = field(default_factory=AbortSignal)

    async def accept(self) -> WorkAccepted:
        """Compose the message, and store its images."""
        self.message = await self.compose()
        return WorkAccepted(self.work_id, self.kind, self.message, self.options, self.key)

    def begin(self) -> list[Record]:
        """Return the changes since the last turn, and the message."""
        records: list[Record] = list(self.session.changes())
        if self.message is not None:
            records.append(MessageAdded(self.work_id, self.message))
        return records

    def stop(self) -> None:
        """Signal tools that run in threads."""
        self.aborted.set("the work was aborted")

    async def run(self, ctx: WorkContext) -> WorkResult:
        """Request replies and run tool calls until the message is answered."""
        session = self.session
        models = await session.registry.models.open_all(self.models)
        collector = None if self.result is None else ResultCollector(self.result, models)
        pending = ctx.event_log.conversation.pending_calls
        loop = self._loop(ctx, models, collector, pending)
        agent, key = session.setup.agent.name, str(ctx.event_log.key)
        with span_agent(agent, session=key, model=models[0].name) as span:
            reply = None if pending else await self._recorded_reply(ctx, collector)
            if reply is None:
                attempts = {one.call.id: 1 for one in pending if one.started}
                reply = await loop.run([one.call for one in pending], attempts)
            span.used(self.meter.usage)
        result = None if self.result is None else self.result.dump(reply.data)
        return WorkResult(value=reply, text=reply.text, result=result)

    def restore(self, end: WorkEnded) -> WorkResult:
        """Return the reply that the log has."""
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
        setup = self.session.setup
        child_sessions = {one.call.id: one.task for one in pending if one.task is not None}
        # The tools of the session come first and in their order, so that providers can cache them.
        tools = {**self.session.tools(TaskRunner(work=ctx, known=child_sessions)), **self.tools}
        if collector is not None:
            tools.update((tool.name, tool) for tool in collector.tools())
        work = ctx.event_log.conversation.work.get(self.work_id)
        compactor = Compactor(work=ctx, options=setup.options.compaction or None)
        return Loop(
            work=ctx,
            requester=ModelRequester(
                work=ctx,
                models=models,
                system=self.session.system,
                tools=list(tools.values()),
                thinking=self.thinking,
                result=None if collector is None else collector.schema,
                shorten=compactor.shorten,
            ),
            tools=ToolRunner(
                work=ctx,
                tools=tools,
                context=ToolContext(
                    session=str(ctx.event_log.key),
                    sandbox=setup.workspace,
                    env=self.session.registry.ctx.env,
                    harness=self.session.registry.harness,
                    aborted=self.aborted,
                ),
                approval=setup.options.approval,
            ),
            collector=collector,
            compact=compactor.compact_if_needed,
            checkpoints=Checkpointer(
                work=ctx, prompt=_text_of(self.message), turns=0 if work is None else work.turns
            ),
        )

    async def _recorded_reply(
        self, ctx: WorkContext, collector: ResultCollector[Any] | None
    ) -> Reply[Any] | None:
        """Return the reply that the log has if the process was killed just before the end."""
        conversation = ctx.event_log.conversation
        work = conversation.work.get(self.work_id)
        message = None if work is None else work.reply
        if message is None:
            return None
        last = conversation.messages[-1] if conversation.messages else None
        answered = isinstance(last, AssistantMessage) and not message.calls
        if collector is not None:
            for call in message.calls:
                if call.name in (FINISH, GIVE_UP):
                    await collector.replay(call)
            if answered:
                collector.read(message.text)
            if not collector.finished(message.text):
                return None
        elif not answered:
            return None
        return Reply(
            text=message.text,
            data=None if collector is None else collector.value,
            model=message.model,
            usage=self.meter.usage,
        )


def _text_of(message: UserMessage | None) -> str:
    parts = () if message is None else message.parts
    return " ".join(part.text for part in parts if isinstance(part, Text))


def new_prompt(
    session: SessionContext,
    kind: WorkKind,
    compose: Callable[[], Awaitable[UserMessage]],
    result: Any,
    options: PromptOptions,
) -> PromptItem:
    """Return the work item of a new prompt. Raises `InvalidOption`."""
    defaults = session.setup.options
    thinking = check_thinking(options.get("thinking"))
    models = check_models(options.get("model"))
    timeout = check_timeout(options.get("timeout"))
    spec = result if result is None or isinstance(result, ResultSpec) else ResultSpec.of(result)
    stored: dict[str, Any] = {
        "result": None if spec is None else spec.schema,
        "model": [one if isinstance(one, str) else one.name for one in models] or None,
        "thinking": thinking,
        "timeout": timeout,
    }
    tools = options.get("tools")
    return PromptItem(
        session=session,
        kind=kind,
        compose=compose,
        options={name: value for name, value in stored.items() if value is not None},
        key=options.get("key"),
        result=spec,
        tools=by_name(as_tools(tools)) if tools else {},
        models=models or defaults.model,
        thinking=thinking or defaults.thinking,
        timeout=timeout,
        meter=session.new_meter(options.get("budget")),
    )


def resumed_prompt(session: SessionContext, work: WorkState) -> PromptItem:
    """Return the work item of a prompt that a killed process left unfinished.

    Tools that were passed with it are lost, and its result is decoded JSON.
    """
    defaults, options = session.setup.options, work.options
    objects = {one.name: one for one in defaults.model if not isinstance(one, str)}
    result = options.get("result")

    async def compose() -> UserMessage:
        return work.message or UserMessage(())

    meter = session.new_meter()
    meter.add(work.usage, turns=work.turns)
    return PromptItem(
        session=session,
        work_id=work.id,
        kind=work.kind,
        compose=compose,
        options=options,
        key=work.key,
        result=None if result is None else ResultSpec.of(result),
        tools={},
        models=[objects.get(name, name) for name in options.get("model", ())] or defaults.model,
        thinking=options.get("thinking") or defaults.thinking,
        timeout=options.get("timeout"),
        meter=meter,
        message=work.message,
    )
