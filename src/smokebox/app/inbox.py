"""Accepted work in one SQLite file, which several processes of a host may share.

Work of one target is done in the order it was accepted, by one process at a time: the one that
holds the lock of the target. The kernel releases the lock of a process that dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import msgspec

from smokebox.agents.events import Outcome  # noqa: TC001 (msgspec resolves it)
from smokebox.agents.log.store import Wakeups, closed
from smokebox.agents.log.writer_locks import WriterLocks
from smokebox.app import inbox_tables as tables
from smokebox.errors import Conflict, InvalidOption, NotFound
from smokebox.foundation.ids import new_global_id
from smokebox.foundation.storage import DatabaseWriter
from smokebox.wire.failure import Failure  # noqa: TC001

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence

T = TypeVar("T")

# Interval at which waiting callers check for changes by other processes.
_POLL = 0.5
_PAGE = 500
NEW = "new"


@dataclass(frozen=True, slots=True)
class Note:
    """An event of a submission. Places start at 1."""

    place: int
    at: float
    data: bytes


class AppInbox:
    """Submissions, from acceptance to outcome."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self._writer = tables.INBOX.open(self.path)
        self._reader = tables.INBOX.connect(self.path)
        self._owners = WriterLocks(f"{self.path}-owners")
        self._reads = ThreadPoolExecutor(1, thread_name_prefix="smokebox-inbox-read")
        self._commits = DatabaseWriter(
            self._writer,
            name="smokebox-inbox",
            translate=lambda error: tables.INBOX.translate(error, self.path),
        )
        self._wakes = Wakeups()
        self._claimed: set[int] = set()
        self._closed = False

    async def accept(
        self,
        target: WorkTarget,
        body: Any,
        *,
        key: str | None = None,
        request: dict[str, Any] | None = None,
        head: int = 0,
    ) -> Submission:
        """Accept work; it is durable when this returns.

        The same `key` for the same target returns the earlier submission.

        Raises `Conflict` if its body differs.
        """
        data = msgspec.json.encode(body)
        digest = hashlib.sha256(data).hexdigest()
        id, now = new_global_id(), time.time()
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
        """Return a submission. Raises `NotFound`."""
        rows = await self._select(tables.GET, (id,))
        if not rows:
            raise NotFound(
                f"there is no submission {id!r:.100}.",
                hint="It may have been deleted after the app's retention time.",
                kind="submission",
                name=id,
            )
        return _submission(rows[0])

    async def runs(self, workflow: str, *, limit: int = 100) -> list[Submission]:
        """Return the runs of a workflow, the latest first."""
        return [_submission(row) for row in await self._select(tables.RUNS, (workflow, limit))]

    async def run(self, id: str) -> Submission:
        """Return a run of a workflow. Raises `NotFound`."""
        rows = await self._select(tables.RUN, (id,))
        if not rows:
            raise NotFound(
                f"there is no run {id!r:.100}.",
                hint="POST /workflows/{name} starts one.",
                kind="run",
                name=id,
            )
        return _submission(rows[0])

    async def lately(self, since: float) -> list[tuple[str, WorkTarget]]:
        """Return ids and targets of submissions that have no outcome, or got one since then."""
        rows = await self._select(tables.LATELY, (since,))
        return [(id, WorkTarget(kind=kind, name=name, id=of)) for id, kind, name, of in rows]

    async def open(self) -> int:
        """Count the submissions without an outcome."""
        return int((await self._select(tables.COUNT_OPEN, ()))[0][0])

    async def wait(self, id: str, timeout: float | None = None) -> Submission:
        """Wait for a submission to end, and return it as it is after the timeout."""
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
        """Claim up to `most` targets that no process works on."""
        # Enough rows that targets claimed already do not hide free ones behind them.
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
        """Release a claimed target."""
        self._claimed.discard(number)
        if not self._closed:
            self._owners.give(number)
            # Another target may take its place, or the target may have received work meanwhile.
            self._wakes.wake(NEW)

    async def begin(self, number: int) -> Submission | None:
        """Start the next submission of a claimed target; None when there is none."""

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

    async def end(self, id: str, ending: SubmissionResult) -> bool:
        """Record the outcome; False if there is one already, which stays."""
        ended = await self._submit(lambda one: _end(one, tables.END, id, ending))
        self._wakes.wake(id)
        return ended

    async def abort(self, id: str, ending: SubmissionResult) -> bool:
        """Abort a submission: a waiting one ends at once, a running one is notified.

        Returns False if it has already ended.
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
        """Return the running submissions that were aborted."""
        return {str(id) for (id,) in await self._select(tables.ABORTS, ())}

    async def decide(self, decision: ApprovalDecision) -> None:
        """Record whether a tool call may run, and notify the process that runs the conversation."""
        asked, told = (decision.name, decision.id), (decision.allowed, decision.reason)
        values = (decision.call_id, *told, *asked)
        await self._submit(lambda one: one.execute(tables.DECIDE, values))
        self._wakes.wake(NEW)

    async def decisions(self) -> list[ApprovalDecision]:
        """Return the decisions that have not been applied."""
        rows = await self._select(tables.DECISIONS, ())
        return [
            ApprovalDecision(
                name=name, id=id, call_id=call_id, allowed=bool(allowed), reason=reason
            )
            for name, id, call_id, allowed, reason in rows
        ]

    async def decided(self, decision: ApprovalDecision) -> None:
        """Delete a decision that has been applied."""
        values = (decision.call_id, decision.name, decision.id)
        await self._submit(lambda one: one.execute(tables.DECIDED, values))

    async def open_of(self, target: WorkTarget) -> Sequence[str]:
        """Return the submissions of a target that have no outcome, in order."""
        found = await self._select(tables.TARGET, (target.kind, target.name, target.id))
        rows = await self._select(tables.OPEN_OF, found[0]) if found else []
        return [str(id) for (id,) in rows]

    async def forget(self, target: WorkTarget) -> bool:
        """Remove everything of a target; False if there is nothing.

        Raises `Conflict` while it has unfinished work.
        """

        def remove(connection: sqlite3.Connection) -> bool:
            values = (target.kind, target.name, target.id)
            found = connection.execute(tables.TARGET, values).fetchone()
            if found is not None:
                if connection.execute(tables.OPEN_OF, found).fetchone():
                    raise Conflict(
                        f"{target} has unfinished work.",
                        hint="Abort it first.",
                        kind="submission",
                        name=str(target),
                    )
                connection.execute(tables.FORGET_TARGET, found)
            return found is not None

        return await self._submit(remove)

    async def sweep(self, before: float) -> int:
        """Delete submissions that ended before that time, and return their number."""
        return await self._submit(lambda one: one.execute(tables.SWEEP, (before,)).rowcount)

    @contextlib.asynccontextmanager
    async def expired(
        self, before: float, *, limit: int = _PAGE
    ) -> AsyncIterator[list[WorkTarget]]:
        """Yield targets whose work all ended before that time, then delete them.

        Each target stays claimed meanwhile.
        """
        rows = await self._select(tables.EXPIRED, (before, limit))
        held = [row for row in rows if self._owners.take(row[0])]
        numbers = [(row[0],) for row in held]
        try:
            yield [WorkTarget(kind=kind, name=name, id=id) for _, kind, name, id in held]

            def remove(connection: sqlite3.Connection) -> None:
                # A target that received work meanwhile is kept.
                for number in numbers:
                    if not connection.execute(tables.OPEN_OF, number).fetchone():
                        connection.execute(tables.FORGET_TARGET, number)

            await self._submit(remove)
        finally:
            for (number,) in numbers:
                self.give_back(number)

    async def note(self, id: str, data: bytes) -> None:
        """Append an event to a submission."""
        values = (id, time.time(), data, id)
        await self._submit(lambda one: one.execute(tables.NOTE, values).fetchone())
        self._wakes.wake(id)

    async def notes(self, id: str, *, after: int = 0, limit: int = _PAGE) -> list[Note]:
        """Return the events of a submission after a place."""
        rows = await self._select(tables.NOTES, (id, after, limit))
        return [Note(int(place), float(at), bytes(data)) for place, at, data in rows]

    async def last_note(self, id: str) -> int:
        """Return the place of a submission's last event, 0 if there is none."""
        return int((await self._select(tables.LAST_NOTE, (id,)))[0][0])

    async def follow(self, id: str, *, after: int = 0) -> AsyncGenerator[Note, None]:
        """Yield the events of a submission, then new ones until it ends."""
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
        """Return when a schedule is due next; `first` if it is new or was changed."""

        def find(connection: sqlite3.Connection) -> float:
            known = connection.execute(tables.DUE, (name,)).fetchone()
            if known is not None and known[0] == line:
                return float(known[1])
            connection.execute(tables.SET_DUE, (name, line, first))
            return first

        return await self._submit(find)

    async def set_due(self, name: str, line: str, due: float) -> None:
        """Set when a schedule is due next."""
        await self._submit(lambda one: one.execute(tables.SET_DUE, (name, line, due)))

    @contextlib.contextmanager
    def listen(self) -> Iterator[asyncio.Event]:
        """Return an event that is set when this process accepts or aborts work."""
        with self._wakes.listen(NEW) as event:
            yield event

    async def aclose(self) -> None:
        """Close the inbox; accepted work stays. Safe to repeat."""
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
        # A commit that has started completes even if the caller is cancelled.
        return await asyncio.shield(self._commits.submit(job))

    async def _select(self, sql: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        def read() -> list[tuple[Any, ...]]:
            return self._reader.execute(sql, values).fetchall()

        if self._closed:
            raise closed(self.path)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._reads, read)
        except sqlite3.Error as error:
            raise tables.INBOX.translate(error, self.path) from error


