"""What records come to."""

from __future__ import annotations

import random

import pytest

from agents.log.scenes import Scene, answer, ended, fold, sendable, user
from smokebox.agents.log.conformance import KEY, fill, near
from smokebox.agents.log.conversation import Conversation, interrupted_records
from smokebox.agents.log.memory import MemoryStore
from smokebox.agents.log.records import (
    AbortRequested,
    ApprovalDecided,
    ApprovalRequested,
    Compacted,
    MessageAdded,
    Record,
    ReplyDelta,
    ReplyEnded,
    ReplyFailed,
    ReplyStarted,
    SessionCreated,
    TaskEnded,
    TaskStarted,
    ToolStarted,
    WorkAccepted,
    WorkEnded,
    WorkStarted,
)
from smokebox.agents.log.work_state import NOT_RUN, UNKNOWN
from smokebox.agents.messages import (
    AssistantMessage,
    Text,
    Thinking,
    ToolReturns,
    Usage,
    UserMessage,
)

START: list[Record] = [
    SessionCreated("You are a test."),
    WorkAccepted("w", "prompt", user("go"), options={"a": 1}, key="k"),
    WorkStarted("w"),
    MessageAdded("w", user("go")),
]


def asked(*calls: str, tokens: int = 0) -> list[Record]:
    """An answer that wants tools."""
    return [ReplyStarted("w", "r", "m"), ReplyEnded("r", answer("ok", *calls, tokens=tokens))]


def told(conversation: Conversation) -> list[str]:
    """What tools came to, as the model is told."""
    returns = [one for one in conversation.messages if isinstance(one, ToolReturns)]
    return [one.text for message in returns for one in message.returns]


@pytest.mark.parametrize("seed", range(12))
def test_any_beginning_of_a_session_can_be_sent_and_gone_on_with(seed: int) -> None:
    records = list(Scene(random.Random(seed)).records())
    for end in range(len(records) + 1):
        conversation = fold(Conversation(), records[:end])
        assert sendable(conversation.messages)
        fold(conversation, interrupted_records(conversation))
        assert sendable(conversation.messages)
        assert not conversation.replies
        fold(conversation, [ended(one.call.id) for one in conversation.pending_calls])
        fold(conversation, [MessageAdded("later", user("go on"))])
        assert sendable(conversation.messages)
        assert conversation.messages[-1] == user("go on")
        assert len(conversation.positions) == len(conversation.messages)
        assert conversation.positions == sorted(conversation.positions)


@pytest.mark.parametrize("seed", range(40))
def test_records_in_an_order_that_no_loop_writes_can_be_sent_too(seed: int) -> None:
    dice = random.Random(seed)
    records = list(Scene(dice).records())
    dice.shuffle(records)
    conversation = Conversation()
    for record in records:
        fold(conversation, [record])
        assert sendable(conversation.messages)


def test_tools_are_shown_once_all_of_an_answer_have_ended() -> None:
    conversation = fold(Conversation(), START + asked("a", "b"))
    assert conversation.messages == [user("go")]
    fold(conversation, [ToolStarted("w", "b", "bash"), ended("b", "second")])
    assert [one.call.id for one in conversation.pending_calls] == ["a"]
    assert conversation.messages == [user("go")]
    fold(conversation, [ended("a", "first")])
    assert told(conversation) == ["first", "second"]
    assert conversation.pending_calls == []


def test_what_is_said_while_tools_run_comes_after_them() -> None:
    conversation = fold(Conversation(), START + asked("a"))
    fold(conversation, [MessageAdded("w", user("also")), ended("a")])
    assert [type(one).__name__ for one in conversation.messages] == [
        "UserMessage",
        "AssistantMessage",
        "ToolReturns",
        "UserMessage",
    ]
    # None of these can be parted from the others by a compaction.
    assert len(set(conversation.positions[1:])) == 1


def test_answers_without_an_end_play_no_part() -> None:
    begun: list[Record] = [ReplyStarted("w", "r", "m"), ReplyDelta("r", "half an ans")]
    conversation = fold(Conversation(), START + begun)
    assert conversation.messages == [user("go")]
    assert conversation.replies["r"].text == "half an ans"
    [failed] = interrupted_records(conversation)
    assert failed == ReplyFailed("r", "the process that read it was killed", "interrupted")


def test_blank_text_is_not_shown() -> None:
    thoughts = AssistantMessage(parts=(Thinking("hm"), Text(" ")), model="m")
    blank: list[Record] = [ReplyEnded("r", thoughts), MessageAdded("w", UserMessage((Text("\n"),)))]
    conversation = fold(Conversation(), START + blank)
    assert conversation.messages == [user("go")]


