"""Execution of Python commands: turn-taking of streaming commands, and file calls on another
thread.

bashkit calls each streaming command of a script in order, but runs only one at a time to its end.
Two in one pipeline would deadlock; the first one detects that.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast
from weakref import WeakSet

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

    from smokebox.sandbox.filesystems.tree import Tree


T = TypeVar("T")

PATIENCE = 1.0
_LOOKS = 2


class CommandTurn(Coroutine[Any, Any, int]):
    """Streaming command that was called, and starts when bashkit runs it."""

    def __init__(self, begin: Callable[[CommandTurn], Coroutine[Any, Any, int]]) -> None:
        self._begin = begin
        self._running: Coroutine[Any, Any, int] | None = None
        # A script runs on its own thread and calls its commands there.
        self._script = threading.get_ident()
        with _lock:
            _called.add(self)

    @property
    def is_waited_for(self) -> bool:
        """Return whether another command of the same script was called and cannot start."""
        with _lock:
            called = list(_called)
        return any(one._running is None and one._script == self._script for one in called)

    async def patiently(self, work: Awaitable[T]) -> T:
        """Await input or output, but raise if another command waits for this one."""
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
        """Resume until the next await."""
        if self._running is None:
            self._running = self._begin(self)
        return self._running.send(value)

    def throw(
        self,
        kind: type[BaseException] | BaseException,
        value: BaseException | object = None,
        trace: TracebackType | None = None,
    ) -> Any:
        """Resume with an exception."""
        if self._running is None:
            raise kind
        return self._running.throw(kind)

    def close(self) -> None:
        """Close the coroutine."""
        if self._running is not None:
            self._running.close()

    def __await__(self) -> Any:
        return self


_called: WeakSet[CommandTurn] = WeakSet()
_lock = threading.Lock()

_STUCK = (
    "it waits for another streaming command of the same pipeline, and they run one at a time. "
    "Put a file between the two"
)


def elsewhere(work: Callable[[], T]) -> T:
    """Run `work` on another thread, and return its result or raise its error.

    On bashkit's own thread each file operation starts a thread, which takes ten times as long as
    passing the call to a waiting one.
    """
    errand = _Errand(work)
    try:
        helper = _idle.pop()
    except IndexError:
        helper = SimpleQueue()
        threading.Thread(target=_help, args=(helper,), daemon=True, name="smokebox-files").start()
    helper.put(cast("_Errand[object]", errand))
    return errand.result()


def files_elsewhere(tree: Tree) -> Tree:
    """Return a view of `tree` whose calls run on another thread."""
    return cast("Tree", _Files(tree))


class _Errand(Generic[T]):
    """Function passed to another thread, with its result."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._done = threading.Lock()
        self._done.acquire()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error

    def finish(self) -> None:
        self._done.release()

    def result(self) -> T:
        self._done.acquire()
        if self._error is not None:
            raise self._error
        return self._result


class _Files:
    """Proxy of a `Tree` that makes each call on another thread."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def __getattr__(self, name: str) -> object:
        value: object = getattr(self._tree, name)
        return partial(_call, value) if callable(value) else value


def _call(method: Callable[..., object], *args: object, **options: object) -> object:
    def work() -> object:
        answer = method(*args, **options)
        return list(answer) if isinstance(answer, Iterator) else answer

    answer = elsewhere(work)
    return iter(answer) if isinstance(answer, list) and method.__name__ == "walk" else answer


def _help(inbox: SimpleQueue[_Errand[object]]) -> None:
    while True:
        errand = inbox.get()
        errand.run()
        # Idle again before the result is released, so that the next call reuses this thread.
        _idle.append(inbox)
        errand.finish()
        del errand


_idle: deque[SimpleQueue[_Errand[object]]] = deque()
# Threads do not survive a fork.
os.register_at_fork(after_in_child=_idle.clear)
