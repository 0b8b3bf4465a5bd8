"""Keeps a conversation short enough for its model, while work goes on or by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smokebox.agents.compaction import Compaction, cut, should_compact, summarize
from smokebox.agents.events import CompactionEnd, CompactionStart
from smokebox.agents.log.records import Compacted
from smokebox.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from smokebox.agents.budget import Meter
    from smokebox.agents.events import Event
    from smokebox.agents.journal import Journal
    from smokebox.agents.model import Model


@dataclass(slots=True, kw_only=True)
class Compactor:
    """Summarizes for one piece of work. `open` makes a model of what `Compaction.model` names."""

    work_id: str
    journal: Journal
    emit: Callable[[Event], None]
    meter: Meter
    options: Compaction | None
    open: Callable[[str | Model], Awaitable[Model]]
    _in_vain: bool = field(default=False, init=False)
    _shortened_at: int = field(default=-1, init=False)

    async def settle(self, model: Model) -> None:
        """Summarize if the conversation has become too long.

        Where that fails the work goes on: the model may have room enough for it after all.
        """
        tokens = self.journal.conversation.tokens
        if self._in_vain or not should_compact(tokens, model.info, self.options):
            return
        try:
            await self.compact(model)
        except ModelError:
            self._in_vain = True
        # What is still too long would be summarized before each turn, and for nothing.
        after = self.journal.conversation.tokens
        self._in_vain |= should_compact(after, model.info, self.options)

    async def shorten(self, model: Model) -> bool:
        """Summarize because the model could not read all of it; not twice for one turn."""
        if self.options is None or self._shortened_at == self.meter.turns:
            return False
        self._shortened_at = self.meter.turns
        try:
            return await self.compact(model) is not None
        except ModelError:
            return False

    async def compact(self, model: Model, focus: str | None = None) -> str | None:
        """Summarize now. Gives the summary, or None where there is nothing to be gained."""
        options = self.options or Compaction()
        conversation = self.journal.conversation
        before = conversation.tokens
        piece = cut(conversation, model.info, options)
        if piece is None:
            return None
        self.emit(CompactionStart(before))
        by = model if options.model is None else await self.open(options.model)
        try:
            summary = await summarize(
                by, piece.messages, focus, piece.previous, request=piece.request
            )
        except ModelError as error:
            self.emit(CompactionEnd(before, str(error)))
            raise
        self.meter.add(summary.usage)
        await self.journal.append(
            Compacted(summary.text, piece.keep_from, before, summary.usage, self.work_id)
        )
        self.emit(CompactionEnd(self.journal.conversation.tokens))
        return summary.text
