"""The state of a session, built from its records: the messages a model sees, and pending work.

Any prefix of a log, wherever a crash cut it off, yields messages that a provider accepts: the
results of all tool calls follow the calls, and no message is empty.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from smokebox.agents.log.records import (
    AbortRequested,
    ApprovalDecided,
    ApprovalRequested,
    CheckpointTaken,
    Compacted,
    MessageAdded,
    ReplyDelta,
    ReplyEnded,
    ReplyFailed,
    ReplyStarted,
    ResourcesChanged,
    SessionCreated,
    TaskEnded,
    TaskStarted,
    ToolEnded,
    ToolStarted,
    WorkAccepted,
    WorkEnded,
    WorkStarted,
)
from smokebox.agents.log.store import SessionKey
from smokebox.agents.messages import (
    AssistantMessage,
    NativePart,
    Text,
    Thinking,
    ToolCall,
    ToolReturn,
    ToolReturns,
    Usage,
    UserMessage,
)

if TYPE_CHECKING:
    from smokebox.agents.events import Outcome
    from smokebox.agents.log.records import Record, StoredRecord, WorkKind
    from smokebox.agents.log.store import SessionStore
    from smokebox.agents.messages import AssistantPart, Message, UserPart


CHARACTERS_PER_TOKEN = 4
IMAGE_TOKENS = 1200
# Overhead of a message.
_MESSAGE_TOKENS = 4
_PAGE = 1000

SUMMARY = "summary"
"""Signal of the message that replaces compacted messages."""
PREFACE = "This is a summary of the conversation up to here, made to save room."
UNKNOWN = (
    "It is not known what this call did: the process that ran it was killed before it ended. "
    "It may have had its effect, in part or in whole, and was not run again. Check before you "
    "repeat it."
)
NOT_RUN = "This call was not run: the work ended before."


def estimate(message: Message) -> int:
    """Estimate the tokens of a message."""
    match message:
        case UserMessage() | AssistantMessage():
            size = sum(_part_tokens(part) for part in message.parts)
        case ToolReturns():
            size = sum(
                _text_tokens(result.text) + IMAGE_TOKENS * len(result.images)
                for result in message.returns
            )
    return size + _MESSAGE_TOKENS


def _estimate_prefix(created: SessionCreated) -> int:
    """Estimate the tokens of the system prompt and the tools."""
    tools = sum(_text_tokens(json.dumps(tool)) for tool in created.tools)
    return _text_tokens(created.system) + tools


def _part_tokens(part: UserPart | AssistantPart) -> int:
    match part:
        case Text() | Thinking():
            return _text_tokens(part.text)
        case ToolCall():
            return _text_tokens(part.name) + _text_tokens(part.arguments)
        case NativePart():
            return _text_tokens(json.dumps(part.data))
        case _:
            return IMAGE_TOKENS


def _text_tokens(text: str) -> int:
    return len(text) // CHARACTERS_PER_TOKEN + 1


def _without_blank_text(message: Message) -> Message | None:
    """Return the message without blank text, or None if nothing is left to send.

    A reply of thinking alone counts as nothing: most providers reject it. The same object is
    returned if there is nothing to remove.
    """
    match message:
        case UserMessage():
            parts = tuple(part for part in message.parts if not _is_blank(part))
            if len(parts) == len(message.parts) and parts:
                return message
            return UserMessage(parts, signal=message.signal) if parts else None
        case AssistantMessage():
            kept = tuple(part for part in message.parts if not _is_blank(part))
            if all(isinstance(part, Thinking) for part in kept):
                return None
            if len(kept) == len(message.parts):
                return message
            return AssistantMessage(
                parts=kept, model=message.model, stop=message.stop, usage=message.usage
            )
        case _:
            return message


def _is_blank(part: UserPart | AssistantPart) -> bool:
    return isinstance(part, Text) and not part.text.strip()


@dataclass(slots=True, kw_only=True)
class WorkState:
    """An accepted work item.

    `applied` is set once the model has its message. `turns` and `usage` count all attempts.
    `reply` is the last complete reply. `message` and `options` are dropped at the end.
    """

    id: str
    kind: WorkKind
    accepted_at: float
    message: UserMessage | None = None
    options: dict[str, Any] = field(default_factory=dict)
    key: str | None = None
    attempts: int = 0
    applied: bool = False
    aborting: bool = False
    turns: int = 0
    usage: Usage = field(default_factory=Usage)
    reply: AssistantMessage | None = None
    end: WorkEnded | None = None


ApprovalState: TypeAlias = Literal["none", "requested", "allowed", "denied"]


@dataclass(slots=True, kw_only=True)
class PendingCall:
    """A tool call that has not ended. Once `started`, the tool may have had an effect.

    `task` is the child session that does it; `reason` is why approval was denied.
    """

    call: ToolCall
    work_id: str
    started: bool = False
    durable: bool = False
    task: str | None = None
    approval: ApprovalState = "none"
    reason: str = ""


@dataclass(slots=True, kw_only=True)
class ChildTask:
    """A task in a child session; `outcome` is None while it runs."""

    session: str
    work_id: str
    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The files of the workspace as they were after a turn; 0 is before the first of a prompt.

    Attributes:
        id: Id of its snapshot: of a Linux sandbox, `smokebox snapshot` knows it too.
        description: What was done until then.
        turn: Number of the turn.
        created_at: Seconds since the epoch.
        work_id: Id of the operation.
        session: Name of the session that it was taken in, if this one was forked from it.
        offset: Offset of its record in that session.
        in_blob: The store of the conversation has the snapshot.
    """

    id: str
    description: str
    turn: int
    created_at: float
    work_id: str
    session: str | None
    offset: int
    in_blob: bool


