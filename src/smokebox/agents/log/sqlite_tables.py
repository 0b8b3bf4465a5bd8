"""Tables and statements of the SQLite store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smokebox.agents.log.records import too_new
from smokebox.agents.log.store import SessionKey, SessionSummary
from smokebox.foundation.storage import DatabaseFormat

if TYPE_CHECKING:
    from smokebox.errors import StoreTooNew


# One tuple of statements for each version. Released ones never change.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        # AUTOINCREMENT: the number of a deleted session is never reused.
        """
        CREATE TABLE sessions (
            number INTEGER PRIMARY KEY AUTOINCREMENT,
            agent TEXT NOT NULL, id TEXT NOT NULL, session TEXT NOT NULL,
            parent TEXT, forked_from TEXT,
            head INTEGER NOT NULL DEFAULT 0, unfinished INTEGER NOT NULL DEFAULT 0,
            created_at REAL NOT NULL, updated_at REAL NOT NULL,
            epoch INTEGER NOT NULL DEFAULT 0, owner TEXT NOT NULL DEFAULT '',
            UNIQUE (agent, id, session)
        )
        """,
        "CREATE INDEX sessions_by_change ON sessions (updated_at)",
        """
        CREATE TABLE records (
            session INTEGER NOT NULL REFERENCES sessions (number) ON DELETE CASCADE,
            place INTEGER NOT NULL, at REAL NOT NULL, version INTEGER NOT NULL,
            data BLOB NOT NULL,
            PRIMARY KEY (session, place)
        ) WITHOUT ROWID
        """,
        "CREATE TABLE blobs (name TEXT PRIMARY KEY, at REAL NOT NULL, data BLOB NOT NULL)",
        """
        CREATE TABLE uses (
            session INTEGER NOT NULL REFERENCES sessions (number) ON DELETE CASCADE,
            blob TEXT NOT NULL,
            PRIMARY KEY (session, blob)
        ) WITHOUT ROWID
        """,
        "CREATE INDEX uses_by_blob ON uses (blob)",
    ),
)


def _too_new(path: str, version: int, latest: int) -> StoreTooNew:
    return too_new(f"the store {path}", version, latest)


def _repair_hint(path: str) -> str:
    return "Set persist= to another path, or move the file away: an empty one is created."


SESSION_STORE = DatabaseFormat(
    label="session store",
    # "SMKA"
    application_id=0x534D4B41,
    migrations=MIGRATIONS,
    # A tool starts only after the record of its start is on disk, so that it does not run twice
    # even after a power failure.
    synchronous="FULL",
    busy_seconds=30.0,
    repair_hint=_repair_hint,
    too_new=_too_new,
    make_directory=True,
)


_KEY = "agent = ? AND id = ? AND session = ?"

CREATE = (
    "INSERT INTO sessions (agent, id, session, created_at, updated_at) VALUES (?, ?, ?, ?, ?) "
    "ON CONFLICT DO NOTHING"
)
OWNER = f"SELECT number, owner FROM sessions WHERE {_KEY}"
TAKE_OVER = (
    "UPDATE sessions SET epoch = epoch + 1, owner = ? WHERE number = ? RETURNING epoch, head"
)
DELETE_EMPTY = "DELETE FROM sessions WHERE number = ? AND epoch = ? AND head = 0"

HEAD = "SELECT head FROM sessions WHERE number = ? AND epoch = ?"
ADD = "INSERT INTO records (session, place, at, version, data) VALUES (?, ?, ?, ?, ?)"
USE = "INSERT INTO uses (session, blob) VALUES (?, ?) ON CONFLICT DO NOTHING"
DROP_USE = "DELETE FROM uses WHERE session = ? AND blob = ?"
ADVANCE = (
    "UPDATE sessions SET head = ?, updated_at = ?, unfinished = unfinished + ?, "
    "parent = coalesce(?, parent), forked_from = coalesce(?, forked_from) WHERE number = ?"
)

FIND = f"SELECT number, head FROM sessions WHERE {_KEY}"
READ = (
    "SELECT place, at, version, data FROM records "
    f"WHERE session = (SELECT number FROM sessions WHERE {_KEY}) AND place > ? "
    "ORDER BY place LIMIT ?"
)
LIST = (
    "SELECT agent, id, session, created_at, updated_at, head, unfinished, parent FROM sessions "
    "WHERE head > 0 AND (? IS NULL OR agent = ?) AND (? IS NULL OR id = ?) "
    "AND substr(id, 1, length(?)) = ? "
    "ORDER BY updated_at DESC, number DESC LIMIT ?"
)
LIST_INSTANCE = (
    "SELECT agent, id, session, created_at, updated_at, head, unfinished, parent FROM sessions "
    "WHERE head > 0 AND agent = ? AND id = ? ORDER BY updated_at DESC, number DESC LIMIT ?"
)

FAMILY = f"""
    WITH RECURSIVE family (number, name) AS (
        SELECT number, session FROM sessions WHERE {_KEY}
        UNION
        SELECT child.number, child.session
        FROM family
        JOIN sessions AS parent ON parent.number = family.number
        JOIN sessions AS child
            ON child.agent = parent.agent AND child.id = parent.id AND child.parent = parent.session
    )
    SELECT number, name FROM family
"""
FORKS = (
    "SELECT number, session, forked_from FROM sessions "
    "WHERE agent = ? AND id = ? AND forked_from IS NOT NULL"
)
DELETE = "DELETE FROM sessions WHERE number = ?"

PUT_BLOB = (
    "INSERT INTO blobs (name, at, data) VALUES (?, ?, ?) "
    "ON CONFLICT (name) DO UPDATE SET at = excluded.at"
)
GET_BLOB = "SELECT data FROM blobs WHERE name = ?"
DELETE_UNUSED_BLOBS = "DELETE FROM blobs WHERE at < ? AND name NOT IN (SELECT blob FROM uses)"


def summary(row: tuple[Any, ...]) -> SessionSummary:
    """Return the summary of a row of `LIST`."""
    agent, id, session, created_at, updated_at, head, unfinished, parent = row
    return SessionSummary(
        key=SessionKey(agent, id, session),
        created_at=created_at,
        updated_at=updated_at,
        head=head,
        unfinished=unfinished,
        parent=parent,
    )