def _end(connection: sqlite3.Connection, statement: str, id: str, ending: SubmissionResult) -> bool:
    """Record an outcome together with the last note; False if the statement changes nothing."""
    now, data = time.time(), msgspec.json.encode(ending)
    if not connection.execute(statement, (now, data, id)).rowcount:
        return False
    told = msgspec.json.encode({"event": "ended", **msgspec.to_builtins(ending)})
    connection.execute(tables.NOTE, (id, now, told, id)).fetchone()
    return True


def _number(connection: sqlite3.Connection, target: WorkTarget) -> int:
    values = (target.kind, target.name, target.id)
    connection.execute(tables.MAKE_TARGET, values)
    return int(connection.execute(tables.TARGET, values).fetchone()[0])


def _submission(row: tuple[Any, ...]) -> Submission:
    id, kind, name, target, body, at, state, attempts, asked, ended_at, ending, request, head = row
    return Submission(
        id=id,
        target=WorkTarget(kind=kind, name=name, id=target),
        body=msgspec.json.decode(body),
        accepted_at=at,
        state=state,
        attempts=attempts,
        abort_asked=bool(asked),
        ended_at=ended_at,
        ending=None if ending is None else msgspec.json.decode(ending, type=SubmissionResult),
        request=None if request is None else msgspec.json.decode(request),
        head=head,
    )


