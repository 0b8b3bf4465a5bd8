"""The agent: the first process of a jail, which starts what the engine asks for.

It is a keeper (`smokebox.runtime.supervisor`) that listens instead of being handed sockets:
each connection is one request, taken by a supervisor. A request starts with a verb.

- `run`, `shell`, `terminal`, `pty` and `start` start a program. What `run` started ends with
  its connection, and so does the `shell` of a session, whose commands can be ended alone,
  and the program of a `terminal`, or of a `pty` that is made here; what `start` started
  runs on, and its end is written to a file that came with the request.
- `signal` sends a signal to what a supervisor has, or to itself; `root`, `socket` and `ways-out`
  answer with descriptors.

The engine believes nothing that is said here: a process of the sandbox could be saying it.
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

# Any address that is not of the loopback would do: all that is asked by DNS comes to the engine.
RESOLVER = "10.11.0.1"
_RESOLV_CONF = "/etc/resolv.conf"

# What root inside may do, to files, processes and ports of the sandbox alone.
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
NAMESPACES = b"namespaces"
LEADER, TREE, SUPERVISOR = b"leader", b"tree", b"supervisor"

STARTED, DONE = b"S", b"D"
# What `start` answers, and writes to the file of a process: its pid, once it has one, and
# its supervisor's.
BEGUN = struct.Struct("!cii")
# What follows in that file when it has ended: whether its time was up, and its wait status.
EXIT = struct.Struct("!ci")
ENDED, LATE = b"X", b"T"

_TIOCSCTTY = 0x540E
_OOM_SCORE = b"500"
_NO_USER = b"0:0:"
# What a supervisor tells the agent that has a lasting program, and takes no other request.
_TAKEN = b"*"


def take_name(name: str) -> None:
    """Have a name, that programs inside can look up too, and somebody to ask for others."""
    linux.sethostname(name)
    with contextlib.suppress(OSError):
        _write("/etc/hostname", f"{name}\n")
        _write("/etc/hosts", f"127.0.0.1 localhost {name}\n::1 localhost ip6-localhost\n")
    with contextlib.suppress(OSError):
        # Often a link to where systemd has its own.
        if os.path.islink(_RESOLV_CONF):
            os.unlink(_RESOLV_CONF)
        _write(_RESOLV_CONF, f"nameserver {RESOLVER}\n")


def hold_to(rlimits: Mapping[int, int]) -> None:
    """Set limits for this process and what it starts, none above those that it has."""
    for kind, value in rlimits.items():
        hard = resource.getrlimit(kind)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (bound, bound))


def lock_up() -> None:
    """Give up what only building needed; nothing that is started gets it back."""
    os.umask(0o022)
    linux.set_dumpable(False)
    linux.limit_capabilities(CAPABILITIES)
    linux.set_capabilities(CAPABILITIES)


def _write(path: str, text: str) -> None:
    # The sandbox may have left a pipe there, which would hold us for ever.
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
    user: bytes = _NO_USER,
    rlimits: Mapping[int, int] | None = None,
) -> bytes:
    """The request to start a program; no field of it can hold a NUL."""
    limits = b",".join(b"%d=%d" % limit for limit in (rlimits or {}).items())
    head = [verb, user, limits, b"%r" % timeout, b"%r" % grace, cwd, b"%d" % len(argv)]
    return b"\0".join([*head, *argv, *env])


def pack_user(uid: int, gid: int, groups: Sequence[int]) -> bytes:
    """Who a program runs as, for `pack_program`."""
    return b"%d:%d:%s" % (uid, gid, b",".join(b"%d" % group for group in groups))


class GuestInit(SupervisorPool):
    """Pid 1 of a jail. It outlives the engine, and ends when it is killed."""

    def __init__(
        self, listener: socket.socket, egress_sockets: Sequence[socket.socket] = ()
    ) -> None:
        listener.setblocking(False)
        super().__init__(listener, None)
        self.egress_sockets = egress_sockets

    def serve(self, wake: int) -> None:
        """As any keeper does, with a supervisor made ahead of the first request."""
        self.fork()
        super().serve(wake)

    def gather(self) -> None:
        """As any keeper does, by the library that the zygote had loaded."""
        linux.become_subreaper()

    def supervisor(self, control: socket.socket, wake: int) -> Supervisor:
        """One that knows the verbs above."""
        supervisor = GuestSupervisor(control, None, wake, self.say)
        supervisor.egress_sockets = self.egress_sockets
        return supervisor

    def read_lines(self) -> list[bytes]:
        """What supervisors tell; for one that is taken for good another is made ahead."""
        lines = super().read_lines()
        if not self.idle and any(line[:1] == _TAKEN for line in lines):
            self.fork()
        return lines

    def accept(self) -> socket.socket | None:
        """The next connection, unless another supervisor was quicker."""
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
    """A supervisor that starts programs as any user and under limits, and runs errands."""

    user = _NO_USER
    rlimits = b""
    rate = b"0"
    errand = False
    book = -1
    pump: LogPump | None = None
    writer: int | None = None
    shell: SupervisedShell | None = None
    terminal: SupervisedTerminal | None = None
    # The sockets that lead out of the jail, kept for the engine that comes after this one.
    egress_sockets: Sequence[socket.socket] = ()

    def run(self) -> bool:
        """As any supervisor does; after an errand another request can follow."""
        return super().run() or self.errand

    def launch(self, fds: list[int], fields: list[bytes]) -> bool:
        """Do what the verb says; True when a program runs that is to be watched."""
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
                self.start_lasting(fds, rest)
            elif verb == TERMINAL:
                self.start_terminal(SupervisedTerminal(self), fds, rest)
            elif verb == PTY:
                self.make_terminal(size, fds, rest)
            elif super().launch(fds, rest):
                self.shell = SupervisedShell(self)
                self.shell.supervise()
        else:
            self.errand = True
            # Before the answer: the next request may come at once.
            self.tell(b"-")
            self.do_errand(verb, rest)
        return False

    def hear(self) -> bool:
        """Take what the engine says; False when it means the end."""
        heard = self.shell or self.terminal
        return heard.hear() if heard else super().hear()

    def do_errand(self, verb: bytes, rest: list[bytes]) -> None:
        """Answer at once, in one message."""
        if verb == SIGNAL:
            self.send_signal(*rest)
        elif verb == ROOT:
            self.give(os.open("/", os.O_PATH | os.O_CLOEXEC))
        elif verb == SOCKET:
            sock = socket.socket(socket.AF_INET6 if rest == [b"6"] else socket.AF_INET)
            self.give(sock.detach())
        elif verb == EGRESS_SOCKETS:
            self.give(*(os.dup(sock.fileno()) for sock in self.egress_sockets))
        elif verb == NAMESPACES:
            flags = os.O_RDONLY | os.O_CLOEXEC
            self.give(*(os.open(f"/proc/self/ns/{kind}", flags) for kind in ("user", "mnt")))

    def spawn(self, argv: list[bytes], env: list[bytes], fds: list[int]) -> int:
        """Start a program, found by the PATH that it gets."""
        program = [_find(argv[0], env), *argv[1:]]
        if self.user == _NO_USER and not self.rlimits and not self.terminal:
            pid = super().spawn(program, env, fds)
        else:
            pid = self.fork_exec(program, env, fds)
        # Out of memory, the kernel shall take what was started before those who mind it.
        with contextlib.suppress(OSError), open(f"/proc/{pid}/oom_score_adj", "wb", 0) as score:
            score.write(_OOM_SCORE)
        return pid

    def fork_exec(self, program: list[bytes], env: list[bytes], fds: list[int]) -> int:
        """`spawn` for what posix_spawn cannot do: other users, limits, and terminals."""
        failed, failing = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if not pid:
            try:
                self.become(program, env, fds)
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

    def become(self, program: list[bytes], env: list[bytes], fds: list[int]) -> None:
        os.setsid()
        for number, fd in enumerate(fds[:3]):
            os.dup2(fd, number)
        if self.terminal:
            fcntl.ioctl(0, _TIOCSCTTY, 0)
            self.terminal.enter()
        for limit in filter(None, self.rlimits.split(b",")):
            kind, _, value = limit.partition(b"=")
            resource.setrlimit(int(kind), (int(value), int(value)))
        uid, gid, groups = self.user.split(b":")
        if self.user != _NO_USER:
            os.setgroups([int(group) for group in filter(None, groups.split(b","))])
            os.setresgid(int(gid), int(gid), int(gid))
            os.setresuid(int(uid), int(uid), int(uid))
        signal.set_wakeup_fd(-1)
        # Handlers end with exec; what Python ignores would not.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execve(program[0], program, dict(pair.split(b"=", 1) for pair in env))

    def start_terminal(
        self, terminal: SupervisedTerminal, fds: list[int], fields: list[bytes]
    ) -> None:
        """Start a program in a terminal, and mind it to its end."""
        self.terminal = terminal
        if super().launch(fds, fields):
            terminal.supervise()

    def make_terminal(self, size: bytes, pipes: list[int], fields: list[bytes]) -> None:
        """Start a program in a terminal of our own, or say why there is none."""
        uid, _, _ = self.user.split(b":")
        try:
            terminal = RelayedTerminal(self, pipes, size, int(uid))
        except OSError as error:
            self.say(FAILED, STAGE_START, error.errno or 0)
        else:
            self.start_terminal(terminal, terminal.descriptors(), fields)

    def start_lasting(self, fds: list[int], fields: list[bytes]) -> None:
        """Start a program that outlives its connection, and mind it to its end.

        After stdin and the two logs comes the file for its end, and perhaps the writing
        end of its stdin, held here so that the death of the engine is no end of file.
        """
        stdin, out, err, self.book, *writers = fds
        uid, gid, _ = self.user.split(b":")
        self.pump = LogPump([out, err], int(uid), int(gid), int(self.rate))
        self.writer = writers[0] if writers else None
        # Before the program runs, which may stop us at once: whom to kill with all it has.
        self.write_down(BEGUN.pack(STARTED, 0, os.getpid()), 0)
        if not super().launch([stdin, *self.pump.writers], fields):
            return
        signal.signal(signal.SIGUSR1, self.close_stdin)
        begun = BEGUN.pack(STARTED, self.leader, os.getpid())
        self.write_down(begun, 0)
        with contextlib.suppress(OSError):
            self.control.sendall(begun)
        self.control.close()
        self.tell(_TAKEN)
        self.supervise_lasting()

    def supervise_lasting(self) -> None:
        """Wait for its end, write that down, and stay while anything of it is left."""
        assert self.pump is not None
        self.leftovers = set(self.pump.logs)
        for fd in (self.wake, *self.leftovers):
            self.poll.register(fd, select.POLLIN)
        flags = self.watch()
        self.pump.drain()
        status = signal.SIGKILL if self.status is None else self.status
        ended = EXIT.pack(LATE if flags & TIMED_OUT else ENDED, status)
        self.write_down(ended, BEGUN.size)
        self.linger()
        self.pump.drain()

    def write_down(self, words: bytes, place: int) -> None:
        # On a full disk too, the program shall have somebody who minds it.
        with contextlib.suppress(OSError):
            os.pwrite(self.book, words, place)

    def discard(self, fd: int) -> None:
        """Take what came through a pipe: of a lasting program to its log."""
        if self.terminal:
            self.terminal.move()
        elif self.pump is None:
            super().discard(fd)
        elif not self.pump.move(fd):
            self.poll.unregister(fd)
            self.leftovers.discard(fd)

    def close_stdin(self, *_: object) -> None:
        """End of file for a lasting program: the engine has closed its end too."""
        if self.writer is not None:
            os.close(self.writer)
            self.writer = None

    def send_signal(self, supervisor: bytes, number: bytes, scope: bytes) -> None:
        """Signal the process group of a supervisor's leader, its whole tree, or the supervisor."""
        try:
            if scope == TREE:
                if not signal_tree(int(supervisor), int(number), signal.SIGCONT, below=self.below):
                    raise ProcessLookupError
            elif scope == SUPERVISOR:
                os.kill(int(supervisor), int(number))
            else:
                os.killpg(int(supervisor), int(number))
        except OSError as error:
            self.say(FAILED, STAGE_START, error.errno or 0)
        else:
            self.control.sendall(DONE)

    def give(self, *fds: int) -> None:
        """Answer with descriptors."""
        socket.send_fds(self.control, [DONE], fds)
        for fd in fds:
            os.close(fd)


def _find(name: bytes, env: list[bytes]) -> bytes:
    if b"/" in name:
        return name
    path = next((pair[5:] for pair in env if pair.startswith(b"PATH=")), os.defpath.encode())
    for directory in path.split(b":"):
        candidate = os.path.join(directory or b".", name)
        if os.access(candidate, os.X_OK) and os.path.isfile(candidate):
            return candidate
    raise FileNotFoundError(2, "not found", os.fsdecode(name))
