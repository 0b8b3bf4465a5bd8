"""SQLite databases: open and migrate a file, and write to it from one thread in group commits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import sqlite3
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from smokebox.errors import (
    AccessDenied,
    Conflict,
    PathError,
    SmokeboxError,
    StorageFull,
    Unsupported,
    from_os_error,
)
from smokebox.foundation.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

T = TypeVar("T")
Job: TypeAlias = "Callable[[sqlite3.Connection], T]"

# Small enough that the first caller of a batch does not wait long.
LARGEST_BATCH = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseFormat:
    """Format of an SQLite file of ours: its tables, and how errors name it.

    Attributes:
        label: Name of the file in errors, such as "record".
        application_id: Number in the header that tells our files from other programs'.
        migrations: One tuple of statements per version. Released ones never change.
        synchronous: `NORMAL` survives the death of any process, and may lose the last commits
            when power fails. `FULL` waits for the disk.
        repair_hint: Hint for a file that cannot be used, given its path.
        too_new: Error for a file of a later version, given path, version and latest version.
            Defaults to `Unsupported`.
        unmarked_table: Table by which a file without an application id is recognized as ours.
            The first migration must accept that it exists.
        quick_check: Check the file for damage when it is opened.
        make_directory: Create the directory of the file when it is missing.
    """

    label: str
    application_id: int
    migrations: tuple[tuple[str, ...], ...]
    synchronous: Literal["NORMAL", "FULL"]
    busy_seconds: float
    repair_hint: Callable[[str], str]
    too_new: Callable[[str, int, int], SmokeboxError] | None = None
    unmarked_table: str | None = None
    quick_check: bool = False
    make_directory: bool = False

    def open(self, path: str) -> sqlite3.Connection:
        """Connect to a file of the latest version, creating or migrating it as needed."""
        connection = self.connect(path)
        try:
            self._check(connection, path)
            self._migrate(connection)
        except sqlite3.Error as error:
            connection.close()
            raise self.translate(error, path) from error
        except BaseException:
            connection.close()
            raise
        return connection

    def connect(self, path: str) -> sqlite3.Connection:
        """Connect in autocommit mode, without checking the tables.

        Any thread may use the connection, one at a time.
        """
        try:
            if self.make_directory:
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            make_private(path)
        except OSError as error:
            raise from_os_error(error, path) from error
        connection = sqlite3.connect(
            path, isolation_level=None, timeout=self.busy_seconds, check_same_thread=False
        )
        try:
            self._use_wal(connection)
            connection.execute(f"PRAGMA synchronous = {self.synchronous}")
            connection.execute("PRAGMA foreign_keys = ON")
        except sqlite3.Error as error:
            connection.close()
            raise self.translate(error, path) from error
        return connection

    def translate(self, error: sqlite3.Error, path: str) -> SmokeboxError:
        """Return the Smokebox error for an error of SQLite about the file."""
        match getattr(error, "sqlite_errorcode", 0) & 0xFF:
            case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
                return self._unusable(path, str(error))
            case sqlite3.SQLITE_FULL:
                return StorageFull(
                    path,
                    f"no space left for the {self.label} {path}",
                    hint="Free some space and try again.",
                )
            case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_PERM:
                return AccessDenied(
                    path,
                    f"cannot write the {self.label} {path}: {error}",
                    hint="Fix its permissions.",
                )
            case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
                return Conflict(
                    f"another program has locked the {self.label} {path}.",
                    hint="Close the program that has it open, such as a sqlite3 shell.",
                    kind=self.label,
                    name=path,
                )
        return PathError(path, f"the {self.label} {path} cannot be used: {error}")

    def _use_wal(self, connection: sqlite3.Connection) -> None:
        # Two processes that do this to a new file collide, and SQLite does not wait.
        deadline = time.monotonic() + self.busy_seconds
        while True:
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def _check(self, connection: sqlite3.Connection, path: str) -> None:
        if self.quick_check:
            [(problem,), *_] = connection.execute("PRAGMA quick_check(1)")
            if problem != "ok":
                raise self._unusable(path, problem)
        # In one transaction: another process may be creating the file at this moment.
        with connection:
            connection.execute("BEGIN")
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
            [(application_id,)] = connection.execute("PRAGMA application_id")
        unmarked = not application_id and (not tables or self.unmarked_table in tables)
        if application_id != self.application_id and not unmarked:
            raise self._unusable(path, "it is the database of another program")
        self.check_version(connection, path)

    def check_version(self, connection: sqlite3.Connection, path: str) -> None:
        """Raise `too_new`, by default `Unsupported`, for a file of a later version."""
        version, latest = _version(connection), len(self.migrations)
        if version > latest:
            raise (self.too_new or self._too_new)(path, version, latest)

    def _migrate(self, connection: sqlite3.Connection) -> None:
        if _version(connection) == len(self.migrations):
            return
        # One transaction for all versions: a migration that fails changes nothing.
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            for statements in self.migrations[_version(connection) :]:
                for statement in statements:
                    connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {self.application_id}")
            connection.execute(f"PRAGMA user_version = {len(self.migrations)}")

    def _too_new(self, path: str, version: int, latest: int) -> Unsupported:
        return Unsupported(
            f"the {self.label} {path} is of version {version}, from a later Smokebox: this one "
            f"knows versions up to {latest}.",
            hint="Upgrade Smokebox, or set SMOKEBOX_HOME to another directory.",
            operation="open",
            version=version,
        )

    def _unusable(self, path: str, problem: str) -> PathError:
        return PathError(
            path,
            f"the {self.label} {path} is not usable: {problem}",
            hint=self.repair_hint(path),
        )


def _version(connection: sqlite3.Connection) -> int:
    [(version,)] = connection.execute("PRAGMA user_version")
    return int(version)


def make_private(path: str) -> None:
    """Create an empty file that only its owner may read, unless the file exists.

    An existing file is never opened: closing it would drop the locks that SQLite holds on it in
    this process, and another process would then remove its write-ahead log.
    """
    if os.path.exists(path):
        return
    temporary = f"{path}.{new_id()}"
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        # Another process may have been quicker.
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.unlink(temporary)


@dataclass(frozen=True, slots=True)
class _PendingJob:
    job: Job[Any]
    done: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class _JobOutcome:
    done: asyncio.Future[Any]
    # The value that the job returned, or the exception that it raised.
    result: object


class DatabaseWriter:
    """A thread that runs jobs in order. Jobs that arrive during a commit share the next one.

    A job changes nothing but the database, as it may run twice: when a job of a batch raises,
    the batch is rolled back and each job runs in a transaction of its own.

    Args:
        connection: Connection in autocommit mode, which the writer closes.
        name: Name of the thread.
        translate: Returns the exception to raise for an error of SQLite.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        *,
        name: str,
        translate: Callable[[sqlite3.Error], Exception],
    ) -> None:
        self._connection = connection
        self._translate = translate
        self._pending: queue.SimpleQueue[_PendingJob | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job[T]) -> asyncio.Future[T]:
        """Queue a job. The future has its result once its changes are committed."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._pending.put(_PendingJob(job, done))
        return done

    def close(self) -> None:
        """Run the queued jobs, end the thread and close the database. Blocks until then."""
        self._pending.put(None)
        self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        while batch := self._next_batch():
            _deliver(self._commit(batch))

    def _next_batch(self) -> list[_PendingJob]:
        """Wait for at least one job. Empty once `close` was called and the queue is drained."""
        batch: list[_PendingJob] = []
        with contextlib.suppress(queue.Empty):
            while len(batch) < LARGEST_BATCH:
                pending = self._pending.get(block=not batch)
                if pending is None:
                    if batch:
                        self._pending.put(None)
                    break
                batch.append(pending)
        return batch

    def _commit(self, batch: list[_PendingJob]) -> list[_JobOutcome]:
        try:
            with self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                results = [pending.job(self._connection) for pending in batch]
        except Exception as error:
            if len(batch) == 1 or isinstance(error, sqlite3.OperationalError):
                result = self._translate(error) if isinstance(error, sqlite3.Error) else error
                return [_JobOutcome(pending.done, result) for pending in batch]
            # One job is at fault: run each alone, so that the others succeed.
            return [outcome for pending in batch for outcome in self._commit([pending])]
        return [
            _JobOutcome(pending.done, result)
            for pending, result in zip(batch, results, strict=True)
        ]


def _deliver(outcomes: Iterable[_JobOutcome]) -> None:
    """Wake each event loop once, however many of its jobs are done."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_JobOutcome]] = {}
    for outcome in outcomes:
        by_loop.setdefault(outcome.done.get_loop(), []).append(outcome)
    for loop, its_outcomes in by_loop.items():
        # The loop may be closed, and then there is no caller left.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_settle, its_outcomes)


def _settle(outcomes: Iterable[_JobOutcome]) -> None:
    for outcome in outcomes:
        if outcome.done.done():
            continue
        if isinstance(outcome.result, Exception):
            outcome.done.set_exception(outcome.result)
        else:
            outcome.done.set_result(outcome.result)
