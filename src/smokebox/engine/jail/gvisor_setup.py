"""The porter: the first process of a gVisor jail, on our side of its wall.

It builds the root as `cell` does, but stays outside of it, in a bare tree of its own, and
has runsc start the kernel that the sandbox sees. Programs inside that kernel can be sent
descriptors and cannot send any, nor accept connections. So the porter accepts, answers what
asks for a descriptor, and hands all other connections in. When it ends, everything does.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import select
import signal
import socket
import time

from smokebox.engine.jail import guest_init, linux, network, seccomp
from smokebox.engine.jail.guest_init import CAPABILITIES
from smokebox.engine.jail.namespace_setup import IO, MESSAGE_SIZE, NamespaceSetup, make_way
from smokebox.runtime.supervisor import LENGTH

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

# What the agent inside says, and the only words of it that are listened to.
READY, ENTERED = b"ready", b"entered"
# What a connection that is handed in comes with.
HANDED = b"c"
# Where the interpreter is, in the directory of the engine's pipes.
INTERPRETER = "agent"

_NAME = "box"
_RUNSC, _ROOT, _PRIVATE = "runsc", "merged", "private"
_LOG = f"/{_PRIVATE}/log"
_LOG_END = 4096
_MOST_FILES = 1 << 20
_BARE = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
_DEVICES = ("null", "zero", "random", "urandom")
_CAPABILITY_NAMES = {
    linux.CAP_CHOWN: "CAP_CHOWN",
    linux.CAP_DAC_OVERRIDE: "CAP_DAC_OVERRIDE",
    linux.CAP_FOWNER: "CAP_FOWNER",
    linux.CAP_FSETID: "CAP_FSETID",
    linux.CAP_KILL: "CAP_KILL",
    linux.CAP_SETGID: "CAP_SETGID",
    linux.CAP_SETUID: "CAP_SETUID",
    linux.CAP_NET_BIND_SERVICE: "CAP_NET_BIND_SERVICE",
    linux.CAP_SYS_CHROOT: "CAP_SYS_CHROOT",
}
# What the agent needs besides, until it is entered: to take a name, to hide the cgroups by
# which it finds what its supervisors have, and to give these two up.
_BUILDING = ("CAP_SYS_ADMIN", "CAP_SETPCAP")


class GvisorSetup(NamespaceSetup):
    """One gVisor jail from its doorstep."""

    interpreter = -1
    runsc = -1

    def live(self, go: socket.socket) -> None:
        """Everything from the fork to the end of the jail."""
        try:
            self.build(go)
            root = os.open(f"/{_ROOT}", os.O_PATH | os.O_CLOEXEC)
            self.present(os.dup(root))
            # The engine counts us first: what we start is counted with us.
            if not self.setup.recv(MESSAGE_SIZE):
                return
            channel = self.boot()
            if channel is None or not self.hand_over(channel):
                return
        except OSError as error:
            self.report({"error": error.errno or 0, "stage": self.stage, "text": str(error)}, [])
            return
        self.setup.close()
        ConnectionRelay(self.listener, channel, root, self.egress_sockets.sockets).keep()

    def reach(self) -> None:
        """Take hold of the two things of the host's that a sandbox gets to see."""
        self.stage = "interpreter"
        self.interpreter = linux.open_tree(str(self.request.words["interpreter"]))
        self.stage = "runsc"
        self.runsc = linux.open_tree(str(self.request.words["runsc"]))

    def build(self, go: socket.socket) -> None:
        """Make the root of the sandbox, and around it a bare tree to stand in."""
        trees = self.settle(go)
        linux.set_process_name("smokebox-gvisor")
        self.stage = "root"
        pipes = linux.open_tree("run/io")
        self.mount_root(trees)
        self.stage = "pipes"
        quiet = linux.ATTR_RDONLY | linux.ATTR_NOSUID | linux.ATTR_NODEV
        make_way(os.path.dirname(IO[1:]), IO[1:], "proc", "sys", "dev")
        # What is there inside is not there outside, and cannot be written to.
        for name in ("proc", "sys"):
            linux.mount("tmpfs", name, "tmpfs", _BARE | linux.MS_RDONLY, "size=0")
        linux.mount("tmpfs", "dev", "tmpfs", linux.MS_NOSUID | linux.MS_NOEXEC, "mode=755,size=64k")
        _bring_devices("dev")
        if os.path.islink("tmp") or not os.path.isdir("tmp"):
            make_way("tmp")
            os.chmod("tmp", 0o1777)
        _attach(pipes, IO[1:], quiet | linux.ATTR_NOEXEC)
        _attach(self.interpreter, f"{IO[1:]}/{INTERPRETER}", quiet)
        os.chdir("..")
        for number in range(len(self.request.layers)):
            linux.umount(f"low{number}", linux.MNT_DETACH)
        linux.umount("data", linux.MNT_DETACH)
        os.close(os.open(_RUNSC, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o755))
        _attach(self.runsc, _RUNSC, quiet)
        self.stage = "devices"
        self.furnish()
        self.stage = "pivot"
        linux.pivot_root(".", ".")
        linux.umount(".", linux.MNT_DETACH)
        os.chdir("/")
        self.stage = "network"
        self.egress_sockets = network.furnish()

    def furnish(self) -> None:
        """What runsc wants to find where it runs."""
        for name in ("proc", "dev", "tmp", _PRIVATE, f"{_PRIVATE}/state", f"{_PRIVATE}/bundle"):
            os.mkdir(name, 0o700 if name == _PRIVATE else 0o755)
        _bring_devices("dev")
        linux.mount("proc", "proc", "proc", _BARE)
        argv = self.request.words["argv"]
        assert isinstance(argv, list)
        with open(f"{_PRIVATE}/bundle/config.json", "w") as file:
            json.dump(describe([str(word) for word in argv]), file)

    def boot(self) -> socket.socket | None:
        """Start the kernel and the agent in it; a channel to it, or None when that failed."""
        self.stage = "runsc"
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        channel, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        log = os.open(_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with theirs:
            os.posix_spawn(
                f"/{_RUNSC}",
                _command(),
                {"PATH": "/"},
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, fd, number)
                    for number, fd in enumerate((theirs.fileno(), log, log))
                ],
                # Nobody asks us how our children ended, but runsc asks its own.
                setsigdef=signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP},
            )
        os.close(log)
        heard = self.hear(channel)
        if heard == READY:
            self.report({"booted": True}, [])
            return channel
        if heard is not None:
            self.report({"error": errno.ENOEXEC, "stage": self.stage, "text": last_line(_LOG)}, [])
        return None

    def hand_over(self, channel: socket.socket) -> bool:
        """Wait for the name and the limits, and have the agent take them."""
        self.stage = "enter"
        message = self.setup.recv(MESSAGE_SIZE)
        if not message:
            return False
        words = json.loads(message)
        limits = ",".join(f"{kind}={value}" for kind, value in words["rlimits"].items())
        channel.send(f"{words['hostname']}\0{limits}".encode())
        if self.hear(channel) != ENTERED:
            return False
        linux.limit_capabilities(())
        linux.set_capabilities(())
        linux.set_no_new_privileges()
        seccomp.install(seccomp.profile())
        self.report({"entered": True}, [])
        return True

    def hear(self, channel: socket.socket) -> bytes | None:
        """The agent's next word, empty when it is gone; None when the engine is."""
        poll = select.poll()
        poll.register(channel, select.POLLIN)
        poll.register(self.setup, 0)
        if channel.fileno() not in dict(poll.poll()):
            return None
        try:
            return channel.recv(len(ENTERED) + 1)
        except ConnectionError:
            return b""


