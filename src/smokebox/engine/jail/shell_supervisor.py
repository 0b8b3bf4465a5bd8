"""What a supervisor does for the shell of a session, which outlives its commands.

A command that must end is not the shell: all that came since the last `MARK` is killed,
and the shell is sent `INTERRUPTION`, for which it has a trap.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time

from smokebox.runtime.supervisor import (
    ALONE,
    EXITED,
    KILL_SECONDS,
    receive_fds,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from smokebox.runtime.supervisor import Supervisor

# What the supervisor is told: what runs belongs to earlier commands; end the command, with a
# grace or at once; kill the shell itself; read these pipes, which nobody wants any more.
MARK, INTERRUPT, INTERRUPT_NOW, END, DRAIN = b"M", b"I", b"N", b"E", b"D"
# What it answers to the first.
MARKED = b"M"
# SIGRTMIN + 5 of glibc, by its number, which is the same for every C library.
INTERRUPTION = 39


class SupervisedShell:
    """The shell that a supervisor has started, and what it left in the background."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.earlier: set[int] = set()
        self.due: float | None = None
        # Not every kernel lists the children of a process, or gives us its orphans.
        listing = f"/proc/self/task/{os.getpid()}/children"
        self.listed = supervisor.subreaper and os.path.exists(listing)

    def supervise(self) -> None:
        """Report the shell's end, and stay while anything of it is left or until told."""
        supervisor, reported = self.supervisor, False
        for fd in (supervisor.control.fileno(), supervisor.wake):
            supervisor.poll.register(fd, select.POLLIN)
        while not supervisor.childless or not reported:
            if supervisor.status is not None and not reported:
                supervisor.say(EXITED, ALONE if supervisor.childless else 0, supervisor.status)
                reported = True
            elif supervisor.next(None) == "end" or not self.interrupt_if_due():
                supervisor.destroy()
                return

    def hear(self) -> bool:
        """Take what the engine says; False when everything must end."""
        try:
            word, fds = receive_fds(self.supervisor.control, 1, 2)
        except ConnectionError:
            # It has closed its end without having read our last message.
            return False
        if word == MARK:
            self.earlier = self.below()
            self.supervisor.say(MARKED, 0, 0)
        elif word in (INTERRUPT, INTERRUPT_NOW):
            self.due = self.supervisor.grace if word == INTERRUPT else 0.0
        elif word == END:
            self.signal(self.supervisor.leader, signal.SIGKILL)
        elif word == DRAIN:
            for fd in fds:
                self.supervisor.poll.register(fd, select.POLLIN)
            self.supervisor.leftovers.update(fds)
        else:
            return False
        return True

    def interrupt_if_due(self) -> bool:
        """End the command, if that was asked for; False when everything must end."""
        grace, self.due = self.due, None
        if grace is None or self.supervisor.status is not None:
            return True
        leader = self.supervisor.leader
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
            event = self.supervisor.next(min(until, time.monotonic() + 0.01))
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
        return set(self.supervisor.below(os.getpid())) - self.earlier - {self.supervisor.leader}

    def below(self) -> set[int]:
        """All that is below the supervisor."""
        if not self.listed:
            return set(self.supervisor.below(os.getpid()))
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
