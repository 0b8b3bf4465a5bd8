"""One thread that writes to an SQLite database, and commits together what waits."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

T = TypeVar("T")
Job: TypeAlias = "Callable[[sqlite3.Connection], T]"

# Few enough that the first of them is soon answered.
LARGEST_BATCH = 1000


@dataclass(frozen=True, slots=True)
class Waiting:
    """A job, and the future that gets what it returns."""

    job: Job[Any]
    done: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job went: what it returned, or what was wrong."""

    done: asyncio.Future[Any]
    result: object


class Commits:
    """Runs jobs in the order in which they are asked for; while one commit runs, others gather.

    A job changes nothing but the database, for it may be run again: one that raises does so
    alone, and its changes are undone. `fault` makes an error of ours from one of SQLite's.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        *,
        name: str,
        fault: Callable[[sqlite3.Error], Exception],
    ) -> None:
        self._connection = connection
        self._fault = fault
        self._waiting: queue.SimpleQueue[Waiting | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job[T]) -> asyncio.Future[T]:
        """Ask for a job. The future has its result once its changes are committed."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.put(Waiting(job, done))
        return done

    def close(self) -> None:
        """Do what was asked for, end the thread and close the database. Blocks until then."""
        self._waiting.put(None)
        self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        while batch := self._gather():
            _tell(self._commit(batch))

    def _gather(self) -> list[Waiting]:
        """What waits, at least one; nothing once `close` was called and all else was done."""
        batch: list[Waiting] = []
        with contextlib.suppress(queue.Empty):
            while len(batch) < LARGEST_BATCH:
                one = self._waiting.get(block=not batch)
                if one is None:
                    if batch:
                        self._waiting.put(None)
                    break
                batch.append(one)
        return batch

    def _commit(self, batch: list[Waiting]) -> list[Outcome]:
        try:
            with self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                results = [one.job(self._connection) for one in batch]
        except Exception as error:
            if len(batch) == 1 or isinstance(error, sqlite3.OperationalError):
                result = self._fault(error) if isinstance(error, sqlite3.Error) else error
                return [Outcome(one.done, result) for one in batch]
            # One of them is wrong: each by itself, so that the others do not suffer for it.
            return [outcome for one in batch for outcome in self._commit([one])]
        return [Outcome(one.done, result) for one, result in zip(batch, results, strict=True)]


def _tell(outcomes: Iterable[Outcome]) -> None:
    """Wake each event loop once, however many of its jobs are done."""
    loops: dict[asyncio.AbstractEventLoop, list[Outcome]] = {}
    for outcome in outcomes:
        loops.setdefault(outcome.done.get_loop(), []).append(outcome)
    for loop, its in loops.items():
        # The loop may be gone, and with it all who could be told.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_settle, its)


def _settle(outcomes: Iterable[Outcome]) -> None:
    for outcome in outcomes:
        if outcome.done.done():
            continue
        if isinstance(outcome.result, Exception):
            outcome.done.set_exception(outcome.result)
        else:
            outcome.done.set_result(outcome.result)
