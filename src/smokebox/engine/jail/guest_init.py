"""Guest init: the first process of a jail, which starts programs for the engine.

It is a pool of supervisors (`smokebox.runtime.supervisor`) that listens on a socket: each
connection carries one request, which one supervisor serves. A request starts with a verb.

- `run`, `shell`, `terminal`, `pty` and `start` start a program. A program of `run` ends with its
  connection, and so does the `shell` of a session, whose commands can be killed one by one, and
  the program in a `terminal`, or in a `pty` that is created here. A program of `start` keeps
  running, and its exit is written to a file that came with the request.
- `signal` signals the processes of a supervisor, or the supervisor. `root`, `socket`,
  `egress-sockets` and `namespaces` respond with descriptors. `attach` makes the connection that
  of an engine.

The engine trusts nothing that it receives from here: a process of the sandbox could have sent it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import select
import signal
import socket
import struct

from smokebox.engine.jail import linux
from smokebox.engine.jail.log_pump import LogPump
from smokebox.engine.jail.shell_supervisor import SupervisedShell
from smokebox.engine.jail.stdin_pump import StdinPump
from smokebox.engine.jail.terminal_supervisor import RelayedTerminal, SupervisedTerminal
from smokebox.runtime.supervisor import (
    FAILED,
    STAGE_START,
    TIMED_OUT,
    Supervisor,
    SupervisorPool,
    signal_tree,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from smokebox.engine.jail.engine_lease import EngineLease

# Any address outside the loopback network would do: all DNS traffic goes to the engine.
RESOLVER = "10.11.0.1"
_RESOLV_CONF = "/etc/resolv.conf"

# Rights of root inside, over files, processes and ports of the sandbox alone.
CAPABILITIES = (
    linux.CAP_CHOWN,
    linux.CAP_DAC_OVERRIDE,
    linux.CAP_FOWNER,
    linux.CAP_FSETID,
    linux.CAP_KILL,
    linux.CAP_SETGID,
    linux.CAP_SETUID,
    linux.CAP_NET_BIND_SERVICE,
    linux.CAP_SYS_CHROOT,
)
RUN, SHELL, START = b"run", b"shell", b"start"
TERMINAL, PTY = b"terminal", b"pty"
SIGNAL, ROOT, SOCKET, EGRESS_SOCKETS = b"signal", b"root", b"socket", b"egress-sockets"
NAMESPACES, ATTACH = b"namespaces", b"attach"
# Kind of a `socket` besides the versions of IP.
DIAGNOSTICS = b"diagnostics"
LEADER, TREE, SUPERVISOR = b"leader", b"tree", b"supervisor"

STARTED, DONE = b"S", b"D"
# Response to `start`, and first record of a process's exit file: the pids of the process (0 before
# it has one) and of its supervisor.
START_RECORD = struct.Struct("!cii")
# Second record of that file: EXITED or LATE (it was killed at its timeout), and a wait status.
EXIT_RECORD = struct.Struct("!ci")
EXITED, LATE = b"X", b"T"

_TIOCSCTTY = 0x540E
_NETLINK_SOCK_DIAG = 4
_OOM_SCORE = b"500"
_ROOT_USER = b"0:0:"
# Report of a supervisor whose program outlives the connection: it serves no other request.
_OCCUPIED = b"*"


def set_hostname(name: str) -> None:
    """Set the host name, add it to the hosts file, and point the resolver at the engine."""
    linux.sethostname(name)
    with contextlib.suppress(OSError):
        _write("/etc/hostname", f"{name}\n")
        _write("/etc/hosts", f"127.0.0.1 localhost {name}\n::1 localhost ip6-localhost\n")
    with contextlib.suppress(OSError):
        # Often a symlink into a directory of systemd.
        if os.path.islink(_RESOLV_CONF):
            os.unlink(_RESOLV_CONF)
        _write(_RESOLV_CONF, f"nameserver {RESOLVER}\n")


def set_rlimits(rlimits: Mapping[int, int]) -> None:
    """Limit this process and those it starts, at most to the current hard limits."""
    for kind, value in rlimits.items():
        hard = resource.getrlimit(kind)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (bound, bound))


def drop_privileges() -> None:
    """Drop, for good, the capabilities that only the setup needed."""
    os.umask(0o022)
    linux.set_dumpable(False)
    linux.limit_capabilities(CAPABILITIES)
    linux.set_capabilities(CAPABILITIES)


def _write(path: str, text: str) -> None:
    # The sandbox may have left a pipe there, which would block for ever.
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags, 0o644)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def pack_program(
    *,
    verb: bytes,
    argv: Sequence[bytes],
    env: Sequence[bytes],
    cwd: bytes,
    timeout: float = 0.0,
    grace: float = 0.0,
    user: bytes = _ROOT_USER,
    rlimits: Mapping[int, int] | None = None,
) -> bytes:
    """Encode the request to start a program. No field can hold a NUL."""
    limits = b",".join(b"%d=%d" % limit for limit in (rlimits or {}).items())
    head = [verb, user, limits, b"%r" % timeout, b"%r" % grace, cwd, b"%d" % len(argv)]
    return b"\0".join([*head, *argv, *env])


def pack_user(uid: int, gid: int, groups: Sequence[int]) -> bytes:
    """Encode the user of a program for `pack_program`."""
    return b"%d:%d:%s" % (uid, gid, b",".join(b"%d" % group for group in groups))


class GuestInit(SupervisorPool):
    """Pid 1 of a jail. It outlives the engine, until it is killed or its lease expires."""

    def __init__(
        self, listener: socket.socket, egress_sockets: Sequence[socket.socket] = ()
    ) -> None:
        listener.setblocking(False)
        super().__init__(listener, None)
        self.egress_sockets = egress_sockets
        self.lease: EngineLease | None = None

    def serve(self, wakeup: int) -> None:
        """Serve until the lease expires. The first supervisor is forked ahead of its request."""
        self.fork()
        super().serve(wakeup)
        # The kernel kills all other processes with pid 1.
        os._exit(0)

    def wait(self) -> dict[int, int]:
        return self.lease.wait() if self.lease else super().wait()

    def is_orphaned(self, ready: dict[int, int]) -> bool:
        return self.lease is not None and self.lease.expired

    def isolate(self) -> None:
        # By the library that the zygote has loaded.
        linux.become_subreaper()

    def supervisor(self, control: socket.socket, wakeup: int) -> Supervisor:
        supervisor = GuestSupervisor(control, None, wakeup, self.report)
        supervisor.egress_sockets = self.egress_sockets
        supervisor.lease = self.lease
        return supervisor

    def read_reports(self) -> list[bytes]:
        """Read reports, and replace a supervisor that serves no other request."""
        lines = super().read_reports()
        if not self.idle and any(line[:1] == _OCCUPIED for line in lines):
            self.fork()
        return lines

    def accept(self) -> socket.socket | None:
        try:
            control, _ = self.requests.accept()
        except OSError:
            return None
        control.setblocking(True)
        return control

    def reap(self) -> None:
        """Reap children, and continue supervisors that a program inside the sandbox has stopped."""
        for pid in tuple(self.supervisors):
            with contextlib.suppress(ChildProcessError, ProcessLookupError):
                if os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG):
                    self.idle.discard(pid)
                    os.kill(pid, signal.SIGCONT)
        super().reap()


class GuestSupervisor(Supervisor):
    """A supervisor that starts programs as any user and under limits, and serves short requests."""

    user = _ROOT_USER
    rlimits = b""
    rate = b"0"
    reusable = False
    exit_file = -1
    pump: LogPump | None = None
    stdin: StdinPump | None = None
    stdin_writer: int | None = None
    shell: SupervisedShell | None = None
    terminal: SupervisedTerminal | None = None
    # Kept for the engine that adopts the jail.
    egress_sockets: Sequence[socket.socket] = ()
    lease: EngineLease | None = None

    def run(self) -> bool:
        """Serve one request; True if another can follow."""
        return super().run() or self.reusable

    def launch(self, fds: list[int], fields: list[bytes]) -> bool:
        """Serve a request; True if a program of `run` has started."""
        verb, *rest = fields
        if verb in (RUN, SHELL, TERMINAL, PTY, START):
            if verb == START:
                self.rate, *rest = rest
            elif verb == PTY:
                size, *rest = rest
            self.user, self.rlimits, *rest = rest
            if verb == RUN:
                return super().launch(fds, rest)
            if verb == START:
                self.start_background(fds, rest)
            elif verb == TERMINAL:
                self.start_terminal(SupervisedTerminal(self), fds, rest)
            elif verb == PTY:
                self.start_pty(size, fds, rest)
            elif super().launch(fds, rest):
                self.shell = SupervisedShell(self)
                self.shell.supervise()
        else:
            self.reusable = True
            # Before the response, as the next request may come at once.
            self.report(b"-")
            self.respond(verb, rest)
        return False

    def handle_message(self) -> bool:
        handler = self.shell or self.terminal
        return handler.handle_message() if handler else super().handle_message()

    def respond(self, verb: bytes, rest: list[bytes]) -> None:
        """Respond to a short request with one message."""
        if verb == SIGNAL:
            self.send_signal(*rest)
        elif verb == ROOT:
            self.send_fds(os.open("/", os.O_PATH | os.O_CLOEXEC))
        elif verb == SOCKET:
            self.send_fds(_socket(rest[0]).detach())
        elif verb == EGRESS_SOCKETS:
            self.send_fds(*(os.dup(sock.fileno()) for sock in self.egress_sockets))
        elif verb == NAMESPACES:
            flags = os.O_RDONLY | os.O_CLOEXEC
            self.send_fds(*(os.open(f"/proc/self/ns/{kind}", flags) for kind in ("user", "mnt")))
        elif verb == ATTACH and self.lease is not None:
            socket.send_fds(self.lease.sender, [b"+"], [self.control.fileno()])
            self.control.sendall(DONE)

    def spawn(self, argv: list[bytes], env: list[bytes], fds: list[int]) -> int:
        """Start a program, looked up in the PATH of its environment."""
        program = [_find(argv[0], env), *argv[1:]]
        if self.user == _ROOT_USER and not self.rlimits and not self.terminal:
            pid = super().spawn(program, env, fds)
        else:
            pid = self.fork_exec(program, env, fds)
        # Out of memory, the kernel has to kill programs before supervisors.
        with contextlib.suppress(OSError), open(f"/proc/{pid}/oom_score_adj", "wb", 0) as score:
            score.write(_OOM_SCORE)
        return pid

    def fork_exec(self, program: list[bytes], env: list[bytes], fds: list[int]) -> int:
        """Start a program in ways that posix_spawn lacks: other users, limits, terminals."""
        failed, failing = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if not pid:
            try:
                self.exec(program, env, fds)
            except OSError as error:
                os.write(failing, b"%d" % (error.errno or 0))
            finally:
                os._exit(127)
        os.close(failing)
        number = os.read(failed, 16)
        os.close(failed)
        if number:
            os.waitpid(pid, 0)
            raise OSError(int(number), os.strerror(int(number)))
        return pid

    def exec(self, program: list[bytes], env: list[bytes], fds: list[int]) -> None:
        os.setsid()
        for number, fd in enumerate(fds[:3]):
            os.dup2(fd, number)
        if self.terminal:
            fcntl.ioctl(0, _TIOCSCTTY, 0)
            self.terminal.before_exec()
        for limit in filter(None, self.rlimits.split(b",")):
            kind, _, value = limit.partition(b"=")
            resource.setrlimit(int(kind), (int(value), int(value)))
        uid, gid, groups = self.user.split(b":")
        if self.user != _ROOT_USER:
            os.setgroups([int(group) for group in filter(None, groups.split(b","))])
            os.setresgid(int(gid), int(gid), int(gid))
            os.setresuid(int(uid), int(uid), int(uid))
        signal.set_wakeup_fd(-1)
        # Exec resets handlers, but not the signals that Python or the engine's parent ignores, such
        # as nohup.
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execve(program[0], program, dict(pair.split(b"=", 1) for pair in env))

    def start_terminal(
        self, terminal: SupervisedTerminal, fds: list[int], fields: list[bytes]
    ) -> None:
        """Start a program in a terminal, and supervise it to its end."""
        self.terminal = terminal
        if super().launch(fds, fields):
            terminal.supervise()

    def start_pty(self, size: bytes, pipes: list[int], fields: list[bytes]) -> None:
        """Create a terminal and start a program in it."""
        uid, _, _ = self.user.split(b":")
        try:
            terminal = RelayedTerminal(self, pipes, size, int(uid))
        except OSError as error:
            self.send(FAILED, STAGE_START, error.errno or 0)
        else:
            self.start_terminal(terminal, terminal.descriptors(), fields)

    def start_background(self, fds: list[int], fields: list[bytes]) -> None:
        """Start a program that outlives its connection, and supervise it to its end.

        After stdin and the two logs comes the exit file, and possibly the write end of stdin. It
        is held open here so that the program does not read end of file when the engine dies.
        """
        stdin, out, err, self.exit_file, *writers = fds
        uid, gid, _ = self.user.split(b":")
        self.pump = LogPump([out, err], int(uid), int(gid), int(self.rate))
        if writers:
            self.stdin, self.stdin_writer = StdinPump(stdin, int(uid), int(gid)), writers[0]
            stdin = self.stdin.reader
        # Before the program runs, which may stop us at once: it is killed by this pid then.
        self.write_record(START_RECORD.pack(STARTED, 0, os.getpid()), 0)
        if not super().launch([stdin, *self.pump.writers], fields):
            return
        signal.signal(signal.SIGUSR1, self.close_stdin)
        record = START_RECORD.pack(STARTED, self.leader, os.getpid())
        self.write_record(record, 0)
        with contextlib.suppress(OSError):
            self.control.sendall(record)
        self.control.close()
        self.report(_OCCUPIED)
        # Before the logs: a program that closes its stdin may say so at once.
        self.released = self.stdin.begin(self.poll) if self.stdin else set()
        self.released.update(self.pump.logs)
        for fd in (self.wakeup, *self.pump.logs):
            self.poll.register(fd, select.POLLIN)
        flags = self.wait_for_leader()
        self.pump.drain()
        status = signal.SIGKILL if self.status is None else self.status
        kind = LATE if flags & TIMED_OUT else EXITED
        self.write_record(EXIT_RECORD.pack(kind, status), START_RECORD.size)
        self.wait_for_background()
        self.pump.drain()

    def write_record(self, record: bytes, offset: int) -> None:
        # The program needs its supervisor even if the disk is full.
        with contextlib.suppress(OSError):
            os.pwrite(self.exit_file, record, offset)

    def drain(self, fd: int) -> None:
        if self.terminal:
            self.terminal.relay()
        elif self.pump is None:
            super().drain(fd)
        elif fd not in self.pump.logs:
            assert self.stdin is not None
            self.stdin.move(fd, self.poll)
        elif not self.pump.move(fd):
            self.poll.unregister(fd)
            self.released.discard(fd)

    def close_stdin(self, *_: object) -> None:
        """Close our write end of stdin. The engine has closed its own."""
        if self.stdin_writer is not None:
            os.close(self.stdin_writer)
            self.stdin_writer = None

    def send_signal(self, pid: bytes, number: bytes, scope: bytes) -> None:
        """Signal the process group of a leader, the tree of a supervisor, or the supervisor."""
        try:
            if scope == TREE:
                if not signal_tree(int(pid), int(number), signal.SIGCONT, tree=self.tree):
                    raise ProcessLookupError
            elif scope == SUPERVISOR:
                os.kill(int(pid), int(number))
            else:
                os.killpg(int(pid), int(number))
        except OSError as error:
            self.send(FAILED, STAGE_START, error.errno or 0)
        else:
            self.control.sendall(DONE)

    def send_fds(self, *fds: int) -> None:
        """Respond with descriptors, and close them here."""
        socket.send_fds(self.control, [DONE], fds)
        for fd in fds:
            os.close(fd)


def _socket(kind: bytes) -> socket.socket:
    if kind == DIAGNOSTICS:
        return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG)
    return socket.socket(socket.AF_INET6 if kind == b"6" else socket.AF_INET)


def _find(name: bytes, env: list[bytes]) -> bytes:
    if b"/" in name:
        return name
    path = next((pair[5:] for pair in env if pair.startswith(b"PATH=")), os.defpath.encode())
    for directory in path.split(b":"):
        candidate = os.path.join(directory or b".", name)
        if os.access(candidate, os.X_OK) and os.path.isfile(candidate):
            return candidate
    raise FileNotFoundError(2, "not found", os.fsdecode(name))
