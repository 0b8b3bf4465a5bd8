"""The first process of a gVisor jail, on the host's side of the gVisor kernel.

It mounts the root like `namespace_setup`, but stays outside of it in a nearly empty tree, and lets
runsc start the kernel that the sandbox sees. Programs in that kernel can receive descriptors but
neither send them nor accept connections. So this process accepts connections, responds to
requests for a descriptor itself, and passes all other connections in. When it exits, the sandbox
ends.
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

from smokebox.engine.jail import guest_init, linux, seccomp
from smokebox.engine.jail.engine_lease import EngineLease
from smokebox.engine.jail.guest_init import CAPABILITIES
from smokebox.engine.jail.gvisor_guest_init import ENTERED, READY
from smokebox.engine.jail.namespace_setup import (
    IO,
    MESSAGE_SIZE,
    NamespaceSetup,
    make_directories,
    mount_devices,
)
from smokebox.runtime.supervisor import LENGTH

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

# Directory of the copied interpreter, in the directory of the engine's pipes.
INTERPRETER = "interpreter"

_CONTAINER = "smokebox"
_RUNSC, _ROOT, _PRIVATE = "runsc", "merged", "private"
_LOG = f"/{_PRIVATE}/log"
_LOG_TAIL = 4096
_MOST_FILES = 1 << 20
_RESTRICTED = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
_DEVICES = ("null", "zero", "random", "urandom")
_CAPABILITY_NAMES = {getattr(linux, name): name for name in dir(linux) if name.startswith("CAP_")}
# Guest init needs these until it is entered: to set the host name, to hide the cgroups of its
# supervisors, and to drop both capabilities.
_SETUP_CAPABILITIES = ("CAP_SYS_ADMIN", "CAP_SETPCAP")


class GvisorSetup(NamespaceSetup):
    """Builds one gVisor jail from the host's side."""

    interpreter = -1
    runsc = -1

    def run(self, go: socket.socket) -> None:
        try:
            self.build(go)
            root = os.open(f"/{_ROOT}", os.O_PATH | os.O_CLOEXEC)
            self.report_ready(os.dup(root))
            # The engine adds this process to the cgroup first: its children inherit that.
            if not self.setup.recv(MESSAGE_SIZE):
                return
            channel = self.boot()
            if channel is None or not self.enter_guest(channel):
                return
        except OSError as error:
            self.report_error(error.errno or 0, str(error))
            return
        relay = ConnectionRelay(self.listener, channel, root, self.egress_sockets.sockets)
        relay.run(EngineLease(relay.poll, self.setup, self.orphan_timeout))

    def open_host_paths(self) -> None:
        self.stage = "interpreter"
        self.interpreter = linux.open_tree(str(self.request.fields["interpreter"]))
        self.stage = "runsc"
        self.runsc = linux.open_tree(str(self.request.fields["runsc"]))

    def build(self, go: socket.socket) -> None:
        """Mount the root of the sandbox, and around it the tree that runsc runs in."""
        trees = self.become_root(go)
        linux.set_process_name("smokebox-gvisor")
        self.stage = "root"
        pipes = linux.open_tree("run/io")
        self.mount_root(trees)
        self.stage = "pipes"
        read_only = linux.ATTR_RDONLY | linux.ATTR_NOSUID | linux.ATTR_NODEV
        make_directories(os.path.dirname(IO[1:]), IO[1:], "proc", "sys", "dev")
        # gVisor mounts its own there; seen from outside they are empty and read-only.
        for name in ("proc", "sys"):
            linux.mount("tmpfs", name, "tmpfs", _RESTRICTED | linux.MS_RDONLY, "size=0")
        linux.mount("tmpfs", "dev", "tmpfs", linux.MS_NOSUID | linux.MS_NOEXEC, "mode=755,size=64k")
        mount_devices("dev", _DEVICES)
        if os.path.islink("tmp") or not os.path.isdir("tmp"):
            make_directories("tmp")
            os.chmod("tmp", 0o1777)
        _attach(pipes, IO[1:], read_only | linux.ATTR_NOEXEC)
        _attach(self.interpreter, f"{IO[1:]}/{INTERPRETER}", read_only)
        os.chdir("..")
        for number in range(len(self.request.layers)):
            linux.umount(f"low{number}", linux.MNT_DETACH)
        linux.umount("data", linux.MNT_DETACH)
        os.close(os.open(_RUNSC, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o755))
        _attach(self.runsc, _RUNSC, read_only)
        self.stage = "devices"
        self.make_runsc_files()
        self.pivot()

    def make_runsc_files(self) -> None:
        """Create the directories, devices and configuration that runsc needs."""
        for name in ("proc", "dev", "tmp", _PRIVATE, f"{_PRIVATE}/state", f"{_PRIVATE}/bundle"):
            os.mkdir(name, 0o700 if name == _PRIVATE else 0o755)
        mount_devices("dev", _DEVICES)
        linux.mount("proc", "proc", "proc", _RESTRICTED)
        argv = self.request.fields["argv"]
        assert isinstance(argv, list)
        with open(f"{_PRIVATE}/bundle/config.json", "w") as file:
            json.dump(oci_config([str(word) for word in argv]), file)

    def boot(self) -> socket.socket | None:
        """Start the kernel and guest init; a channel to guest init, or None on failure."""
        self.stage = "runsc"
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        channel, guest_channel = socket.socketpair(type=socket.SOCK_SEQPACKET)
        log = os.open(_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with guest_channel:
            os.posix_spawn(
                f"/{_RUNSC}",
                _command(),
                {"PATH": "/"},
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, fd, number)
                    for number, fd in enumerate((guest_channel.fileno(), log, log))
                ],
                # This process ignores SIGCHLD, but runsc waits for its children.
                setsigdef=signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP},
            )
        os.close(log)
        message = self.receive(channel)
        if message == READY:
            self.report({"booted": True})
            return channel
        if message is not None:
            self.report_error(errno.ENOEXEC, last_line(_LOG))
        return None

    def enter_guest(self, channel: socket.socket) -> bool:
        """Pass the host name and limits to guest init, and drop privileges."""
        self.stage = "enter"
        message = self.setup.recv(MESSAGE_SIZE)
        if not message:
            return False
        fields = json.loads(message)
        self.orphan_timeout = float(fields["orphan_timeout"])
        limits = ",".join(f"{kind}={value}" for kind, value in fields["rlimits"].items())
        channel.send(f"{fields['hostname']}\0{limits}".encode())
        if self.receive(channel) != ENTERED:
            return False
        linux.limit_capabilities(())
        linux.set_capabilities(())
        linux.set_no_new_privileges()
        seccomp.install(seccomp.profile())
        self.report({"entered": True})
        return True

    def receive(self, channel: socket.socket) -> bytes | None:
        """Return the next message of guest init, b"" if it is gone, None if the engine is."""
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
    """Accepts connections, and serves them or passes them to guest init."""

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
        self.accepted: dict[int, socket.socket] = {}
        self.poll = select.poll()

    def run(self, lease: EngineLease) -> None:
        """Serve until guest init is gone or the lease expires."""
        self.listener.setblocking(False)
        self.poll.register(self.listener, select.POLLIN)
        # Only for hang-up: nothing that guest init sends is read.
        self.poll.register(self.channel, 0)
        while not lease.expired:
            for fd in lease.wait():
                if fd == self.channel.fileno():
                    return
                if fd == self.listener.fileno():
                    self.accept()
                elif control := self.accepted.pop(fd, None):
                    self.poll.unregister(fd)
                    with control, contextlib.suppress(OSError):
                        self.serve(control, lease)

    def accept(self) -> None:
        """Accept a connection, and wait for its request."""
        try:
            control, _ = self.listener.accept()
        except OSError:
            # Most often too many are open, and one of them will be closed.
            time.sleep(0.01)
            return
        self.accepted[control.fileno()] = control
        self.poll.register(control, select.POLLIN)

    def serve(self, control: socket.socket, lease: EngineLease) -> None:
        """Serve a request that gVisor cannot, and pass any other one in."""
        head = control.recv(LENGTH.size + len(guest_init.EGRESS_SOCKETS) + 2, socket.MSG_PEEK)
        verb, _, rest = head[LENGTH.size :].partition(b"\0")
        if verb == guest_init.ROOT:
            socket.send_fds(control, [guest_init.DONE], [self.root])
        elif verb == guest_init.SOCKET:
            with socket.socket(socket.AF_INET6 if rest == b"6" else socket.AF_INET) as sock:
                socket.send_fds(control, [guest_init.DONE], [sock.fileno()])
        elif verb == guest_init.EGRESS_SOCKETS:
            fds = [sock.fileno() for sock in self.egress_sockets]
            socket.send_fds(control, [guest_init.DONE], fds)
        elif verb == guest_init.ATTACH:
            control.recv(len(head))
            lease.attach(control.dup())
            control.sendall(guest_init.DONE)
        elif head:
            socket.send_fds(self.channel, [b"c"], [control.fileno()])


