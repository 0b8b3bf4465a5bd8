"""A sign that work was called off, which a thread can look at as well as a coroutine."""

from __future__ import annotations

import threading
import weakref

from smokebox.errors import Aborted


class AbortSignal:
    """Set once, for good. A coroutine is cancelled besides; a thread has to look here."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._children: weakref.WeakSet[AbortSignal] = weakref.WeakSet()
        self._reason = ""

    def __bool__(self) -> bool:
        return self._event.is_set()

    @property
    def reason(self) -> str:
        """Why, as far as somebody said."""
        return self._reason

    def set(self, reason: str = "") -> None:
        """Call the work off, and what belongs to it. A second time changes nothing."""
        with self._lock:
            if self._event.is_set():
                return
            self._reason = reason
            self._event.set()
            children = list(self._children)
        for child in children:
            child.set(reason)

    def child(self) -> AbortSignal:
        """A sign of its own that is set with this one too."""
        child = AbortSignal()
        with self._lock:
            self._children.add(child)
            already = self._event.is_set()
        if already:
            child.set(self._reason)
        return child

    def wait(self, timeout: float | None = None) -> bool:
        """In a thread: sleep that ends early when the work is called off, and says whether."""
        return self._event.wait(timeout)

    def check(self) -> None:
        """Raise `Aborted` when the work was called off."""
        if self:
            raise Aborted("the work was called off.", hint=self._reason, reason=self._reason)
