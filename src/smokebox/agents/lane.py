"""The work of one session: one piece at a time, and exactly one outcome for each."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from smokebox.agents.events import OperationEnd
from smokebox.agents.failures import recorded, restored
from smokebox.agents.log.records import AbortAsked, UserSaid, WorkEnded, WorkStarted
from smokebox.agents.log.recovery import settle
from smokebox.agents.messages import Text, Usage, UserMessage
from smokebox.agents.operation import Operation
from smokebox.errors import Aborted, DeadlineExceeded, LimitReached, SessionBusy

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from smokebox.agents.durability import Durability
    from smokebox.agents.events import Event, Outcome
    from smokebox.agents.job import Ending, Job, WhenBusy
    from smokebox.agents.journal import Journal
    from smokebox.agents.log.work import Work

# How long one try to become the writer lasts while another process is.
_TRY = 0.5
_CALLED_OFF = "[The request above was called off before it was done.]"


@dataclass(slots=True, kw_only=True)
class _Piece:
    """Work on its way. `stoppable` is whether cancelling its task stops it: neither before the
    first step nor while its end is recorded. `accepted` is whether its acceptance is recorded,
    `at` when it was; `attempt` counts how often it was begun, and `applied` says whether the
    model was told."""

    job: Job
    operation: Operation[Any]
    joining: bool = False
    stoppable: bool = False
    accepted: bool = False
    at: float = 0.0
    attempt: int = 0
    applied: bool = False
    ended: bool = False
    joined: list[_Piece] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return self.job.work_id


class Lane:
    """Does the work of a session, each piece when the one before it has ended.

    `revive` makes a job of work that another process has left without an outcome.
    """

    def __init__(
        self, journal: Journal, durability: Durability, revive: Callable[[Work], Job]
    ) -> None:
        self._journal = journal
        self._durability = durability
        self._revive = revive
        self._pieces: list[_Piece] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> Operation[Any] | None:
        """What it works on, if anything."""
        return self._pieces[0].operation if self._pieces else None

    def find(self, work_id: str) -> Operation[Any] | None:
        """The operation of work that waits or goes on."""
        found = (piece.operation for piece in self._pieces if piece.id == work_id)
        return next(found, None)

    def submit(
        self,
        job: Job,
        *,
        when_busy: WhenBusy = "raise",
        listener: Callable[[Event], object] | None = None,
    ) -> Operation[Any]:
        """Have work done. Raises `SessionBusy` at once where this process does other work."""
        if self._pieces and when_busy == "raise":
            raise SessionBusy(
                f"the session {self._journal.key.session!r} works on something else.",
                hint="Await that first, pass when_busy='queue' or 'join', or use another session.",
                session=str(self._journal.key),
            )
        piece = _Piece(
            job=job,
            operation=Operation(job.work_id, listener=listener),
            joining=when_busy == "join",
        )
        before = self._pieces[-1] if self._pieces else None
        self._pieces.append(piece)
        self._start(piece, self._drive(piece, before, patient=when_busy != "raise"))
        return piece.operation

    async def recover(self) -> None:
        """Go on with what another process has left without an outcome, if it has ended."""
        try:
            await self._journal.acquire()
        except SessionBusy:
            return
        await self._adopt(None)
        if not self._pieces:
            await self._journal.release()

    async def close(self, reason: str) -> None:
        """Call off everything, and wait for that."""
        for piece in list(self._pieces):
            await piece.operation.abort(reason)
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def leave(self) -> None:
        """Stop without an outcome: what was accepted goes on when the session is opened again."""
        for task in list(self._tasks):
            task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _start(self, piece: _Piece, work: Coroutine[Any, Any, None]) -> None:
        piece.task = self._spawn(work)
        piece.task.add_done_callback(lambda _: piece.operation.fail(asyncio.CancelledError()))
        piece.operation.run_by(piece.task, lambda: self._stop(piece))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _stop(self, piece: _Piece) -> None:
        if piece.accepted and not piece.ended and self._journal.held:
            # Recorded at once: killed before its tools have let go, it stays called off.
            self._journal.add(AbortAsked(piece.id))
            self._spawn(self._flush())
        piece.job.stop()
        if piece.task is not None and piece.stoppable:
            piece.task.cancel()

    async def _flush(self) -> None:
        try:
            await self._journal.flush()
        except Exception:
            return  # Whoever does the work learns of it by a flush of their own.

    async def _adopt(self, piece: _Piece | None) -> _Piece | None:
        """Put work that nobody does before `piece`; gives the last of it."""
        left = [
            work for work in self._journal.conversation.unfinished if self.find(work.id) is None
        ]
        if not left:
            return None
        await self._journal.append(*settle(self._journal.conversation))
        place = len(self._pieces) if piece is None else self._pieces.index(piece)
        last = self._pieces[place - 1] if place else None
        for work in left:
            last = self._take_up(work, place, last)
            place += 1
        return last

    def _take_up(self, work: Work, place: int, before: _Piece | None) -> _Piece:
        piece = _Piece(
            job=self._revive(work),
            operation=Operation(work.id),
            accepted=True,
            at=work.accepted_at,
            attempt=work.attempts,
            applied=work.applied,
        )
        self._pieces.insert(place, piece)
        if work.aborting:
            piece.operation.abort("it was called off before the process was killed")
        self._start(piece, self._drive(piece, before, patient=True))
        return piece

    async def _drive(self, piece: _Piece, before: _Piece | None, *, patient: bool) -> None:
        ending: Ending | None = None
        error: BaseException | None = None
        piece.stoppable = True
        try:
            if piece.operation.abort_reason is not None:
                raise asyncio.CancelledError
            await self._acquire(patient=patient)
            if not piece.accepted:
                before = await self._adopt(piece) or before
            if before is not None:
                await self._wait_behind(piece, before)
            if not piece.ended:
                ending = self._done_before(piece) or await self._work(piece)
        except asyncio.CancelledError as cancelled:
            error = _why(piece, cancelled)
        except Exception as failure:
            error = failure
        piece.stoppable = False
        try:
            error = await self._end(piece, ending, error)
            self._pieces.remove(piece)
            if not self._pieces:
                await self._journal.release()
        except Exception as failure:
            error = failure
        finally:
            _resolve(piece, ending, error)

    async def _acquire(self, *, patient: bool) -> None:
        while True:
            try:
                return await self._journal.acquire(wait=_TRY if patient else 0.0)
            except SessionBusy:
                if not patient:
                    raise

    async def _wait_behind(self, piece: _Piece, before: _Piece) -> None:
        if not piece.accepted and not self._is_known(piece):
            await self._accept(piece)
            await self._journal.flush()
        await before.operation.wait()

    async def _accept(self, piece: _Piece) -> None:
        self._journal.add(await piece.job.accept())
        piece.accepted, piece.at = True, time.time()

    def _is_known(self, piece: _Piece) -> bool:
        key = piece.job.key
        return key is not None and key in self._journal.conversation.keys

    def _done_before(self, piece: _Piece) -> Ending | None:
        """What work of the same key has come to, if there was any."""
        if piece.accepted or not self._is_known(piece):
            return None
        conversation = self._journal.conversation
        end = conversation.work[conversation.keys[piece.job.key or ""]].end
        if end is None:
            return None
        piece.ended = True
        piece.operation.emit(OperationEnd(end.outcome, end.text, end.usage))
        if end.outcome != "completed":
            raise restored(end.error)
        return piece.job.restore(end)

    async def _work(self, piece: _Piece) -> Ending:
        limits = self._durability
        allowed = limits.timeout if piece.job.timeout is None else piece.job.timeout
        if piece.attempt >= limits.max_attempts:
            raise LimitReached(
                f"the work was begun {piece.attempt} times, and never came to its end.",
                hint="Ask for it again, or raise Durability(max_attempts=...).",
                limit="max_attempts",
            )
        if not piece.accepted:
            await self._accept(piece)
        limit = asyncio.timeout(max(0.0, piece.at + allowed - time.time()))
        try:
            async with limit:
                self._begin(piece)
                await self._journal.flush()
                return await piece.job.run(piece.operation, lambda: self._join(piece))
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineExceeded(
                f"the work took longer than the {allowed:g} seconds that it may.",
                hint="Pass timeout=, or raise Durability(timeout=...).",
                operation=piece.job.kind,
                timeout=allowed,
            ) from None

    def _begin(self, piece: _Piece) -> None:
        piece.attempt += 1
        self._journal.add(WorkStarted(piece.id, piece.attempt))
        if not piece.applied:
            piece.applied = True
            self._journal.add(*piece.job.begin())

    def _join(self, host: _Piece) -> bool:
        """Have the host's model see what those said who wait to join."""
        waiting = [one for one in self._pieces if one.joining and one.accepted and not one.ended]
        for piece in waiting:
            piece.joining = False
            self._begin(piece)
            host.joined.append(piece)
        return bool(waiting)

    async def _end(
        self, piece: _Piece, ending: Ending | None, error: BaseException | None
    ) -> BaseException | None:
        """Record the outcome; gives the error that stands instead where that cannot be done."""
        if piece.ended or not piece.accepted or isinstance(error, asyncio.CancelledError):
            return error
        if isinstance(error, Aborted) and piece.applied:
            told = UserMessage((Text(_CALLED_OFF),), signal="aborted")
            self._journal.add(UserSaid(piece.id, told))
        ends = [one for one in piece.joined if not one.ended]
        self._journal.add(_ended(piece, ending, error, piece.job.usage))
        self._journal.add(*(_ended(one, ending, error, Usage()) for one in ends))
        try:
            await self._journal.flush()
        except Exception as failure:
            error = failure
        text = "" if ending is None else ending.text
        for one in (piece, *ends):
            one.ended = True
            usage = piece.job.usage if one is piece else Usage()
            one.operation.emit(OperationEnd(_outcome(error), text, usage))
            if one is not piece:
                _resolve(one, ending, error)
        return error


def _why(piece: _Piece, cancelled: asyncio.CancelledError) -> BaseException:
    reason = piece.operation.abort_reason
    if reason is None:
        return cancelled
    if piece.task is not None:
        piece.task.uncancel()
    return Aborted(f"the work was called off: {reason}.", reason=reason)


def _ended(
    piece: _Piece, ending: Ending | None, error: BaseException | None, usage: Usage
) -> WorkEnded:
    return WorkEnded(
        piece.id,
        _outcome(error),
        "" if ending is None else ending.text,
        None if ending is None else ending.result,
        None if error is None else recorded(error),
        usage,
    )


def _outcome(error: BaseException | None) -> Outcome:
    if error is None:
        return "completed"
    return "aborted" if isinstance(error, Aborted) else "failed"


def _resolve(piece: _Piece, ending: Ending | None, error: BaseException | None) -> None:
    if error is not None:
        piece.operation.fail(error)
    elif ending is not None:
        piece.operation.succeed(ending.value)
