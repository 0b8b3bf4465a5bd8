"""Accepted work, in one SQLite file, which several processes of a host may work off together.

Work of one target is taken in the order in which it was accepted, by one process at a time:
whoever has the lock of the target, which the kernel takes back from a process that dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

import msgspec

from smokebox.agents.log.owners import Owners
from smokebox.agents.log.refusals import closed
from smokebox.agents.log.tables import connect, fault, open_tables
from smokebox.agents.log.wakes import Wakes
from smokebox.app import tables
from smokebox.app.submission import Decision, Ending, Submission, Target
from smokebox.errors import Conflict, NotFound
from smokebox.wire.commits import Commits

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence

T = TypeVar("T")

# How often whoever waits looks for what another process has done.
_POLL = 0.5
_PAGE = 500
NEW = "new"


@dataclass(frozen=True, slots=True)
class Note:
    """Something that happened to a submission; its place begins at 1."""

    place: int
    at: float
    data: bytes


class Inbox:
    """Submissions, from their acceptance to their one outcome."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self._writer = open_tables(self.path, tables.MIGRATIONS)
        self._reader = connect(self.path)
        self._owners = Owners(f"{self.path}-owners")
        self._reads = ThreadPoolExecutor(1, thread_name_prefix="smokebox-inbox-read")
        self._commits = Commits(
            self._writer, name="smokebox-inbox", fault=lambda error: fault(error, self.path)
        )
        self._wakes = Wakes()
        self._claimed: set[int] = set()
        self._closed = False

    async def accept(
        self,
        target: Target,
        body: Any,
        *,
        key: str | None = None,
        request: dict[str, Any] | None = None,
        head: int = 0,
    ) -> Submission:
        """Take work on; it is durable when this returns.

        The same `key` for the same target gives the submission that it gave before, and raises
        `Conflict` where the body is another one.
        """
        data = msgspec.json.encode(body)
        digest = hashlib.sha256(data).hexdigest()
        id, now = uuid4().hex, time.time()
        asked = None if request is None else msgspec.json.encode(request)

        def add(connection: sqlite3.Connection) -> str:
            number = _number(connection, target)
            known = connection.execute(tables.BY_KEY, (number, key)).fetchone() if key else None
            if known is not None:
                if known[1] != digest:
                    raise _another(key or "")
                return str(known[0])
            connection.execute(tables.ADD, (id, number, data, asked, head, key, digest, now))
            return id

        found = await self._submit(add)
        if found != id:
            return await self.get(found)
        self._wakes.wake(NEW)
        return Submission(
            id=id, target=target, body=body, accepted_at=now, request=request, head=head
        )

    async def get(self, id: str) -> Submission:
        """A submission by its id. Raises `NotFound`."""
        rows = await self._select(tables.GET, (id,))
        if not rows:
            raise NotFound(
                f"there is no submission {id!r:.100}.",
                hint="It may have been forgotten after the time that the app keeps work for.",
                kind="submission",
                name=id,
            )
        return _submission(rows[0])

    async def runs(self, workflow: str, *, limit: int = 100) -> list[Submission]:
        """Runs of a workflow, the latest first."""
        return [_submission(row) for row in await self._select(tables.RUNS, (workflow, limit))]

    async def run(self, id: str) -> Submission:
        """A run of a workflow by its id. Raises `NotFound`."""
        rows = await self._select(tables.RUN, (id,))
        if not rows:
            raise NotFound(
                f"there is no run {id!r:.100}.",
                hint="POST /workflows/{name} begins one.",
                kind="run",
                name=id,
            )
        return _submission(rows[0])

    async def lately(self, since: float) -> list[tuple[str, Target]]:
        """The ids of what has no outcome, or got one since then, and whose work it is."""
        rows = await self._select(tables.LATELY, (since,))
        return [(id, Target(kind=kind, name=name, id=of)) for id, kind, name, of in rows]

    async def open(self) -> int:
        """How many have no outcome yet."""
        return int((await self._select(tables.COUNT_OPEN, ()))[0][0])

    async def wait(self, id: str, timeout: float | None = None) -> Submission:
        """A submission once it has ended, or as it is when the time is up."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._wakes.listen(id) as more:
            while True:
                more.clear()
                found = await self.get(id)
                left = _POLL if deadline is None else min(_POLL, deadline - time.monotonic())
                if found.state == "ended" or left <= 0:
                    return found
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await more.wait()
                if self._closed:
                    return found

    async def claim(self, most: int) -> Sequence[int]:
        """Become the one who works for targets that nobody works for, up to so many."""
        # Those that others have, or we have already, stand in the way of none behind them.
        rows = await self._select(tables.OPEN, (most + len(self._claimed) + _PAGE,))
        taken: list[int] = []
        for (number,) in rows:
            if len(taken) >= most:
                break
            if self._owners.take(number):
                taken.append(number)
        self._claimed.update(taken)
        return taken

    def give_back(self, number: int) -> None:
        """Work for a target no longer."""
        self._claimed.discard(number)
        if not self._closed:
            self._owners.give(number)
            # Another target may take its place, or it was given more at this moment.
            self._wakes.wake(NEW)

    async def begin(self, number: int) -> Submission | None:
        """The next piece of work of a target that was claimed, begun; None when there is none."""

        def take(connection: sqlite3.Connection) -> Submission | None:
            rows = connection.execute(tables.FIRST, (number,)).fetchall()
            if not rows:
                return None
            connection.execute(tables.BEGIN, (rows[0][0],))
            return _submission(rows[0])

        begun = await self._submit(take)
        if begun is not None:
            self._wakes.wake(begun.id)
        return begun

    async def end(self, id: str, ending: Ending) -> bool:
        """Record the outcome; False where there is one already, which stands."""
        ended = await self._submit(lambda one: _end(one, tables.END, id, ending))
        self._wakes.wake(id)
        return ended

    async def abort(self, id: str, ending: Ending) -> bool:
        """Call a submission off: one that waits ends at once, one that runs is told.

        False where it has ended before.
        """

        def ask(connection: sqlite3.Connection) -> bool:
            if _end(connection, tables.END_WAITING, id, ending):
                return True
            return connection.execute(tables.ASK_ABORT, (id,)).rowcount > 0

        asked = await self._submit(ask)
        self._wakes.wake(id)
        self._wakes.wake(NEW)
        return asked

    async def aborted(self) -> set[str]:
        """Those that run and were called off."""
        return {str(id) for (id,) in await self._select(tables.ABORTS, ())}

    async def decide(self, decision: Decision) -> None:
        """Say whether a tool call may run; whoever works for the conversation is told."""
        asked, told = (decision.name, decision.id), (decision.allowed, decision.reason)
        values = (decision.call_id, *told, *asked)
        await self._submit(lambda one: one.execute(tables.DECIDE, values))
        self._wakes.wake(NEW)

    async def decisions(self) -> list[Decision]:
        """What was decided and has had no effect yet."""
        rows = await self._select(tables.DECISIONS, ())
        return [
            Decision(name=name, id=id, call_id=call_id, allowed=bool(allowed), reason=reason)
            for name, id, call_id, allowed, reason in rows
        ]

    async def decided(self, decision: Decision) -> None:
        """Forget a decision that has had its effect."""
        values = (decision.call_id, decision.name, decision.id)
        await self._submit(lambda one: one.execute(tables.DECIDED, values))

    async def open_of(self, target: Target) -> Sequence[str]:
        """The submissions of a target that have no outcome, in their order."""
        found = await self._select(tables.TARGET, (target.kind, target.name, target.id))
        rows = await self._select(tables.OPEN_OF, found[0]) if found else []
        return [str(id) for (id,) in rows]

    async def forget(self, target: Target) -> bool:
        """Remove everything of a target, False where there is nothing. Raises `Conflict` while
        it has work that has not ended."""

        def remove(connection: sqlite3.Connection) -> bool:
            values = (target.kind, target.name, target.id)
            found = connection.execute(tables.TARGET, values).fetchone()
            if found is not None:
                if connection.execute(tables.OPEN_OF, found).fetchone():
                    raise Conflict(
                        f"{target} has work that has not ended.",
                        hint="Abort it first.",
                        kind="submission",
                        name=str(target),
                    )
                connection.execute(tables.FORGET_TARGET, found)
            return found is not None

        return await self._submit(remove)

    async def sweep(self, before: float) -> int:
        """Forget submissions that ended before that time; how many."""
        return await self._submit(lambda one: one.execute(tables.SWEEP, (before,)).rowcount)

    @contextlib.asynccontextmanager
    async def expired(self, before: float, *, limit: int = _PAGE) -> AsyncIterator[list[Target]]:
        """Targets all of whose work ended before that time: nobody works for them meanwhile, and
        they are forgotten at the end."""
        rows = await self._select(tables.EXPIRED, (before, limit))
        held = [row for row in rows if self._owners.take(row[0])]
        numbers = [(row[0],) for row in held]
        try:
            yield [Target(kind=kind, name=name, id=id) for _, kind, name, id in held]

            def remove(connection: sqlite3.Connection) -> None:
                # What was accepted meanwhile keeps its target.
                for number in numbers:
                    if not connection.execute(tables.OPEN_OF, number).fetchone():
                        connection.execute(tables.FORGET_TARGET, number)

            await self._submit(remove)
        finally:
            for (number,) in numbers:
                self.give_back(number)

    async def note(self, id: str, data: bytes) -> None:
        """Add to what happened to a submission."""
        values = (id, time.time(), data, id)
        await self._submit(lambda one: one.execute(tables.NOTE, values).fetchone())
        self._wakes.wake(id)

    async def notes(self, id: str, *, after: int = 0, limit: int = _PAGE) -> list[Note]:
        """What happened to a submission behind a place."""
        rows = await self._select(tables.NOTES, (id, after, limit))
        return [Note(int(place), float(at), bytes(data)) for place, at, data in rows]

    async def last_note(self, id: str) -> int:
        """The place of the last that happened to a submission, 0 before the first."""
        return int((await self._select(tables.LAST_NOTE, (id,)))[0][0])

    async def follow(self, id: str, *, after: int = 0) -> AsyncGenerator[Note, None]:
        """What happened, then what happens, until the submission has ended."""
        with self._wakes.listen(id) as more:
            while not self._closed:
                more.clear()
                ended = (await self.get(id)).state == "ended"
                found = await self.notes(id, after=after)
                for note in found:
                    yield note
                    after = note.place
                if not found:
                    if ended:
                        return
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_POLL):
                            await more.wait()

    async def due(self, name: str, line: str, first: float) -> float:
        """When a schedule is due next; `first` for one that is new, or was changed."""

        def find(connection: sqlite3.Connection) -> float:
            known = connection.execute(tables.DUE, (name,)).fetchone()
            if known is not None and known[0] == line:
                return float(known[1])
            connection.execute(tables.SET_DUE, (name, line, first))
            return first

        return await self._submit(find)

    async def set_due(self, name: str, line: str, due: float) -> None:
        """Say when a schedule is due next."""
        await self._submit(lambda one: one.execute(tables.SET_DUE, (name, line, due)))

    @contextlib.contextmanager
    def listen(self) -> Iterator[asyncio.Event]:
        """An event that is set when this process accepts or calls off work."""
        with self._wakes.listen(NEW) as event:
            yield event

    async def aclose(self) -> None:
        """Let go of it; what was accepted stays. Safe to repeat."""
        if self._closed:
            return
        self._closed = True
        self._wakes.wake_all()
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._commits.close()
        self._reads.shutdown()
        self._reader.close()
        self._owners.close()

    async def _submit(self, job: Callable[[sqlite3.Connection], T]) -> T:
        if self._closed:
            raise closed(self.path)
        # A commit that is under way happens, whether or not somebody waits for it.
        return await asyncio.shield(self._commits.submit(job))

    async def _select(self, sql: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        def read() -> list[tuple[Any, ...]]:
            return self._reader.execute(sql, values).fetchall()

        if self._closed:
            raise closed(self.path)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._reads, read)
        except sqlite3.Error as error:
            raise fault(error, self.path) from error


def _end(connection: sqlite3.Connection, statement: str, id: str, ending: Ending) -> bool:
    """Record an outcome together with the last note; False where the statement ends nothing."""
    now, data = time.time(), msgspec.json.encode(ending)
    if not connection.execute(statement, (now, data, id)).rowcount:
        return False
    told = msgspec.json.encode({"event": "ended", **msgspec.to_builtins(ending)})
    connection.execute(tables.NOTE, (id, now, told, id)).fetchone()
    return True


def _number(connection: sqlite3.Connection, target: Target) -> int:
    values = (target.kind, target.name, target.id)
    connection.execute(tables.MAKE_TARGET, values)
    return int(connection.execute(tables.TARGET, values).fetchone()[0])


def _submission(row: tuple[Any, ...]) -> Submission:
    id, kind, name, target, body, at, state, attempts, asked, ended_at, ending, request, head = row
    return Submission(
        id=id,
        target=Target(kind=kind, name=name, id=target),
        body=msgspec.json.decode(body),
        accepted_at=at,
        state=state,
        attempts=attempts,
        abort_asked=bool(asked),
        ended_at=ended_at,
        ending=None if ending is None else msgspec.json.decode(ending, type=Ending),
        request=None if request is None else msgspec.json.decode(request),
        head=head,
    )


def _another(key: str) -> Conflict:
    return Conflict(
        f"the idempotency key {key!r:.100} was used for another body.",
        hint="Send what was sent before, or another key.",
        kind="idempotency_key",
        name=key,
    )
