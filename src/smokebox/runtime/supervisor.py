"""Helper process that starts commands, reaps them, and kills what is left of them.

`smokebox.runtime.supervisor_client` runs this file as a script, once per Python process; it uses
the standard library only. A pool forks one supervisor per running command. The supervisor is a
child subreaper and starts the command in a new session. Everything that the command starts,
daemons and `setsid` included, stays below its supervisor, so "no children left" means that
nothing of the command is left, and killing one command cannot touch another. A supervisor kills
its process tree at the deadline, on request, when the sandbox is closed, and when the process
that requested the command is gone. If the command left nothing behind, it takes the next one.
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

TYPE_CHECKING = False  # Importing `typing` takes longer than the rest of this module.
if TYPE_CHECKING:
    from collections.abc import Callable, Collection

# Message of a supervisor: a kind, flags (or the stage that failed), a wait status (or errno).
MESSAGE = struct.Struct("!cBi")
EXITED, FAILED = b"X", b"F"
TIMED_OUT, CHILDLESS, KILLED = 1, 2, 4
STAGE_START, STAGE_CWD, STAGE_EXEC = 1, 2, 3

# Messages to a supervisor. RELEASE comes with the read ends of the pipes.
KILL, RELEASE = b"K", b"L"

LENGTH = struct.Struct("!Q")
KILL_SECONDS = 2.0
IDLE_SECONDS = 10
SHUTDOWN_SECONDS = 1.0
_READ = 1 << 16
_LONGEST_POLL = 1 << 30
_PR_SET_CHILD_SUBREAPER = 36


def pack(*, argv: list[bytes], env: list[bytes], cwd: bytes, timeout: float, grace: float) -> bytes:
    """Encode a request. No field can hold a NUL. A `timeout` of 0 is none."""
    head = [b"%r" % timeout, b"%r" % grace, cwd, b"%d" % len(argv)]
    return b"\0".join([*head, *argv, *env])


def receive_fds(sock: socket.socket, size: int, count: int) -> tuple[bytes, list[int]]:
    """Receive bytes and close-on-exec descriptors.

    `socket.recv_fds` ignores its flags (CPython 3.11 to 3.13), and with them CLOEXEC.
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
    """Return the process group of every live process below `root`.

    The processes in `without` and their descendants are left out.
    """
    children: dict[int, list[int]] = {}
    groups: dict[int, int] = {}
    # Highest first: the youngest is the likeliest to exit before it is read.
    for pid in sorted((int(name) for name in os.listdir("/proc") if name.isdigit()), reverse=True):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb", 0) as stat:
            # The name in parentheses may hold anything: the fields follow the last one.
            state, parent, group, _ = stat.read().rpartition(b") ")[2].split(None, 3)
            if pid not in without:
                children.setdefault(int(parent), []).append(pid)
            if state not in b"ZX":
                groups[pid] = int(group)
    found: list[int] = children.pop(root, [])
    for pid in found:
        found += children.pop(pid, [])
    return {pid: groups[pid] for pid in found if pid in groups}


def signal_tree(
    root: int,
    *signals: int,
    without: Collection[int] = (),
    tree: Callable[[int, Collection[int]], dict[int, int]] = descendants,
) -> bool:
    """Signal every process below `root`; none can escape by forking. False if there is none.

    Process groups are stopped first, until no new one appears. A signal to a group is atomic
    against fork, and every group below a supervisor was created there, so no other process is
    in it.
    """
    stopped: set[int] = set()
    for _ in range(100):
        fresh = set(tree(root, without).values()) - stopped
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
    # It has exited, or runs as another user (a setuid program), which cannot be helped.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


