"""Compaction: decides when a conversation is summarized and which messages stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from smokebox.agents.events import CompactionEnd, CompactionStart
from smokebox.agents.log.conversation import SUMMARY, estimate
from smokebox.agents.log.records import Compacted, WorkAccepted
from smokebox.agents.messages import ToolReturns, UserMessage
from smokebox.agents.work.item import WorkItem, WorkResult
from smokebox.agents.work.summary import last_request, request_in_summary, summarize
from smokebox.errors import InvalidOption, ModelError
from smokebox.options import refuse_unknown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from smokebox.agents.log.conversation import Conversation, WorkState
    from smokebox.agents.log.records import WorkEnded, WorkKind
    from smokebox.agents.messages import Message
    from smokebox.agents.model import Model, ModelInfo
    from smokebox.agents.session_context import SessionContext
    from smokebox.agents.work.item import WorkContext


DEFAULT_RESERVE = 20_000
DEFAULT_KEEP = 8_000
_MIN_RESERVE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """Settings of compaction. Sizes are in tokens.

    A conversation is summarized when less than `reserve` of the model's context window is
    left, by default the model's maximum output, at most 20,000. About `keep_recent` tokens at
    its end stay as they are. `model` writes the summary, by default the model of the
    conversation. If the context window is unknown, a conversation is compacted only when it
    overflows, or by `Session.compact`.
    """

    reserve: int | None = None
    keep_recent: int = DEFAULT_KEEP
    model: str | Model | None = field(default=None)

    def __post_init__(self) -> None:
        for name, value in (("reserve", self.reserve), ("keep_recent", self.keep_recent)):
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InvalidOption(
                    f"compaction: {name}={value!r} is not a number of tokens.",
                    hint="Pass a whole number, 0 or more.",
                    option=name,
                    value=value,
                )


def as_compaction(value: object) -> Compaction | None:
    """Return the option as settings: a `Compaction`, its fields, None for the default.

    Returns None for False: conversations are never compacted.
    """
    if value is None or value is True:
        return Compaction()
    if value is False:
        return None
    if isinstance(value, Compaction):
        return value
    if isinstance(value, Mapping):
        fields: dict[str, Any] = dict(value)
        refuse_unknown("compaction", fields, ("reserve", "keep_recent", "model"))
        return Compaction(**fields)
    raise InvalidOption(
        f"compaction={value!r} is neither a Compaction nor a bool.",
        hint="Pass Compaction(...), False for never, or leave it out.",
        option="compaction",
        value=repr(value),
    )


def threshold(info: ModelInfo, options: Compaction | None) -> int | None:
    """Return the number of tokens above which a conversation is compacted; None for never."""
    window = info.context_window
    if options is None or not window:
        return None
    reserve = options.reserve
    if reserve is None:
        reserve = min(DEFAULT_RESERVE, info.max_output or DEFAULT_RESERVE)
    if reserve * 2 >= window:
        reserve = max(_MIN_RESERVE, window // 3)
    return window - min(reserve, window // 2)


def should_compact(tokens: int, info: ModelInfo, options: Compaction | None) -> bool:
    """Return True if a conversation of so many tokens is to be compacted before the next turn."""
    limit = threshold(info, options)
    return limit is not None and tokens > limit


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionCut:
    """The messages to summarize; messages from position `keep_from` on stay.

    `previous` is the summary of an earlier compaction. `request` is the user's request, if the
    cut is after it: the summary quotes it.
    """

    messages: Sequence[Message]
    keep_from: int
    previous: str | None = None
    request: str | None = None


def cut(conversation: Conversation, info: ModelInfo, options: Compaction) -> CompactionCut | None:
    """Return where to cut a conversation, or None if compaction would gain nothing.

    A cut is before a message of the user or the model, never between a tool call and its
    result. If even the last such section is too long, the whole conversation is summarized.
    """
    messages, positions = conversation.messages, conversation.positions
    first = messages[0] if messages else None
    start = 1 if isinstance(first, UserMessage) and first.signal == SUMMARY else 0
    limit = threshold(info, options)
    keep = options.keep_recent if limit is None else min(options.keep_recent, limit // 2)
    cuts = [
        n
        for n in range(start, len(messages))
        if not isinstance(messages[n], ToolReturns)
        and (n == start or positions[n] != positions[n - 1])
    ]
    index = _choose_cut(messages, cuts, keep, limit)
    if index <= start:
        return None
    summarized, kept = messages[start:index], messages[index:]
    previous = conversation.summary if start else None
    request = last_request(summarized) or request_in_summary(previous)
    return CompactionCut(
        messages=summarized,
        keep_from=positions[index] if kept else conversation.position + 1,
        previous=previous,
        request=None if last_request(kept) else request,
    )


def _choose_cut(messages: Sequence[Message], cuts: list[int], keep: int, limit: int | None) -> int:
    """Return the first possible cut with at most `keep` tokens after it."""
    size, sizes = 0, {len(messages): 0}
    for number in range(len(messages) - 1, -1, -1):
        size += estimate(messages[number])
        sizes[number] = size
    fitting = [cut for cut in cuts if sizes[cut] <= keep]
    if fitting:
        return fitting[0]
    # The last section alone is larger than `keep`: it stays if it fits in the window.
    if cuts and (limit is None or sizes[cuts[-1]] <= limit // 2):
        return cuts[-1]
    return len(messages)


@dataclass(slots=True, kw_only=True)
class Compactor:
    """Compacts the conversation during one work item."""

    work: WorkContext
    options: Compaction | None
    _useless: bool = field(default=False, init=False)
    _shortened_at: int = field(default=-1, init=False)

    async def compact_if_needed(self, model: Model) -> None:
        """Summarize if the conversation has become too long.

        If that fails the work continues, as the conversation may still fit.
        """
        tokens = self.work.event_log.conversation.tokens
        if self._useless or not should_compact(tokens, model.info, self.options):
            return
        try:
            await self.compact(model)
        except ModelError:
            self._useless = True
        # A conversation that is still too long would be summarized before each turn.
        after = self.work.event_log.conversation.tokens
        self._useless |= should_compact(after, model.info, self.options)

    async def shorten(self, model: Model) -> bool:
        """Summarize after a context overflow; False if that failed or was done in this turn."""
        if self.options is None or self._shortened_at == self.work.meter.turns:
            return False
        self._shortened_at = self.work.meter.turns
        try:
            return await self.compact(model) is not None
        except ModelError:
            return False

    async def compact(self, model: Model, focus: str | None = None) -> str | None:
        """Summarize now, and return the summary; None if that would gain nothing."""
        options = self.options or Compaction()
        conversation = self.work.event_log.conversation
        before = conversation.tokens
        found = cut(conversation, model.info, options)
        if found is None:
            return None
        self.work.emit(CompactionStart(before))
        if options.model is not None:
            model = await self.work.session.registry.models.open(options.model)
        try:
            summary = await summarize(
                model, found.messages, focus, found.previous, request=found.request
            )
        except ModelError as error:
            self.work.emit(CompactionEnd(before, str(error)))
            raise
        self.work.meter.add(summary.usage)
        await self.work.event_log.append(
            Compacted(summary.text, found.keep_from, before, summary.usage, self.work.work_id)
        )
        self.work.emit(CompactionEnd(self.work.event_log.conversation.tokens))
        return summary.text


@dataclass(slots=True, kw_only=True)
class CompactionItem(WorkItem):
    """Summarizes the conversation of a session. Its value is the summary, "" for none."""

    kind: WorkKind = "compact"
    focus: str | None

    @classmethod
    def resumed(cls, session: SessionContext, work: WorkState) -> CompactionItem:
        """Return a compaction that a killed process left unfinished."""
        focus = work.options.get("focus")
        return cls(session=session, work_id=work.id, focus=focus, meter=session.new_meter())

    async def accept(self) -> WorkAccepted:
        """Return the record, with the focus."""
        options = {} if self.focus is None else {"focus": self.focus}
        return WorkAccepted(self.work_id, self.kind, None, options)

    async def run(self, ctx: WorkContext) -> WorkResult:
        """Summarize the conversation with the model of the agent."""
        options = self.session.setup.options
        models = await self.session.registry.models.open_all(options.model)
        compactor = Compactor(work=ctx, options=options.compaction or None)
        summary = await compactor.compact(models[0], self.focus) or ""
        return WorkResult(value=summary, text=summary)

    def restore(self, end: WorkEnded) -> WorkResult:
        """Return the summary that the log has."""
        return WorkResult(value=end.text, text=end.text)
