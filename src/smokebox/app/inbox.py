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
TargetKind: TypeAlias = Literal["agent", "workflow"]
SubmissionState: TypeAlias = Literal["waiting", "running", "ended"]

# Interval at which waiting callers check for changes by other processes.
_POLL = 0.5
_PAGE = 500
_NEW_WORK = "new"
# Valid ids of conversations, as they appear in URLs.
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkTarget:
    """A conversation with an agent or a run of a workflow; does one submission at a time.

    `name` is that of the agent or workflow, `id` that of the conversation or run.
    """

    kind: TargetKind
    name: str
    id: str

    def __str__(self) -> str:
        return f"{self.kind}s/{self.name}/{self.id}"


class SubmissionOutcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """Outcome of a submission; `result` is the workflow's return value or the agent's reply."""

    status: Outcome = msgspec.field(name="outcome")
    result: Any = None
    error: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSubmission:
    """Accepted work as stored.

    `attempts` counts its starts. Its records come after the offset `head` of its conversation.
    """

    id: str
    target: WorkTarget
    body: Any
    accepted_at: float
    state: SubmissionState = "waiting"
    attempts: int = 0
    abort_requested: bool = False
    ended_at: float | None = None
    outcome: SubmissionOutcome | None = None
    request: dict[str, Any] | None = None
    head: int = 0


@dataclass(frozen=True, slots=True)
class SubmissionEvent:
    """An event of a submission, as JSON. Offsets start at 1."""

    offset: int
    at: float
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovalDecision:
    """Decision on a tool call that waits for approval."""

    name: str
    id: str
    call_id: str
    allowed: bool
    reason: str = ""


