"""Compaction: when a conversation is summarized, what is kept, and the work item that does it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from smokebox.agents.events import CompactionEnd, CompactionStart
from smokebox.agents.log.conversation import SUMMARY, estimate
from smokebox.agents.log.records import Compacted, WorkAccepted
from smokebox.agents.messages import ToolReturns, UserMessage
from smokebox.agents.work.item import WorkItem, WorkResult
from smokebox.agents.work.summary import Summary, request_in, request_of, summarize
from smokebox.errors import InvalidOption, ModelError
from smokebox.options import refuse_unknown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from smokebox.agents.log.conversation import Conversation
    from smokebox.agents.log.records import WorkEnded, WorkKind
    from smokebox.agents.log.work_state import WorkState
    from smokebox.agents.messages import Message
    from smokebox.agents.model import Model, ModelInfo
    from smokebox.agents.session_context import SessionContext
    from smokebox.agents.work.item import WorkContext


__all__ = [
    "Compaction",
    "CompactionCut",
    "Summary",
    "as_compaction",
    "cut",
    "should_compact",
    "summarize",
    "threshold",
]

DEFAULT_RESERVE = 20_000
DEFAULT_KEEP = 8_000
_SMALLEST_RESERVE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """How conversations are kept short. Sizes are in tokens.

    A conversation is summarized when less than `reserve` of the model's window is left, by
    default what the model may answer with, at most 20,000. About `keep_recent` at its end
    stays as it is. `model` does it, by default the one that is talked to. One whose window
    nobody knows is only compacted when it overflows, or by hand.
    """

    reserve: int | None = None
    keep_recent: int = DEFAULT_KEEP
    model: str | Model | None = field(default=None)

    def __post_init__(self) -> None:
        for name, value in (("reserve", self.reserve), ("keep_recent", self.keep_recent)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise _not_tokens(name, value)
            if value is not None and value < 0:
                raise _not_tokens(name, value)


def as_compaction(value: object) -> Compaction | None:
    """The option of an agent: a `Compaction`, its fields, None for the default, False for never."""
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
    """Above how many tokens a conversation is compacted; None is never."""
    window = info.context_window
    if options is None or not window:
        return None
    reserve = options.reserve
    if reserve is None:
        reserve = min(DEFAULT_RESERVE, info.max_output or DEFAULT_RESERVE)
    if reserve * 2 >= window:
        reserve = max(_SMALLEST_RESERVE, window // 3)
    # A window smaller than all that is nobody's; still, half of it is more than nothing.
    return window - min(reserve, window // 2)


def should_compact(tokens: int, info: ModelInfo, options: Compaction | None) -> bool:
    """Whether a conversation of so many tokens is to be compacted before the next turn."""
    limit = threshold(info, options)
    return limit is not None and tokens > limit


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionCut:
    """What is summarized, and what stays: `keep_from` is for the record `Compacted`.

    `previous` is the summary that was there already, and `request` what is being worked on
    where the cut is in the midst of it. Both are for `summarize`.
    """

    messages: Sequence[Message]
    keep_from: int
    previous: str | None = None
    request: str | None = None


def cut(conversation: Conversation, info: ModelInfo, options: Compaction) -> CompactionCut | None:
    """Where to cut a conversation, or None where there is nothing to be gained.

    It is only cut before something that a person or the model said, never between a tool
    call and what it came to. Where even the last piece is too long, all of it is summarized.
    """
    messages, positions = conversation.messages, conversation.positions
    start = 1 if messages and _is_summary(messages[0]) else 0
    limit = threshold(info, options)
    keep = options.keep_recent if limit is None else min(options.keep_recent, limit // 2)
    borders = [n for n in range(start, len(messages)) if _is_border(messages, positions, n, start)]
    index = _index(messages, borders, keep, limit)
    if index <= start:
        return None
    rest = messages[index:]
    gone = messages[start:index]
    previous = conversation.summary if start else None
    return CompactionCut(
        messages=gone,
        keep_from=positions[index] if rest else conversation.position + 1,
        previous=previous,
        request=None if request_of(rest) else request_of(gone) or request_in(previous),
    )


def _index(messages: Sequence[Message], borders: list[int], keep: int, limit: int | None) -> int:
    """The first border from which on no more than `keep` is left."""
    size, sizes = 0, {len(messages): 0}
    for number in range(len(messages) - 1, -1, -1):
        size += estimate(messages[number])
        sizes[number] = size
    fitting = [border for border in borders if sizes[border] <= keep]
    if fitting:
        return fitting[0]
    # The last piece alone is more than is to be kept: it stays if the window bears it.
    if borders and (limit is None or sizes[borders[-1]] <= limit // 2):
        return borders[-1]
    return len(messages)


def _is_border(
    messages: Sequence[Message], positions: Sequence[int], number: int, start: int
) -> bool:
    if isinstance(messages[number], ToolReturns):
        return False
    return number == start or positions[number] != positions[number - 1]


def _is_summary(message: Message) -> bool:
    return isinstance(message, UserMessage) and message.signal == SUMMARY


def _not_tokens(name: str, value: object) -> InvalidOption:
    return InvalidOption(
        f"compaction: {name}={value!r} is not a number of tokens.",
        hint="Pass a whole number, 0 or more.",
        option=name,
        value=value,
    )


@dataclass(slots=True, kw_only=True)
class Compactor:
    """Summarizes for one piece of work. `open` makes a model of what `Compaction.model` names."""

    work: WorkContext
    options: Compaction | None
    _in_vain: bool = field(default=False, init=False)
    _shortened_at: int = field(default=-1, init=False)

    async def settle(self, model: Model) -> None:
        """Summarize if the conversation has become too long.

        Where that fails the work goes on: the model may have room enough for it after all.
        """
        tokens = self.work.event_log.conversation.tokens
        if self._in_vain or not should_compact(tokens, model.info, self.options):
            return
        try:
            await self.compact(model)
        except ModelError:
            self._in_vain = True
        # What is still too long would be summarized before each turn, and for nothing.
        after = self.work.event_log.conversation.tokens
        self._in_vain |= should_compact(after, model.info, self.options)

    async def shorten(self, model: Model) -> bool:
        """Summarize because the model could not read all of it; not twice for one turn."""
        if self.options is None or self._shortened_at == self.work.meter.turns:
            return False
        self._shortened_at = self.work.meter.turns
        try:
            return await self.compact(model) is not None
        except ModelError:
            return False

    async def compact(self, model: Model, focus: str | None = None) -> str | None:
        """Summarize now. Gives the summary, or None where there is nothing to be gained."""
        options = self.options or Compaction()
        conversation = self.work.event_log.conversation
        before = conversation.tokens
        piece = cut(conversation, model.info, options)
        if piece is None:
            return None
        self.work.emit(CompactionStart(before))
        by = (
            model
            if options.model is None
            else await self.work.session.registry.models.open(options.model)
        )
        try:
            summary = await summarize(
                by, piece.messages, focus, piece.previous, request=piece.request
            )
        except ModelError as error:
            self.work.emit(CompactionEnd(before, str(error)))
            raise
        self.work.meter.add(summary.usage)
        await self.work.event_log.append(
            Compacted(summary.text, piece.keep_from, before, summary.usage, self.work.work_id)
        )
        self.work.emit(CompactionEnd(self.work.event_log.conversation.tokens))
        return summary.text


@dataclass(slots=True, kw_only=True)
class CompactionItem(WorkItem):
    """Summarizes the conversation of a session; its value is the summary, "" for none."""

    kind: WorkKind = "compact"
    focus: str | None

    @classmethod
    def resumed(cls, session: SessionContext, work: WorkState) -> CompactionItem:
        """Return a compaction that a killed process left unfinished."""
        focus = work.options.get("focus")
        return cls(session=session, work_id=work.id, focus=focus, meter=session.new_meter())

    async def accept(self) -> WorkAccepted:
        """With the focus, so that another process can go on with it."""
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
        """The summary, from the record."""
        return WorkResult(value=end.text, text=end.text)
