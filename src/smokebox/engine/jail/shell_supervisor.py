"""Supervision of the shell of a session, which outlives its commands.

To stop a command without the shell, the supervisor kills every process started since the last
`MARK`, and sends the shell `INTERRUPT_SIGNAL`, for which it has a trap.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time

from smokebox.runtime.supervisor import CHILDLESS, EXITED, KILL_SECONDS, receive_fds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from smokebox.runtime.supervisor import Supervisor

# Messages to the supervisor: current processes belong to earlier commands; stop the command, with
# a grace period or at once; kill the shell; drain the pipes that come with the message.
MARK, INTERRUPT, INTERRUPT_NOW, END, DRAIN = b"M", b"I", b"N", b"E", b"D"
# Response to MARK.
MARKED = b"M"
# SIGRTMIN + 5 of glibc, as a number, which is the same for every C library.
INTERRUPT_SIGNAL = 39


class SupervisedShell:
    """The shell of a supervisor, and the background processes of its commands."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self.earlier: set[int] = set()
        self.interrupt_grace: float | None = None
        # Not every kernel lists the children of a process, or reparents orphans to a subreaper.
        listing = f"/proc/self/task/{os.getpid()}/children"
        self.lists_children = supervisor.subreaper and os.path.exists(listing)

    def supervise(self) -> None:
        """Report the shell's exit, and stay while any process of it is left."""
        supervisor, reported = self.supervisor, False
        for fd in (supervisor.control.fileno(), supervisor.wakeup):
            supervisor.poll.register(fd, select.POLLIN)
        while not supervisor.childless or not reported:
            if supervisor.status is not None and not reported:
                flags = CHILDLESS if supervisor.childless else 0
                supervisor.send(EXITED, flags, supervisor.status)
                reported = True
            elif supervisor.next_event(None) == "stop" or not self.interrupt_if_requested():
                supervisor.kill_all()
                return

    def handle_message(self) -> bool:
        """Handle a message of the engine; False if everything must end."""
        try:
            word, fds = receive_fds(self.supervisor.control, 1, 2)
        except ConnectionError:
            # The engine closed its end without reading our last message.
            return False
        if word == MARK:
            self.earlier = self.all_processes()
            self.supervisor.send(MARKED, 0, 0)
        elif word in (INTERRUPT, INTERRUPT_NOW):
            self.interrupt_grace = self.supervisor.grace if word == INTERRUPT else 0.0
        elif word == END:
            _signal(self.supervisor.leader, signal.SIGKILL)
        elif word == DRAIN:
            for fd in fds:
                self.supervisor.poll.register(fd, select.POLLIN)
            self.supervisor.released.update(fds)
        else:
            return False
        return True

    def interrupt_if_requested(self) -> bool:
        """Stop the command if that was requested; False if everything must end."""
        grace, self.interrupt_grace = self.interrupt_grace, None
        if grace is None or self.supervisor.status is not None:
            return True
        leader = self.supervisor.leader
        # A stopped shell cannot start the next command while this one is being killed.
        _signal(leader, signal.SIGSTOP)
        alive = not grace or self.terminate(time.monotonic() + grace)
        self.kill()
        _signal(leader, INTERRUPT_SIGNAL)
        _signal(leader, signal.SIGCONT)
        return alive and self.kill_until_shell_ends()

    def kill_until_shell_ends(self) -> bool:
        """Kill what the command still starts; False if everything must end.

        A shell that was about to fork does so first, and runs its trap when that child has ended.
        """
        while self.supervisor.status is None:
            if self.supervisor.next_event(time.monotonic() + 0.01) == "stop":
                return False
            self.kill()
        self.kill()
        return True

    def terminate(self, until: float) -> bool:
        """Send SIGTERM to the command, and wait for it; False if everything must end."""
        for pid in self.command_processes():
            _signal(pid, signal.SIGTERM)
            _signal(pid, signal.SIGCONT)
        while self.command_processes() and time.monotonic() < until:
            if self.supervisor.next_event(min(until, time.monotonic() + 0.01)) == "stop":
                return False
        return True

    def kill(self) -> None:
        """Kill the command's processes; none can escape by forking."""
        until = time.monotonic() + KILL_SECONDS
        stopped: set[int] = set()
        while (found := self.command_processes()) and time.monotonic() < until:
            if found - stopped:
                for pid in found - stopped:
                    _signal(pid, signal.SIGSTOP)
                stopped |= found
            else:
                for pid in found:
                    _signal(pid, signal.SIGKILL)
                time.sleep(0.002)

    def command_processes(self) -> set[int]:
        """Return the live processes that the current command has started."""
        return set(self.supervisor.tree(os.getpid())) - self.earlier - {self.supervisor.leader}

    def all_processes(self) -> set[int]:
        """Return all processes of the supervisor."""
        if not self.lists_children:
            return set(self.supervisor.tree(os.getpid()))
        found: list[int] = _children(os.getpid())
        for pid in found:
            found += _children(pid)
        return set(found)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", "rb", 0) as file:
                found += map(int, file.read().split())
    return found
