"""Runner of an app's inbox: each submission gets exactly one outcome."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

import msgspec

from smokebox.agents.session import stream_replies
from smokebox.app.attachments import unpack
from smokebox.app.context import WorkflowContext
from smokebox.app.conversations import delete_expired
from smokebox.app.definitions import ServedAgent
from smokebox.app.inbox import SubmissionOutcome
from smokebox.errors import Aborted, DeadlineExceeded, SmokeboxError
from smokebox.project import project_folder
from smokebox.wire.failure import Failure, failure_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.agents.log.store import SessionStore
    from smokebox.app.conversations import OpenConversations
    from smokebox.app.definitions import ServedFunction
    from smokebox.app.inbox import AppInbox, ApprovalDecision, StoredSubmission
    from smokebox.app.project import AppProject

# Interval at which to check for work that other processes accepted, aborted, or left when they
# died.
_POLL = 1.0
_SWEEP_SECONDS = 30.0
# Seconds a function has to end after it is cancelled.
_CANCEL_SECONDS = 10.0

_log = logging.getLogger("smokebox.app")


class Runner:
    """Works on several targets at once, and on the submissions of each in order."""

    def __init__(
        self,
        inbox: AppInbox,
        store: SessionStore,
        conversations: OpenConversations,
        project: Callable[[], AppProject],
        env: Any,
    ) -> None:
        self._inbox = inbox
        self._store = store
        self._conversations = conversations
        self._project = project
        self._env = env
        self._workers: set[asyncio.Task[None]] = set()
        self._stops: dict[str, Callable[[], object]] = {}
        self._claim_task: asyncio.Task[None] | None = None
        self._draining = False

    def start(self) -> None:
        """Start, and continue work that a previous process left."""
        self._claim_task = asyncio.create_task(self._claim())

    async def stop(self, grace: float = 0.0) -> None:
        """Start nothing more, and abandon work that does not end within `grace` seconds.

        The next start continues it.
        """
        await self.drain(grace)
        for worker in self._workers:
            worker.cancel()
        if self._workers:
            await asyncio.wait(self._workers)

    async def drain(self, grace: float) -> None:
        """Start nothing more, and wait until running work ends or `grace` seconds pass.

        Returns at once when called again.
        """
        if self._draining:
            return
        self._draining = True
        if self._claim_task is not None:
            self._claim_task.cancel()
            await asyncio.wait([self._claim_task])
        if self._workers and grace > 0:
            await asyncio.wait(self._workers, timeout=grace)

    async def _claim(self) -> None:
        swept = time.monotonic()
        with self._inbox.listen() as changed:
            while True:
                changed.clear()
                try:
                    await self._process_inbox()
                    if time.monotonic() - swept > _SWEEP_SECONDS:
                        swept = time.monotonic()
                        await self._delete_expired()
                except Exception:
                    # Keep polling: a full disk, for example, may be cleared.
                    _log.exception("cannot process the inbox")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL):
                        await changed.wait()

    async def _process_inbox(self) -> None:
        for id in await self._inbox.aborted_ids() if self._stops else ():
            if (stop := self._stops.get(id)) is not None:
                stop()
        for decision in await self._inbox.decisions() if self._stops else ():
            await self._decide(decision)
        free = self._project().settings.concurrency - len(self._workers)
        for number in await self._inbox.claim(free) if free > 0 else ():
            worker = asyncio.create_task(self._work_on(number))
            self._workers.add(worker)
            worker.add_done_callback(self._workers.discard)

    async def _decide(self, decision: ApprovalDecision) -> None:
        """Apply a decision to a tool call that waits in this process."""
        harness = self._conversations.find(decision.name, decision.id)
        session = None if harness is None else await harness.session()
        if session is None or decision.call_id not in {one.call_id for one in session.approvals}:
            return
        if decision.allowed:
            await session.approve(decision.call_id)
        else:
            await session.deny(decision.call_id, decision.reason)
        await self._inbox.delete_decision(decision)

    async def _delete_expired(self) -> None:
        await self._conversations.sweep()
        if (retention := self._project().settings.retention) is not None:
            before = time.time() - retention
            await delete_expired(self._inbox, self._store, self._conversations, before)

    async def _work_on(self, number: int) -> None:
        # Agents look names up in their project, wherever the app was started.
        project_folder.set(self._project().folder)
        try:
            # A draining runner does not start the next item.
            while not self._draining and (submission := await self._inbox.start_next(number)):
                outcome = await self._work(submission)
                await self._inbox.finish(submission.id, outcome)
        except Exception:
            _log.exception("work ended without an outcome and is retried")
            await asyncio.sleep(_POLL)
        finally:
            self._inbox.release(number)

    async def _work(self, submission: StoredSubmission) -> SubmissionOutcome:
        target = submission.target
        try:
            if submission.abort_requested and not submission.attempts:
                raise Aborted("the work was aborted before it started.", reason="abort")
            served = self._project().find(target.kind, target.name)
            if isinstance(served, ServedAgent):
                result = await self._prompt(served, submission)
            else:
                result = await self._call(served, submission)
            return SubmissionOutcome("completed", to_json_types(result))
        except Aborted as error:
            return SubmissionOutcome("aborted", error=failure_of(error))
        except SmokeboxError as error:
            return SubmissionOutcome("failed", error=failure_of(error))
        except Exception as error:
            _log.warning("%s failed", target, exc_info=error)
            return SubmissionOutcome(
                "failed", error=Failure(code="error", message=_describe(error))
            )

    async def _prompt(self, served: ServedAgent, submission: StoredSubmission) -> dict[str, Any]:
        """Prompt an agent, or continue a prompt of a killed process, found by its key."""
        id, body = submission.target.id, submission.body
        async with self._conversations.use(served, id, body) as harness:
            session = await harness.session()
            stream_replies(session)
            message = await unpack(harness, body)
            operation = session.prompt(
                message.text, images=message.images, key=submission.id, when_busy="queue"
            )
            with self._abortable(submission.id, lambda: operation.abort("aborted")):
                if submission.abort_requested:
                    # The process that started it was killed. Abort it, or a later start would
                    # continue it.
                    operation.abort("aborted")
                await operation.wait()
            reply = await operation
        return {
            "text": reply.text,
            "data": reply.data,
            "model": reply.model,
            "usage": msgspec.to_builtins(reply.usage),
            "stopped": reply.stopped,
        }

    async def _call(self, served: ServedFunction, submission: StoredSubmission) -> Any:
        if submission.abort_requested:
            raise Aborted("the work was aborted.", reason="abort")
        if submission.attempts >= served.attempts:
            raise SmokeboxError(
                f"the app stopped while {served.name} ran, and it is not restarted.",
                hint=f"Set `attempts = 2` in {served.file.name} if it is safe to run again.",
                attempts=submission.attempts,
            )
        ctx = WorkflowContext(
            submission, inbox=self._inbox, store=self._store, env=self._env, name=served.name
        )
        ctx.log.event("started", attempt=ctx.attempt)

        async def call() -> Any:
            try:
                return await served.function(ctx)
            except SystemExit as error:
                # SystemExit would end the app.
                raise SmokeboxError(
                    f"{served.name} called sys.exit({error.code!r:.80}).",
                    hint="Return the result, or raise an error.",
                ) from None

        task = asyncio.create_task(call())
        try:
            with self._abortable(submission.id, task.cancel):
                await asyncio.wait([task], timeout=served.timeout)
            if not task.done():
                raise DeadlineExceeded(
                    f"{served.name} exceeded its timeout of {served.timeout:g} seconds.",
                    hint=f"Set `timeout = ...` in {served.file.name}.",
                    operation=served.name,
                    timeout=served.timeout,
                )
            if task.cancelled():
                raise Aborted("the work was aborted.", reason="abort")
            return task.result()
        finally:
            task.cancel()
            if not (await asyncio.wait([task], timeout=_CANCEL_SECONDS))[0]:
                _log.error("%s did not end after it was cancelled", served.name)
            await ctx.aclose()

    @contextlib.contextmanager
    def _abortable(self, id: str, stop: Callable[[], object]) -> Any:
        self._stops[id] = stop
        try:
            yield
        finally:
            del self._stops[id]


def to_json_types(value: Any) -> Any:
    """Convert a workflow's result to JSON types. Raises `SmokeboxError`."""
    try:
        return msgspec.json.decode(msgspec.json.encode(value, enc_hook=_encode))
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise SmokeboxError(
            f"the result cannot be encoded as JSON: {error}.",
            hint="Return dicts, lists, strings, numbers, dataclasses or pydantic models.",
        ) from None


def _encode(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} cannot be encoded")


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
