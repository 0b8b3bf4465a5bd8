"""Random records of a session, as the loop would write them."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    SessionCreated,
    StoredRecord,
    TaskEnded,
    TaskStarted,
    ToolEnded,
    ToolStarted,
    WorkAccepted,
    WorkEnded,
    WorkStarted,
)
from smokebox.agents.messages import (
    AssistantMessage,
    Text,
    Thinking,
    ToolCall,
    ToolReturn,
    ToolReturns,
    Usage,
    UserMessage,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Iterator, Sequence

    from smokebox.agents.log.conversation import Conversation
    from smokebox.agents.log.records import Record
    from smokebox.agents.messages import AssistantPart, Message, StopReason


def user(text: str) -> UserMessage:
    return UserMessage((Text(text),))


def reply_message(text: str = "", *calls: str, tokens: int = 0) -> AssistantMessage:
    """Return a reply with calls of the tool `bash` by these ids."""
    parts: list[AssistantPart] = [Text(text)] if text else []
    parts += [ToolCall(call, "bash", "{}") for call in calls]
    usage = Usage(requests=1, input_tokens=tokens, output_tokens=0)
    stop: StopReason = "tool_calls" if calls else "end"
    return AssistantMessage(parts=tuple(parts), model="m", stop=stop, usage=usage)


def tool_ended(call: str, text: str = "done") -> ToolEnded:
    return ToolEnded(call, ToolReturn(call, "bash", text))


def apply_records(conversation: Conversation, records: Iterable[Record]) -> Conversation:
    """Apply records to a conversation."""
    for record in records:
        conversation.apply(StoredRecord(conversation.head + 1, 1000.0 + conversation.head, record))
    return conversation


def sendable(messages: Sequence[Message]) -> bool:
    """Return True if a provider would accept these messages."""
    pending: tuple[str, ...] = ()
    for message in messages:
        if isinstance(message, ToolReturns):
            if not pending or tuple(one.call_id for one in message.returns) != pending:
                return False
            pending = ()
            continue
        if pending or not message.parts:
            return False
        if any(isinstance(part, Text) and not part.text.strip() for part in message.parts):
            return False
        if isinstance(message, AssistantMessage):
            if all(isinstance(part, Thinking) for part in message.parts):
                return False
            pending = tuple(call.id for call in message.calls)
    return not pending


class RandomSession:
    """Generates records of a session from a seed."""

    def __init__(self, rng: random.Random) -> None:
        self._random = rng
        self._count = 0

    def records(self) -> Iterator[Record]:
        yield SessionCreated("You are a test.", model="m")
        for _ in range(self._random.randint(1, 6)):
            yield from self._work()

    def _name(self, kind: str) -> str:
        self._count += 1
        return f"{kind}{self._count}"

    def _work(self) -> Iterator[Record]:
        work = self._name("work")
        yield WorkAccepted(
            work, "prompt", user(f"do {work}"), key=self._random.choice([None, work])
        )
        yield WorkStarted(work)
        yield MessageAdded(work, user(f"do {work}"))
        for _ in range(self._random.randint(0, 4)):
            yield from self._turn(work)
        if self._random.random() < 0.3:
            yield Compacted("All is well.", self._count, work_id=work)
        if self._random.random() < 0.2:
            yield AbortRequested(work)
            yield WorkEnded(work, "aborted")
            return
        yield from self._reply(work, ())
        yield WorkEnded(work, "completed", text="done")

    def _turn(self, work: str) -> Iterator[Record]:
        calls = tuple(self._name("call") for _ in range(self._random.randint(1, 3)))
        yield from self._reply(work, calls)
        started = list(calls)
        self._random.shuffle(started)
        for call in started:
            if self._random.random() < 0.2:
                yield ApprovalRequested(work, call, "bash", "{}")
                yield ApprovalDecided(call, self._random.random() < 0.5, "no")
            yield ToolStarted(work, call, "bash", durable=self._random.random() < 0.2)
        self._random.shuffle(started)
        for call in started:
            if self._random.random() < 0.2:
                child = self._name("child")
                yield TaskStarted(work, child, call)
                yield TaskEnded(child, "completed")
            if self._random.random() < 0.2:
                yield MessageAdded(work, user("and more"))
            yield tool_ended(call, f"result of {call}")

    def _reply(self, work: str, calls: tuple[str, ...]) -> Iterator[Record]:
        while self._random.random() < 0.3:
            reply = self._name("reply")
            yield ReplyStarted(work, reply, "m")
            yield ReplyDelta(reply, "I was cut")
            yield ReplyFailed(reply, "overloaded")
        reply = self._name("reply")
        yield ReplyStarted(work, reply, "m")
        yield ReplyDelta(reply, "Let me ")
        yield ReplyDelta(reply, "hm", thinking=True)
        text = self._random.choice(["", " ", f"Reply {reply}"])
        yield ReplyEnded(reply, reply_message(text, *calls, tokens=self._random.choice([0, 500])))
