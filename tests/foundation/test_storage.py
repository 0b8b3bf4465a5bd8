"""SQLite files: creation, migration, errors, and the writer."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from smokebox.errors import Conflict, PathError, SmokeboxError
from smokebox.foundation.storage import DatabaseFormat, DatabaseWriter

if TYPE_CHECKING:
    from pathlib import Path

FIRST = ("CREATE TABLE notes (text TEXT)", "INSERT INTO notes VALUES ('stored')")


def too_new(path: str, version: int, latest: int) -> SmokeboxError:
    return SmokeboxError(f"version {version} of {path} is above {latest}")


def notes_format(*migrations: tuple[str, ...]) -> DatabaseFormat:
    return DatabaseFormat(
        label="notebook",
        application_id=0x4E4F5445,
        migrations=migrations,
        synchronous="NORMAL",
        busy_seconds=0.1,
        repair_hint=lambda path: f"Remove {path}.",
        too_new=too_new,
    )


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "notes.db")


def test_older_file_is_migrated_and_keeps_its_rows(path: str) -> None:
    second = ("ALTER TABLE notes ADD COLUMN stars INTEGER NOT NULL DEFAULT 5",)
    notes_format(FIRST).open(path).close()
    with contextlib.closing(notes_format(FIRST, second).open(path)) as connection:
        assert connection.execute("SELECT text, stars FROM notes").fetchall() == [("stored", 5)]
        assert connection.execute("PRAGMA user_version").fetchall() == [(2,)]


def test_failed_migration_changes_nothing(path: str) -> None:
    notes_format(FIRST).open(path).close()
    with pytest.raises(PathError, match="NONSENSE"):
        notes_format(FIRST, ("DROP TABLE notes", "NONSENSE")).open(path)
    with contextlib.closing(notes_format(FIRST).open(path)) as connection:
        assert connection.execute("SELECT * FROM notes").fetchall() == [("stored",)]


def test_file_of_a_later_version_is_refused(path: str) -> None:
    notes_format(FIRST, ("CREATE TABLE more (x)",)).open(path).close()
    with pytest.raises(SmokeboxError, match=r"version 2 of .* is above 1"):
        notes_format(FIRST).open(path)


def test_file_of_another_program_is_refused_with_a_hint(path: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE theirs (x)")
    with pytest.raises(PathError, match=r"another program.*Remove"):
        notes_format(FIRST).open(path)


def test_file_without_application_id_is_recognized_by_its_table(path: str) -> None:
    adopted = replace(
        notes_format(("CREATE TABLE IF NOT EXISTS notes (text TEXT)",)), unmarked_table="notes"
    )
    with contextlib.closing(sqlite3.connect(path)) as old:
        old.execute("CREATE TABLE notes (text TEXT)")
        old.execute("INSERT INTO notes VALUES ('stored')")
        old.commit()
    for _ in range(2):
        with contextlib.closing(adopted.open(path)) as connection:
            assert connection.execute("SELECT text FROM notes").fetchall() == [("stored",)]
            assert connection.execute("PRAGMA application_id").fetchall() == [(0x4E4F5445,)]


def test_new_file_is_private_to_its_owner(path: str) -> None:
    notes_format(FIRST).open(path).close()
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_locked_file_is_a_conflict(path: str) -> None:
    with contextlib.closing(notes_format(FIRST).open(path)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        with (
            contextlib.closing(notes_format(FIRST).connect(path)) as other,
            pytest.raises(sqlite3.OperationalError) as caught,
        ):
            other.execute("INSERT INTO notes VALUES ('late')")
    error = notes_format(FIRST).translate(caught.value, path)
    assert isinstance(error, Conflict)
    assert "has locked the notebook" in str(error)


async def test_failed_job_does_not_undo_its_batch(path: str) -> None:
    def fail(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO notes VALUES ('undone')")
        raise ValueError("no")

    database = notes_format(FIRST)
    writer = DatabaseWriter(
        database.open(path), name="writer", translate=lambda error: database.translate(error, path)
    )
    try:
        first = writer.submit(lambda db: db.execute("INSERT INTO notes VALUES ('a')").rowcount)
        failed = writer.submit(fail)
        last = writer.submit(lambda db: db.execute("INSERT INTO notes VALUES ('b')").rowcount)
        assert (await first, await last) == (1, 1)
        with pytest.raises(ValueError, match="no"):
            await failed
    finally:
        writer.close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT text FROM notes").fetchall()
    assert rows == [("stored",), ("a",), ("b",)]
