"""Tests of the conversation that records build."""

from __future__ import annotations

import random

import pytest

from agents.log.random_session import (
    RandomSession,
    apply_records,
    reply_message,
    sendable,
    tool_ended,
    user,
)
from smokebox.agents.log.conformance import KEY, sibling, write_session
from smokebox.agents.log.conversation import NOT_RUN, UNKNOWN, Conversation, interrupted_records
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


def reply_with_calls(*calls: str, tokens: int = 0) -> list[Record]:
    """Return the records of a reply with tool calls."""
    return [
        ReplyStarted("w", "r", "m"),
        ReplyEnded("r", reply_message("ok", *calls, tokens=tokens)),
    ]


def tool_results(conversation: Conversation) -> list[str]:
    """Return the texts of all tool results."""
    returns = [one for one in conversation.messages if isinstance(one, ToolReturns)]
    return [one.text for message in returns for one in message.returns]


@pytest.mark.parametrize("seed", range(12))
def test_any_prefix_of_a_log_can_be_sent_and_resumed(seed: int) -> None:
    records = list(RandomSession(random.Random(seed)).records())
    for end in range(len(records) + 1):
        conversation = apply_records(Conversation(), records[:end])
        assert sendable(conversation.messages)
        apply_records(conversation, interrupted_records(conversation))
        assert sendable(conversation.messages)
        assert not conversation.replies
        apply_records(conversation, [tool_ended(one.call.id) for one in conversation.pending_calls])
        apply_records(conversation, [MessageAdded("later", user("continue"))])
        assert sendable(conversation.messages)
        assert conversation.messages[-1] == user("continue")
        assert len(conversation.positions) == len(conversation.messages)
        assert conversation.positions == sorted(conversation.positions)


@pytest.mark.parametrize("seed", range(40))
def test_shuffled_records_can_be_sent(seed: int) -> None:
    rng = random.Random(seed)
    records = list(RandomSession(rng).records())
    rng.shuffle(records)
    conversation = Conversation()
    for record in records:
        apply_records(conversation, [record])
        assert sendable(conversation.messages)


def test_tool_results_are_added_when_all_have_ended() -> None:
    conversation = apply_records(Conversation(), START + reply_with_calls("a", "b"))
    assert conversation.messages == [user("go")]
    apply_records(conversation, [ToolStarted("w", "b", "bash"), tool_ended("b", "second")])
    assert [one.call.id for one in conversation.pending_calls] == ["a"]
    assert conversation.messages == [user("go")]
    apply_records(conversation, [tool_ended("a", "first")])
    assert tool_results(conversation) == ["first", "second"]
    assert conversation.pending_calls == []


def test_message_during_tools_comes_after_the_results() -> None:
    conversation = apply_records(Conversation(), START + reply_with_calls("a"))
    apply_records(conversation, [MessageAdded("w", user("also")), tool_ended("a")])
    assert [type(one).__name__ for one in conversation.messages] == [
        "UserMessage",
        "AssistantMessage",
        "ToolReturns",
        "UserMessage",
    ]
    # A compaction cannot separate these.
    assert len(set(conversation.positions[1:])) == 1


def test_partial_reply_is_not_a_message() -> None:
    started: list[Record] = [ReplyStarted("w", "r", "m"), ReplyDelta("r", "half an ans")]
    conversation = apply_records(Conversation(), START + started)
    assert conversation.messages == [user("go")]
    assert conversation.replies["r"].text == "half an ans"
    [failed] = interrupted_records(conversation)
    assert failed == ReplyFailed("r", "the process that read it was killed", "interrupted")


def test_blank_text_is_removed() -> None:
    thoughts = AssistantMessage(parts=(Thinking("hm"), Text(" ")), model="m")
    blank: list[Record] = [ReplyEnded("r", thoughts), MessageAdded("w", UserMessage((Text("\n"),)))]
    conversation = apply_records(Conversation(), START + blank)
    assert conversation.messages == [user("go")]


def test_interrupted_tools_have_an_unknown_result() -> None:
    started: list[Record] = [
        ToolStarted("w", "ran", "bash"),
        ToolStarted("w", "durable", "bash", durable=True),
        ToolStarted("w", "task", "task"),
        TaskStarted("w", "child", "task"),
    ]
    records = START + reply_with_calls("ran", "durable", "task", "waiting") + started
    conversation = apply_records(Conversation(), records)
    [unknown] = interrupted_records(conversation)
    assert (unknown.call_id, unknown.status) == ("ran", "unknown")  # type: ignore[union-attr]
    apply_records(conversation, [unknown])
    left = {one.call.id: one for one in conversation.pending_calls}
    assert list(left) == ["durable", "task", "waiting"]
    assert left["task"].task == "child"
    apply_records(conversation, [tool_ended(id) for id in left])
    assert tool_results(conversation) == [UNKNOWN, "done", "done", "done"]


