"""Operations: the caller's handle of a work item, and the worker's side of it."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from smokebox.agents.events import OperationEnd, TextEvent, ThinkingEvent, ToolEnd, ToolOutput
from smokebox.errors import Aborted, NotAwaited

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator

    from smokebox.agents.events import Event

T = TypeVar("T")

MAX_EVENTS = 20_000
MAX_BUFFERED = 4 * 1024 * 1024


class Operation(Generic[T]):
    """Work of a session. It runs whether or not this handle is kept.

    `await` returns its result; cancelling the task that awaits it aborts the work. Iterating
    gives its events, to any number of readers, each from the oldest that is still buffered: of
    very long work the oldest are dropped, and a reader that is far behind misses those.
    """

    def __init__(self, control: OperationControl[T]) -> None:
        self._control = control

    @property
    def id(self) -> str:
        """The id of the work in the event log."""
        return self._control.id

    @property
    def done(self) -> bool:
        """True if the work has ended."""
        return self._control.done

    def abort(self, reason: str = "") -> OperationAbort:
        """Stop the model and the tools, and end the work as aborted.

        Await the return value to wait until that is recorded. Does nothing if the work has
        ended.
        """
        self._control.abort(reason)
        return OperationAbort(self)

    async def wait(self) -> None:
        """Wait for the end without raising its error; cancelling this leaves the work running."""
        await self._control.wait()

    def __await__(self) -> Generator[object, None, T]:
        return self._result().__await__()

    async def _result(self) -> T:
        try:
            return await self._control.result()
        except asyncio.CancelledError:
            if not self.done:
                await self.abort("the task that awaited it was cancelled")
            raise

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._control.read()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            raise NotAwaited(
                f"this operation has no attribute {name!r}: it is not the result, which has to "
                "be awaited.",
                hint="Write `await session.prompt(...)`, and use what that returns.",
                attribute=name,
            )


class OperationAbort:
    """Awaitable end of an operation that is being aborted."""

    def __init__(self, operation: Operation[Any]) -> None:
        self._wait = operation.wait

    def __await__(self) -> Generator[object, None, None]:
        return self._wait().__await__()


class OperationControl(Generic[T]):
    """Worker's side of an operation: publishes its events, and sets its result."""

    def __init__(self, id: str, *, listener: Callable[[Event], object] | None = None) -> None:
        self.id = id
        self.operation: Operation[T] = Operation(self)
        self.abort_reason: str | None = None
        self._events: deque[Event] = deque()
        self._first = 0
        self._buffered = 0
        self._readers: list[asyncio.Future[None]] = []
        self._listener = listener
        self._result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None
        self._stop: Callable[[], object] | None = None

    @property
    def done(self) -> bool:
        """True if it has a result or an error."""
        return self._result.done()

    def abort(self, reason: str) -> None:
        """Stop the task that runs it."""
        # A task that was cancelled from elsewhere is one whose event loop ends: its work is not
        # aborted, but resumed when its session is opened again.
        ending = self._task is not None and self._task.cancelling()
        if self.abort_reason is None and not self._result.done() and not ending:
            self.abort_reason = reason or "abort() was called"
            if self._stop is not None:
                self._stop()

    async def wait(self) -> None:
        """Wait for the result or the error."""
        if not self._result.done():
            await asyncio.wait([self._result])

    async def result(self) -> T:
        """Return the result, or raise the error."""
        return await asyncio.shield(self._result)

    async def read(self) -> AsyncIterator[Event]:
        """Yield the events from the oldest that is buffered to the last."""
        at = self._first
        while True:
            at = max(at, self._first)
            while at < self._first + len(self._events):
                event = self._events[at - self._first]
                at += 1
                yield event
                at = max(at, self._first)
                if isinstance(event, OperationEnd):
                    return
            if self._result.done():
                return
            reader: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._readers.append(reader)
            await reader

    def emit(self, event: Event) -> None:
        """Publish an event to all readers and the listener."""
        self._events.append(event)
        self._buffered += _weight(event)
        while self._buffered > MAX_BUFFERED or len(self._events) > MAX_EVENTS:
            self._buffered -= _weight(self._events.popleft())
            self._first += 1
        if self._listener is not None:
            self._listener(event)
        if self._readers:
            self._wake()

    def listen(self, listener: Callable[[Event], object]) -> None:
        """Call `listener` with each event from now on."""
        self._listener = listener

    def run_by(self, task: asyncio.Task[None], stop: Callable[[], object]) -> None:
        """Set the task that does the work, and the function that stops it."""
        self._task, self._stop = task, stop
        if self.abort_reason is not None:
            stop()

    def succeed(self, value: T) -> None:
        """End with a result."""
        if not self._result.done():
            self._result.set_result(value)
        self._wake()

    def fail(self, error: BaseException) -> None:
        """End with an error, which does not have to be retrieved."""
        if not self._result.done():
            if isinstance(error, asyncio.CancelledError):
                error = Aborted(
                    "the event loop ended while the work was running.",
                    hint="It continues when its session is opened again.",
                    reason="closed",
                )
            self._result.set_exception(error)
            self._result.exception()
        self._wake()

    def _wake(self) -> None:
        readers, self._readers = self._readers, []
        for reader in readers:
            if not reader.done():
                reader.set_result(None)


def _weight(event: Event) -> int:
    if isinstance(event, (TextEvent, ThinkingEvent, ToolEnd)):
        return 100 + len(event.text)
    return 100 + (len(event.chunk.data) if isinstance(event, ToolOutput) else 0)
