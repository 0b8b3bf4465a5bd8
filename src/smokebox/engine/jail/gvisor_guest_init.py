"""The agent where the kernel is gVisor's, which has no pidfds, no subreapers, and gives the
orphans of a command to the first process.

So what a supervisor has is a cgroup inside of that kernel, with the supervisor itself in it. The
agent hides these before anything else runs. It is run by an interpreter that comes along,
in `python -I -S`, and imports little: each module costs time at every start.
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
from smokebox.engine.jail.guest_init import GuestInit, GuestSupervisor, hold_to, lock_up, take_name
from smokebox.runtime.supervisor import IDLE_SECONDS, receive_fds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from smokebox.runtime.supervisor import Supervisor

READY, ENTERED = b"ready", b"entered"

_CGROUPS = "/sys/fs/cgroup"
# The one that every version of gVisor has. Nothing is limited by it.
_HIERARCHY = "memory"
# How soon it is looked whether the last orphan of a command has ended, and how rarely.
_FIRST_LOOK, _RAREST_LOOK = 0.02, 1.0
# How often those who fled are looked for again, while there are others each time.
_SWEEPS = 100
# Linux's MAX_ARG_STRLEN.
_LONGEST_WORD = 1 << 17
_MESSAGE_SIZE = 1 << 16


class SupervisorCgroups:
    """The processes of each supervisor, by its pid."""

    def __init__(self) -> None:
        self.directory = os.open(
            f"{_CGROUPS}/{_HIERARCHY}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        )

    def hide(self) -> None:
        """Take the cgroups out of everybody's sight but ours."""
        for name in os.listdir(_CGROUPS):
            with contextlib.suppress(OSError):
                linux.umount(f"{_CGROUPS}/{name}", linux.MNT_DETACH)
        linux.umount(_CGROUPS, linux.MNT_DETACH)

    def join(self) -> None:
        """Give this process a group of its own; what it starts will be there too."""
        pid = os.getpid()
        os.mkdir(_name(pid), dir_fd=self.directory)
        with open(f"{_name(pid)}/cgroup.procs", "wb", 0, opener=self.open) as file:
            file.write(b"%d" % pid)

    def members(self, pid: int) -> set[int]:
        """What is alive in the group of a process, besides itself."""
        try:
            with open(f"{_name(pid)}/cgroup.procs", "rb", 0, opener=self.open) as file:
                return {int(member) for member in file.read().split()} - {pid}
        except OSError:
            return set()

    def clear(self, pid: int) -> None:
        """Kill what is left in the group of a process that has ended, and remove it."""
        while left := self.members(pid):
            for member in left:
                with contextlib.suppress(OSError):
                    os.kill(member, signal.SIGKILL)
            time.sleep(0.002)
        with contextlib.suppress(OSError):
            os.rmdir(_name(pid), dir_fd=self.directory)

    def strays(self, supervisors: Collection[int]) -> set[int]:
        """Who has left the group of a supervisor: root inside can reach the cgroups through us."""
        found = {int(name) for name in os.listdir("/proc") if name.isdigit()} - {1, *supervisors}
        for supervisor in supervisors if found else ():
            found -= self.members(supervisor)
        return found

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags, dir_fd=self.directory)


