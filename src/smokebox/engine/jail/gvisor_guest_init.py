"""Guest init inside gVisor, whose kernel lacks pidfds and subreapers and reparents the orphans of
a command to the first process.

The processes of a supervisor are therefore tracked by a cgroup inside that kernel, with the
supervisor itself in it. Guest init hides these cgroups before anything else runs. It is run by a
copied interpreter with `python -I -S`, and imports little: each module costs time at every start.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import socket
import time

from smokebox.engine.jail import linux
from smokebox.engine.jail.guest_init import (
    GuestInit,
    GuestSupervisor,
    drop_privileges,
    set_hostname,
    set_rlimits,
)
from smokebox.runtime.supervisor import IDLE_SECONDS, receive_fds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from smokebox.runtime.supervisor import Supervisor

# Messages to `gvisor_setup`.
READY, ENTERED = b"ready", b"entered"

_CGROUPS = "/sys/fs/cgroup"
# The controller that every version of gVisor has. It limits nothing here.
_CONTROLLER = "memory"
# First and longest interval of checks for the exit of a command's last orphan.
_FIRST_CHECK, _LONGEST_CHECK = 0.02, 1.0
# Rounds of killing processes without a supervisor, while there are new ones each time.
_KILL_ROUNDS = 100
# MAX_ARG_STRLEN of Linux.
_LONGEST_ARGUMENT = 1 << 17
_MESSAGE_SIZE = 1 << 16


class SupervisorCgroups:
    """The processes of each supervisor, by its pid."""

    def __init__(self) -> None:
        self.directory = os.open(
            f"{_CGROUPS}/{_CONTROLLER}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        )

    def hide(self) -> None:
        """Unmount the cgroups; only `directory` still leads to them."""
        for name in os.listdir(_CGROUPS):
            with contextlib.suppress(OSError):
                linux.umount(f"{_CGROUPS}/{name}", linux.MNT_DETACH)
        linux.umount(_CGROUPS, linux.MNT_DETACH)

    def join(self) -> None:
        """Move this process into a new cgroup, which those that it starts inherit."""
        pid = os.getpid()
        os.mkdir(_name(pid), dir_fd=self.directory)
        with open(f"{_name(pid)}/cgroup.procs", "wb", 0, opener=self.open) as file:
            file.write(b"%d" % pid)

    def members(self, pid: int) -> set[int]:
        """Return the live processes in the cgroup of a supervisor, without itself."""
        try:
            with open(f"{_name(pid)}/cgroup.procs", "rb", 0, opener=self.open) as file:
                return {int(member) for member in file.read().split()} - {pid}
        except OSError:
            return set()

    def remove(self, pid: int) -> None:
        """Kill what is left in the cgroup of a supervisor that has exited, and remove it."""
        while left := self.members(pid):
            for member in left:
                with contextlib.suppress(OSError):
                    os.kill(member, signal.SIGKILL)
            time.sleep(0.002)
        with contextlib.suppress(OSError):
            os.rmdir(_name(pid), dir_fd=self.directory)

    def escaped(self, supervisors: Collection[int]) -> set[int]:
        """Return processes in no supervisor's cgroup.

        Root inside can reach the cgroups through a descriptor of guest init, and leave them.
        """
        found = {int(name) for name in os.listdir("/proc") if name.isdigit()} - {1, *supervisors}
        for supervisor in supervisors if found else ():
            found -= self.members(supervisor)
        return found

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags, dir_fd=self.directory)


class GvisorGuestInit(GuestInit):
    """Pid 1 inside gVisor. Connections come through a socket from `gvisor_setup`."""

    def __init__(self, channel: socket.socket, cgroups: SupervisorCgroups) -> None:
        super().__init__(channel)
        self.cgroups = cgroups
        self.permanent = -1

    def fork(self) -> None:
        """Fork a supervisor. One of them never times out, because forks are slow in gVisor."""
        is_permanent = self.permanent not in self.supervisors
        self.idle_seconds = None if is_permanent else IDLE_SECONDS
        before = set(self.supervisors)
        super().fork()
        if is_permanent:
            self.permanent = next(iter(self.supervisors - before), -1)

    def isolate(self) -> None:
        """Enter a new cgroup with default signal handlers; pid 1 needs neither."""
        if os.getpid() != 1:
            handle_all(signal.SIG_DFL)
            self.cgroups.join()

    def watch_parent(self) -> int | None:
        # When pid 1 exits, the kernel kills every other process.
        return None

    def supervisor(self, control: socket.socket, wakeup: int) -> Supervisor:
        return GvisorSupervisor(control, None, wakeup, self.report, self.cgroups)

    def accept(self) -> socket.socket | None:
        try:
            word, fds = receive_fds(self.requests, 1, 1)
        except BlockingIOError:
            return None
        if not word:
            # The process outside is gone, and the sandbox is about to end.
            os._exit(0)
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=fds[0]) if fds else None

    def clean_up(self, supervisor: int, status: int) -> None:
        self.cgroups.remove(supervisor)
        self.kill_orphans()
        if not self.idle:
            self.fork()

    def kill_orphans(self) -> None:
        killed: set[int] = set()
        for _ in range(_KILL_ROUNDS):
            escaped = self.cgroups.escaped(self.supervisors) - killed
            if not escaped:
                return
            for pid in escaped:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            killed |= escaped


class GvisorSupervisor(GuestSupervisor):
    """A supervisor that polls for the exit of orphans, of which the kernel does not notify it."""

    subreaper = False
    killed_tree = False

    def __init__(
        self,
        control: socket.socket,
        owner: int | None,
        wakeup: int,
        report: Callable[[bytes], None],
        cgroups: SupervisorCgroups,
    ) -> None:
        super().__init__(control, owner, wakeup, report)
        self.cgroups = cgroups
        self.check_interval = _FIRST_CHECK

    def tree(self, root: int, without: Collection[int] = ()) -> dict[int, int]:
        found: dict[int, int] = {}
        for pid in self.cgroups.members(root) - set(without):
            with contextlib.suppress(OSError):
                found[pid] = os.getpgid(pid)
        return found

    def run(self) -> bool:
        # After a kill it exits, so that guest init looks for processes that left its cgroup.
        return super().run() and not self.killed_tree

    def wait_for_leader(self) -> int:
        flags = super().wait_for_leader()
        self.killed_tree = flags != 0
        return flags

    def spawn(self, argv: list[bytes], env: list[bytes], fds: list[int]) -> int:
        """Start a program, with the errno of Linux for an argument that is too long."""
        try:
            return super().spawn(argv, env, fds)
        except OSError as error:
            longest = max(map(len, [*argv[1:], *env]), default=0)
            if error.errno == errno.ENAMETOOLONG and longest >= _LONGEST_ARGUMENT:
                raise OSError(errno.E2BIG, os.strerror(errno.E2BIG)) from error
            raise

    def reap(self) -> None:
        super().reap()
        self.childless = not self.cgroups.members(os.getpid())

    def next_event(self, until: float | None) -> str:
        """Wait for an event; once the leader has exited, also poll for the exit of orphans."""
        if self.status is None:
            return super().next_event(until)
        check_at = time.monotonic() + self.check_interval
        self.check_interval = min(2 * self.check_interval, _LONGEST_CHECK)
        event = super().next_event(check_at if until is None else min(check_at, until))
        if event == "timeout" and (until is None or time.monotonic() < until):
            self.reap()
            return "child"
        return event


def main() -> None:
    """Report that guest init runs, wait for the host name and limits, and serve."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=os.dup(0))
    linux.set_process_name("smokebox-init")
    cgroups = SupervisorCgroups()
    channel.send(READY)
    message = channel.recv(_MESSAGE_SIZE)
    if not message:
        return
    hostname, _, limits = message.decode().partition("\0")
    set_hostname(hostname)
    cgroups.hide()
    pairs = (limit.split("=") for limit in limits.split(",") if limit)
    set_rlimits({int(kind): int(value) for kind, value in pairs})
    # Linux does not deliver signals without a handler to pid 1; gVisor does.
    handle_all(signal.SIG_IGN)
    drop_privileges()
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    gc.freeze()
    channel.send(ENTERED)
    GvisorGuestInit(channel, cgroups).run()


def handle_all(handler: signal.Handlers) -> None:
    """Set the handler of every signal except SIGCHLD."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(number, handler)


def _name(pid: int) -> str:
    return f"smokebox-{pid}"
