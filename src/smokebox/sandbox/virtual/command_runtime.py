"""Execution of Python commands: turns of streaming commands, and file calls on other threads.

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

CHECK_SECONDS = 1.0
_DEADLOCK_CHECKS = 2


class CommandTurn(Coroutine[Any, Any, int]):
    """Streaming command that was called, and starts when bashkit runs it."""

    def __init__(self, begin: Callable[[CommandTurn], Coroutine[Any, Any, int]]) -> None:
        self._begin = begin
        self._running: Coroutine[Any, Any, int] | None = None
        # A script runs on its own thread and calls its commands there.
        self._script = threading.get_ident()
        with _lock:
            _turns.add(self)

    @property
    def blocks_another(self) -> bool:
        """True if another command of the same script was called and cannot start."""
        with _lock:
            turns = list(_turns)
        return any(one._running is None and one._script == self._script for one in turns)

    async def wait_for_io(self, work: Awaitable[T]) -> T:
        """Await input or output, but raise if another command waits for this one."""
        future = asyncio.ensure_future(work)
        checks = 0
        try:
            while not future.done():
                await asyncio.wait({future}, timeout=CHECK_SECONDS)
                checks = checks + 1 if self.blocks_another else 0
                if checks >= _DEADLOCK_CHECKS and not future.done():
                    raise OSError(errno.EDEADLK, _DEADLOCK)
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


_turns: WeakSet[CommandTurn] = WeakSet()
_lock = threading.Lock()

_DEADLOCK = (
    "it waits for another streaming command of the same pipeline, and they run one at a time. "
    "Put a file between the two"
)


def run_in_helper_thread(work: Callable[[], T]) -> T:
    """Run `work` on another thread, and return its result or raise its error.

    On bashkit's own thread each file operation starts a thread, which takes ten times as long as
    passing the call to a waiting one.
    """
    call = _ThreadCall(work)
    try:
        inbox = _idle.pop()
    except IndexError:
        inbox = SimpleQueue()
        threading.Thread(
            target=_serve_calls, args=(inbox,), daemon=True, name="smokebox-files"
        ).start()
    inbox.put(cast("_ThreadCall[object]", call))
    return call.result()


def threaded_tree(tree: Tree) -> Tree:
    """Return a view of `tree` whose calls run on another thread."""
    return cast("Tree", _ThreadedTree(tree))


class _ThreadCall(Generic[T]):
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


class _ThreadedTree:
    """Proxy of a `Tree` that makes each call on another thread."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def __getattr__(self, name: str) -> object:
        value: object = getattr(self._tree, name)
        return partial(_call, value) if callable(value) else value


def _call(method: Callable[..., object], *args: object, **options: object) -> object:
    def work() -> object:
        result = method(*args, **options)
        return list(result) if isinstance(result, Iterator) else result

    result = run_in_helper_thread(work)
    return iter(result) if isinstance(result, list) and method.__name__ == "walk" else result


def _serve_calls(inbox: SimpleQueue[_ThreadCall[object]]) -> None:
    while True:
        call = inbox.get()
        call.run()
        # Idle again before the result is released, so that the next call reuses this thread.
        _idle.append(inbox)
        call.finish()
        del call


_idle: deque[SimpleQueue[_ThreadCall[object]]] = deque()
# Threads do not survive a fork.
os.register_at_fork(after_in_child=_idle.clear)