class AppInbox:
    """Submissions, from acceptance to outcome."""

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        writer = tables.INBOX.open(self.path)
        self._reader = tables.INBOX.connect(self.path)
        self._owners = WriterLocks(f"{self.path}-owners")
        self._reads = ThreadPoolExecutor(1, thread_name_prefix="smokebox-inbox-read")
        self._commits = DatabaseWriter(
            writer,
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
        delivery: str | None = None,
        request: dict[str, Any] | None = None,
        head: int = 0,
    ) -> StoredSubmission:
        """Accept work; it is durable when this returns.

        Args:
            target: Conversation or run that the work is for.
            body: Message or payload, as JSON types.
            key: Idempotency key: the same key for the same target returns the earlier submission.
            delivery: Key of a signed delivery, which is accepted for one target only. Unless it is
                `key` too, it is accepted there again.
            request: HTTP request that the work came with.
            head: Last offset of the conversation.

        Raises:
            Conflict: The key was used with another body, or the delivery for another target.
        """
        data = msgspec.json.encode(body)
        digest = hashlib.sha256(data).hexdigest()
        id, now = new_global_id(), time.time()
        request_data = None if request is None else msgspec.json.encode(request)
        target_values = (target.kind, target.name, target.id)

        def add(connection: sqlite3.Connection) -> str:
            connection.execute(tables.ADD_TARGET, target_values)
            (number,) = connection.execute(tables.TARGET, target_values).fetchone()
            known = connection.execute(tables.BY_KEY, (number, key)).fetchone() if key else None
            if known is not None:
                if known[1] != digest:
                    raise _key_conflict(key or "")
                return str(known[0])
            if delivery is not None:
                values = (target.kind, target.name, delivery)
                earlier = connection.execute(tables.DELIVERED_TO, values).fetchone()
                if earlier is None:
                    connection.execute(tables.ADD_DELIVERY, (*values, target.id))
                elif delivery == key or earlier[0] != target.id:
                    raise _delivery_conflict(target)
            connection.execute(tables.ADD, (id, number, data, request_data, head, key, digest, now))
            return id

        found = await self._submit(add)
        if found != id:
            return await self.get(found)
        self._wakes.wake(_NEW_WORK)
        return StoredSubmission(
            id=id, target=target, body=body, accepted_at=now, request=request, head=head
        )

    async def get(self, id: str) -> StoredSubmission:
        """Return a submission. Raises `NotFound`."""
        rows = await self._select(tables.GET, (id,))
        if not rows:
            raise no_submission(id)
        return _submission(rows[0])

    async def runs(self, workflow: str, *, limit: int, prefix: str = "") -> list[StoredSubmission]:
        """Return the runs of a workflow whose ids begin with the prefix, the latest first."""
        rows = await self._select(tables.RUNS, (workflow, prefix, prefix, limit))
        return [_submission(row) for row in rows]

    async def run(self, id: str) -> StoredSubmission:
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

    async def recent(self, since: float) -> list[tuple[str, WorkTarget]]:
        """Return ids and targets of submissions that are open or ended after `since`."""
        rows = await self._select(tables.RECENT, (since,))
        return [
            (id, WorkTarget(kind=kind, name=name, id=target_id))
            for id, kind, name, target_id in rows
        ]

    async def count_open(self) -> int:
        """Count the submissions without an outcome."""
        return int((await self._select(tables.COUNT_OPEN, ()))[0][0])

    async def wait(self, id: str, timeout: float | None = None) -> StoredSubmission:
        """Wait for a submission to end, at most `timeout` seconds, and return it."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._wakes.listen(id) as changed:
            while True:
                changed.clear()
                found = await self.get(id)
                left = _POLL if deadline is None else min(_POLL, deadline - time.monotonic())
                if found.state == "ended" or left <= 0:
                    return found
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await changed.wait()
                if self._closed:
                    return found

    async def claim(self, limit: int) -> Sequence[int]:
        """Claim up to `limit` targets with open work that no process works on."""
        # Enough rows that claimed targets do not hide free ones behind them.
        rows = await self._select(tables.OPEN_TARGETS, (limit + len(self._claimed) + _PAGE,))
        claimed: list[int] = []
        for (number,) in rows:
            if len(claimed) >= limit:
                break
            if self._owners.acquire(number):
                claimed.append(number)
        self._claimed.update(claimed)
        return claimed

    def release(self, number: int) -> None:
        """Release a claimed target."""
        self._claimed.discard(number)
        if not self._closed:
            self._owners.release(number)
            # A worker is free now, and the target may have received work meanwhile.
            self._wakes.wake(_NEW_WORK)

    async def start_next(self, number: int) -> StoredSubmission | None:
        """Start the next submission of a claimed target; None if there is none."""

        def start(connection: sqlite3.Connection) -> StoredSubmission | None:
            rows = connection.execute(tables.FIRST, (number,)).fetchall()
            if not rows:
                return None
            connection.execute(tables.START, (rows[0][0],))
            return _submission(rows[0])

        started = await self._submit(start)
        if started is not None:
            self._wakes.wake(started.id)
        return started

    async def finish(self, id: str, outcome: SubmissionOutcome) -> bool:
        """Record the outcome; return False if there is one already, which is kept."""
        finished = await self._submit(lambda one: _finish(one, tables.FINISH, id, outcome))
        self._wakes.wake(id)
        return finished

    async def abort(self, id: str, outcome: SubmissionOutcome) -> bool:
        """Abort a submission: a waiting one ends at once, a running one is notified.

        Returns False if it has already ended.
        """

        def abort(connection: sqlite3.Connection) -> bool:
            if _finish(connection, tables.FINISH_WAITING, id, outcome):
                return True
            return connection.execute(tables.REQUEST_ABORT, (id,)).rowcount > 0

        aborted = await self._submit(abort)
        self._wakes.wake(id)
        self._wakes.wake(_NEW_WORK)
        return aborted

    async def aborted_ids(self) -> set[str]:
        """Return the running submissions whose abort was requested."""
        return {str(id) for (id,) in await self._select(tables.ABORTED_IDS, ())}

    async def add_decision(self, decision: ApprovalDecision) -> None:
        """Record a decision and notify the process that runs the conversation."""
        target = (decision.name, decision.id)
        values = (decision.call_id, decision.allowed, decision.reason, *target)
        await self._submit(lambda one: one.execute(tables.ADD_DECISION, values))
        self._wakes.wake(_NEW_WORK)

    async def decisions(self) -> list[ApprovalDecision]:
        """Return the decisions that have not been applied."""
        rows = await self._select(tables.DECISIONS, ())
        return [
            ApprovalDecision(
                name=name, id=id, call_id=call_id, allowed=bool(allowed), reason=reason
            )
            for name, id, call_id, allowed, reason in rows
        ]

    async def delete_decision(self, decision: ApprovalDecision) -> None:
        """Delete a decision that has been applied."""
        values = (decision.call_id, decision.name, decision.id)
        await self._submit(lambda one: one.execute(tables.DELETE_DECISION, values))

    async def open_ids(self, target: WorkTarget) -> Sequence[str]:
        """Return the submissions of a target that have no outcome, in order."""
        found = await self._select(tables.TARGET, (target.kind, target.name, target.id))
        rows = await self._select(tables.OPEN_IDS, found[0]) if found else []
        return [str(id) for (id,) in rows]

    async def delete(self, target: WorkTarget) -> bool:
        """Delete a target and its submissions; return False if it does not exist.

        Raises `Conflict` while it has unfinished work.
        """

        def delete(connection: sqlite3.Connection) -> bool:
            values = (target.kind, target.name, target.id)
            found = connection.execute(tables.TARGET, values).fetchone()
            if found is not None:
                if connection.execute(tables.OPEN_IDS, found).fetchone():
                    raise Conflict(
                        f"{target} has unfinished work.",
                        hint="Abort it first.",
                        kind="submission",
                        name=str(target),
                    )
                connection.execute(tables.DELETE_TARGET, found)
            return found is not None

        return await self._submit(delete)

    async def delete_ended(self, before: float) -> int:
        """Delete submissions that ended before that time, and return their number."""
        return await self._submit(lambda one: one.execute(tables.DELETE_ENDED, (before,)).rowcount)

    @contextlib.asynccontextmanager
    async def expired(self, before: float) -> AsyncIterator[list[WorkTarget]]:
        """Yield targets whose work all ended before that time, and delete them after the block.

        They stay claimed during the block.
        """
        rows = await self._select(tables.EXPIRED, (before, _PAGE))
        claimed = [row for row in rows if self._owners.acquire(row[0])]
        numbers = [(row[0],) for row in claimed]
        try:
            yield [WorkTarget(kind=kind, name=name, id=id) for _, kind, name, id in claimed]

            def delete(connection: sqlite3.Connection) -> None:
                # A target that received work meanwhile is kept.
                for number in numbers:
                    if not connection.execute(tables.OPEN_IDS, number).fetchone():
                        connection.execute(tables.DELETE_TARGET, number)

            await self._submit(delete)
        finally:
            for (number,) in numbers:
                self.release(number)

    async def add_event(self, id: str, data: bytes) -> None:
        """Append an event to a submission."""
        values = (id, time.time(), data, id)
        await self._submit(lambda one: one.execute(tables.ADD_EVENT, values))
        self._wakes.wake(id)

    async def events(self, id: str, *, after: int = 0, limit: int = _PAGE) -> list[SubmissionEvent]:
        """Return the events of a submission after an offset."""
        rows = await self._select(tables.EVENTS, (id, after, limit))
        return [SubmissionEvent(int(offset), float(at), bytes(data)) for offset, at, data in rows]

    async def last_offset(self, id: str) -> int:
        """Return the offset of a submission's last event, 0 if there is none."""
        return int((await self._select(tables.LAST_OFFSET, (id,)))[0][0])

    async def follow(self, id: str, *, after: int = 0) -> AsyncGenerator[SubmissionEvent, None]:
        """Yield the events of a submission, then new ones until it ends."""
        with self._wakes.listen(id) as changed:
            while not self._closed:
                changed.clear()
                ended = (await self.get(id)).state == "ended"
                events = await self.events(id, after=after)
                for event in events:
                    yield event
                    after = event.offset
                if not events:
                    if ended:
                        return
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_POLL):
                            await changed.wait()

    async def due(self, name: str, cron: str, first: float) -> float:
        """Return when a schedule is due next; `first` if it is new or was changed."""

        def find(connection: sqlite3.Connection) -> float:
            known = connection.execute(tables.DUE, (name,)).fetchone()
            if known is not None and known[0] == cron:
                return float(known[1])
            connection.execute(tables.SET_DUE, (name, cron, first))
            return first

        return await self._submit(find)

    async def set_due(self, name: str, cron: str, due: float) -> None:
        """Set when a schedule is due next."""
        await self._submit(lambda one: one.execute(tables.SET_DUE, (name, cron, due)))

    @contextlib.contextmanager
    def listen(self) -> Iterator[asyncio.Event]:
        """Yield an event that is set when this process accepts or aborts work."""
        with self._wakes.listen(_NEW_WORK) as event:
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


