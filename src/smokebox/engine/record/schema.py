"""The file of the durable record: opened, brought up to date, and its faults in words."""

from __future__ import annotations

import os
import shlex
import sqlite3
from typing import TYPE_CHECKING

from smokebox.errors import (
    AccessDenied,
    Conflict,
    NotFound,
    PathError,
    SmokeboxError,
    StorageFull,
    Unsupported,
)
from smokebox.sandbox.filesystems.filesystem import from_os_error
from smokebox.wire.private_file import make_private

if TYPE_CHECKING:
    from collections.abc import Sequence

# "SMKB": tells our files from other programs'.
APPLICATION = 0x534D4B42
BUSY_SECONDS = 5.0

# One tuple of statements for each version. Those that were released never change.
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
        # Backups outlive the sandbox that they are of: no reference to it.
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
)


def connect(path: str) -> sqlite3.Connection:
    """A connection in autocommit, which any one thread at a time may use."""
    try:
        make_private(path)
    except OSError as error:
        raise from_os_error(error, path) from error
    connection = sqlite3.connect(
        path, isolation_level=None, timeout=BUSY_SECONDS, check_same_thread=False
    )
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        # What is committed is in the kernel's hands, and survives the death of any process.
        # Only the loss of power could take the last commits, and never tear the file.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")
    except sqlite3.Error as error:
        connection.close()
        raise fault(error, path) from error
    return connection


def open_record(path: str, migrations: Sequence[Sequence[str]] = MIGRATIONS) -> sqlite3.Connection:
    """A connection to a record of the latest version, made or brought there as needed."""
    connection = connect(path)
    try:
        _check_ours(connection, path, len(migrations))
        _migrate(connection, migrations)
    except sqlite3.Error as error:
        connection.close()
        raise fault(error, path) from error
    except BaseException:
        connection.close()
        raise
    return connection


def fault(error: sqlite3.Error, path: str) -> SmokeboxError:
    """What SQLite said of the record, in a class of ours."""
    code = getattr(error, "sqlite_errorcode", 0)
    match code & 0xFF:
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return _broken(path, str(error))
        case sqlite3.SQLITE_FULL:
            return StorageFull(
                path, f"no space left for the record {path}", hint="Free some and try again."
            )
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_PERM:
            return AccessDenied(
                path, f"cannot write the record {path}: {error}", hint="Mend its permissions."
            )
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return Conflict(
                f"another program holds the record {path}.",
                hint="Close what has it open, such as a sqlite3 shell.",
                kind="record",
                name=path,
            )
    if code == sqlite3.SQLITE_CONSTRAINT_FOREIGNKEY:
        return NotFound(
            "the record has no sandbox of that id.", hint="It was destroyed.", kind="sandbox"
        )
    if code in (sqlite3.SQLITE_CONSTRAINT_UNIQUE, sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY):
        return Conflict(f"the record has such a row already ({error}).", kind="record", name=path)
    return PathError(path, f"the record {path} cannot be used: {error}")


def _check_ours(connection: sqlite3.Connection, path: str, latest: int) -> None:
    [(problem,), *_] = connection.execute("PRAGMA quick_check(1)")
    if problem != "ok":
        raise _broken(path, problem)
    [(application,)] = connection.execute("PRAGMA application_id")
    [(tables,)] = connection.execute("SELECT count(*) FROM sqlite_master")
    if application != APPLICATION and (application or tables):
        raise _broken(path, "it is the database of another program")
    version = _version(connection)
    if version > latest:
        raise Unsupported(
            f"the record {path} is of version {version}, from a later Smokebox: this one "
            f"knows versions up to {latest}.",
            hint="Upgrade Smokebox, or set SMOKEBOX_HOME to another directory.",
            operation="open",
            version=version,
        )


def _migrate(connection: sqlite3.Connection, migrations: Sequence[Sequence[str]]) -> None:
    """All or nothing: one transaction, whatever the number of versions."""
    if _version(connection) == len(migrations):
        return
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        for statements in migrations[_version(connection) :]:
            for statement in statements:
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
        connection.execute(f"PRAGMA user_version = {len(migrations)}")


def _version(connection: sqlite3.Connection) -> int:
    [(version,)] = connection.execute("PRAGMA user_version")
    return int(version)


def _broken(path: str, problem: str) -> PathError:
    files = shlex.quote(path)
    aside = shlex.quote(os.path.join(os.path.dirname(path), "broken-record"))
    return PathError(
        path,
        f"the record {path} is not usable: {problem}",
        hint=f"Move it aside with `mkdir {aside} && mv {files}* {aside}` and start again: an "
        "empty one is made. The files of the sandboxes stay beside it, in boxes/.",
    )
