"""Work items: the unit of work of a session, and the context that one runs in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from smokebox.agents.limits import UsageMeter
from smokebox.foundation.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.agents.events import Event
    from smokebox.agents.log.event_log import EventLog
    from smokebox.agents.log.records import Record, WorkAccepted, WorkEnded, WorkKind
    from smokebox.agents.session_context import SessionContext


WhenBusy: TypeAlias = Literal["raise", "queue", "join"]
"""Handling of work for a busy session: raise `SessionBusy`, run it afterwards, or add it to
the conversation that is running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkContext:
    """A work item while it runs: everything that its parts share."""

    session: SessionContext
    event_log: EventLog
    work_id: str
    meter: UsageMeter
    emit: Callable[[Event], None]
    """Publish an event of the operation."""
    join: Callable[[], bool]
    """Add messages that were sent meanwhile to the conversation; False if there were none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkResult:
    """Result of a work item: a value for the caller, a text and a JSON value for the log."""

    value: Any
    text: str = ""
    result: Any = None


@dataclass(slots=True, kw_only=True)
class WorkItem(ABC):
    """A unit of work of a session: a prompt, a skill, a task, a command or a compaction.

    Items with the same `key` are one: the second gets the result of the first. `timeout` is
    the most seconds it may take, by default what `Durability` says.
    """

    session: SessionContext
    kind: WorkKind
    work_id: str = field(default_factory=new_id)
    key: str | None = None
    timeout: float | None = None
    meter: UsageMeter = field(default_factory=lambda: UsageMeter(None))

    @abstractmethod
    async def accept(self) -> WorkAccepted:
        """Prepare the item, and return the record that another process can resume it from."""

    def begin(self) -> list[Record]:
        """Return the records to write when it starts for the first time."""
        return []

    @abstractmethod
    async def run(self, ctx: WorkContext) -> WorkResult:
        """Do the work."""

    @abstractmethod
    def restore(self, end: WorkEnded) -> WorkResult:
        """Return the result that the log has."""

    def stop(self) -> None:
        """Signal threads that the work is being aborted; coroutines are cancelled."""