class Supervisor:
    """Starts one command and owns its process tree.

    `owner` is a pidfd of the process that requested the command. `wakeup` becomes readable when
    a child exits. `report` sends a line to the pool.
    """

    # True if an orphan of the command becomes a child of its supervisor.
    subreaper = True

    def __init__(
        self,
        control: socket.socket,
        owner: int | None,
        wakeup: int,
        report: Callable[[bytes], None],
    ) -> None:
        self.control = control
        self.owner = owner
        self.wakeup = wakeup
        self.report = report
        self.commands: int | None = None
        self.leader = -1
        self.status: int | None = None
        self.childless = False
        self.deadline: float | None = None
        self.grace = 0.0
        self.released: set[int] = set()
        self.poll = select.poll()

    def run(self) -> bool:
        """Start the command, report its exit, and stay while any process of it is left.

        Returns True if nothing was left at its exit, so that another command can follow.
        """
        if not self.start():
            return False
        for fd in (self.control.fileno(), self.owner, self.commands, self.wakeup):
            if fd is not None:
                self.poll.register(fd, select.POLLIN)
        flags = self.wait_for_leader()
        clean = self.childless
        if clean:
            # Before the owner is notified, as its next command may come at once.
            self.report(b"-")
        self.send(EXITED, flags | (CHILDLESS if clean else 0), self.status or 0)
        if not flags & KILLED:
            self.wait_for_background()
        if self.commands is not None:
            os.close(self.commands)
        return clean

    def start(self) -> bool:
        """Receive the request and start the command; on failure, send the reason."""
        data, fds = receive_fds(self.control, _READ, 5)
        while len(data) < LENGTH.size or len(data) < LENGTH.size + LENGTH.unpack_from(data)[0]:
            more = self.control.recv(1 << 20)
            if not more:
                return False
            data += more
        return self.launch(fds, data[LENGTH.size :].split(b"\0"))

    def launch(self, fds: list[int], fields: list[bytes]) -> bool:
        """Start the command of a request made by `pack`."""
        timeout, grace, cwd, count, *rest = fields
        if len(fds) > 3:
            self.commands = fds.pop()
        if len(fds) < 3:
            self.send(FAILED, STAGE_START, errno.EMFILE)
            return False
        self.grace = float(grace)
        argv, env = rest[: int(count)], rest[int(count) :]
        stage = STAGE_CWD
        try:
            os.chdir(cwd)
            stage = STAGE_EXEC
            self.leader = self.spawn(argv, env, fds)
        except OSError as error:
            self.send(FAILED, stage, error.errno or 0)
            return False
        os.chdir("/")
        for fd in fds:
            os.close(fd)
        if float(timeout):
            self.deadline = time.monotonic() + float(timeout)
        return True

    def spawn(self, argv: list[bytes], env: list[bytes], fds: list[int]) -> int:
        """Start the program `argv[0]` in a new session, and return its pid."""
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

    def tree(self, root: int, without: Collection[int] = ()) -> dict[int, int]:
        """Return the process group of every live process of the supervisor `root`."""
        return descendants(root, without)

    def signal_all(self, *signals: int) -> None:
        """Signal every process of this supervisor."""
        signal_tree(os.getpid(), *signals, tree=self.tree)

    def wait_for_leader(self) -> int:
        """Wait for the leader's exit, or kill the tree. Returns flags that tell which."""
        while self.status is None:
            event = self.next_event(self.deadline)
            if event == "timeout":
                self.terminate()
                return TIMED_OUT
            if event == "stop":
                self.kill_all()
                return KILLED
        return 0

    def wait_for_background(self) -> None:
        """Wait until background processes have exited; kill them when they must stop."""
        while not self.childless:
            if self.next_event(None) == "stop":
                self.kill_all()
                return

    def next_event(self, until: float | None) -> str:
        """Wait for "child", for "stop" if everything must end, or for "timeout" at `until`."""
        wait = None if until is None else max(0.0, until - time.monotonic()) * 1000
        ready = [fd for fd, _ in self.poll.poll(wait and min(wait, _LONGEST_POLL))]
        if not ready and until is not None and time.monotonic() >= until:
            return "timeout"
        for fd in ready:
            if fd == self.wakeup:
                os.read(self.wakeup, _READ)
                self.reap()
            elif fd in self.released:
                self.drain(fd)
            elif fd != self.control.fileno() or not self.handle_message():
                return "stop"
        return "child"

    def handle_message(self) -> bool:
        """Handle a message of the owner; False if everything must end."""
        try:
            word, fds = receive_fds(self.control, 1, 2)
        except ConnectionError:
            # The owner closed its end without reading our message.
            return False
        if word != RELEASE:
            return False
        self.poll.unregister(self.control.fileno())
        for fd in fds:
            self.poll.register(fd, select.POLLIN)
        self.released.update(fds)
        return True

    def drain(self, fd: int) -> None:
        # A server left in the background must not die of SIGPIPE at its next log line.
        with contextlib.suppress(BlockingIOError):
            if not os.read(fd, _READ):
                self.poll.unregister(fd)
                self.released.discard(fd)
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
        """Send SIGTERM to the tree, and SIGKILL after the grace period or on request."""
        self.signal_all(signal.SIGTERM, signal.SIGCONT)
        until = time.monotonic() + self.grace
        while not self.childless:
            if self.next_event(until) != "child":
                self.kill_all()
                return

    def kill_all(self) -> None:
        """Kill the tree. Waits at most `KILL_SECONDS` for a process stuck in the kernel."""
        until = time.monotonic() + KILL_SECONDS
        while not self.childless and time.monotonic() < until:
            self.signal_all(signal.SIGKILL)
            self.wait_for_child(0.05)

    def wait_for_child(self, seconds: float) -> None:
        # Children only: a closed connection, which may have caused the kill, stays readable.
        poll = select.poll()
        poll.register(self.wakeup, select.POLLIN)
        if poll.poll(seconds * 1000):
            os.read(self.wakeup, _READ)
        self.reap()

    def send(self, kind: bytes, flags: int, value: int) -> None:
        with contextlib.suppress(OSError):
            self.control.sendall(MESSAGE.pack(kind, flags, value))


def _wake_on_child_exit() -> int:
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return read


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