def _another(key: str) -> Conflict:
    return Conflict(
        f"the idempotency key {key!r:.100} was used with a different body.",
        hint="Send the same body, or another key.",
        kind="idempotency_key",
        name=key,
    )


TargetKind: TypeAlias = Literal["agent", "workflow"]
SubmissionState: TypeAlias = Literal["waiting", "running", "ended"]
# Valid ids of conversations, as they appear in URLs.
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkTarget:
    """An agent's conversation or a workflow's run. Its work is done one item at a time.

    `name` is the agent's or workflow's, `id` the conversation's or the run's.
    """

    kind: TargetKind
    name: str
    id: str

    def __str__(self) -> str:
        return f"{self.kind}s/{self.name}/{self.id}"


class SubmissionResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """Outcome of work. `result` is the value a workflow returned, or an agent's reply."""

    outcome: Outcome
    result: Any = None
    error: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """Accepted work as stored.

    `attempts` counts how often it was started. All of its records come after the offset `head` of
    its conversation.
    """

    id: str
    target: WorkTarget
    body: Any
    accepted_at: float
    state: SubmissionState = "waiting"
    attempts: int = 0
    abort_asked: bool = False
    ended_at: float | None = None
    ending: SubmissionResult | None = None
    request: dict[str, Any] | None = None
    head: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovalDecision:
    """A decision on a tool call that waits for approval."""

    name: str
    id: str
    call_id: str
    allowed: bool
    reason: str = ""


def check_conversation_id(id: object) -> str:
    """Return `id` if it is a valid id of a conversation."""
    if isinstance(id, str) and _ID.fullmatch(id):
        return id
    raise InvalidOption(
        f"an id must be at most 100 letters, digits, '.', '_' and '-', not {id!r:.120}.",
        hint="Use the id of a user or a ticket, for example.",
        option="id",
        value=id,
    )