class ConnectionRelay:
    """Where connections come in, and what is answered there."""

    def __init__(
        self,
        listener: socket.socket,
        channel: socket.socket,
        root: int,
        egress_sockets: Sequence[socket.socket],
    ) -> None:
        self.listener = listener
        self.channel = channel
        self.root = root
        self.egress_sockets = egress_sockets
        self.waiting: dict[int, socket.socket] = {}
        self.poll = select.poll()

    def keep(self) -> None:
        """Let connections in until nobody is inside any more."""
        self.listener.setblocking(False)
        self.poll.register(self.listener, select.POLLIN)
        # What they say in there is not read: only that they are gone.
        self.poll.register(self.channel, 0)
        while True:
            for fd, _ in self.poll.poll():
                if fd == self.channel.fileno():
                    return
                if fd == self.listener.fileno():
                    self.accept()
                else:
                    self.poll.unregister(fd)
                    with self.waiting.pop(fd) as control, contextlib.suppress(OSError):
                        self.attend(control)

    def accept(self) -> None:
        """Take a connection, which has yet to say what it wants."""
        try:
            control, _ = self.listener.accept()
        except OSError:
            # Most often too many are open, and one of them will end.
            time.sleep(0.01)
            return
        self.waiting[control.fileno()] = control
        self.poll.register(control, select.POLLIN)

    def attend(self, control: socket.socket) -> None:
        """Answer here what asks for a descriptor, and hand everything else in."""
        head = control.recv(LENGTH.size + len(guest_init.EGRESS_SOCKETS) + 2, socket.MSG_PEEK)
        verb, _, rest = head[LENGTH.size :].partition(b"\0")
        if verb == guest_init.ROOT:
            socket.send_fds(control, [guest_init.DONE], [self.root])
        elif verb == guest_init.SOCKET:
            with socket.socket(socket.AF_INET6 if rest == b"6" else socket.AF_INET) as sock:
                socket.send_fds(control, [guest_init.DONE], [sock.fileno()])
        elif verb == guest_init.EGRESS_SOCKETS:
            egress_sockets = [sock.fileno() for sock in self.egress_sockets]
            socket.send_fds(control, [guest_init.DONE], egress_sockets)
        elif head:
            socket.send_fds(self.channel, [HANDED], [control.fileno()])


