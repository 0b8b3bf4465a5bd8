"""When Ctrl-C may come: in the user's code, and never in the middle of a frame."""

from __future__ import annotations

import signal
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class InterruptGuard:
    """SIGINT as `KeyboardInterrupt`, while code runs, and not while the kernel does.

    `with calm:` holds an interrupt back until the end of the block. Only the main thread is
    ever interrupted, so blocks of others cost nothing.
    """

    def __init__(self) -> None:
        self.running = False
        self.pending = False
        self._depth = 0
        self._main = threading.get_ident()
        self.begin()
        self.end()

    def __enter__(self) -> None:
        if threading.get_ident() == self._main:
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() == self._main:
            self._depth -= 1
            if self.pending and not self._depth and self.running:
                self.pending = False
                raise KeyboardInterrupt

    def begin(self) -> None:
        """From here on interrupts are for the code, whatever the last one did about them."""
        signal.signal(signal.SIGINT, self._interrupt)
        self.pending = False
        self.running = True

    def end(self) -> None:
        """From here on they are for nobody."""
        self.running = False

    def _interrupt(self, *_: Any) -> None:
        if not self.running:
            return
        if self._depth:
            self.pending = True
        else:
            raise KeyboardInterrupt
