"""The database of the durable record: its migrations, and its errors."""

from __future__ import annotations

import os
import shlex
import sqlite3

from smokebox.errors import (
    Conflict,
    NotFound,
    SmokeboxError,
)
from smokebox.foundation.storage import DatabaseFormat

# One tuple of statements per version. Released ones never change. A field of what rows keep as JSON
# needs a version too, as an earlier Smokebox cannot read it.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """
        CREATE TABLE sandboxes (
            id TEXT PRIMARY KEY, key TEXT NOT NULL UNIQUE,
            image TEXT NOT NULL, digest TEXT NOT NULL, tier TEXT NOT NULL,
            created_at REAL NOT NULL, last_active_at REAL NOT NULL,
            status TEXT NOT NULL, generation INTEGER NOT NULL,
            limits TEXT NOT NULL, env TEXT NOT NULL, labels TEXT NOT NULL, settings TEXT NOT NULL,
            jail TEXT, stop_reason TEXT
        )
        """,
        "CREATE INDEX sandboxes_by_status ON sandboxes (status)",
        """
        CREATE TABLE sessions (
            sandbox_id TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
            name TEXT NOT NULL, cwd TEXT NOT NULL, user TEXT NOT NULL,
            created_at REAL NOT NULL, env TEXT NOT NULL, state BLOB,
            PRIMARY KEY (sandbox_id, name)
        )
        """,
        """
        CREATE TABLE processes (
            sandbox_id TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
            process_id TEXT NOT NULL, generation INTEGER NOT NULL,
            command TEXT NOT NULL, argv TEXT NOT NULL, cwd TEXT NOT NULL, user TEXT NOT NULL,
            started_at REAL NOT NULL, status TEXT NOT NULL, pid INTEGER, exit_code INTEGER,
            ended_at REAL, session TEXT, stdin INTEGER NOT NULL,
            PRIMARY KEY (sandbox_id, process_id)
        )
        """,
        """
        CREATE TABLE ports (
            sandbox_id TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
            port INTEGER NOT NULL, token TEXT NOT NULL, name TEXT,
            PRIMARY KEY (sandbox_id, port)
        )
        """,
    ),
    (
        "ALTER TABLE ports ADD COLUMN generation INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE ports ADD COLUMN private INTEGER NOT NULL DEFAULT 0",
    ),
    ("ALTER TABLE sandboxes ADD COLUMN egress TEXT NOT NULL DEFAULT '{}'",),
    (
        """
        CREATE TABLE contexts (
            sandbox_id TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
            context_id TEXT NOT NULL, generation INTEGER NOT NULL,
            language TEXT NOT NULL, cwd TEXT NOT NULL, created_at REAL NOT NULL,
            timeout REAL, shared INTEGER NOT NULL, exit_code INTEGER, ended_at REAL, reason TEXT,
            PRIMARY KEY (sandbox_id, context_id)
        )
        """,
    ),
    (
        """
        CREATE TABLE mounts (
            sandbox_id TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
            path TEXT NOT NULL, request TEXT NOT NULL,
            generation INTEGER NOT NULL, pid INTEGER, started INTEGER NOT NULL,
            PRIMARY KEY (sandbox_id, path)
        )
        """,
    ),
    (
        # No reference to the sandbox: backups outlive it.
        """
        CREATE TABLE backups (
            id TEXT PRIMARY KEY, sandbox_id TEXT NOT NULL, path TEXT NOT NULL, name TEXT,
            status TEXT NOT NULL, place TEXT NOT NULL,
            created_at REAL NOT NULL, expires_at REAL,
            size INTEGER NOT NULL, bytes INTEGER NOT NULL, files INTEGER NOT NULL,
            disk INTEGER NOT NULL, checksum TEXT NOT NULL
        )
        """,
        "CREATE INDEX backups_by_sandbox ON backups (sandbox_id)",
        """
        CREATE TABLE restores (
            sandbox_id TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
            staging TEXT NOT NULL, path TEXT NOT NULL, state TEXT NOT NULL,
            PRIMARY KEY (sandbox_id, staging)
        )
        """,
    ),
    (
        "ALTER TABLE ports ADD COLUMN slug TEXT NOT NULL DEFAULT ''",
        "UPDATE ports SET slug = lower(hex(randomblob(4)))",
    ),
    (
        "ALTER TABLE sandboxes ADD COLUMN stop_cause TEXT",
        "UPDATE sandboxes SET stop_cause = 'disk' WHERE stop_reason LIKE 'its files take%'",
    ),
    (
        """
        CREATE TABLE images (
            digest TEXT PRIMARY KEY, config TEXT NOT NULL, layers TEXT NOT NULL,
            base TEXT NOT NULL, source TEXT NOT NULL, manifest TEXT NOT NULL,
            size INTEGER NOT NULL, created_at REAL NOT NULL, used_at REAL NOT NULL
        )
        """,
        """
        CREATE TABLE image_names (
            name TEXT NOT NULL, scope TEXT NOT NULL,
            digest TEXT NOT NULL REFERENCES images (digest) ON DELETE CASCADE,
            PRIMARY KEY (name, scope)
        )
        """,
        "CREATE INDEX image_names_by_digest ON image_names (digest)",
        """
        CREATE TABLE image_grants (
            digest TEXT NOT NULL REFERENCES images (digest) ON DELETE CASCADE,
            scope TEXT NOT NULL,
            PRIMARY KEY (digest, scope)
        )
        """,
        "CREATE INDEX sandboxes_by_digest ON sandboxes (digest)",
    ),
    (
        """
        CREATE TABLE build_steps (
            scope TEXT NOT NULL, key TEXT NOT NULL, result TEXT NOT NULL, stored TEXT NOT NULL,
            created_at REAL NOT NULL, used_at REAL NOT NULL,
            PRIMARY KEY (scope, key)
        )
        """,
    ),
    (
        "ALTER TABLE sandboxes ADD COLUMN layers TEXT NOT NULL DEFAULT '[]'",
        "ALTER TABLE sandboxes ADD COLUMN snapshot TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE sandboxes ADD COLUMN pending TEXT NOT NULL DEFAULT ''",
        # No reference to the sandbox: snapshots outlive it.
        """
        CREATE TABLE snapshots (
            id TEXT PRIMARY KEY, sandbox_id TEXT NOT NULL, scope TEXT NOT NULL, name TEXT,
            description TEXT NOT NULL, status TEXT NOT NULL, parent TEXT,
            image TEXT NOT NULL, digest TEXT NOT NULL, tier TEXT NOT NULL,
            layers TEXT NOT NULL, created_at REAL NOT NULL,
            size INTEGER NOT NULL, files INTEGER NOT NULL,
            limits TEXT NOT NULL, env TEXT NOT NULL, labels TEXT NOT NULL, settings TEXT NOT NULL,
            egress TEXT NOT NULL, sessions TEXT NOT NULL
        )
        """,
        "CREATE UNIQUE INDEX snapshots_by_name ON snapshots (scope, name) WHERE name IS NOT NULL",
        "CREATE INDEX snapshots_by_sandbox ON snapshots (sandbox_id)",
        """
        CREATE TABLE snapshot_layers (
            id TEXT PRIMARY KEY, sandbox_id TEXT NOT NULL,
            size INTEGER NOT NULL, files INTEGER NOT NULL, created_at REAL NOT NULL,
            merged TEXT NOT NULL
        )
        """,
    ),
    ("ALTER TABLE snapshot_layers ADD COLUMN target TEXT NOT NULL DEFAULT '/'",),
    # The group of a sandbox and its jail, in JSON.
    (),
    # And the checkpoints of a sandbox, in JSON.
    ("ALTER TABLE snapshots ADD COLUMN origin TEXT NOT NULL DEFAULT 'user'",),
)


def translate_error(error: sqlite3.Error, path: str) -> SmokeboxError:
    """Convert an error of SQLite to a Smokebox error."""
    code = getattr(error, "sqlite_errorcode", 0)
    if code == sqlite3.SQLITE_CONSTRAINT_FOREIGNKEY:
        return NotFound(
            "the record has no sandbox with that id.", hint="It was destroyed.", kind="sandbox"
        )
    if code in (sqlite3.SQLITE_CONSTRAINT_UNIQUE, sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY):
        return Conflict(f"the record already has such a row ({error}).", kind="record", name=path)
    return RECORD.translate(error, path)


def _repair_hint(path: str) -> str:
    files = shlex.quote(path)
    aside = shlex.quote(os.path.join(os.path.dirname(path), "broken-record"))
    return (
        f"Move it aside with `mkdir {aside} && mv {files}* {aside}` and start again: an empty one "
        "is created. The files of the sandboxes stay beside it, in boxes/."
    )


RECORD = DatabaseFormat(
    label="record",
    # "SMKB"
    application_id=0x534D4B42,
    migrations=MIGRATIONS,
    synchronous="NORMAL",
    busy_seconds=5.0,
    repair_hint=_repair_hint,
    quick_check=True,
)
