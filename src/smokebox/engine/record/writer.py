"""The one writer of the durable record."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.engine.record.schema import fault
from smokebox.wire.commits import Commits

if TYPE_CHECKING:
    import asyncio
    import sqlite3

    from smokebox.engine.record.rows import Change


class Writer:
    """Writes changes in the order in which they are asked for."""

    def __init__(self, path: str, connection: sqlite3.Connection) -> None:
        self._commits = Commits(
            connection, name="smokebox-record", fault=lambda error: fault(error, path)
        )

    def submit(self, changes: tuple[Change, ...]) -> asyncio.Future[int]:
        """Ask for changes. The future has the number of rows once they are committed."""

        def apply(connection: sqlite3.Connection) -> int:
            return sum(connection.execute(one.sql, one.values).rowcount for one in changes)

        return self._commits.submit(apply)

    def close(self) -> None:
        """Commit what was asked for, and end the thread. Blocks until then."""
        self._commits.close()