@dataclass(slots=True, kw_only=True)
class PartialReply:
    """A reply that has not ended."""

    id: str
    work_id: str
    text: str = ""


@dataclass(slots=True, kw_only=True)
class _CallBatch:
    """The tool calls of one reply, and the results so far."""

    message: AssistantMessage
    work_id: str
    calls: dict[str, PendingCall]
    ended: dict[str, ToolReturn] = field(default_factory=dict)

    @property
    def pending(self) -> list[PendingCall]:
        return [pending for id, pending in self.calls.items() if id not in self.ended]

    def returns(self) -> ToolReturns:
        """Return a result for every call, in the order of the calls."""
        return ToolReturns(tuple(map(self._return, self.calls.values())))

    def _return(self, pending: PendingCall) -> ToolReturn:
        call = pending.call
        if call.id in self.ended:
            return self.ended[call.id]
        return ToolReturn(
            call.id, call.name, UNKNOWN if pending.started else NOT_RUN, is_error=True
        )


@dataclass(slots=True)
class Conversation:
    """The state of a session after the records that were applied.

    Attributes:
        messages: Messages that the model sees. The list grows at its end, and is replaced by
            another when the conversation is compacted.
        positions: For each message the position at which a `Compacted` may cut before it;
            messages that must stay together have the same one.
        base: Position before the first record; not 0 in a fork.
        head: Offset of the last record.
        resources: The record with the current tools.
        keys: Ids of work items by idempotency key.
        tokens: Estimate of the tokens that a model has to read.
        call_ids: Ids of all tool calls.
        checkpoints: States of the workspace that can be restored, oldest first.
    """

    messages: list[Message] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    base: int = 0
    head: int = 0
    created: SessionCreated | None = None
    resources: SessionCreated | ResourcesChanged | None = None
    work: dict[str, WorkState] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    tasks: dict[str, ChildTask] = field(default_factory=dict)
    replies: dict[str, PartialReply] = field(default_factory=dict)
    usage: Usage = field(default_factory=Usage)
    summary: str | None = None
    tokens: int = 0
    call_ids: set[str] = field(default_factory=set)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    _batch: _CallBatch | None = None
    # Messages that arrived while tools ran: they come after the results of the tools.
    _held: list[UserMessage] = field(default_factory=list)

    @classmethod
    async def load(cls, store: SessionStore, key: SessionKey, *, until: int | None = None) -> Self:
        """Apply the records of a session in a store, all or up to an offset."""
        conversation = cls()
        while page := await store.read(key, after=conversation.head, limit=_PAGE):
            for stored in page:
                if until is not None and stored.offset > until:
                    return conversation
                record = stored.record
                if isinstance(record, SessionCreated) and record.forked_from is not None:
                    origin = SessionKey(key.agent, key.id, record.forked_from)
                    inherited = await cls.load(store, origin, until=record.forked_at)
                    conversation._inherit(inherited, record.forked_from)
                conversation.apply(stored)
        return conversation

    @property
    def unfinished(self) -> list[WorkState]:
        """Work items that have not ended, in the order of acceptance."""
        return [work for work in self.work.values() if work.end is None]

    @property
    def pending_calls(self) -> list[PendingCall]:
        """Tool calls of the last reply that have not ended, in the order of the calls."""
        return [] if self._batch is None else self._batch.pending

    @property
    def position(self) -> int:
        """Position of the last record."""
        return self.base + self.head

    def apply(self, stored: StoredRecord) -> None:
        """Apply the next record."""
        self.head = stored.offset
        self._apply(stored.record, stored.at)

    def extend(self, records: list[Record], at: float) -> None:
        """Apply records that were appended at this time."""
        for record in records:
            self.head += 1
            self._apply(record, at)

    def _apply(self, record: Record, at: float) -> None:
        match record:
            case SessionCreated():
                self.created = self.resources = record
                self.tokens += _estimate_prefix(record)
            case ResourcesChanged():
                self.resources = record
                self._add_or_hold(record.message)
            case MessageAdded():
                if work := self.work.get(record.work_id):
                    work.applied = True
                self._add_or_hold(record.message)
            case Compacted():
                self._compact(record)
            case ReplyStarted() | ReplyDelta() | ReplyEnded() | ReplyFailed():
                self._apply_reply(record)
            case ToolStarted() | ToolEnded() | ApprovalRequested() | ApprovalDecided():
                self._apply_tool(record)
            case TaskStarted() | TaskEnded():
                self._apply_task(record)
            case CheckpointTaken():
                self._add_checkpoint(record, at)
            case _:
                self._apply_work(record, at)

    def _apply_work(
        self, record: WorkAccepted | WorkStarted | AbortRequested | WorkEnded, at: float
    ) -> None:
        if isinstance(record, WorkAccepted):
            self.work.setdefault(
                record.work_id,
                WorkState(
                    id=record.work_id,
                    kind=record.kind,
                    accepted_at=at,
                    message=record.message,
                    options=record.options,
                    key=record.key,
                ),
            )
            if record.key is not None:
                self.keys.setdefault(record.key, record.work_id)
            return
        work = self.work.get(record.work_id)
        if work is None or work.end is not None:
            return
        match record:
            case WorkStarted():
                work.attempts = max(work.attempts + 1, record.attempt)
            case AbortRequested():
                work.aborting = True
            case WorkEnded():
                work.end = record
                work.message, work.options = None, {}
                if self._batch is not None and self._batch.work_id == work.id:
                    self._close_batch()
                self.replies = {i: r for i, r in self.replies.items() if r.work_id != work.id}

    def _apply_reply(self, record: ReplyStarted | ReplyDelta | ReplyEnded | ReplyFailed) -> None:
        reply_id = record.reply_id
        match record:
            case ReplyStarted():
                self.replies[reply_id] = PartialReply(id=reply_id, work_id=record.work_id)
            case ReplyDelta():
                if reply_id in self.replies and not record.thinking:
                    self.replies[reply_id].text += record.text
            case ReplyFailed():
                self.replies.pop(reply_id, None)
            case ReplyEnded():
                reply = self.replies.pop(reply_id, None)
                self._add_reply(record.message, "" if reply is None else reply.work_id)

    def _apply_tool(
        self, record: ToolStarted | ToolEnded | ApprovalRequested | ApprovalDecided
    ) -> None:
        batch = self._batch
        if batch is None or record.call_id not in batch.calls:
            return
        call = batch.calls[record.call_id]
        match record:
            case ToolStarted():
                call.started, call.durable = True, record.durable
            case ApprovalRequested():
                call.approval = "requested"
            case ApprovalDecided():
                call.approval = "allowed" if record.allowed else "denied"
                call.reason = record.reason
            case ToolEnded():
                # The first result counts.
                batch.ended.setdefault(record.call_id, record.result)
                if not batch.pending:
                    self._close_batch()

    def _apply_task(self, record: TaskStarted | TaskEnded) -> None:
        if isinstance(record, TaskStarted):
            self.tasks[record.session] = ChildTask(session=record.session, work_id=record.work_id)
            if self._batch is not None and record.call_id in self._batch.calls:
                self._batch.calls[record.call_id].task = record.session
            return
        self._add_usage(record.usage, "")
        if task := self.tasks.get(record.session):
            task.outcome = record.outcome

    def _add_checkpoint(self, record: CheckpointTaken, at: float) -> None:
        added = Checkpoint(
            id=record.snapshot,
            description=record.description,
            turn=record.turn,
            created_at=at,
            work_id=record.work_id,
            session=None,
            offset=self.head,
            in_blob=record.in_blob,
        )
        self.checkpoints = [*self.checkpoints, added][-record.keep :]

    def _add_or_hold(self, message: UserMessage) -> None:
        if self._batch is not None:
            self._held.append(message)
        else:
            self._add(message)

    def _add_reply(self, message: AssistantMessage, work_id: str) -> None:
        # Open only after a crash: the loop continues when all tools have ended.
        self._close_batch()
        self._add_usage(message.usage, work_id)
        calls, total = message.calls, message.usage.total_tokens
        if work := self.work.get(work_id):
            work.turns += 1
            work.reply = message
        if calls:
            pending = {call.id: PendingCall(call=call, work_id=work_id) for call in calls}
            self.call_ids.update(pending)
            self._batch = _CallBatch(message=message, work_id=work_id, calls=pending)
        else:
            self._add(message)
        if total:
            self.tokens = total

    def _close_batch(self) -> None:
        batch, self._batch = self._batch, None
        if batch is None:
            return
        held, self._held = self._held, []
        tokens = self.tokens
        self._add(batch.message)
        if batch.message.usage.total_tokens:
            # The number of the provider includes the reply.
            self.tokens = tokens
        self._add(batch.returns())
        for message in held:
            self._add(message)

    def _add(self, message: Message) -> None:
        if (kept := _without_blank_text(message)) is not None:
            self.messages.append(kept)
            self.positions.append(self.position)
            self.tokens += estimate(kept)

    def _compact(self, record: Compacted) -> None:
        self._add_usage(record.usage, record.work_id)
        kept = [
            (position, message)
            for position, message in zip(self.positions, self.messages, strict=True)
            if position >= record.keep_from
            and not (isinstance(message, UserMessage) and message.signal == SUMMARY)
        ]
        self.summary = record.summary
        first = UserMessage((Text(f"{PREFACE}\n\n{record.summary}"),), signal=SUMMARY)
        # New lists: a request that is being sent keeps the old ones.
        self.messages = [first, *(message for _, message in kept)]
        self.positions = [min(record.keep_from, self.position), *(place for place, _ in kept)]
        prefix = 0 if self.created is None else _estimate_prefix(self.created)
        self.tokens = prefix + sum(map(estimate, self.messages))

    def _add_usage(self, usage: Usage, work_id: str) -> None:
        self.usage += usage
        if work := self.work.get(work_id):
            work.usage += usage

    def _inherit(self, origin: Conversation, session: str) -> None:
        """Start with the messages of another session, without its work."""
        self.checkpoints = [
            replace(one, session=one.session or session) for one in origin.checkpoints
        ]
        self.base = origin.position
        self.messages, self.positions = origin.messages, origin.positions
        self.summary, self.call_ids = origin.summary, origin.call_ids
        self.tokens = sum(map(estimate, self.messages))


def interrupted_records(conversation: Conversation) -> list[Record]:
    """Return the records that end what a killed process left running and cannot be resumed.

    Replies that were cut off have failed, and are requested again. Tools that may have run end
    with an unknown result, and are not run again. The calls that remain pending are safe to
    run: those that had not started, durable ones, and those whose child session can resume.
    """
    records: list[Record] = [
        ReplyFailed(reply.id, "the process that read it was killed", code="interrupted")
        for reply in conversation.replies.values()
    ]
    for pending in conversation.pending_calls:
        if pending.started and not pending.durable and pending.task is None:
            call = pending.call
            result = ToolReturn(call.id, call.name, UNKNOWN, is_error=True)
            records.append(ToolEnded(call.id, result, status="unknown"))
    return records
