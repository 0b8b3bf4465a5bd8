"""What keeps records. Small on purpose: memory, SQLite and Postgres are all behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from smokebox.agents.log.records import Record, Stored


@dataclass(frozen=True, slots=True, order=True)
class SessionKey:
    """Which session: of which agent, of which instance of it, by which name."""

    agent: str
    id: str
    session: str

    def __str__(self) -> str:
        return f"{self.agent}/{self.id}/{self.session}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSummary:
    """What a list of sessions shows. `unfinished` is how much accepted work has no end.

    `parent` is the name of the session whose task this one does.
    """

    key: SessionKey
    created_at: float
    updated_at: float
    head: int
    unfinished: int
    parent: str | None = None


class Writer(Protocol):
    """The right to add to one session, until another takes it."""

    @property
    def key(self) -> SessionKey:
        """Which session."""
        ...

    @property
    def head(self) -> int:
        """The offset of the last record, 0 before the first."""
        ...

    async def append(self, records: Sequence[Record]) -> int:
        """Add records, all or none; they are durable when it returns the new head.

        Appends take effect in the order of the calls. One that is cancelled takes effect all
        the same, but who called cannot know when. Raises `Fenced` once another writer has
        taken the session, or it was deleted.
        """
        ...

    async def release(self) -> None:
        """Give the right back. Safe to repeat."""
        ...


class Store(Protocol):
    """Sessions and their records."""

    async def open(self, key: SessionKey, *, wait: float = 0.0) -> Writer:
        """Become the writer of a session, which need not be there yet.

        One whose writer is alive raises `SessionBusy` (after `wait` seconds of trying); one
        whose writer has died is taken over at once where that can be known, else when its
        lease is over.
        """
        ...

    async def read(self, key: SessionKey, *, after: int = 0, limit: int = 1000) -> list[Stored]:
        """Records behind an offset, in order; none for a session that is not there."""
        ...

    def follow(self, key: SessionKey, *, after: int = 0) -> AsyncGenerator[Stored, None]:
        """Records behind an offset, then those that are added, without gap or repeat.

        Those that another process adds too. Waits for a session that is not there yet, and ends
        when one is deleted. A slow reader holds nobody up, and takes no memory.
        """
        ...

    async def sessions(
        self, *, agent: str | None = None, id: str | None = None, limit: int = 1000
    ) -> list[SessionSummary]:
        """Sessions that have records, those that changed last first."""
        ...

    async def delete(self, key: SessionKey) -> bool:
        """Remove a session with its records and children; False where there is none.

        Their writers are `Fenced` from then on. Raises `Conflict` while a fork needs the records.
        """
        ...

    async def put_blob(self, data: bytes) -> str:
        """Keep bytes beside the records; gives their name, the same for the same bytes."""
        ...

    async def get_blob(self, name: str) -> bytes:
        """The bytes of that name. Raises `NotFound`."""
        ...

    async def aclose(self) -> None:
        """Let go of it; what was added stays."""
        ...
