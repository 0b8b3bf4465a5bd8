"""Works off the inbox of an app: every submission comes to one outcome."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

import msgspec

from smokebox.app.attachments import unpack
from smokebox.app.context import Context
from smokebox.app.retention import forget_old
from smokebox.app.served import ServedAgent
from smokebox.app.submission import Ending
from smokebox.client.bindings import home
from smokebox.errors import Aborted, DeadlineExceeded, SmokeboxError
from smokebox.wire.failure import Failure, failure_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.agents.log.store import Store
    from smokebox.app.conversations import Conversations
    from smokebox.app.inbox import Inbox
    from smokebox.app.project import Project
    from smokebox.app.served import ServedFunction
    from smokebox.app.submission import Decision, Submission

# How often to look for what other processes have accepted, called off, or left when they died.
_POLL = 1.0
_SWEEP_SECONDS = 30.0
# How long a function may take to end once it is cancelled.
_CANCEL_SECONDS = 10.0

_log = logging.getLogger("smokebox.app")


class Runner:
    """Does the work of an app, of several targets at a time, of each in its order."""

    def __init__(
        self,
        inbox: Inbox,
        store: Store,
        conversations: Conversations,
        project: Callable[[], Project],
        env: Any,
    ) -> None:
        self._inbox = inbox
        self._store = store
        self._conversations = conversations
        self._project = project
        self._env = env
        self._workers: set[asyncio.Task[None]] = set()
        self._stops: dict[str, Callable[[], object]] = {}
        self._claiming: asyncio.Task[None] | None = None
        self._draining = False

    def start(self) -> None:
        """Begin, with what was left by whoever did this before."""
        self._claiming = asyncio.create_task(self._claim())

    async def stop(self, grace: float = 0.0) -> None:
        """Begin nothing more, give what goes on `grace` seconds, and leave the rest to go on
        when the app is started again."""
        await self.drain(grace)
        for worker in self._workers:
            worker.cancel()
        if self._workers:
            await asyncio.wait(self._workers)

    async def drain(self, grace: float) -> None:
        """Begin nothing more, and return when nothing goes on, or when the time is up; at once
        where that was waited for before."""
        if self._draining:
            return
        self._draining = True
        if self._claiming is not None:
            self._claiming.cancel()
            await asyncio.wait([self._claiming])
        if self._workers and grace > 0:
            await asyncio.wait(self._workers, timeout=grace)

    async def _claim(self) -> None:
        swept = time.monotonic()
        with self._inbox.listen() as more:
            while True:
                more.clear()
                try:
                    await self._look()
                    if time.monotonic() - swept > _SWEEP_SECONDS:
                        swept = time.monotonic()
                        await self._sweep()
                except Exception:
                    # A disk that is full now may not be so later.
                    _log.exception("the inbox cannot be worked off")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL):
                        await more.wait()

    async def _look(self) -> None:
        for id in await self._inbox.aborted() if self._stops else ():
            if (stop := self._stops.get(id)) is not None:
                stop()
        for decision in await self._inbox.decisions() if self._stops else ():
            await self._decide(decision)
        free = self._project().settings.concurrency - len(self._workers)
        for number in await self._inbox.claim(free) if free > 0 else ():
            worker = asyncio.create_task(self._work_for(number))
            self._workers.add(worker)
            worker.add_done_callback(self._workers.discard)

    async def _decide(self, decision: Decision) -> None:
        """Let a tool call run that waits in this process, or not."""
        harness = self._conversations.find(decision.name, decision.id)
        session = None if harness is None else await harness.session()
        if session is None or decision.call_id not in {one.call_id for one in session.approvals}:
            return
        if decision.allowed:
            await session.approve(decision.call_id)
        else:
            await session.deny(decision.call_id, decision.reason)
        await self._inbox.decided(decision)

    async def _sweep(self) -> None:
        await self._conversations.sweep()
        if (retention := self._project().settings.retention) is not None:
            before = time.time() - retention
            await forget_old(self._inbox, self._store, self._conversations, before)

    async def _work_for(self, number: int) -> None:
        # What agents look up by name is their project's, wherever the app was started.
        home.set(self._project().folder)
        try:
            # What waits behind what goes on is not begun by one who is about to end.
            while not self._draining and (submission := await self._inbox.begin(number)):
                ending = await self._work(submission)
                await self._inbox.end(submission.id, ending)
        except Exception:
            _log.exception("work was left without an outcome, and is tried again")
            await asyncio.sleep(_POLL)
        finally:
            self._inbox.give_back(number)

    async def _work(self, submission: Submission) -> Ending:
        target = submission.target
        try:
            if submission.abort_asked and not submission.attempts:
                raise Aborted("the work was called off before it was begun.", reason="abort")
            served = self._project().find(target.kind, target.name)
            if isinstance(served, ServedAgent):
                result = await self._answer(served, submission)
            else:
                result = await self._call(served, submission)
            return Ending("completed", plain(result))
        except Aborted as error:
            return Ending("aborted", error=failure_of(error))
        except SmokeboxError as error:
            return Ending("failed", error=failure_of(error))
        except Exception as error:
            _log.warning("%s failed", target, exc_info=error)
            return Ending("failed", error=Failure(code="error", message=_told(error)))

    async def _answer(self, served: ServedAgent, submission: Submission) -> dict[str, Any]:
        """Have an agent answer. What a killed process had begun is gone on with: by its key
        the record knows that it is the same."""
        id, body = submission.target.id, submission.body
        async with self._conversations.use(served, id, body) as harness:
            session = await harness.session()
            session.journal.live = True
            given = await unpack(harness, body)
            operation = session.prompt(
                given.text,
                images=given.images,
                key=submission.id,
                when_busy="queue",
            )
            with self._stopped_by(submission.id, lambda: operation.abort("it was called off")):
                if submission.abort_asked:
                    # Whoever had begun it was killed: it must not be gone on with later.
                    operation.abort("it was called off")
                await operation.wait()
            reply = await operation
        return {
            "text": reply.text,
            "data": reply.data,
            "model": reply.model,
            "usage": msgspec.to_builtins(reply.usage),
            "stopped": reply.stopped,
        }

    async def _call(self, served: ServedFunction, submission: Submission) -> Any:
        if submission.abort_asked:
            raise Aborted("the work was called off.", reason="abort")
        if submission.attempts >= served.attempts:
            raise SmokeboxError(
                f"the app was stopped while {served.name} ran, which is not begun again.",
                hint=f"Set `attempts = 2` in {served.file.name} where it may be.",
                attempts=submission.attempts,
            )
        ctx = Context(
            submission, inbox=self._inbox, store=self._store, env=self._env, name=served.name
        )
        ctx.log.note("started", attempt=ctx.attempt)

        async def call() -> Any:
            try:
                return await served.function(ctx)
            except SystemExit as error:
                # It would end the app.
                raise SmokeboxError(
                    f"{served.name} called sys.exit({error.code!r:.80}).",
                    hint="Return the result, or raise an error.",
                ) from None

        task = asyncio.create_task(call())
        try:
            with self._stopped_by(submission.id, task.cancel):
                await asyncio.wait([task], timeout=served.timeout)
            if not task.done():
                raise DeadlineExceeded(
                    f"{served.name} took longer than the {served.timeout:g} seconds it may.",
                    hint=f"Set `timeout = ...` in {served.file.name}.",
                    operation=served.name,
                    timeout=served.timeout,
                )
            if task.cancelled():
                raise Aborted("the work was called off.", reason="abort")
            return task.result()
        finally:
            task.cancel()
            if not (await asyncio.wait([task], timeout=_CANCEL_SECONDS))[0]:
                _log.error("%s does not end though it was cancelled, and is left", served.name)
            await ctx.aclose()

    @contextlib.contextmanager
    def _stopped_by(self, id: str, stop: Callable[[], object]) -> Any:
        self._stops[id] = stop
        try:
            yield
        finally:
            del self._stops[id]


def plain(value: Any) -> Any:
    """What a workflow returned, as JSON has it. Raises `SmokeboxError` where it has not."""
    try:
        return msgspec.json.decode(msgspec.json.encode(value, enc_hook=_encode))
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise SmokeboxError(
            f"what was returned is not JSON: {error}.",
            hint="Return dicts, lists, strings, numbers, dataclasses or pydantic models.",
        ) from None


def _encode(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    raise TypeError(f"nobody can say what {type(value).__name__} is in JSON")


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
