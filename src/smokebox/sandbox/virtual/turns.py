"""Who may run next, among the streaming commands of one script.

The engine calls each as its place in the script comes, but runs only one at a time to its
end. Two in one pipeline would wait for each other for ever: here the first of them notices.
"""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from types import TracebackType

T = TypeVar("T")

PATIENCE = 1.0
_LOOKS = 2


class Turn(Coroutine[Any, Any, int]):
    """A command that was called, and begins when the engine runs it; if it never does, no harm."""

    def __init__(self, begin: Callable[[Turn], Coroutine[Any, Any, int]]) -> None:
        self._begin = begin
        self._running: Coroutine[Any, Any, int] | None = None
        # A script runs on a thread of its own, and calls its commands there.
        self._script = threading.get_ident()
        with _lock:
            _called.add(self)

    @property
    def is_waited_for(self) -> bool:
        """Whether another command of the same script was called and cannot begin."""
        with _lock:
            called = list(_called)
        return any(one._running is None and one._script == self._script for one in called)

    async def patiently(self, work: Awaitable[T]) -> T:
        """Wait for input or output, but not for a command that waits for this one."""
        future = asyncio.ensure_future(work)
        looks = 0
        try:
            while not future.done():
                await asyncio.wait({future}, timeout=PATIENCE)
                looks = looks + 1 if self.is_waited_for else 0
                if looks >= _LOOKS and not future.done():
                    raise OSError(errno.EDEADLK, _STUCK)
            return future.result()
        finally:
            future.cancel()

    def send(self, value: object) -> Any:
        """Go on to the next wait."""
        if self._running is None:
            self._running = self._begin(self)
        return self._running.send(value)

    def throw(
        self,
        kind: type[BaseException] | BaseException,
        value: BaseException | object = None,
        trace: TracebackType | None = None,
    ) -> Any:
        """Go on with an exception."""
        if self._running is None:
            raise kind
        return self._running.throw(kind)

    def close(self) -> None:
        """End it where it stands."""
        if self._running is not None:
            self._running.close()

    def __await__(self) -> Any:
        return self


_called: WeakSet[Turn] = WeakSet()
_lock = threading.Lock()

_STUCK = (
    "it waits for another streaming command of the same pipeline, and they run one at a time. "
    "Put a file between the two"
)
