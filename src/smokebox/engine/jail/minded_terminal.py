"""What a minder does for the program of a terminal: nothing of it outlives the terminal.

When the program has ended, or the engine wants it to or is gone, whatever is left below the
minder is hung up, and after a moment killed.
"""

from __future__ import annotations

import select
import signal
import time

from smokebox.sandbox.keeper import EXITED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from smokebox.sandbox.keeper import Minder

# What the minder says once the program runs.
STARTED = b"S"
# How long what is hung up may take to end by itself.
HANGUP_SECONDS = 2.0

_LOOK_SECONDS = 0.02


class MindedTerminal:
    """The program that a minder has started in a terminal, and what came of it."""

    def __init__(self, minder: Minder) -> None:
        self.minder = minder
        self.told = False

    def mind(self) -> None:
        """Report the program's start and its end, and end all that is left of it."""
        minder = self.minder
        for fd in (minder.control.fileno(), minder.wake):
            minder.poll.register(fd, select.POLLIN)
        minder.say(STARTED, 0, minder.leader)
        while minder.status is None and minder.next(None) != "end":
            pass
        self.tell()
        self.hang_up()
        self.tell()

    def enter(self) -> None:
        """Called in what will be the program, once the terminal is its own."""

    def hear(self) -> bool:
        """Take what the engine says; False when it means the end, as all does."""
        return False

    def move(self) -> None:
        """Carry what there is to and fro, where that is on us."""

    def tell(self) -> None:
        """Report how the program ended, once, as soon as that is known."""
        if self.minder.status is not None and not self.told:
            self.told = True
            self.minder.say(EXITED, 0, self.minder.status)

    def hang_up(self) -> None:
        """End everything, for a bounded time."""
        minder = self.minder
        if not minder.childless:
            minder.signal_all(signal.SIGHUP, signal.SIGCONT)
        until = time.monotonic() + HANGUP_SECONDS
        while not minder.childless and (left := until - time.monotonic()) > 0:
            # Not every kernel tells of an orphan's end.
            minder.await_child(min(left, _LOOK_SECONDS))
            self.tell()
        minder.destroy()
