"""The keeper: a small process that starts commands and sees to it that they end.

It is run as a script by `smokebox.runtime.process`, once per Python process, and uses the
standard library only. Each command has a supervisor to itself, forked by the keeper, which is
a child subreaper and starts the command in a session of its own. Whatever the command
starts, daemons and `setsid` included, stays below its supervisor, so "no children left" means
that nothing of the command is left, and killing one command cannot touch another. A
supervisor kills its tree at the deadline, when told to, when the sandbox is closed, and when
the process that asked for the command is gone. One that is left with nothing takes the
next command.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import select
import signal
import socket
import struct
import sys
import time

TYPE_CHECKING = False  # As typing has it, without the time that importing typing takes.
if TYPE_CHECKING:
    from collections.abc import Callable, Collection

# What a supervisor says: a kind, flags (or the stage that failed), and a wait status (or errno).
MESSAGE = struct.Struct("!cBi")
EXITED, FAILED = b"X", b"F"
TIMED_OUT, ALONE, KILLED = 1, 2, 4
STAGE_START, STAGE_CWD, STAGE_EXEC = 1, 2, 3

# What a supervisor is told. Letting go brings the read ends of the pipes with it.
KILL, RELEASE = b"K", b"L"

LENGTH = struct.Struct("!Q")
KILL_SECONDS = 2.0
IDLE_SECONDS = 10
LEAVE_SECONDS = 1.0
_READ = 1 << 16
_LONGEST_POLL = 1 << 30
_PR_SET_CHILD_SUBREAPER = 36


def pack(*, argv: list[bytes], env: list[bytes], cwd: bytes, timeout: float, grace: float) -> bytes:
    """A request as bytes; no field of it can hold a NUL. A `timeout` of 0 is none."""
    head = [b"%r" % timeout, b"%r" % grace, cwd, b"%d" % len(argv)]
    return b"\0".join([*head, *argv, *env])


def receive_fds(sock: socket.socket, size: int, count: int) -> tuple[bytes, list[int]]:
    """Bytes and descriptors that no command inherits.

    `socket.recv_fds` drops its flags (CPython 3.11 to 3.13), and with them CLOEXEC.
    """
    width = struct.calcsize("i")
    data, ancillary, _, _ = sock.recvmsg(
        size, socket.CMSG_LEN(count * width), socket.MSG_CMSG_CLOEXEC
    )
    fds: list[int] = []
    for _, _, payload in ancillary:
        fds += (fd for (fd,) in struct.iter_unpack("i", payload[: len(payload) // width * width]))
    return data, fds


def descendants(root: int, without: Collection[int] = ()) -> dict[int, int]:
    """Every living process below `root` with its process group, save `without` and theirs."""
    children: dict[int, list[int]] = {}
    groups: dict[int, int] = {}
    # Highest first: the youngest is the likeliest to be gone before we come to it.
    for pid in sorted((int(name) for name in os.listdir("/proc") if name.isdigit()), reverse=True):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb", 0) as stat:
            # The name in parentheses may hold anything, so the fields are those after the last.
            state, parent, group, _ = stat.read().rpartition(b") ")[2].split(None, 3)
            if pid not in without:
                children.setdefault(int(parent), []).append(pid)
            if state not in b"ZX":
                groups[pid] = int(group)
    below: list[int] = children.pop(root, [])
    for pid in below:
        below += children.pop(pid, [])
    return {pid: groups[pid] for pid in below if pid in groups}


def signal_tree(
    root: int,
    *signals: int,
    without: Collection[int] = (),
    below: Callable[[int, Collection[int]], dict[int, int]] = descendants,
) -> bool:
    """Send signals to everything below `root`, which cannot fork its way out meanwhile.

    Groups are stopped first, until no unknown one shows up. A signal to a group is atomic
    against fork, and every group below a supervisor was made there, so it holds nobody else.
    Tells whether there was anything.
    """
    stopped: set[int] = set()
    for _ in range(100):
        fresh = set(below(root, without).values()) - stopped
        if not fresh:
            break
        for group in fresh:
            _signal_group(group, signal.SIGSTOP)
        stopped |= fresh
    for number in signals:
        for group in stopped:
            _signal_group(group, number)
    return bool(stopped)


def _signal_group(group: int, number: int) -> None:
    # Gone already, or another user's (a setuid program): nothing we could do.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


class Supervisor:
    """Starts one command and owns all that comes of it."""

    # Whether an orphan of the command becomes a child of its supervisor.
    subreaper = True

    def __init__(
        self, control: socket.socket, owner: int | None, wake: int, tell: Callable[[bytes], None]
    ) -> None:
        self.control = control
        self.owner = owner
        self.wake = wake
        self.tell = tell
        self.life: int | None = None
        self.leader = -1
        self.status: int | None = None
        self.childless = False
        self.deadline: float | None = None
        self.grace = 0.0
        self.leftovers: set[int] = set()
        self.poll = select.poll()

    def run(self) -> bool:
        """Start the command, report its end, and stay while anything of it is left.

        True when nothing was ever left, and another command can follow.
        """
        if not self.start():
            return False
        for fd in (self.control.fileno(), self.owner, self.life, self.wake):
            if fd is not None:
                self.poll.register(fd, select.POLLIN)
        flags = self.watch()
        clean = self.childless
        if clean:
            # Before the owner hears of it, whose next command may come at once.
            self.tell(b"-")
        self.say(EXITED, flags | (ALONE if clean else 0), self.status or 0)
        if not flags & KILLED:
            self.linger()
        if self.life is not None:
            os.close(self.life)
        return clean

    def start(self) -> bool:
        """Read the request and start the command, or say why not."""
        request = self.receive()
        return request is not None and self.launch(*request)

    def launch(self, fds: list[int], fields: list[bytes]) -> bool:
        """Start the command that `pack` wrote down."""
        timeout, grace, cwd, count, *rest = fields
        if len(fds) > 3:
            self.life = fds.pop()
        if len(fds) < 3:
            self.say(FAILED, STAGE_START, errno.EMFILE)
            return False
        self.grace = float(grace)
        argv, env = rest[: int(count)], rest[int(count) :]
        stage = STAGE_CWD
        try:
            os.chdir(cwd)
            stage = STAGE_EXEC
            self.leader = self.spawn(argv, env, fds)
        except OSError as error:
            self.say(FAILED, stage, error.errno or 0)
            return False
        os.chdir("/")
        for fd in fds:
            os.close(fd)
        if float(timeout):
            self.deadline = time.monotonic() + float(timeout)
        return True

    def spawn(self, argv: list[bytes], env: list[bytes], fds: list[int]) -> int:
        """Start the program `argv[0]` in a session of its own; its pid."""
        return os.posix_spawn(
            argv[0],
            argv,
            dict(pair.split(b"=", 1) for pair in env),
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(fds[:3])],
            setsid=True,
            setsigmask=(),
            # Python ignores SIGPIPE, and a program would inherit that.
            setsigdef=signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP},
        )

    def below(self, root: int, without: Collection[int] = ()) -> dict[int, int]:
        """Every living process that a supervisor has, with its process group."""
        return descendants(root, without)

    def signal_all(self, *signals: int) -> None:
        """Send signals to everything that this supervisor has."""
        signal_tree(os.getpid(), *signals, below=self.below)

    def receive(self) -> tuple[list[int], list[bytes]] | None:
        data, fds = receive_fds(self.control, _READ, 5)
        while len(data) < LENGTH.size or len(data) < LENGTH.size + LENGTH.unpack_from(data)[0]:
            more = self.control.recv(1 << 20)
            if not more:
                return None
            data += more
        return fds, data[LENGTH.size :].split(b"\0")

    def watch(self) -> int:
        """Wait for the leader's exit, or bring the tree down; how it came, as flags."""
        while self.status is None:
            event = self.next(self.deadline)
            if event == "late":
                self.terminate()
                return TIMED_OUT
            if event == "end":
                self.destroy()
                return KILLED
        return 0

    def linger(self) -> None:
        """Keep what was left in the background, until it ends or must."""
        while not self.childless:
            if self.next(None) == "end":
                self.destroy()
                return

    def next(self, until: float | None) -> str:
        """What happens next: "child", "end" when all must end, or "late" after `until`."""
        wait = None if until is None else max(0.0, until - time.monotonic()) * 1000
        ready = [fd for fd, _ in self.poll.poll(wait and min(wait, _LONGEST_POLL))]
        if not ready and until is not None and time.monotonic() >= until:
            return "late"
        for fd in ready:
            if fd == self.wake:
                os.read(self.wake, _READ)
                self.reap()
            elif fd in self.leftovers:
                self.discard(fd)
            elif fd != self.control.fileno() or not self.hear():
                return "end"
        return "child"

    def hear(self) -> bool:
        """Take what the owner says; False when it means the end."""
        try:
            word, fds = receive_fds(self.control, 1, 2)
        except ConnectionError:
            # It has closed its end without having read our message.
            return False
        if word != RELEASE:
            return False
        self.poll.unregister(self.control.fileno())
        for fd in fds:
            self.poll.register(fd, select.POLLIN)
        self.leftovers.update(fds)
        return True

    def discard(self, fd: int) -> None:
        # A server left in the background must not die of SIGPIPE at its next line of log.
        with contextlib.suppress(BlockingIOError):
            if not os.read(fd, _READ):
                self.poll.unregister(fd)
                self.leftovers.discard(fd)
                os.close(fd)

    def reap(self) -> None:
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if pid == self.leader:
                    self.status = status
        except ChildProcessError:
            self.childless = True

    def terminate(self) -> None:
        """Ask the tree to end, and after the grace, or when told to, end it."""
        self.signal_all(signal.SIGTERM, signal.SIGCONT)
        until = time.monotonic() + self.grace
        while not self.childless:
            if self.next(until) != "child":
                self.destroy()
                return

    def destroy(self) -> None:
        """Kill the tree. A process that the kernel holds gets at most `KILL_SECONDS`."""
        until = time.monotonic() + KILL_SECONDS
        while not self.childless and time.monotonic() < until:
            self.signal_all(signal.SIGKILL)
            self.await_child(0.05)

    def await_child(self, seconds: float) -> None:
        # Only children count here: the owner's silence is what made this a killing.
        poll = select.poll()
        poll.register(self.wake, select.POLLIN)
        if poll.poll(seconds * 1000):
            os.read(self.wake, _READ)
        self.reap()

    def say(self, kind: bytes, flags: int, value: int) -> None:
        with contextlib.suppress(OSError):
            self.control.sendall(MESSAGE.pack(kind, flags, value))


