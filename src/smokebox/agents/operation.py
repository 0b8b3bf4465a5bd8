"""A piece of work as its caller holds it: to wait for, to watch, to call off."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

from smokebox.agents.events import OperationEnd, TextEvent, ThinkingEvent, ToolEnd, ToolOutput
from smokebox.errors import Aborted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator

    from smokebox.agents.events import Event

T = TypeVar("T")

MAX_EVENTS = 20_000
MAX_HELD = 4 * 1024 * 1024


class Operation(Generic[T]):
    """Work that goes on, whether or not somebody holds on to this.

    `await` gives its result; cancelling whoever awaits calls it off. Iterating gives its
    events, to as many as like, each from the first that is still held: of very long work the
    oldest are let go. A reader that stays far behind misses those.
    """

    def __init__(self, id: str, *, listener: Callable[[Event], object] | None = None) -> None:
        self.id = id
        self._events: deque[Event] = deque()
        self._first = 0
        self._held = 0
        self._readers: list[asyncio.Future[None]] = []
        self._listener = listener
        self._result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None
        self._stop: Callable[[], object] | None = None
        self.abort_reason: str | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._result.done()

    def abort(self, reason: str = "") -> Ended:
        """Call it off: stops the model and the tools, and ends it as aborted.

        Awaiting what this gives waits until that is recorded. Nothing happens where it has
        ended already.
        """
        # A task that is cancelled without us is one whose event loop ends: what it does is
        # not called off, but goes on when its session is opened again.
        ending = self._task is not None and self._task.cancelling()
        if self.abort_reason is None and not self._result.done() and not ending:
            self.abort_reason = reason or "abort() was called"
            if self._stop is not None:
                self._stop()
        return Ended(self)

    async def wait(self) -> None:
        """Wait for its end, whatever it is; cancelling this does nothing to it."""
        if not self._result.done():
            await asyncio.wait([self._result])

    def __await__(self) -> Generator[object, None, T]:
        return self._get().__await__()

    async def _get(self) -> T:
        try:
            return await asyncio.shield(self._result)
        except asyncio.CancelledError:
            if not self._result.done():
                await self.abort("whoever waited for it was cancelled")
            raise

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._read()

    async def _read(self) -> AsyncIterator[Event]:
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
        """Have everybody who watches see that event."""
        self._events.append(event)
        self._held += _weight(event)
        while self._held > MAX_HELD or len(self._events) > MAX_EVENTS:
            self._held -= _weight(self._events.popleft())
            self._first += 1
        if self._listener is not None:
            self._listener(event)
        if self._readers:
            self._wake()

    def listen(self, listener: Callable[[Event], object]) -> None:
        """Have somebody told of each event from here on."""
        self._listener = listener

    def run_by(self, task: asyncio.Task[None], stop: Callable[[], object]) -> None:
        """Say what does the work, and how that is stopped."""
        self._task, self._stop = task, stop
        if self.abort_reason is not None:
            stop()

    def succeed(self, value: T) -> None:
        """End it with a result."""
        if not self._result.done():
            self._result.set_result(value)
        self._wake()

    def fail(self, error: BaseException) -> None:
        """End it with an error, which nobody has to look at."""
        if not self._result.done():
            if isinstance(error, asyncio.CancelledError):
                error = Aborted(
                    "the event loop ended while the work went on.",
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


class Ended:
    """The end of an operation, to be awaited by who wants to."""

    def __init__(self, operation: Operation[T]) -> None:
        self._wait = operation.wait

    def __await__(self) -> Generator[object, None, None]:
        return self._wait().__await__()


def _weight(event: Event) -> int:
    if isinstance(event, (TextEvent, ThinkingEvent, ToolEnd)):
        return 100 + len(event.text)
    return 100 + (len(event.chunk.data) if isinstance(event, ToolOutput) else 0)
