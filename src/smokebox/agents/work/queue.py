"""The work of one session: one item at a time, with exactly one outcome for each."""

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
    from smokebox.agents.log.event_log import EventLog
    from smokebox.agents.log.work_state import WorkState
    from smokebox.agents.operation import Operation
    from smokebox.agents.work.item import WhenBusy, WorkItem, WorkResult


# How long one try to become the writer lasts while another process is.
_TRY = 0.5
_CALLED_OFF = "[The request above was called off before it was done.]"


@dataclass(slots=True, kw_only=True)
class _Entry:
    """Work on its way. `stoppable` is whether cancelling its task stops it: neither before the
    first step nor while its end is recorded. `accepted` is whether its acceptance is recorded,
    `at` when it was; `attempt` counts how often it was begun, and `applied` says whether the
    model was told."""

    item: WorkItem
    control: OperationControl[Any]
    joining: bool = False
    stoppable: bool = False
    accepted: bool = False
    at: float = 0.0
    attempt: int = 0
    applied: bool = False
    ended: bool = False
    joined: list[_Entry] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return self.item.work_id


class WorkQueue:
    """Does the work of a session, each entry when the one before it has ended.

    `resume` makes a job of work that another process has left without an outcome.
    """

    def __init__(
        self, log: EventLog, durability: Durability, resume: Callable[[WorkState], WorkItem]
    ) -> None:
        self._log = log
        self._durability = durability
        self._resume = resume
        self._entries: list[_Entry] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> Operation[Any] | None:
        """What it works on, if anything."""
        return self._entries[0].control.operation if self._entries else None

    def find(self, work_id: str) -> OperationControl[Any] | None:
        """The operation of work that waits or goes on."""
        found = (entry.control for entry in self._entries if entry.id == work_id)
        return next(found, None)

    def submit(
        self,
        item: WorkItem,
        *,
        when_busy: WhenBusy = "raise",
        listener: Callable[[Event], object] | None = None,
    ) -> Operation[Any]:
        """Have work done. Raises `SessionBusy` at once where this process does other work."""
        if self._entries and when_busy == "raise":
            raise SessionBusy(
                f"the session {self._log.key.session!r} works on something else.",
                hint="Await that first, pass when_busy='queue' or 'join', or use another session.",
                session=str(self._log.key),
            )
        entry = _Entry(
            item=item,
            control=OperationControl(item.work_id, listener=listener),
            joining=when_busy == "join",
        )
        before = self._entries[-1] if self._entries else None
        self._entries.append(entry)
        self._start(entry, self._drive(entry, before, patient=when_busy != "raise"))
        return entry.control.operation

    async def recover(self) -> None:
        """Go on with what another process has left without an outcome, if it has ended."""
        try:
            await self._log.acquire()
        except SessionBusy:
            return
        await self._adopt(None)
        if not self._entries:
            await self._log.release()

    async def close(self, reason: str) -> None:
        """Call off everything, and wait for that."""
        for entry in list(self._entries):
            await entry.control.operation.abort(reason)
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def suspend(self) -> None:
        """Stop without an outcome: what was accepted goes on when the session is opened again."""
        for task in list(self._tasks):
            task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _start(self, entry: _Entry, work: Coroutine[Any, Any, None]) -> None:
        entry.task = self._spawn(work)
        entry.task.add_done_callback(lambda _: entry.control.fail(asyncio.CancelledError()))
        entry.control.run_by(entry.task, lambda: self._stop(entry))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _stop(self, entry: _Entry) -> None:
        if entry.accepted and not entry.ended and self._log.held:
            # Recorded at once: killed before its tools have let go, it stays called off.
            self._log.add(AbortRequested(entry.id))
            self._spawn(self._flush())
        entry.item.stop()
        if entry.task is not None and entry.stoppable:
            entry.task.cancel()

    async def _flush(self) -> None:
        try:
            await self._log.flush()
        except Exception:
            return  # Whoever does the work learns of it by a flush of their own.

    async def _adopt(self, entry: _Entry | None) -> _Entry | None:
        """Put work that nobody does before `entry`; gives the last of it."""
        left = [work for work in self._log.conversation.unfinished if self.find(work.id) is None]
        if not left:
            return None
        await self._log.append(*interrupted_records(self._log.conversation))
        place = len(self._entries) if entry is None else self._entries.index(entry)
        last = self._entries[place - 1] if place else None
        for work in left:
            last = self._take_up(work, place, last)
            place += 1
        return last

    def _take_up(self, work: WorkState, place: int, before: _Entry | None) -> _Entry:
        entry = _Entry(
            item=self._resume(work),
            control=OperationControl(work.id),
            accepted=True,
            at=work.accepted_at,
            attempt=work.attempts,
            applied=work.applied,
        )
        self._entries.insert(place, entry)
        if work.aborting:
            entry.control.abort("it was called off before the process was killed")
        self._start(entry, self._drive(entry, before, patient=True))
        return entry

    async def _drive(self, entry: _Entry, before: _Entry | None, *, patient: bool) -> None:
        result: WorkResult | None = None
        error: BaseException | None = None
        entry.stoppable = True
        try:
            if entry.control.abort_reason is not None:
                raise asyncio.CancelledError
            await self._acquire(patient=patient)
            if not entry.accepted:
                before = await self._adopt(entry) or before
            if before is not None:
                await self._wait_behind(entry, before)
            if not entry.ended:
                result = self._done_before(entry) or await self._work(entry)
        except asyncio.CancelledError as cancelled:
            error = _why(entry, cancelled)
        except Exception as failure:
            error = failure
        entry.stoppable = False
        try:
            error = await self._end(entry, result, error)
            self._entries.remove(entry)
            if not self._entries:
                await self._log.release()
        except Exception as failure:
            error = failure
        finally:
            _resolve(entry, result, error)

    async def _acquire(self, *, patient: bool) -> None:
        while True:
            try:
                return await self._log.acquire(wait=_TRY if patient else 0.0)
            except SessionBusy:
                if not patient:
                    raise

    async def _wait_behind(self, entry: _Entry, before: _Entry) -> None:
        if not entry.accepted and not self._is_known(entry):
            await self._accept(entry)
            await self._log.flush()
        await before.control.wait()

    async def _accept(self, entry: _Entry) -> None:
        self._log.add(await entry.item.accept())
        entry.accepted, entry.at = True, time.time()

    def _is_known(self, entry: _Entry) -> bool:
        key = entry.item.key
        return key is not None and key in self._log.conversation.keys

    def _done_before(self, entry: _Entry) -> WorkResult | None:
        """What work of the same key has come to, if there was any."""
        if entry.accepted or not self._is_known(entry):
            return None
        conversation = self._log.conversation
        end = conversation.work[conversation.keys[entry.item.key or ""]].end
        if end is None:
            return None
        entry.ended = True
        entry.control.emit(OperationEnd(end.outcome, end.text, end.usage))
        if end.outcome != "completed":
            raise load_error(end.error)
        return entry.item.restore(end)

    async def _work(self, entry: _Entry) -> WorkResult:
        limits = self._durability
        allowed = limits.timeout if entry.item.timeout is None else entry.item.timeout
        if entry.attempt >= limits.max_attempts:
            raise LimitReached(
                f"the work was begun {entry.attempt} times, and never came to its end.",
                hint="Ask for it again, or raise Durability(max_attempts=...).",
                limit="max_attempts",
            )
        if not entry.accepted:
            await self._accept(entry)
        limit = asyncio.timeout(max(0.0, entry.at + allowed - time.time()))
        try:
            async with limit:
                self._begin(entry)
                await self._log.flush()
                return await entry.item.run(self._context(entry))
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineExceeded(
                f"the work took longer than the {allowed:g} seconds that it may.",
                hint="Pass timeout=, or raise Durability(timeout=...).",
                operation=entry.item.kind,
                timeout=allowed,
            ) from None

    def _context(self, entry: _Entry) -> WorkContext:
        return WorkContext(
            session=entry.item.session,
            work_id=entry.id,
            emit=entry.control.emit,
            meter=entry.item.meter,
            join=lambda: self._join(entry),
        )

    def _begin(self, entry: _Entry) -> None:
        entry.attempt += 1
        self._log.add(WorkStarted(entry.id, entry.attempt))
        if not entry.applied:
            entry.applied = True
            self._log.add(*entry.item.begin())

    def _join(self, host: _Entry) -> bool:
        """Have the host's model see what those said who wait to join."""
        waiting = [one for one in self._entries if one.joining and one.accepted and not one.ended]
        for entry in waiting:
            entry.joining = False
            self._begin(entry)
            host.joined.append(entry)
        return bool(waiting)

    async def _end(
        self, entry: _Entry, result: WorkResult | None, error: BaseException | None
    ) -> BaseException | None:
        """Record the outcome; gives the error that stands instead where that cannot be done."""
        if entry.ended or not entry.accepted or isinstance(error, asyncio.CancelledError):
            return error
        if isinstance(error, Aborted) and entry.applied:
            told = UserMessage((Text(_CALLED_OFF),), signal="aborted")
            self._log.add(MessageAdded(entry.id, told))
        ends = [one for one in entry.joined if not one.ended]
        self._log.add(_ended(entry, result, error, entry.item.usage))
        self._log.add(*(_ended(one, result, error, Usage()) for one in ends))
        try:
            await self._log.flush()
        except Exception as failure:
            error = failure
        text = "" if result is None else result.text
        for one in (entry, *ends):
            one.ended = True
            usage = entry.item.usage if one is entry else Usage()
            one.control.emit(OperationEnd(_outcome(error), text, usage))
            if one is not entry:
                _resolve(one, result, error)
        return error


def _why(entry: _Entry, cancelled: asyncio.CancelledError) -> BaseException:
    reason = entry.control.abort_reason
    if reason is None:
        return cancelled
    if entry.task is not None:
        entry.task.uncancel()
    return Aborted(f"the work was called off: {reason}.", reason=reason)


def _ended(
    entry: _Entry, result: WorkResult | None, error: BaseException | None, usage: Usage
) -> WorkEnded:
    return WorkEnded(
        entry.id,
        _outcome(error),
        "" if result is None else result.text,
        None if result is None else result.result,
        None if error is None else dump_error(error),
        usage,
    )


def _outcome(error: BaseException | None) -> Outcome:
    if error is None:
        return "completed"
    return "aborted" if isinstance(error, Aborted) else "failed"


def _resolve(entry: _Entry, result: WorkResult | None, error: BaseException | None) -> None:
    if error is not None:
        entry.control.fail(error)
    elif result is not None:
        entry.control.succeed(result.value)