class SupervisorPool:
    """Forks supervisors when none is idle, and reaps them.

    Idle supervisors wait for the next control socket themselves. Each reports when it becomes
    busy (`+`) or idle (`-`) by a line with its pid, so most commands need no fork here.
    """

    # How long a supervisor waits for the next command; None is for ever.
    idle_seconds: float | None = IDLE_SECONDS

    def __init__(self, requests: socket.socket, owner: int | None) -> None:
        self.requests = requests
        self.owner = owner
        self.supervisors: set[int] = set()
        self.idle: set[int] = set()
        self.poll = select.poll()
        self.reports, self.report_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def run(self) -> None:
        """Serve until the owner closes its end or is gone, then wait for the supervisors."""
        self.isolate()
        wakeup = _wake_on_child_exit()
        self.serve(wakeup)
        # In some containers no other process reaps them.
        until = time.monotonic() + SHUTDOWN_SECONDS
        while self.supervisors and time.monotonic() < until:
            select.select([wakeup], [], [], 0.05)
            self.reap()

    def serve(self, wakeup: int) -> None:
        for fd in (self.owner, self.reports, wakeup):
            if fd is not None:
                self.poll.register(fd, select.POLLIN)
        while True:
            self.poll.register(self.requests.fileno(), 0 if self.idle else select.POLLIN)
            ready = self.wait()
            with contextlib.suppress(BlockingIOError):
                self.read_reports()
            if wakeup in ready:
                os.read(wakeup, _READ)
                self.reap()
            event = ready.get(self.requests.fileno(), 0)
            if event & (select.POLLHUP | select.POLLERR) or self.is_orphaned(ready):
                return
            if event and not self.idle:
                self.fork()

    def wait(self) -> dict[int, int]:
        """Wait for events, and return them by descriptor."""
        return dict(self.poll.poll())

    def is_orphaned(self, ready: dict[int, int]) -> bool:
        """Return True if the owner of all commands is gone."""
        return self.owner in ready

    def fork(self) -> None:
        """Fork a supervisor for the waiting command, or refuse the command."""
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
        """Supervise one command after the other, as long as they leave nothing behind."""
        self.isolate()
        wakeup = _wake_on_child_exit()
        parent = self.watch_parent()
        poll = select.poll()
        for fd in (self.owner, parent, self.requests.fileno()):
            if fd is not None:
                poll.register(fd, select.POLLIN)
        while ready := dict(poll.poll(self.idle_seconds and self.idle_seconds * 1000)):
            hangup = ready.get(self.requests.fileno(), 0) & select.POLLHUP
            if hangup or self.owner in ready or parent in ready:
                return
            if control := self.accept():
                self.report(b"+")
                with control:
                    if not self.supervisor(control, wakeup).run():
                        return
        self.report(b"+")

    def isolate(self) -> None:
        """Keep all processes that this one starts below it, orphans included."""
        if _libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")

    def watch_parent(self) -> int | None:
        """Return a descriptor that is readable once the pool is gone; None if none is needed."""
        return os.pidfd_open(os.getppid())

    def supervisor(self, control: socket.socket, wakeup: int) -> Supervisor:
        """Return the supervisor of the command behind `control`."""
        return Supervisor(control, self.owner, wakeup, self.report)

    def accept(self) -> socket.socket | None:
        """Return the next control socket, or None if another supervisor took it."""
        try:
            _, fds = receive_fds(self.requests, 1, 1)
        except BlockingIOError:
            return None
        return socket.socket(fileno=fds[0]) if fds else None

    def report(self, sign: bytes) -> None:
        os.write(self.report_fd, b"%s%d\n" % (sign, os.getpid()))

    def read_reports(self) -> list[bytes]:
        data = os.read(self.reports, _READ)
        # Lines are shorter than PIPE_BUF and arrive whole; only the read could cut one.
        while not data.endswith(b"\n"):
            data += os.read(self.reports, 1)
        lines = data.splitlines()
        for line in lines:
            pid = int(line[1:])
            if line[:1] == b"-" and pid in self.supervisors:
                self.idle.add(pid)
            else:
                self.idle.discard(pid)
        return lines

    def reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                self.idle.discard(pid)
                if pid in self.supervisors:
                    self.supervisors.discard(pid)
                    self.clean_up(pid, status)

    def clean_up(self, supervisor: int, status: int) -> None:
        """Clean up after a supervisor that has exited."""
        if os.WIFSIGNALED(status):
            self.kill_orphans()

    def kill_orphans(self) -> None:
        """Kill what a killed supervisor left: its processes are now below this one."""
        until = time.monotonic() + KILL_SECONDS
        while descendants(os.getpid(), self.supervisors) and time.monotonic() < until:
            signal_tree(os.getpid(), signal.SIGKILL, without=self.supervisors)
            time.sleep(0.005)


def main() -> None:
    """Run a pool for the parent process; argv holds the descriptor of its socket."""
    owner = os.pidfd_open(os.getppid())
    requests = socket.socket(fileno=int(sys.argv[1]))
    requests.set_inheritable(False)
    requests.setblocking(False)
    SupervisorPool(requests, owner).run()


if __name__ == "__main__":
    main()
