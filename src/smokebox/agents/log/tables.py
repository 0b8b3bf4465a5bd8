"""The file that SQLite keeps sessions in: opened, brought up to date, its faults in words."""

from __future__ import annotations

import os
import sqlite3
import time
from typing import TYPE_CHECKING

from smokebox.agents.log.migrations import too_new
from smokebox.errors import AccessDenied, Conflict, PathError, SmokeboxError, StorageFull
from smokebox.sandbox.filesystems.filesystem import from_os_error
from smokebox.wire.private_file import make_private

if TYPE_CHECKING:
    from collections.abc import Sequence

# "SMKA": tells our files from other programs'.
APPLICATION = 0x534D4B41
BUSY_SECONDS = 30.0

# One tuple of statements for each version. Those that were released never change.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        # AUTOINCREMENT: the number of a deleted session is never another's.
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


def open_tables(path: str, migrations: Sequence[Sequence[str]] = MIGRATIONS) -> sqlite3.Connection:
    """A connection to a file of the latest version, made or brought there as needed."""
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


def connect(path: str) -> sqlite3.Connection:
    """A connection in autocommit, which any one thread at a time may use."""
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        make_private(path)
    except OSError as error:
        raise from_os_error(error, path) from error
    connection = sqlite3.connect(
        path, isolation_level=None, timeout=BUSY_SECONDS, check_same_thread=False
    )
    try:
        _use_wal(connection)
        # A commit waits for the disk: a tool whose start is recorded has not run before that,
        # so not even the loss of power can have it run twice.
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
    except sqlite3.Error as error:
        connection.close()
        raise fault(error, path) from error
    return connection


def _use_wal(connection: sqlite3.Connection) -> None:
    """Two that do this to a new file at once get in each other's way, and SQLite does not wait."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def fault(error: sqlite3.Error, path: str) -> SmokeboxError:
    """What SQLite said of the file, in a class of ours."""
    match getattr(error, "sqlite_errorcode", 0) & 0xFF:
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return _broken(path, str(error))
        case sqlite3.SQLITE_FULL:
            return StorageFull(
                path, f"no space left for the sessions in {path}", hint="Free some, try again."
            )
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_PERM:
            return AccessDenied(
                path, f"cannot write the sessions in {path}: {error}", hint="Mend its permissions."
            )
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return Conflict(
                f"another program holds the sessions in {path}.",
                hint="Close what has it open, such as a sqlite3 shell.",
                kind="store",
                name=path,
            )
    return PathError(path, f"the sessions in {path} cannot be used: {error}")


def _check_ours(connection: sqlite3.Connection, path: str, latest: int) -> None:
    # In one transaction: another process may be making the file at this moment.
    with connection:
        connection.execute("BEGIN")
        [(tables,)] = connection.execute("SELECT count(*) FROM sqlite_master")
        [(application,)] = connection.execute("PRAGMA application_id")
    if application != APPLICATION and (application or tables):
        raise _broken(path, "it is the database of another program")
    version = _version(connection)
    if version > latest:
        raise too_new(f"the store {path}", version, latest)


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
    return PathError(
        path,
        f"{path} does not hold sessions: {problem}",
        hint="Give persist= another path, or move the file aside: an empty one is made.",
    )