def test_work_that_ends_during_tools_has_results_for_all() -> None:
    records = [
        *START,
        *reply_with_calls("a", "b", "c"),
        ToolStarted("w", "b", "bash"),
        tool_ended("a"),
    ]
    conversation = apply_records(Conversation(), [*records, WorkEnded("w", "aborted")])
    assert tool_results(conversation) == ["done", UNKNOWN, NOT_RUN]
    assert sendable(conversation.messages)


def test_first_outcome_of_work_counts() -> None:
    conversation = apply_records(Conversation(), START)
    [work] = conversation.unfinished
    assert (work.id, work.kind, work.attempts, work.applied) == ("w", "prompt", 1, True)
    assert (work.message, work.options) == (user("go"), {"a": 1})
    apply_records(conversation, [WorkStarted("w", attempt=2), AbortRequested("w")])
    assert (work.attempts, work.aborting) == (2, True)
    apply_records(conversation, [WorkEnded("w", "aborted"), WorkEnded("w", "completed")])
    assert work.end is not None and work.end.outcome == "aborted"
    assert conversation.unfinished == []
    assert conversation.keys == {"k": "w"}


def test_work_counts_turns_and_usage() -> None:
    records = [*START, *reply_with_calls("a", tokens=100), tool_ended("a")]
    reply = reply_message("done", tokens=150)
    records += [ReplyStarted("w", "r2", "m"), ReplyEnded("r2", reply)]
    records += [TaskStarted("w", "child"), TaskEnded("child", "failed", Usage(input_tokens=7))]
    conversation = apply_records(Conversation(), records)
    work = conversation.work["w"]
    assert (work.turns, work.usage.input_tokens, work.reply) == (2, 250, reply)
    assert conversation.usage.input_tokens == 257
    assert conversation.tasks["child"].outcome == "failed"


def test_approval_state_is_kept() -> None:
    conversation = apply_records(Conversation(), [*START, *reply_with_calls("a")])
    apply_records(conversation, [ApprovalRequested("w", "a", "bash", "{}")])
    [call] = conversation.pending_calls
    assert call.approval == "requested"
    apply_records(conversation, [ApprovalDecided("a", False, "too dear")])
    assert (call.approval, call.reason) == ("denied", "too dear")


def test_summary_replaces_earlier_messages() -> None:
    conversation = apply_records(Conversation(), [*START, *reply_with_calls("a"), tool_ended("a")])
    apply_records(
        conversation, [MessageAdded("w", user("kept")), ReplyEnded("x", reply_message("kept too"))]
    )
    before = conversation.messages
    keep_from = conversation.positions[-2]
    apply_records(conversation, [Compacted("They worked.", keep_from, usage=Usage(input_tokens=9))])
    summary, *kept = conversation.messages
    assert isinstance(summary, UserMessage) and summary.signal == "summary"
    assert "They worked." in str(summary.parts)
    assert kept == before[-2:]
    assert conversation.usage.input_tokens == 9
    apply_records(conversation, [Compacted("They went on.", conversation.position + 1)])
    assert len(conversation.messages) == 1
    assert conversation.summary == "They went on."


def test_tokens_use_provider_counts_and_estimates() -> None:
    conversation = apply_records(Conversation(), START)
    guess = conversation.tokens
    assert 5 < guess < 20
    apply_records(conversation, reply_with_calls("a", tokens=5000))
    assert conversation.tokens == 5000
    apply_records(conversation, [tool_ended("a", "x" * 4000)])
    assert 5900 < conversation.tokens < 6100
    apply_records(conversation, [Compacted("Short.", conversation.position + 1)])
    assert conversation.tokens < 100


async def test_fork_starts_with_the_original_conversation() -> None:
    store = MemoryStore()
    await write_session(
        store, KEY, *START, ReplyEnded("r", reply_message("first")), MessageAdded("w", user("late"))
    )
    fork = SessionCreated("You are a fork.", forked_from="default", forked_at=5)
    await write_session(store, sibling("fork"), fork, MessageAdded("v", user("other")))
    conversation = await Conversation.load(store, sibling("fork"))
    assert conversation.messages == [user("go"), reply_message("first"), user("other")]
    assert conversation.created == fork
    assert conversation.work == {}
    assert (conversation.base, conversation.head, conversation.position) == (5, 2, 7)
    # A compaction may keep messages of the original session.
    await write_session(store, sibling("fork"), Compacted("Before.", conversation.positions[1]))
    compacted = await Conversation.load(store, sibling("fork"))
    assert compacted.messages[1:] == [reply_message("first"), user("other")]
    again = SessionCreated("You are its fork.", forked_from="fork", forked_at=2)
    await write_session(store, sibling("again"), again)
    second = await Conversation.load(store, sibling("again"))
    assert second.messages == conversation.messages
    assert second.base == 7