class GvisorGuestInit(GuestInit):
    """Pid 1 inside. Connections come through a socket from the porter."""

    def __init__(self, channel: socket.socket, groups: SupervisorCgroups) -> None:
        super().__init__(channel)
        self.groups = groups
        self.standing = -1

    def fork(self) -> None:
        """Fork a supervisor. One of them never times out, because forks are slow in gVisor."""
        stands = self.standing not in self.supervisors
        self.patience = None if stands else IDLE_SECONDS
        before = set(self.supervisors)
        super().fork()
        if stands:
            self.standing = next(iter(self.supervisors - before), -1)

    def gather(self) -> None:
        """Have a group, and signals as any process; the first needs neither."""
        if os.getpid() != 1:
            handle_all(signal.SIG_DFL)
            self.groups.join()

    def watch_parent(self) -> int | None:
        """Nothing: without the first process there are no others."""
        return None

    def supervisor(self, control: socket.socket, wake: int) -> Supervisor:
        """One that finds what it has by its group."""
        return GvisorSupervisor(control, None, wake, self.say, self.groups)

    def accept(self) -> socket.socket | None:
        """The next connection, unless another supervisor was quicker."""
        try:
            word, fds = receive_fds(self.requests, 1, 1)
        except BlockingIOError:
            return None
        if not word:
            # The porter is gone, and we with it in a moment.
            os._exit(0)
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=fds[0]) if fds else None

    def part_with(self, supervisor: int, status: int) -> None:
        """Clear up after a supervisor that has ended, however it did."""
        self.groups.clear(supervisor)
        self.sweep()
        if not self.idle:
            self.fork()

    def sweep(self) -> None:
        """Kill what no supervisor has."""
        killed: set[int] = set()
        for _ in range(_SWEEPS):
            strays = self.groups.strays(self.supervisors) - killed
            if not strays:
                return
            for pid in strays:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            killed |= strays


class GvisorSupervisor(GuestSupervisor):
    """A supervisor that is not told when an orphan ends, and looks."""

    subreaper = False
    forced = False

    def __init__(
        self,
        control: socket.socket,
        owner: int | None,
        wake: int,
        tell: Callable[[bytes], None],
        groups: SupervisorCgroups,
    ) -> None:
        super().__init__(control, owner, wake, tell)
        self.groups = groups
        self.pause = _FIRST_LOOK

    def below(self, root: int, without: Collection[int] = ()) -> dict[int, int]:
        """Every living process that a supervisor has, with its process group."""
        found: dict[int, int] = {}
        for pid in self.groups.members(root) - set(without):
            with contextlib.suppress(OSError):
                found[pid] = os.getpgid(pid)
        return found

    def run(self) -> bool:
        """As any supervisor does; who had to use force ends, for the agent to see to the rest."""
        return super().run() and not self.forced

    def watch(self) -> int:
        """Wait for the leader's exit, or bring the tree down; how it came, as flags."""
        flags = super().watch()
        self.forced = flags != 0
        return flags

    def spawn(self, argv: list[bytes], env: list[bytes], fds: list[int]) -> int:
        """Start a program; a word that is too long for any kernel has another number here."""
        try:
            return super().spawn(argv, env, fds)
        except OSError as error:
            longest = max(map(len, [*argv[1:], *env]), default=0)
            if error.errno == errno.ENAMETOOLONG and longest >= _LONGEST_WORD:
                raise OSError(errno.E2BIG, os.strerror(errno.E2BIG)) from error
            raise

    def reap(self) -> None:
        """Take the ends of children, and see whether anything is left."""
        super().reap()
        self.childless = not self.groups.members(os.getpid())

    def next(self, until: float | None) -> str:
        """What happens next; once the leader has ended, that can be an end nobody tells of."""
        if self.status is None:
            return super().next(until)
        soon = time.monotonic() + self.pause
        self.pause = min(2 * self.pause, _RAREST_LOOK)
        event = super().next(soon if until is None else min(soon, until))
        if event == "late" and (until is None or time.monotonic() < until):
            self.reap()
            return "child"
        return event


def main() -> None:
    """Say that we are there, wait to be entered, and serve."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=os.dup(0))
    linux.set_process_name("smokebox-init")
    groups = SupervisorCgroups()
    channel.send(READY)
    message = channel.recv(_MESSAGE_SIZE)
    if not message:
        return
    name, _, limits = message.decode().partition("\0")
    take_name(name)
    groups.hide()
    pairs = (limit.split("=") for limit in limits.split(",") if limit)
    hold_to({int(kind): int(value) for kind, value in pairs})
    # Linux spares the first process of a namespace what it has no handler for; this kernel
    # does not.
    handle_all(signal.SIG_IGN)
    lock_up()
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    gc.freeze()
    channel.send(ENTERED)
    GvisorGuestInit(channel, groups).run()


def handle_all(handler: signal.Handlers) -> None:
    """Have all signals ignored, or do what they do by themselves."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(number, handler)


def _name(pid: int) -> str:
    return f"smokebox-{pid}"
