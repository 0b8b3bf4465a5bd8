"""Tables and SQL statements of the inbox."""

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
            position INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            target INTEGER NOT NULL REFERENCES targets (number) ON DELETE CASCADE,
            body BLOB NOT NULL, request BLOB, head INTEGER NOT NULL,
            key TEXT, digest TEXT NOT NULL,
            accepted_at REAL NOT NULL, ended_at REAL,
            state TEXT NOT NULL DEFAULT 'waiting',
            attempts INTEGER NOT NULL DEFAULT 0, abort_requested INTEGER NOT NULL DEFAULT 0,
            outcome BLOB,
            UNIQUE (target, key)
        )
        """,
        "CREATE INDEX submissions_of ON submissions (target, position)",
        "CREATE INDEX submissions_open ON submissions (target, position) WHERE state != 'ended'",
        "CREATE INDEX submissions_ended ON submissions (ended_at) WHERE state = 'ended'",
        """
        CREATE TABLE events (
            submission TEXT NOT NULL REFERENCES submissions (id) ON DELETE CASCADE,
            offset INTEGER NOT NULL, at REAL NOT NULL, data BLOB NOT NULL,
            PRIMARY KEY (submission, offset)
        ) WITHOUT ROWID
        """,
        """
        CREATE TABLE decisions (
            target INTEGER NOT NULL REFERENCES targets (number) ON DELETE CASCADE,
            call_id TEXT NOT NULL, allowed INTEGER NOT NULL, reason TEXT NOT NULL,
            PRIMARY KEY (target, call_id)
        ) WITHOUT ROWID
        """,
        "CREATE TABLE schedules (name TEXT PRIMARY KEY, cron TEXT NOT NULL, due REAL NOT NULL)",
    ),
    (
        # Kept when their submissions are deleted, or an old delivery could be sent again.
        """
        CREATE TABLE deliveries (
            kind TEXT NOT NULL, name TEXT NOT NULL, key TEXT NOT NULL, id TEXT NOT NULL,
            PRIMARY KEY (kind, name, key)
        ) WITHOUT ROWID
        """,
    ),
)

INBOX = replace(SESSION_STORE, label="inbox", migrations=MIGRATIONS)

ADD_TARGET = "INSERT OR IGNORE INTO targets (kind, name, id) VALUES (?, ?, ?)"
TARGET = "SELECT number FROM targets WHERE kind = ? AND name = ? AND id = ?"
BY_KEY = "SELECT id, digest FROM submissions WHERE target = ? AND key = ?"
DELIVERED_TO = "SELECT id FROM deliveries WHERE kind = ? AND name = ? AND key = ?"
ADD_DELIVERY = "INSERT INTO deliveries (kind, name, key, id) VALUES (?, ?, ?, ?)"
ADD = (
    "INSERT INTO submissions (id, target, body, request, head, key, digest, accepted_at) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
)
_FIELDS = (
    "submissions.id, kind, name, targets.id, body, accepted_at, state, attempts, abort_requested, "
    "ended_at, outcome, request, head"
)
_ALL = f"SELECT {_FIELDS} FROM submissions JOIN targets ON number = target"
GET = f"{_ALL} WHERE submissions.id = ?"
# Ordered by number, as the index is: each run is the only one of its target.
RUNS = (
    f"{_ALL} WHERE kind = 'workflow' AND name = ? AND substr(targets.id, 1, length(?)) = ? "
    "ORDER BY number DESC LIMIT ?"
)
RUN = f"{_ALL} WHERE targets.id = ? AND +kind = 'workflow' ORDER BY position DESC LIMIT 1"
_TARGETS = (
    "SELECT submissions.id, kind, name, targets.id FROM submissions "
    "JOIN targets ON number = target WHERE"
)
# Each half uses its own index.
RECENT = f"{_TARGETS} state != 'ended' UNION ALL {_TARGETS} state = 'ended' AND ended_at >= ?"
FIRST = f"{_ALL} WHERE target = ? AND state != 'ended' ORDER BY position LIMIT 1"
OPEN_TARGETS = (
    "SELECT target FROM submissions WHERE state != 'ended' GROUP BY target "
    "ORDER BY min(position) LIMIT ?"
)
COUNT_OPEN = "SELECT count(*) FROM submissions WHERE state != 'ended'"
OPEN_IDS = (
    "SELECT submissions.id FROM submissions WHERE target = ? AND state != 'ended' ORDER BY position"
)
START = "UPDATE submissions SET state = 'running', attempts = attempts + 1 WHERE id = ?"
FINISH = (
    "UPDATE submissions SET state = 'ended', ended_at = ?, outcome = ? "
    "WHERE id = ? AND state != 'ended'"
)
FINISH_WAITING = (
    "UPDATE submissions SET state = 'ended', ended_at = ?, outcome = ? "
    "WHERE id = ? AND state = 'waiting'"
)
REQUEST_ABORT = "UPDATE submissions SET abort_requested = 1 WHERE id = ? AND state != 'ended'"
# `state != 'ended'` makes SQLite use the partial index of open submissions.
ABORTED_IDS = (
    "SELECT id FROM submissions WHERE abort_requested AND state != 'ended' AND state = 'running'"
)
DELETE_TARGET = "DELETE FROM targets WHERE number = ?"
DELETE_ENDED = "DELETE FROM submissions WHERE state = 'ended' AND ended_at < ?"
# Targets without more recent work.
EXPIRED = """
    SELECT DISTINCT number, kind, name, targets.id FROM submissions AS old
    JOIN targets ON number = target
    WHERE state = 'ended' AND ended_at < ?1 AND NOT EXISTS (
        SELECT 1 FROM submissions
        WHERE target = old.target AND (state != 'ended' OR ended_at >= ?1)
    )
    LIMIT ?2
"""

ADD_EVENT = (
    "INSERT INTO events (submission, offset, at, data) "
    "SELECT ?, coalesce(max(offset), 0) + 1, ?, ? FROM events WHERE submission = ?"
)
EVENTS = (
    "SELECT offset, at, data FROM events WHERE submission = ? AND offset > ? "
    "ORDER BY offset LIMIT ?"
)
LAST_OFFSET = "SELECT coalesce(max(offset), 0) FROM events WHERE submission = ?"

ADD_DECISION = (
    "INSERT OR IGNORE INTO decisions (target, call_id, allowed, reason) "
    "SELECT number, ?, ?, ? FROM targets WHERE kind = 'agent' AND name = ? AND id = ?"
)
DECISIONS = (
    "SELECT name, id, call_id, allowed, reason FROM decisions JOIN targets ON number = target "
    "WHERE EXISTS (SELECT 1 FROM submissions WHERE target = number AND state != 'ended')"
)
DELETE_DECISION = (
    "DELETE FROM decisions WHERE call_id = ? AND target = "
    "(SELECT number FROM targets WHERE kind = 'agent' AND name = ? AND id = ?)"
)

DUE = "SELECT cron, due FROM schedules WHERE name = ?"
SET_DUE = "INSERT OR REPLACE INTO schedules (name, cron, due) VALUES (?, ?, ?)"
