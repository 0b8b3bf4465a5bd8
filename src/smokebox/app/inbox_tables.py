"""Tables and statements of an inbox."""

from __future__ import annotations

from dataclasses import replace

from smokebox.agents.log.sqlite_tables import SESSION_STORE

# One tuple of statements per schema version. Released versions never change.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        # AUTOINCREMENT: a number is never reused, because locks are keyed by it.
        """
        CREATE TABLE targets (
            number INTEGER PRIMARY KEY AUTOINCREMENT,
            kind TEXT NOT NULL, name TEXT NOT NULL, id TEXT NOT NULL,
            UNIQUE (kind, name, id)
        )
        """,
        "CREATE INDEX targets_by_id ON targets (id)",
        "CREATE INDEX targets_by_name ON targets (kind, name)",
        """
        CREATE TABLE submissions (
            place INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            target INTEGER NOT NULL REFERENCES targets (number) ON DELETE CASCADE,
            body BLOB NOT NULL, request BLOB, head INTEGER NOT NULL,
            key TEXT, digest TEXT NOT NULL,
            accepted_at REAL NOT NULL, ended_at REAL,
            state TEXT NOT NULL DEFAULT 'waiting',
            attempts INTEGER NOT NULL DEFAULT 0, abort_asked INTEGER NOT NULL DEFAULT 0,
            ending BLOB,
            UNIQUE (target, key)
        )
        """,
        "CREATE INDEX submissions_of ON submissions (target, place)",
        "CREATE INDEX submissions_open ON submissions (target, place) WHERE state != 'ended'",
        "CREATE INDEX submissions_ended ON submissions (ended_at) WHERE state = 'ended'",
        """
        CREATE TABLE notes (
            submission TEXT NOT NULL REFERENCES submissions (id) ON DELETE CASCADE,
            place INTEGER NOT NULL, at REAL NOT NULL, data BLOB NOT NULL,
            PRIMARY KEY (submission, place)
        ) WITHOUT ROWID
        """,
        """
        CREATE TABLE decisions (
            target INTEGER NOT NULL REFERENCES targets (number) ON DELETE CASCADE,
            call_id TEXT NOT NULL, allowed INTEGER NOT NULL, reason TEXT NOT NULL,
            PRIMARY KEY (target, call_id)
        ) WITHOUT ROWID
        """,
        "CREATE TABLE schedules (name TEXT PRIMARY KEY, line TEXT NOT NULL, due REAL NOT NULL)",
    ),
)

INBOX = replace(SESSION_STORE, label="inbox", migrations=MIGRATIONS)

MAKE_TARGET = "INSERT OR IGNORE INTO targets (kind, name, id) VALUES (?, ?, ?)"
TARGET = "SELECT number FROM targets WHERE kind = ? AND name = ? AND id = ?"
BY_KEY = "SELECT id, digest FROM submissions WHERE target = ? AND key = ?"
ADD = (
    "INSERT INTO submissions (id, target, body, request, head, key, digest, accepted_at) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
)
_FIELDS = (
    "submissions.id, kind, name, targets.id, body, accepted_at, state, attempts, abort_asked, "
    "ended_at, ending, request, head"
)
_ALL = f"SELECT {_FIELDS} FROM submissions JOIN targets ON number = target"
GET = f"{_ALL} WHERE submissions.id = ?"
# Ordered by number, as the index is: each run is the only one of its target.
RUNS = f"{_ALL} WHERE kind = 'workflow' AND name = ? ORDER BY number DESC LIMIT ?"
RUN = f"{_ALL} WHERE targets.id = ? AND +kind = 'workflow' ORDER BY place DESC LIMIT 1"
_TOLD = (
    "SELECT submissions.id, kind, name, targets.id FROM submissions "
    "JOIN targets ON number = target WHERE"
)
# Each half uses its own index.
LATELY = f"{_TOLD} state != 'ended' UNION ALL {_TOLD} state = 'ended' AND ended_at >= ?"
FIRST = f"{_ALL} WHERE target = ? AND state != 'ended' ORDER BY place LIMIT 1"
OPEN = (
    "SELECT target FROM submissions WHERE state != 'ended' GROUP BY target "
    "ORDER BY min(place) LIMIT ?"
)
COUNT_OPEN = "SELECT count(*) FROM submissions WHERE state != 'ended'"
OPEN_OF = (
    "SELECT submissions.id FROM submissions WHERE target = ? AND state != 'ended' ORDER BY place"
)
BEGIN = "UPDATE submissions SET state = 'running', attempts = attempts + 1 WHERE id = ?"
END = (
    "UPDATE submissions SET state = 'ended', ended_at = ?, ending = ? "
    "WHERE id = ? AND state != 'ended'"
)
END_WAITING = (
    "UPDATE submissions SET state = 'ended', ended_at = ?, ending = ? "
    "WHERE id = ? AND state = 'waiting'"
)
ASK_ABORT = "UPDATE submissions SET abort_asked = 1 WHERE id = ? AND state != 'ended'"
# `state != 'ended'` makes SQLite use the partial index of open submissions.
ABORTS = "SELECT id FROM submissions WHERE abort_asked AND state != 'ended' AND state = 'running'"
FORGET_TARGET = "DELETE FROM targets WHERE number = ?"
SWEEP = "DELETE FROM submissions WHERE state = 'ended' AND ended_at < ?"
# Targets with nothing more recent.
EXPIRED = """
    SELECT DISTINCT number, kind, name, targets.id FROM submissions AS old
    JOIN targets ON number = target
    WHERE state = 'ended' AND ended_at < ?1 AND NOT EXISTS (
        SELECT 1 FROM submissions
        WHERE target = old.target AND (state != 'ended' OR ended_at >= ?1)
    )
    LIMIT ?2
"""

NOTE = (
    "INSERT INTO notes (submission, place, at, data) "
    "SELECT ?, coalesce(max(place), 0) + 1, ?, ? FROM notes WHERE submission = ? "
    "RETURNING place"
)
NOTES = (
    "SELECT place, at, data FROM notes WHERE submission = ? AND place > ? ORDER BY place LIMIT ?"
)
LAST_NOTE = "SELECT coalesce(max(place), 0) FROM notes WHERE submission = ?"

DECIDE = (
    "INSERT OR IGNORE INTO decisions (target, call_id, allowed, reason) "
    "SELECT number, ?, ?, ? FROM targets WHERE kind = 'agent' AND name = ? AND id = ?"
)
DECISIONS = (
    "SELECT name, id, call_id, allowed, reason FROM decisions JOIN targets ON number = target "
    "WHERE EXISTS (SELECT 1 FROM submissions WHERE target = number AND state != 'ended')"
)
DECIDED = (
    "DELETE FROM decisions WHERE call_id = ? AND target = "
    "(SELECT number FROM targets WHERE kind = 'agent' AND name = ? AND id = ?)"
)

DUE = "SELECT line, due FROM schedules WHERE name = ?"
SET_DUE = "INSERT OR REPLACE INTO schedules (name, line, due) VALUES (?, ?, ?)"