def describe(argv: Sequence[str]) -> dict[str, object]:
    """The sandbox as runsc is told of it, in the terms of the OCI runtime specification."""
    capabilities = [*(_CAPABILITY_NAMES[number] for number in CAPABILITIES), *_BUILDING]
    mounts = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
        {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup"},
        # Otherwise runsc has a /tmp of its own, which nobody sees from outside.
        {
            "destination": "/tmp",
            "type": "bind",
            "source": f"/{_ROOT}/tmp",
            "options": ["rbind", "rw"],
        },
    ]
    return {
        "ociVersion": "1.0.2",
        "hostname": _NAME,
        "root": {"path": f"/{_ROOT}", "readonly": False},
        "process": {
            "args": list(argv),
            "cwd": "/",
            "env": ["PATH=/"],
            "user": {"uid": 0, "gid": 0},
            "noNewPrivileges": True,
            "capabilities": {kind: capabilities for kind in ("bounding", "effective", "permitted")},
            "rlimits": [{"type": "RLIMIT_NOFILE", "soft": _MOST_FILES, "hard": _MOST_FILES}],
        },
        "mounts": mounts,
        # Of network and users it has those that we are in.
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")]},
    }


def last_line(path: str) -> str:
    """What a log says last."""
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_END))
        lines = file.read().decode(errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.strip()), "it ended without a word")


def _command() -> list[str]:
    return [
        "runsc",
        f"--root=/{_PRIVATE}/state",
        # Ours, which has nothing but a loopback.
        "--network=host",
        "--overlay2=none",
        # Files are changed from both sides.
        "--file-access=shared",
        "--file-access-mounts=shared",
        "--ignore-cgroups",
        "--cgroupfs",
        "--host-fifo=open",
        "run",
        "-detach",
        "-bundle",
        f"/{_PRIVATE}/bundle",
        _NAME,
    ]


def _bring_devices(place: str) -> None:
    for name in _DEVICES:
        os.close(os.open(f"{place}/{name}", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o666))
        linux.mount(f"/dev/{name}", f"{place}/{name}", None, linux.MS_BIND)


def _attach(tree: int, target: str, attributes: int) -> None:
    linux.mount_setattr(tree, attributes)
    linux.move_mount(tree, target)
    os.close(tree)
