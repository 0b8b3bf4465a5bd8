"""The one writer of the durable record: a thread that commits together what waits."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.engine.record.schema import fault

if TYPE_CHECKING:
    from collections.abc import Iterable

    from smokebox.engine.record.rows import Change

# Few enough that the first of them is soon answered.
LARGEST_BATCH = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """Changes that are made together, and the future that gets the number of rows."""

    changes: tuple[Change, ...]
    done: asyncio.Future[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a write went: rows touched, or what was wrong."""

    write: Write
    result: int | Exception


class Writer:
    """Writes in the order in which they are asked for; while one commit runs, others gather."""

    def __init__(self, path: str, connection: sqlite3.Connection) -> None:
        self._path = path
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._waiting: queue.SimpleQueue[Write | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="smokebox-record", daemon=True)
        self._thread.start()

    def submit(self, changes: tuple[Change, ...]) -> asyncio.Future[int]:
        """Ask for changes. The future has its result once they are committed."""
        done = self._loop.create_future()
        self._waiting.put(Write(changes=changes, done=done))
        return done

    def close(self) -> None:
        """Commit what was asked for, and end the thread. Blocks until then."""
        self._waiting.put(None)
        self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        while batch := self._gather():
            outcomes = self._commit(batch)
            # The loop may be gone, and with it all who could be told.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(_tell, outcomes)

    def _gather(self) -> list[Write]:
        """What waits, at least one; nothing once `close` was called and all else was done."""
        batch: list[Write] = []
        with contextlib.suppress(queue.Empty):
            while len(batch) < LARGEST_BATCH:
                write = self._waiting.get(block=not batch)
                if write is None:
                    if batch:
                        self._waiting.put(None)
                    break
                batch.append(write)
        return batch

    def _commit(self, batch: list[Write]) -> list[Outcome]:
        try:
            with self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                counts = [self._apply(write) for write in batch]
        except Exception as error:
            if len(batch) == 1 or isinstance(error, sqlite3.OperationalError):
                result = fault(error, self._path) if isinstance(error, sqlite3.Error) else error
                return [Outcome(write=write, result=result) for write in batch]
            # One of them is wrong: each by itself, so that the others do not suffer for it.
            return [outcome for write in batch for outcome in self._commit([write])]
        return [
            Outcome(write=write, result=count) for write, count in zip(batch, counts, strict=True)
        ]

    def _apply(self, write: Write) -> int:
        execute = self._connection.execute
        return sum(execute(change.sql, change.values).rowcount for change in write.changes)


def _tell(outcomes: Iterable[Outcome]) -> None:
    for outcome in outcomes:
        done, result = outcome.write.done, outcome.result
        if done.done():
            continue
        if isinstance(result, Exception):
            done.set_exception(result)
        else:
            done.set_result(result)
