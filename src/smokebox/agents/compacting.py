"""Summarizing by hand, as a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from smokebox.agents.compactor import Compactor
from smokebox.agents.job import Ending
from smokebox.agents.log.records import WorkAccepted

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.agents.budget import Meter
    from smokebox.agents.log.records import Record, WorkEnded, WorkKind
    from smokebox.agents.messages import Usage
    from smokebox.agents.operation import Operation
    from smokebox.agents.session import Session


@dataclass(slots=True, kw_only=True)
class Compacting:
    """Summarizes the conversation of a session; its value is the summary, "" for none."""

    session: Session
    work_id: str
    focus: str | None
    meter: Meter
    key: str | None = None
    timeout: float | None = None

    @property
    def kind(self) -> WorkKind:
        """That it compacts."""
        return "compact"

    @property
    def usage(self) -> Usage:
        """What it took up to now."""
        return self.meter.usage

    async def accept(self) -> WorkAccepted:
        """With the focus, so that another process can go on with it."""
        options = {} if self.focus is None else {"focus": self.focus}
        return WorkAccepted(self.work_id, self.kind, None, options)

    def begin(self) -> list[Record]:
        """Nothing that the model is told."""
        return []

    async def run(self, operation: Operation[Any], joins: Callable[[], bool]) -> Ending:
        """Summarize."""
        session = self.session
        options = session.setup.options
        compactor = Compactor(
            work_id=self.work_id,
            journal=session.journal,
            emit=operation.emit,
            meter=self.meter,
            options=options.compaction or None,
            open=session.harness.model,
        )
        models = await session.harness.models(options.model)
        summary = await compactor.compact(models[0], self.focus) or ""
        return Ending(value=summary, text=summary)

    def restore(self, end: WorkEnded) -> Ending:
        """The summary, from the record."""
        return Ending(value=end.text, text=end.text)

    def stop(self) -> None:
        """Nothing else goes on."""
