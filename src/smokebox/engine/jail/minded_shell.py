"""What a minder does for the shell of a session, which outlives its commands.

A command that must end is not the shell: all that came since the last `MARK` is killed,
and the shell is sent `INTERRUPTION`, for which it has a trap.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time

from smokebox.sandbox.keeper import (
    ALONE,
    EXITED,
    KILL_SECONDS,
    receive_fds,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from smokebox.sandbox.keeper import Minder

# What the minder is told: what runs belongs to earlier commands; end the command, with a
# grace or at once; kill the shell itself; read these pipes, which nobody wants any more.
MARK, INTERRUPT, INTERRUPT_NOW, END, DRAIN = b"M", b"I", b"N", b"E", b"D"
# What it answers to the first.
MARKED = b"M"
# SIGRTMIN + 5 of glibc, by its number, which is the same for every C library.
INTERRUPTION = 39


class MindedShell:
    """The shell that a minder has started, and what it left in the background."""

    def __init__(self, minder: Minder) -> None:
        self.minder = minder
        self.earlier: set[int] = set()
        self.due: float | None = None
        # Not every kernel lists the children of a process, or gives us its orphans.
        listing = f"/proc/self/task/{os.getpid()}/children"
        self.listed = minder.subreaper and os.path.exists(listing)

    def mind(self) -> None:
        """Report the shell's end, and stay while anything of it is left or until told."""
        minder, reported = self.minder, False
        for fd in (minder.control.fileno(), minder.wake):
            minder.poll.register(fd, select.POLLIN)
        while not minder.childless or not reported:
            if minder.status is not None and not reported:
                minder.say(EXITED, ALONE if minder.childless else 0, minder.status)
                reported = True
            elif minder.next(None) == "end" or not self.interrupt_if_due():
                minder.destroy()
                return

    def hear(self) -> bool:
        """Take what the engine says; False when everything must end."""
        try:
            word, fds = receive_fds(self.minder.control, 1, 2)
        except ConnectionError:
            # It has closed its end without having read our last message.
            return False
        if word == MARK:
            self.earlier = self.below()
            self.minder.say(MARKED, 0, 0)
        elif word in (INTERRUPT, INTERRUPT_NOW):
            self.due = self.minder.grace if word == INTERRUPT else 0.0
        elif word == END:
            self.signal(self.minder.leader, signal.SIGKILL)
        elif word == DRAIN:
            for fd in fds:
                self.minder.poll.register(fd, select.POLLIN)
            self.minder.leftovers.update(fds)
        else:
            return False
        return True

    def interrupt_if_due(self) -> bool:
        """End the command, if that was asked for; False when everything must end."""
        grace, self.due = self.due, None
        if grace is None or self.minder.status is not None:
            return True
        leader = self.minder.leader
        # Stopped, it cannot go on to the next command while this one is brought down.
        self.signal(leader, signal.SIGSTOP)
        alive = not grace or self.terminate(time.monotonic() + grace)
        self.kill()
        self.signal(leader, INTERRUPTION)
        self.signal(leader, signal.SIGCONT)
        return alive

    def terminate(self, until: float) -> bool:
        """Ask what the command started to end, and wait for it; False if told to end all."""
        self.signal_all(self.fresh(), signal.SIGTERM, signal.SIGCONT)
        while self.fresh() and time.monotonic() < until:
            event = self.minder.next(min(until, time.monotonic() + 0.01))
            if event == "end":
                return False
        return True

    def kill(self) -> None:
        """Kill what the command started, which cannot fork its way out meanwhile."""
        until = time.monotonic() + KILL_SECONDS
        stopped: set[int] = set()
        while (fresh := self.fresh()) and time.monotonic() < until:
            if fresh - stopped:
                self.signal_all(fresh - stopped, signal.SIGSTOP)
                stopped |= fresh
            else:
                self.signal_all(fresh, signal.SIGKILL)
                time.sleep(0.002)

    def fresh(self) -> set[int]:
        """What the command has started, and still lives."""
        return set(self.minder.below(os.getpid())) - self.earlier - {self.minder.leader}

    def below(self) -> set[int]:
        """All that is below the minder."""
        if not self.listed:
            return set(self.minder.below(os.getpid()))
        found: list[int] = _children(os.getpid())
        for pid in found:
            found += _children(pid)
        return set(found)

    def signal_all(self, pids: set[int], *numbers: int) -> None:
        for number in numbers:
            for pid in pids:
                self.signal(pid, number)

    @staticmethod
    def signal(pid: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", "rb", 0) as file:
                found += map(int, file.read().split())
    return found
