"""What the records of a session come to: what a model sees, and what is still to be done.

Any beginning of a record, cut off by whatever killed its writer, folds into messages that a
provider takes: tool calls are followed by what all of them came to, and nothing is empty.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from smokebox.agents.log.records import (
    AbortRequested,
    ApprovalDecided,
    ApprovalRequested,
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
from smokebox.agents.log.work_state import UNKNOWN, CallBatch, OpenReply, Task, WorkState
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
    from smokebox.agents.log.records import Record, StoredRecord
    from smokebox.agents.log.store import SessionStore
    from smokebox.agents.log.work_state import PendingCall
    from smokebox.agents.messages import AssistantPart, Message, UserPart


LETTERS_PER_TOKEN = 4
IMAGE_TOKENS = 1200
# What a message costs besides its words.
_MESSAGE_TOKENS = 4


def estimate(message: Message) -> int:
    """About how many tokens a message is."""
    match message:
        case UserMessage() | AssistantMessage():
            size = sum(_part(part) for part in message.parts)
        case ToolReturns():
            size = sum(_words(one.text) + IMAGE_TOKENS * len(one.images) for one in message.returns)
    return size + _MESSAGE_TOKENS


def estimate_prefix(created: SessionCreated) -> int:
    """About how many tokens precede each conversation: the system prompt and the tools."""
    return _words(created.system) + sum(_words(json.dumps(tool)) for tool in created.tools)


def _part(part: UserPart | AssistantPart) -> int:
    match part:
        case Text() | Thinking():
            return _words(part.text)
        case ToolCall():
            return _words(part.name) + _words(part.arguments)
        case NativePart():
            return _words(json.dumps(part.data))
        case _:
            return IMAGE_TOKENS


def _words(text: str) -> int:
    return len(text) // LETTERS_PER_TOKEN + 1


def without_blank_text(message: Message) -> Message | None:
    """The message as it may be shown, the same object where it may; None if nothing is left.

    An answer of thoughts alone is nothing: most providers cannot be sent one.
    """
    match message:
        case UserMessage():
            parts = tuple(part for part in message.parts if not _blank(part))
            if len(parts) == len(message.parts) and parts:
                return message
            return UserMessage(parts, signal=message.signal) if parts else None
        case AssistantMessage():
            said = tuple(part for part in message.parts if not _blank(part))
            if all(isinstance(part, Thinking) for part in said):
                return None
            if len(said) == len(message.parts):
                return message
            return AssistantMessage(
                parts=said, model=message.model, stop=message.stop, usage=message.usage
            )
        case _:
            return message


def _blank(part: UserPart | AssistantPart) -> bool:
    return isinstance(part, Text) and not part.text.strip()


SUMMARY = "summary"
"""The signal of the message that stands for what was compacted."""
PREFACE = "This is a summary of the conversation up to here, made to save room."

_PAGE = 1000


@dataclass(slots=True)
class Conversation:
    """The state of a session after the records that it was given, in their order.

    `messages` is what the model sees: it grows at its end, and begins anew when the
    conversation is compacted. `positions` says of each where a `Compacted` may cut before it;
    messages that must stay together have the same. `base` is the position before the first
    record, other than 0 in a fork. `resources` is the record that has the tools of now.
    `tokens` is about how much a model would have to read. `call_ids` are those of all tool
    calls since it began.
    """

    messages: list[Message] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    base: int = 0
    head: int = 0
    created: SessionCreated | None = None
    resources: SessionCreated | ResourcesChanged | None = None
    work: dict[str, WorkState] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    tasks: dict[str, Task] = field(default_factory=dict)
    replies: dict[str, OpenReply] = field(default_factory=dict)
    usage: Usage = field(default_factory=Usage)
    summary: str | None = None
    tokens: int = 0
    call_ids: set[str] = field(default_factory=set)
    _batch: CallBatch | None = None
    # What was said while tools ran: it comes after what they came to.
    _held: list[UserMessage] = field(default_factory=list)

    @classmethod
    async def load(cls, store: SessionStore, key: SessionKey, *, until: int | None = None) -> Self:
        """Fold what a store has of a session, all of it or up to an offset."""
        conversation = cls()
        while page := await store.read(key, after=conversation.head, limit=_PAGE):
            for stored in page:
                if until is not None and stored.offset > until:
                    return conversation
                record = stored.record
                if isinstance(record, SessionCreated) and record.forked_from is not None:
                    origin = SessionKey(key.agent, key.id, record.forked_from)
                    conversation._inherit(await cls.load(store, origin, until=record.forked_at))
                conversation.apply(stored)
        return conversation

    @property
    def unfinished(self) -> list[WorkState]:
        """Work whose outcome is still to come, in the order in which it was accepted."""
        return [work for work in self.work.values() if work.unfinished]

    @property
    def pending_calls(self) -> list[PendingCall]:
        """Tool calls of the last answer that have no end yet, in the order of the model."""
        return [] if self._batch is None else self._batch.pending

    @property
    def position(self) -> int:
        """That of the last record."""
        return self.base + self.head

    def apply(self, stored: StoredRecord) -> None:
        """Take the next record."""
        self.head = stored.offset
        self._apply(stored.record, stored.at)

    def _apply(self, record: Record, at: float) -> None:
        match record:
            case SessionCreated():
                self.created = self.resources = record
                self.tokens += estimate_prefix(record)
            case ResourcesChanged():
                self.resources = record
                self._tell(record.message)
            case MessageAdded():
                self._say(record)
            case Compacted():
                self._compact(record)
            case ReplyStarted() | ReplyDelta() | ReplyEnded() | ReplyFailed():
                self._apply_reply(record)
            case ToolStarted() | ToolEnded() | ApprovalRequested() | ApprovalDecided():
                self._apply_tool(record)
            case TaskStarted() | TaskEnded():
                self._apply_task(record)
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
                self.replies[reply_id] = OpenReply(
                    id=reply_id, work_id=record.work_id, model=record.model
                )
            case ReplyDelta():
                if reply_id in self.replies and not record.thinking:
                    self.replies[reply_id].text += record.text
            case ReplyFailed():
                self.replies.pop(reply_id, None)
            case ReplyEnded():
                reply = self.replies.pop(reply_id, None)
                self._answer(record.message, "" if reply is None else reply.work_id)

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
                call.consent = "asked"
            case ApprovalDecided():
                call.consent = "allowed" if record.allowed else "denied"
                call.reason = record.reason
            case ToolEnded():
                batch.end(record.call_id, record.result)
                if not batch.pending:
                    self._close_batch()

    def _apply_task(self, record: TaskStarted | TaskEnded) -> None:
        if isinstance(record, TaskStarted):
            self.tasks[record.session] = Task(
                session=record.session,
                work_id=record.work_id,
                call_id=record.call_id,
                agent=record.agent,
            )
            if self._batch is not None and record.call_id in self._batch.calls:
                self._batch.calls[record.call_id].task = record.session
            return
        self._spend(record.usage, "")
        if task := self.tasks.get(record.session):
            task.outcome = record.outcome

    def _say(self, record: MessageAdded) -> None:
        if work := self.work.get(record.work_id):
            work.applied = True
        self._tell(record.message)

    def _tell(self, message: UserMessage) -> None:
        if self._batch is not None:
            self._held.append(message)
        else:
            self._add(message)

    def _answer(self, message: AssistantMessage, work_id: str) -> None:
        # One that was not closed: no loop goes on before all tools have ended.
        self._close_batch()
        self._spend(message.usage, work_id)
        if work := self.work.get(work_id):
            work.turns += 1
            work.reply = message
        if calls := message.calls:
            self.call_ids.update(call.id for call in calls)
            self._batch = CallBatch.of(message, work_id)
        else:
            self._add(message)
        if message.usage.total_tokens:
            self.tokens = message.usage.total_tokens

    def _close_batch(self) -> None:
        batch, self._batch = self._batch, None
        if batch is None:
            return
        held, self._held = self._held, []
        tokens = self.tokens
        self._add(batch.message)
        if batch.message.usage.total_tokens:
            # It is in that number already.
            self.tokens = tokens
        self._add(batch.returns())
        for message in held:
            self._add(message)

    def _add(self, message: Message) -> None:
        if (shown := without_blank_text(message)) is not None:
            self.messages.append(shown)
            self.positions.append(self.position)
            self.tokens += estimate(shown)

    def _compact(self, record: Compacted) -> None:
        self._spend(record.usage, record.work_id)
        kept = [
            (position, message)
            for position, message in zip(self.positions, self.messages, strict=True)
            if position >= record.keep_from
            and not (isinstance(message, UserMessage) and message.signal == SUMMARY)
        ]
        self.summary = record.summary
        first = UserMessage((Text(f"{PREFACE}\n\n{record.summary}"),), signal=SUMMARY)
        # New lists: whoever still has the old ones sees what was.
        self.messages = [first, *(message for _, message in kept)]
        self.positions = [min(record.keep_from, self.position), *(place for place, _ in kept)]
        prefix = 0 if self.created is None else estimate_prefix(self.created)
        self.tokens = prefix + sum(map(estimate, self.messages))

    def _spend(self, usage: Usage, work_id: str) -> None:
        self.usage += usage
        if work := self.work.get(work_id):
            work.usage += usage

    def _inherit(self, origin: Conversation) -> None:
        """Begin with what was said in another session, and with nothing of its work."""
        self.base = origin.position
        self.messages, self.positions = origin.messages, origin.positions
        self.summary, self.call_ids = origin.summary, origin.call_ids
        self.tokens = sum(map(estimate, self.messages))


def interrupted_records(conversation: Conversation) -> list[Record]:
    """The ends of what was under way and cannot go on.

    Answers that were cut off failed, and are asked for again. Tools that may have run have an
    unknown end, which the model is told, and are never run again. What is left pending after
    that is safe to run: calls that had not started, durable ones, and those whose child
    session can be gone on with.
    """
    failed: list[Record] = [
        ReplyFailed(reply.id, "the process that read it was killed", code="interrupted")
        for reply in conversation.replies.values()
    ]
    return failed + [
        unknown(pending)
        for pending in conversation.pending_calls
        if pending.started and not pending.durable and pending.task is None
    ]


def unknown(pending: PendingCall) -> ToolEnded:
    """The end of a call that may have had its effect."""
    call = pending.call
    result = ToolReturn(call.id, call.name, UNKNOWN, is_error=True)
    return ToolEnded(call.id, result, status="unknown")
