"""When a conversation is summarized, and from where on it is kept as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from smokebox.agents.log.conversation import SUMMARY
from smokebox.agents.log.sizes import estimate
from smokebox.agents.messages import ToolReturns, UserMessage
from smokebox.agents.summary import Summary, request_in, summarize
from smokebox.agents.transcript import request_of
from smokebox.errors import InvalidOption
from smokebox.options import refuse_unknown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from smokebox.agents.log.conversation import Conversation
    from smokebox.agents.messages import Message
    from smokebox.agents.model import Model, ModelInfo

__all__ = [
    "Compaction",
    "Cut",
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
class Cut:
    """What is summarized, and what stays: `keep_from` is for the record `Compacted`.

    `previous` is the summary that was there already, and `request` what is being worked on
    where the cut is in the midst of it. Both are for `summarize`.
    """

    messages: Sequence[Message]
    keep_from: int
    previous: str | None = None
    request: str | None = None


def cut(conversation: Conversation, info: ModelInfo, options: Compaction) -> Cut | None:
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
    return Cut(
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