def oci_config(argv: Sequence[str]) -> dict[str, object]:
    """Return the OCI runtime configuration of the sandbox."""
    capabilities = [*(_CAPABILITY_NAMES[number] for number in CAPABILITIES), *_SETUP_CAPABILITIES]
    mounts = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
        {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup"},
        # Without it, runsc mounts a /tmp that is invisible from outside.
        {
            "destination": "/tmp",
            "type": "bind",
            "source": f"/{_ROOT}/tmp",
            "options": ["rbind", "rw"],
        },
    ]
    return {
        "ociVersion": "1.0.2",
        "hostname": _CONTAINER,
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
        # The network and user namespaces are those of this process.
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")]},
    }


def last_line(path: str) -> str:
    """Return the last line of a log that is not blank."""
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_TAIL))
        lines = file.read().decode(errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.strip()), "it exited without a message")


def _command() -> list[str]:
    return [
        "runsc",
        f"--root=/{_PRIVATE}/state",
        # That of this process, which has only a loopback.
        "--network=host",
        "--overlay2=none",
        # Files change on both sides.
        "--file-access=shared",
        "--file-access-mounts=shared",
        "--ignore-cgroups",
        "--cgroupfs",
        "--host-fifo=open",
        "run",
        "-detach",
        "-bundle",
        f"/{_PRIVATE}/bundle",
        _CONTAINER,
    ]


def _attach(tree: int, target: str, attributes: int) -> None:
    linux.mount_setattr(tree, attributes)
    linux.move_mount(tree, target)
    os.close(tree)
