"""What a piece of work is to the lane that it runs in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.agents.log.records import Record, WorkAccepted, WorkEnded, WorkKind
    from smokebox.agents.messages import Usage
    from smokebox.agents.operation import Operation

WhenBusy: TypeAlias = Literal["raise", "queue", "join"]
"""What becomes of work for a session that has other work: an error, its turn after that, or a
word in the conversation that goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What work came to: a value for who asked, a text and a result for the record."""

    value: Any
    text: str = ""
    result: Any = None


class Job(Protocol):
    """A piece of work."""

    @property
    def work_id(self) -> str:
        """Its id in the record."""
        ...

    @property
    def kind(self) -> WorkKind:
        """What kind of work it is."""
        ...

    @property
    def key(self) -> str | None:
        """Makes it one with other work of the same key."""
        ...

    @property
    def timeout(self) -> float | None:
        """Seconds that it may take, None for as long as any work."""
        ...

    @property
    def usage(self) -> Usage:
        """What it took up to now."""
        ...

    async def accept(self) -> WorkAccepted:
        """Get ready what it needs; gives the record of its acceptance."""
        ...

    def begin(self) -> list[Record]:
        """What is recorded when it begins for the first time."""
        ...

    async def run(self, operation: Operation[Any], joins: Callable[[], bool]) -> Ending:
        """Do it; `joins` adds to the conversation what others have said meanwhile."""
        ...

    def restore(self, end: WorkEnded) -> Ending:
        """What it came to, from the record."""
        ...

    def stop(self) -> None:
        """It is being called off: tell what cannot be cancelled."""
        ...