def test_tools_that_may_have_run_have_an_unknown_end() -> None:
    started: list[Record] = [
        ToolStarted("w", "ran", "bash"),
        ToolStarted("w", "durable", "bash", durable=True),
        ToolStarted("w", "task", "task"),
        TaskStarted("w", "child", "task"),
    ]
    records = START + asked("ran", "durable", "task", "waiting") + started
    conversation = fold(Conversation(), records)
    [unknown] = interrupted_records(conversation)
    assert (unknown.call_id, unknown.status) == ("ran", "unknown")  # type: ignore[union-attr]
    fold(conversation, [unknown])
    left = {one.call.id: one for one in conversation.pending_calls}
    assert list(left) == ["durable", "task", "waiting"]
    assert left["task"].task == "child"
    fold(conversation, [ended(id) for id in left])
    assert told(conversation) == [UNKNOWN, "done", "done", "done"]


def test_work_that_ends_among_tools_says_what_became_of_them() -> None:
    records = [*START, *asked("a", "b", "c"), ToolStarted("w", "b", "bash"), ended("a")]
    conversation = fold(Conversation(), [*records, WorkEnded("w", "aborted")])
    assert told(conversation) == ["done", UNKNOWN, NOT_RUN]
    assert sendable(conversation.messages)


def test_work_has_one_outcome() -> None:
    conversation = fold(Conversation(), START)
    [work] = conversation.unfinished
    assert (work.id, work.kind, work.attempts, work.applied) == ("w", "prompt", 1, True)
    assert (work.message, work.options) == (user("go"), {"a": 1})
    fold(conversation, [WorkStarted("w", attempt=2), AbortRequested("w")])
    assert (work.attempts, work.aborting) == (2, True)
    fold(conversation, [WorkEnded("w", "aborted"), WorkEnded("w", "completed")])
    assert work.end is not None and work.end.outcome == "aborted"
    assert conversation.unfinished == []
    assert conversation.keys == {"k": "w"}


def test_work_knows_its_turns_and_what_they_took() -> None:
    records = [*START, *asked("a", tokens=100), ended("a")]
    reply = answer("done", tokens=150)
    records += [ReplyStarted("w", "r2", "m"), ReplyEnded("r2", reply)]
    records += [TaskStarted("w", "child"), TaskEnded("child", "failed", Usage(input_tokens=7))]
    conversation = fold(Conversation(), records)
    work = conversation.work["w"]
    assert (work.turns, work.usage.input_tokens, work.reply) == (2, 250, reply)
    assert conversation.usage.input_tokens == 257
    assert conversation.tasks["child"].outcome == "failed"


def test_an_approval_is_remembered() -> None:
    conversation = fold(Conversation(), [*START, *asked("a")])
    fold(conversation, [ApprovalRequested("w", "a", "bash", "{}")])
    [call] = conversation.pending_calls
    assert call.consent == "asked"
    fold(conversation, [ApprovalDecided("a", False, "too dear")])
    assert (call.consent, call.reason) == ("denied", "too dear")


def test_a_summary_stands_for_what_came_before() -> None:
    conversation = fold(Conversation(), [*START, *asked("a"), ended("a")])
    fold(conversation, [MessageAdded("w", user("kept")), ReplyEnded("x", answer("kept too"))])
    before = conversation.messages
    keep_from = conversation.positions[-2]
    fold(conversation, [Compacted("They worked.", keep_from, usage=Usage(input_tokens=9))])
    summary, *kept = conversation.messages
    assert isinstance(summary, UserMessage) and summary.signal == "summary"
    assert "They worked." in str(summary.parts)
    assert kept == before[-2:]
    assert conversation.usage.input_tokens == 9
    fold(conversation, [Compacted("They went on.", conversation.position + 1)])
    assert len(conversation.messages) == 1
    assert conversation.summary == "They went on."


def test_tokens_are_what_the_model_said_and_a_guess_for_the_rest() -> None:
    conversation = fold(Conversation(), START)
    guess = conversation.tokens
    assert 5 < guess < 20
    fold(conversation, asked("a", tokens=5000))
    assert conversation.tokens == 5000
    fold(conversation, [ended("a", "x" * 4000)])
    assert 5900 < conversation.tokens < 6100
    fold(conversation, [Compacted("Short.", conversation.position + 1)])
    assert conversation.tokens < 100


async def test_a_fork_begins_with_what_was_said_and_goes_its_own_way() -> None:
    store = MemoryStore()
    await fill(
        store, KEY, *START, ReplyEnded("r", answer("first")), MessageAdded("w", user("late"))
    )
    fork = SessionCreated("You are a fork.", forked_from="default", forked_at=5)
    await fill(store, near("fork"), fork, MessageAdded("v", user("other")))
    conversation = await Conversation.load(store, near("fork"))
    assert conversation.messages == [user("go"), answer("first"), user("other")]
    assert conversation.created == fork
    assert conversation.work == {}
    assert (conversation.base, conversation.head, conversation.position) == (5, 2, 7)
    # A compaction may keep from a place that is in the session it was forked from.
    await fill(store, near("fork"), Compacted("Before.", conversation.positions[1]))
    compacted = await Conversation.load(store, near("fork"))
    assert compacted.messages[1:] == [answer("first"), user("other")]
    again = SessionCreated("You are its fork.", forked_from="fork", forked_at=2)
    await fill(store, near("again"), again)
    second = await Conversation.load(store, near("again"))
    assert second.messages == conversation.messages
    assert second.base == 7
