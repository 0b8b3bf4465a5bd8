"""Tests of compaction: when it happens, where it cuts, and the summary request."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from smokebox.agents.log.conversation import Conversation, estimate
from smokebox.agents.log.records import (
    Compacted,
    MessageAdded,
    ReplyEnded,
    SessionCreated,
    StoredRecord,
    ToolEnded,
)
from smokebox.agents.messages import (
    AssistantMessage,
    ImagePart,
    Message,
    Text,
    Thinking,
    ToolCall,
    ToolReturn,
    ToolReturns,
    Usage,
    UserMessage,
)
from smokebox.agents.model import Delta, ModelInfo, ModelRequest
from smokebox.agents.work.compaction import (
    Compaction,
    as_compaction,
    cut,
    should_compact,
    threshold,
)
from smokebox.agents.work.summary import summarize
from smokebox.errors import ContextOverflow, InvalidOption, ModelError, ModelUnavailable
from smokebox.testing.scripted import ScriptedModel, Turn

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from smokebox.agents.log.records import Record

WINDOW = ModelInfo(context_window=200_000, max_output=32_000)


def user(text: str, signal: str | None = None) -> UserMessage:
    return UserMessage((Text(text),), signal=signal)


def tool_call(name: str, arguments: str = "{}", id: str = "1") -> AssistantMessage:
    return AssistantMessage(parts=(ToolCall(id, name, arguments),), model="m", stop="tool_calls")


def answer(text: str) -> AssistantMessage:
    return AssistantMessage(parts=(Text(text),), model="m")


class ConversationBuilder:
    """Builds a conversation from records, as a session would."""

    def __init__(self) -> None:
        self.conversation = Conversation()
        self.add(SessionCreated(system=""))

    def add(self, record: Record) -> None:
        offset = self.conversation.head + 1
        self.conversation.apply(StoredRecord(offset, 0.0, record))

    def user(self, text: str, signal: str | None = None) -> ConversationBuilder:
        self.add(MessageAdded("w", user(text, signal)))
        return self

    def reply(self, text: str) -> ConversationBuilder:
        self.add(ReplyEnded("r", answer(text)))
        return self

    def run(self, result: str, name: str = "bash", arguments: str = "{}") -> ConversationBuilder:
        self.add(ReplyEnded("r", tool_call(name, arguments)))
        self.add(ToolEnded("1", ToolReturn("1", name, result)))
        return self

    def compact(self, summary: str, keep_from: int) -> ConversationBuilder:
        self.add(Compacted(summary, keep_from))
        return self


@pytest.mark.parametrize(
    ("window", "max_output", "limit"),
    [
        (200_000, 32_000, 180_000),
        (200_000, 8_000, 192_000),
        (200_000, None, 180_000),
        (32_000, 32_000, 32_000 - 10_666),
        (8_000, 4_096, 8_000 - 2_666),
        (2_000, 1_000, 1_000),
        (100, None, 50),
        (None, 8_000, None),
        (0, 8_000, None),
    ],
)
def test_threshold_reserves_space_for_a_reply(
    window: int | None, max_output: int | None, limit: int | None
) -> None:
    info = ModelInfo(context_window=window, max_output=max_output)
    assert threshold(info, Compaction()) == limit
    if limit is None:
        assert not should_compact(10**9, info, Compaction())
    else:
        assert not should_compact(limit, info, Compaction())
        assert should_compact(limit + 1, info, Compaction())


def test_threshold_follows_the_options() -> None:
    assert threshold(WINDOW, Compaction(reserve=50_000)) == 150_000
    assert threshold(WINDOW, as_compaction(False)) is None
    assert as_compaction(None) == as_compaction(True) == Compaction()
    assert as_compaction({"keep_recent": 5}) == Compaction(keep_recent=5)


@pytest.mark.parametrize(
    "value", [{"keep": 1}, {"reserve": -1}, {"reserve": 1.5}, {"keep_recent": True}, "always"]
)
def test_invalid_options_are_refused(value: object) -> None:
    with pytest.raises(InvalidOption, match="compaction"):
        as_compaction(value)


def test_cut_keeps_about_keep_recent_tokens() -> None:
    builder = ConversationBuilder()
    for number in range(20):
        builder.user(f"{number} " + "x" * 400).reply("y" * 400)
    found = cut(builder.conversation, WINDOW, Compaction(keep_recent=1000))
    assert found is not None
    kept = builder.conversation.messages[len(found.messages) :]
    assert 700 < sum(map(estimate, kept)) <= 1000
    assert found.messages == builder.conversation.messages[: len(found.messages)]
    assert (found.request, found.previous) == (None, None)
    builder.compact("S", found.keep_from)
    assert builder.conversation.messages[1:] == kept


def test_cut_keeps_calls_with_their_results() -> None:
    builder = ConversationBuilder().user("Do it.")
    for _ in range(30):
        builder.run("z" * 400)
    for keep in range(0, 3000, 37):
        found = cut(builder.conversation, WINDOW, Compaction(keep_recent=keep))
        assert found is not None
        kept = builder.conversation.messages[len(found.messages) :]
        assert not isinstance(kept[0], ToolReturns)
        assert isinstance(found.messages[-1], (ToolReturns, UserMessage))
        after = ConversationBuilder()
        after.conversation.positions = list(builder.conversation.positions)
        after.conversation.messages = list(builder.conversation.messages)
        after.conversation.head = builder.conversation.head
        after.compact("S", found.keep_from)
        assert after.conversation.messages[1:] == kept


def test_cut_after_the_request_keeps_the_request() -> None:
    builder = ConversationBuilder().user("Old.").reply("Yes.").user("Mend the bridge.")
    for _ in range(10):
        builder.run("z" * 4000)
    found = cut(builder.conversation, WINDOW, Compaction(keep_recent=2500))
    assert found is not None
    assert found.request == "Mend the bridge."
    builder.compact("S\n\n<request>\nMend the bridge.\n</request>", found.keep_from)
    for _ in range(10):
        builder.run("z" * 4000)
    again = cut(builder.conversation, WINDOW, Compaction(keep_recent=2500))
    assert again is not None
    assert again.request == "Mend the bridge."
    assert again.previous == "S\n\n<request>\nMend the bridge.\n</request>"
    assert not any(m == builder.conversation.messages[0] for m in again.messages)


def test_short_conversation_is_not_cut() -> None:
    options = Compaction()
    assert cut(Conversation(), WINDOW, options) is None
    assert (
        cut(ConversationBuilder().user("Hi.").reply("Hello.").conversation, WINDOW, options) is None
    )
    compacted = ConversationBuilder().user("Hi.").reply("Hello.").compact("S", 3).user("More.")
    assert cut(compacted.conversation, WINDOW, options) is None


def test_too_long_last_section_is_summarized() -> None:
    small = ModelInfo(context_window=8000, max_output=2000)
    builder = ConversationBuilder().user("Read it.").run("z" * 40_000)
    found = cut(builder.conversation, small, Compaction())
    assert found is not None
    assert list(found.messages) == builder.conversation.messages
    assert found.request == "Read it."
    builder.compact("S", found.keep_from)
    assert len(builder.conversation.messages) == 1
    assert not should_compact(builder.conversation.tokens, small, Compaction())


def test_long_last_section_that_fits_is_kept() -> None:
    builder = ConversationBuilder().user("Old.").reply("Yes.").user("z" * 80_000)
    found = cut(builder.conversation, WINDOW, Compaction(keep_recent=100))
    assert found is not None
    assert len(found.messages) == 2


def test_messages_of_the_harness_are_not_requests() -> None:
    builder = (
        ConversationBuilder()
        .user("Build it.")
        .reply("x" * 4000)
        .user("Go on.", signal="interrupted")
        .reply("y")
    )
    found = cut(builder.conversation, WINDOW, Compaction(keep_recent=100))
    assert found is not None
    assert found.request == "Build it."


LONG = "HEAD" + "r" * 9000 + "TAIL"
MESSAGES: list[Message] = [
    user("Fix the test."),
    AssistantMessage(
        parts=(
            Thinking("secret thought"),
            Text("Looking."),
            ToolCall("1", "read", '{"path": "a.py"}'),
            ToolCall("2", "edit", '{"path": "b.py", "old_text": "' + "o" * 9000 + '"}'),
            ToolCall("3", "read", "not json"),
        ),
        model="m",
    ),
    ToolReturns(
        (
            ToolReturn(
                "1", "read", "HEAD" + "r" * 9000 + "TAIL", images=(ImagePart("image/png", "h"),)
            ),
            ToolReturn("2", "edit", "no such text", is_error=True),
        )
    ),
]


def sent(model: ScriptedModel, number: int = -1) -> str:
    [message] = model.requests[number].messages
    assert isinstance(message, UserMessage)
    [part] = message.parts
    assert isinstance(part, Text)
    return part.text


async def test_summary_request_has_sections_and_truncated_conversation() -> None:
    model = ScriptedModel(Turn("## Goal\nFix.", usage=Usage(requests=1, input_tokens=9)))
    summary = await summarize(model, MESSAGES)
    prompt = sent(model)
    for section in ("Goal", "Constraints & Preferences", "Key Decisions", "Next Steps"):
        assert f"## {section}\n" in prompt
    assert "[User]: Fix the test." in prompt
    assert "[Assistant]: Looking." in prompt
    assert "[Tool error of edit]: no such text" in prompt
    assert "HEAD" in prompt
    assert "TAIL\n\n" not in prompt
    assert "TAIL [image]" in prompt
    assert "secret thought" not in prompt
    assert len(prompt) < 8000
    assert "<previous-summary>" not in prompt
    assert model.requests[0].tools == ()
    assert summary.usage.input_tokens == 9
    assert summary.text == (
        "## Goal\nFix.\n\n<read-files>\na.py\n</read-files>\n\n"
        "<modified-files>\nb.py\n</modified-files>"
    )


async def test_summary_request_has_focus_and_previous_summary() -> None:
    previous = (
        "## Goal\nOld.\n\n<request>\nOld wish.\n</request>\n\n"
        "<read-files>\nz.py\na.py\n</read-files>"
    )
    model = ScriptedModel("New.")
    text, _ = await summarize(model, MESSAGES, "the database", previous, request="Fix the test.")
    prompt = sent(model)
    assert "<previous-summary>\n## Goal\nOld.\n</previous-summary>" in prompt
    assert prompt.endswith("keep what matters for this: the database")
    assert text == (
        "New.\n\n<request>\nFix the test.\n</request>\n\n<read-files>\nz.py\na.py\n</read-files>"
        "\n\n<modified-files>\nb.py\n</modified-files>"
    )


async def test_summary_request_is_deterministic() -> None:
    first, second = ScriptedModel("S"), ScriptedModel("S")
    assert await summarize(first, MESSAGES) == await summarize(second, MESSAGES)
    assert first.requests[0].messages == second.requests[0].messages


async def test_long_conversation_is_summarized_in_several_requests() -> None:
    small = ModelInfo(context_window=4096, max_output=1024)
    model = ScriptedModel(then=lambda request: f"S{len(model.requests)}", info=small)
    messages = [user(f"<{number}> " + "x" * 900) for number in range(20)]
    text, usage = await summarize(model, [*messages, user("y" * 50_000)])
    steps = len(model.requests)
    assert steps > 3
    assert text == f"S{steps}"
    assert usage.requests == steps
    everything = "".join(sent(model, number) for number in range(steps))
    assert all(f"<{number}>" in everything for number in range(20))
    for number in range(steps):
        assert len(sent(model, number)) / 3 + (model.requests[number].max_tokens or 0) < 4096
        if number:
            assert f"<previous-summary>\nS{number}\n" in sent(model, number)


async def test_overflow_is_retried_with_smaller_chunks() -> None:
    def picky(request: ModelRequest) -> str | Exception:
        [message] = request.messages
        assert isinstance(message, UserMessage)
        too_long = sum(len(part.text) for part in message.parts if isinstance(part, Text)) > 30_000
        return ContextOverflow("too long", model="m") if too_long else "S"

    model = ScriptedModel(then=picky, info=ModelInfo())
    text, _ = await summarize(model, [user("x" * 9_000) for _ in range(20)])
    assert text == "S"


async def test_repeated_overflow_is_raised() -> None:
    model = ScriptedModel(then=ContextOverflow("too long", model="m"))
    with pytest.raises(ContextOverflow):
        await summarize(model, MESSAGES)
    assert len(model.requests) < 20


async def test_empty_summary_is_an_error() -> None:
    with pytest.raises(ModelError, match="empty summary"):
        await summarize(ScriptedModel(" \n"), MESSAGES)


async def test_summary_times_out() -> None:
    with pytest.raises(ModelUnavailable, match=r"in 0\.05 seconds"):
        await summarize(ScriptedModel(Turn("S", hang=True)), MESSAGES, timeout=0.05)


class SilentModel(ScriptedModel):
    """A model whose stream ends without a reply."""

    async def stream(self, request: ModelRequest) -> AsyncGenerator[Delta | AssistantMessage, None]:
        await asyncio.sleep(0)
        return
        yield


async def test_stream_without_a_reply_is_an_error() -> None:
    with pytest.raises(ModelUnavailable, match="without an answer"):
        await summarize(SilentModel(), MESSAGES)