def _finish(
    connection: sqlite3.Connection, statement: str, id: str, outcome: SubmissionOutcome
) -> bool:
    """Record an outcome and the last event; return False if the statement changes nothing."""
    now, data = time.time(), msgspec.json.encode(outcome)
    if not connection.execute(statement, (now, data, id)).rowcount:
        return False
    event = msgspec.json.encode({"event": "ended", **msgspec.to_builtins(outcome)})
    connection.execute(tables.ADD_EVENT, (id, now, event, id))
    return True


def _submission(row: tuple[Any, ...]) -> StoredSubmission:
    id, kind, name, target_id, body, accepted_at, state, attempts, *rest = row
    abort_requested, ended_at, outcome, request, head = rest
    return StoredSubmission(
        id=id,
        target=WorkTarget(kind=kind, name=name, id=target_id),
        body=msgspec.json.decode(body),
        accepted_at=accepted_at,
        state=state,
        attempts=attempts,
        abort_requested=bool(abort_requested),
        ended_at=ended_at,
        outcome=None if outcome is None else msgspec.json.decode(outcome, type=SubmissionOutcome),
        request=None if request is None else msgspec.json.decode(request),
        head=head,
    )


def no_submission(id: str) -> NotFound:
    """Return the error for a submission that does not exist."""
    return NotFound(
        f"there is no submission {id!r:.100}.",
        hint="It may have been deleted after the app's retention time.",
        kind="submission",
        name=id,
    )


def _key_conflict(key: str) -> Conflict:
    return Conflict(
        f"the idempotency key {key!r:.100} was used with a different body.",
        hint="Send the same body, or another key.",
        kind="idempotency_key",
        name=key,
    )


def _delivery_conflict(target: WorkTarget) -> Conflict:
    return Conflict(
        f"this delivery was accepted before: not for {target.id!r:.100}, or it was deleted there.",
        hint="Send each delivery to one URL. A signature does not cover the URL, so a copy of a "
        "delivery is refused at every other.",
        kind="delivery",
        name=target.name,
    )


def check_conversation_id(id: object) -> str:
    """Return `id` if it is a valid id of a conversation, else raise `InvalidOption`."""
    if isinstance(id, str) and _ID.fullmatch(id):
        return id
    raise InvalidOption(
        f"an id must be at most 100 letters, digits, '.', '_' and '-', not {id!r:.120}.",
        hint="Use the id of a user or a ticket, for example.",
        option="id",
        value=id,
    )