def _wake_on_child_exit() -> int:
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return read


def _become_subreaper() -> None:
    if _libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


class SupervisorPool:
    """Forks supervisors when none is idle, and reaps them.

    Idle supervisors wait for the next control socket themselves, and tell by a line with their
    pid when they are busy (`+`) and idle again (`-`). So most commands need no fork here.
    """

    # How long a supervisor waits for the next command; None is for ever.
    patience: float | None = IDLE_SECONDS

    def __init__(self, requests: socket.socket, owner: int | None) -> None:
        self.requests = requests
        self.owner = owner
        self.supervisors: set[int] = set()
        self.idle: set[int] = set()
        self.news, self.tell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def run(self) -> None:
        """Serve until the owner closes its end or is gone, and see the supervisors off."""
        self.gather()
        wake = _wake_on_child_exit()
        self.serve(wake)
        # Some containers have nobody else to reap them.
        until = time.monotonic() + LEAVE_SECONDS
        while self.supervisors and time.monotonic() < until:
            select.select([wake], [], [], 0.05)
            self.reap()

    def serve(self, wake: int) -> None:
        poll = select.poll()
        for fd in (self.owner, self.news, wake):
            if fd is not None:
                poll.register(fd, select.POLLIN)
        while True:
            poll.register(self.requests.fileno(), 0 if self.idle else select.POLLIN)
            ready = dict(poll.poll())
            self.hear()
            if wake in ready:
                os.read(wake, _READ)
                self.reap()
            event = ready.get(self.requests.fileno(), 0)
            if event & (select.POLLHUP | select.POLLERR) or self.owner in ready:
                return
            if event and not self.idle:
                self.fork()

    def fork(self) -> None:
        """Make a supervisor for the command that waits, or refuse it."""
        try:
            pid = os.fork()
        except OSError as error:
            if control := self.accept():
                with control, contextlib.suppress(OSError):
                    control.send(MESSAGE.pack(FAILED, STAGE_START, error.errno or 0))
            return
        if not pid:
            try:
                self.supervise()
            finally:
                os._exit(0)
        self.supervisors.add(pid)
        self.idle.add(pid)

    def supervise(self) -> None:
        """Be a supervisor: of one command after the other, while they leave nothing behind."""
        self.gather()
        wake = _wake_on_child_exit()
        parent = self.watch_parent()
        poll = select.poll()
        for fd in (self.owner, parent, self.requests.fileno()):
            if fd is not None:
                poll.register(fd, select.POLLIN)
        while ready := dict(poll.poll(self.patience and self.patience * 1000)):
            hangup = ready.get(self.requests.fileno(), 0) & select.POLLHUP
            if hangup or self.owner in ready or parent in ready:
                return
            if control := self.accept():
                self.say(b"+")
                with control:
                    if not self.supervisor(control, wake).run():
                        return
        self.say(b"+")

    def gather(self) -> None:
        """See to it that what comes to be below this process can be found there."""
        _become_subreaper()

    def watch_parent(self) -> int | None:
        """A descriptor that can be read when the keeper is gone; None if all goes with it."""
        return os.pidfd_open(os.getppid())

    def supervisor(self, control: socket.socket, wake: int) -> Supervisor:
        """What minds the command behind `control`."""
        return Supervisor(control, self.owner, wake, self.say)

    def accept(self) -> socket.socket | None:
        """The next control socket, unless another supervisor was quicker."""
        try:
            _, fds = receive_fds(self.requests, 1, 1)
        except BlockingIOError:
            return None
        return socket.socket(fileno=fds[0]) if fds else None

    def say(self, sign: bytes) -> None:
        os.write(self.tell, b"%s%d\n" % (sign, os.getpid()))

    def hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            # Lines are short of PIPE_BUF and come whole; only the read could cut one.
            for line in self.read_lines():
                pid = int(line[1:])
                if line[:1] == b"-" and pid in self.supervisors:
                    self.idle.add(pid)
                else:
                    self.idle.discard(pid)

    def read_lines(self) -> list[bytes]:
        data = os.read(self.news, _READ)
        while not data.endswith(b"\n"):
            data += os.read(self.news, 1)
        return data.splitlines()

    def reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                self.idle.discard(pid)
                if pid in self.supervisors:
                    self.supervisors.discard(pid)
                    self.part_with(pid, status)

    def part_with(self, supervisor: int, status: int) -> None:
        """Clear up after a supervisor that has ended."""
        if os.WIFSIGNALED(status):
            self.sweep()

    def sweep(self) -> None:
        """Kill what a supervisor left that was itself killed: it has come to be below us."""
        until = time.monotonic() + KILL_SECONDS
        while descendants(os.getpid(), self.supervisors) and time.monotonic() < until:
            signal_tree(os.getpid(), signal.SIGKILL, without=self.supervisors)
            time.sleep(0.005)


def main() -> None:
    """Keep commands for the process that started this one; argv holds the socket's number."""
    owner = os.pidfd_open(os.getppid())
    requests = socket.socket(fileno=int(sys.argv[1]))
    requests.set_inheritable(False)
    requests.setblocking(False)
    SupervisorPool(requests, owner).run()


if __name__ == "__main__":
    main()
