"""Calls on files from inside the engine, made on a thread outside it.

On the engine's own thread its filesystem starts a thread for every operation, which takes
ten times as long as handing the call to one that waits.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.sandbox.filesystems.tree import Tree

T = TypeVar("T")


def elsewhere(work: Callable[[], T]) -> T:
    """What `work` gives or raises, on another thread."""
    errand = _Errand(work)
    try:
        helper = _idle.pop()
    except IndexError:
        helper = SimpleQueue()
        threading.Thread(target=_help, args=(helper,), daemon=True, name="smokebox-files").start()
    helper.put(cast("_Errand[object]", errand))
    return errand.result()


def files_elsewhere(tree: Tree) -> Tree:
    """The same files, with every call made on another thread."""
    return cast("Tree", _Files(tree))


class _Errand(Generic[T]):
    """A function on its way to another thread and back."""

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
    """Stands for a `Tree`, and goes elsewhere for each of its answers."""

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
        # Free again before the answer is out, so that the next call finds it.
        _idle.append(inbox)
        errand.finish()
        del errand


_idle: deque[SimpleQueue[_Errand[object]]] = deque()
# Threads do not survive a fork.
os.register_at_fork(after_in_child=_idle.clear)
