"""The work queue of one session: one item at a time, with exactly one outcome for each."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from smokebox.agents.events import OperationEnd
from smokebox.agents.log.conversation import interrupted_records
from smokebox.agents.log.records import (
    AbortRequested,
    MessageAdded,
    WorkEnded,
    WorkStarted,
    dump_error,
    load_error,
)
from smokebox.agents.messages import Text, Usage, UserMessage
from smokebox.agents.operation import OperationControl
from smokebox.agents.work.item import WorkContext
from smokebox.errors import Aborted, DeadlineExceeded, LimitReached, SessionBusy

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from smokebox.agents.events import Event, Outcome
    from smokebox.agents.limits import Durability
    from smokebox.agents.log.conversation import WorkState
    from smokebox.agents.log.event_log import EventLog
    from smokebox.agents.operation import Operation
    from smokebox.agents.work.item import WhenBusy, WorkItem, WorkResult


# Seconds of one attempt to become the writer while another process is.
_ACQUIRE_SECONDS = 0.5
_ABORTED = "[The request above was aborted before it was done.]"


@dataclass(slots=True, kw_only=True)
class _QueueEntry:
    """A work item that is queued or running.

    Attributes:
        joining: It waits to be added to the conversation of the running item.
        cancellable: Cancelling its task stops it. Not so before its first step, and while its
            outcome is recorded.
        accepted: Its acceptance is recorded, at the time `accepted_at`.
        attempt: Number of times that it was started.
        applied: The model has its message.
        joined: Entries that share its outcome.
    """

    item: WorkItem
    control: OperationControl[Any]
    joining: bool = False
    cancellable: bool = False
    accepted: bool = False
    accepted_at: float = 0.0
    attempt: int = 0
    applied: bool = False
    ended: bool = False
    joined: list[_QueueEntry] = field(default_factory=list)
    task: asyncio.Task[None] | None = None


class WorkQueue:
    """Runs the work items of a session in order.

    `resume` returns the item of work that another process left unfinished.
    """

    def __init__(
        self, log: EventLog, durability: Durability, resume: Callable[[WorkState], WorkItem]
    ) -> None:
        self._log = log
        self._durability = durability
        self._resume = resume
        self._entries: list[_QueueEntry] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> Operation[Any] | None:
        """The operation in progress, if any."""
        return self._entries[0].control.operation if self._entries else None

    def find(self, work_id: str) -> OperationControl[Any] | None:
        """Return a queued or running operation."""
        found = (entry.control for entry in self._entries if entry.item.work_id == work_id)
        return next(found, None)

    def submit(
        self,
        item: WorkItem,
        *,
        when_busy: WhenBusy = "raise",
        listener: Callable[[Event], object] | None = None,
    ) -> Operation[Any]:
        """Queue a work item. Raises `SessionBusy` if `when_busy` is "raise" and one is queued."""
        if self._entries and when_busy == "raise":
            raise SessionBusy(
                f"the session {self._log.key.session!r} is busy with other work.",
                hint="Await that first, pass when_busy='queue' or 'join', or use another session.",
                session=str(self._log.key),
            )
        entry = _QueueEntry(
            item=item,
            control=OperationControl(item.work_id, listener=listener),
            joining=when_busy == "join",
        )
        previous = self._entries[-1] if self._entries else None
        self._entries.append(entry)
        self._start(entry, self._process(entry, previous, wait=when_busy != "raise"))
        return entry.control.operation

    async def recover(self) -> None:
        """Resume work that another process left unfinished, unless that process is alive."""
        try:
            await self._log.acquire()
        except SessionBusy:
            return
        await self._resume_unfinished(None)
        if not self._entries:
            await self._log.release()

    async def close(self, reason: str) -> None:
        """Abort all work, and wait for its end."""
        for entry in list(self._entries):
            await entry.control.operation.abort(reason)
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def suspend(self) -> None:
        """Stop all work without an outcome: it resumes when the session is opened again."""
        for task in list(self._tasks):
            task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _start(self, entry: _QueueEntry, work: Coroutine[Any, Any, None]) -> None:
        entry.task = self._spawn(work)
        entry.task.add_done_callback(lambda _: entry.control.fail(asyncio.CancelledError()))
        entry.control.run_by(entry.task, lambda: self._stop(entry))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _stop(self, entry: _QueueEntry) -> None:
        if entry.accepted and not entry.ended and self._log.acquired:
            # Recorded at once, so that it stays aborted if the process is killed while tools stop.
            self._log.add(AbortRequested(entry.item.work_id))
            self._spawn(self._flush())
        entry.item.stop()
        if entry.task is not None and entry.cancellable:
            entry.task.cancel()

    async def _flush(self) -> None:
        try:
            await self._log.flush()
        except Exception:
            return  # The next flush of the work raises it.

    async def _resume_unfinished(self, entry: _QueueEntry | None) -> _QueueEntry | None:
        """Queue unfinished work of other processes before `entry`; return the last of it."""
        conversation = self._log.conversation
        unfinished = [work for work in conversation.unfinished if self.find(work.id) is None]
        if not unfinished:
            return None
        await self._log.append(*interrupted_records(conversation))
        place = len(self._entries) if entry is None else self._entries.index(entry)
        last = self._entries[place - 1] if place else None
        for work in unfinished:
            last = self._enqueue_resumed(work, place, last)
            place += 1
        return last

    def _enqueue_resumed(
        self, work: WorkState, place: int, previous: _QueueEntry | None
    ) -> _QueueEntry:
        entry = _QueueEntry(
            item=self._resume(work),
            control=OperationControl(work.id),
            accepted=True,
            accepted_at=work.accepted_at,
            attempt=work.attempts,
            applied=work.applied,
        )
        self._entries.insert(place, entry)
        if work.aborting:
            entry.control.abort("it was aborted before the process was killed")
        self._start(entry, self._process(entry, previous, wait=True))
        return entry

    async def _process(
        self, entry: _QueueEntry, previous: _QueueEntry | None, *, wait: bool
    ) -> None:
        result: WorkResult | None = None
        error: BaseException | None = None
        entry.cancellable = True
        try:
            if entry.control.abort_reason is not None:
                raise asyncio.CancelledError
            await self._acquire(wait=wait)
            if not entry.accepted:
                previous = await self._resume_unfinished(entry) or previous
            if previous is not None:
                await self._wait_for(entry, previous)
            if not entry.ended:
                result = self._stored_result(entry) or await self._run(entry)
        except asyncio.CancelledError as cancelled:
            error = _abort_error(entry, cancelled)
        except Exception as failure:
            error = failure
        entry.cancellable = False
        try:
            error = await self._end(entry, result, error)
            self._entries.remove(entry)
            if not self._entries:
                await self._log.release()
        except Exception as failure:
            error = failure
        finally:
            _resolve(entry, result, error)

    async def _acquire(self, *, wait: bool) -> None:
        while True:
            try:
                return await self._log.acquire(wait=_ACQUIRE_SECONDS if wait else 0.0)
            except SessionBusy:
                if not wait:
                    raise

    async def _wait_for(self, entry: _QueueEntry, previous: _QueueEntry) -> None:
        if not entry.accepted and entry.item.key not in self._log.conversation.keys:
            await self._accept(entry)
            await self._log.flush()
        await previous.control.wait()

    async def _accept(self, entry: _QueueEntry) -> None:
        self._log.add(await entry.item.accept())
        entry.accepted, entry.accepted_at = True, time.time()

    def _stored_result(self, entry: _QueueEntry) -> WorkResult | None:
        """Return the result of an ended item with the same key, or raise its error."""
        key, conversation = entry.item.key, self._log.conversation
        if entry.accepted or key is None or key not in conversation.keys:
            return None
        end = conversation.work[conversation.keys[key]].end
        if end is None:
            return None
        entry.ended = True
        entry.control.emit(OperationEnd(end.outcome, end.text, end.usage))
        if end.outcome != "completed":
            raise load_error(end.error)
        return entry.item.restore(end)

    async def _run(self, entry: _QueueEntry) -> WorkResult:
        item, limits = entry.item, self._durability
        timeout = limits.timeout if item.timeout is None else item.timeout
        if entry.attempt >= limits.max_attempts:
            raise LimitReached(
                f"the work was started {entry.attempt} times, and never finished.",
                hint="Submit it again, or raise Durability(max_attempts=...).",
                limit="max_attempts",
            )
        if not entry.accepted:
            await self._accept(entry)
        context = WorkContext(
            session=item.session,
            event_log=self._log,
            work_id=item.work_id,
            meter=item.meter,
            emit=entry.control.emit,
            join=lambda: self._join(entry),
        )
        deadline = asyncio.timeout(max(0.0, entry.accepted_at + timeout - time.time()))
        try:
            async with deadline:
                self._begin(entry)
                await self._log.flush()
                return await item.run(context)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise DeadlineExceeded(
                f"the work took longer than its timeout of {timeout:g} seconds.",
                hint="Pass timeout=, or raise Durability(timeout=...).",
                operation=item.kind,
                timeout=timeout,
            ) from None

    def _begin(self, entry: _QueueEntry) -> None:
        entry.attempt += 1
        self._log.add(WorkStarted(entry.item.work_id, entry.attempt))
        if not entry.applied:
            entry.applied = True
            self._log.add(*entry.item.begin())

    def _join(self, running: _QueueEntry) -> bool:
        """Add the messages of entries that wait to join."""
        waiting = [e for e in self._entries if e.joining and e.accepted and not e.ended]
        for entry in waiting:
            entry.joining = False
            self._begin(entry)
            running.joined.append(entry)
        return bool(waiting)

    async def _end(
        self, entry: _QueueEntry, result: WorkResult | None, error: BaseException | None
    ) -> BaseException | None:
        """Record the outcome. Return the error of the work, or that of recording it."""
        if entry.ended or not entry.accepted or isinstance(error, asyncio.CancelledError):
            return error
        if isinstance(error, Aborted) and entry.applied:
            message = UserMessage((Text(_ABORTED),), signal="aborted")
            self._log.add(MessageAdded(entry.item.work_id, message))
        usages = {entry.item.work_id: (entry, entry.item.meter.usage)}
        usages |= {e.item.work_id: (e, Usage()) for e in entry.joined if not e.ended}
        text = "" if result is None else result.text
        for work_id, (_, usage) in usages.items():
            self._log.add(
                WorkEnded(
                    work_id,
                    _outcome(error),
                    text,
                    None if result is None else result.result,
                    None if error is None else dump_error(error),
                    usage,
                )
            )
        try:
            await self._log.flush()
        except Exception as failure:
            error = failure
        for ended, usage in usages.values():
            ended.ended = True
            ended.control.emit(OperationEnd(_outcome(error), text, usage))
            if ended is not entry:
                _resolve(ended, result, error)
        return error


def _abort_error(entry: _QueueEntry, cancelled: asyncio.CancelledError) -> BaseException:
    reason = entry.control.abort_reason
    if reason is None:
        return cancelled
    if entry.task is not None:
        entry.task.uncancel()
    return Aborted(f"the work was aborted: {reason}.", reason=reason)


def _outcome(error: BaseException | None) -> Outcome:
    if error is None:
        return "completed"
    return "aborted" if isinstance(error, Aborted) else "failed"


def _resolve(entry: _QueueEntry, result: WorkResult | None, error: BaseException | None) -> None:
    if error is not None:
        entry.control.fail(error)
    elif result is not None:
        entry.control.succeed(result.value)
