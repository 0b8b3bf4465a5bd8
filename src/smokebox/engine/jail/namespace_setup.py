"""What the first process of a jail does before it is the agent: build the walls, lock the door.

It runs in fresh namespaces, forked from the zygote, and has nothing from the image: all of
it is Python that was loaded before the fork.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import stat

from smokebox.engine.jail import kernfs, landlock, linux, network, seccomp
from smokebox.engine.jail.guest_init import GuestInit, hold_to, lock_up, take_name
from smokebox.runtime.supervisor import receive_fds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

# All but that of the network, which takes the kernel as long as the rest, and which the child
# makes while it waits for its ids.
NAMESPACES = (
    linux.NEWUSER | linux.NEWNS | linux.NEWPID | linux.NEWIPC | linux.NEWUTS | linux.NEWCGROUP
)
# Where the engine's pipes are seen inside.
IO = "/run/smokebox"
MESSAGE_SIZE = 1 << 16

_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_LINKS = (
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
)
# Names in /proc that speak of the host, or to it.
_HIDDEN_FILES = (
    "interrupts",
    "kcore",
    "keys",
    "latency_stats",
    "sched_debug",
    "sysrq-trigger",
    "timer_list",
)
_HIDDEN_DIRECTORIES = ("acpi", "asound", "scsi")
_READ_ONLY = ("bus", "fs", "irq", "sys")
_TTY_GROUP = 5
_FEWEST_WATCHES = 16
_SHARED_MEMORY = "mode=1777,size=64m"
# Of those that the kernel has for everybody.
_MOST_TERMINALS = 256


class JailRequest:
    """What the zygote was asked for: layers as (path, target), and how many ids there are."""

    def __init__(self, words: dict[str, object]) -> None:
        self.key = str(words["key"])
        self.directory = str(words["directory"])
        layers = words["layers"]
        assert isinstance(layers, list)
        self.layers = [(str(path), str(target)) for path, target in layers]
        self.first_uid = int(str(words["first_uid"]))
        self.uids = int(str(words["uids"]))
        self.tier = str(words.get("tier", "namespaces"))
        self.words = words
        self.targets = sorted({target for _, target in self.layers})

    @property
    def mapped(self) -> bool:
        """Whether a range of ids is mapped, and the layers with it."""
        return self.uids > 1


class NamespaceSetup:
    """One jail from the inside, until its agent takes over. Errors say which stage failed."""

    def __init__(
        self, request: JailRequest, *, setup: socket.socket, listener: socket.socket
    ) -> None:
        self.request = request
        self.setup = setup
        self.listener = listener
        self.run = -1
        self.egress_sockets = network.EgressSockets()
        self.stage = "ids"

    def live(self, go: socket.socket) -> None:
        """Everything from the fork to the end of the jail."""
        try:
            self.build(go)
            self.present(os.open("/", os.O_PATH | os.O_CLOEXEC))
            if not self.enter():
                return
        except OSError as error:
            self.report({"error": error.errno or 0, "stage": self.stage, "text": str(error)}, [])
            return
        self.setup.close()
        close_files()
        gc.freeze()
        GuestInit(self.listener, self.egress_sockets.sockets).run()

    def build(self, go: socket.socket) -> None:
        """Wait for the ids, then make the root and stand in it."""
        trees = self.settle(go)
        linux.set_process_name("smokebox-init")
        self.stage = "root"
        self.run = os.open("run", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        pipes = linux.open_tree("run/io")
        self.mount_root(trees)
        make_way("dev", "proc", os.path.dirname(IO[1:]), IO[1:])
        self.stage = "devices"
        mount_dev("dev", tty_group=self.request.mapped)
        mount_proc("proc", "dev/null")
        self.stage = "pipes"
        linux.mount_setattr(
            pipes,
            linux.ATTR_RDONLY | linux.ATTR_NOSUID | linux.ATTR_NODEV | linux.ATTR_NOEXEC,
        )
        linux.move_mount(pipes, IO[1:])
        os.close(pipes)
        self.stage = "pivot"
        linux.pivot_root(".", ".")
        linux.umount(".", linux.MNT_DETACH)
        os.chdir("/")
        self.stage = "network"
        self.egress_sockets = network.furnish()

    def present(self, root: int) -> None:
        """Tell the engine that the jail stands, with its root and what leads out of it."""
        # Copies of the sockets stay here, for the engine that may come after this one.
        egress_sockets = [os.dup(sock.fileno()) for sock in self.egress_sockets.sockets]
        self.report({"ready": True, "closed": self.egress_sockets.reason}, [root, *egress_sockets])

    def settle(self, go: socket.socket) -> list[int]:
        """Wait for the ids, and be root in the box, among mounts of our own."""
        refusal = None
        try:
            linux.unshare(linux.NEWNET)
        except OSError as error:
            # Said below: the zygote is busy with us, and would only see that we are gone.
            refusal = error
        _, trees = receive_fds(go, 16, 64)
        go.close()
        if refusal is not None:
            raise refusal
        os.setsid()
        linux.mount(None, "/", None, linux.MS_REC | linux.MS_PRIVATE)
        # As who we were outside: nobody else can pass to it.
        os.chdir(self.request.directory)
        self.reach()
        if self.request.mapped:
            os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        return trees

    def reach(self) -> None:
        """Take hold of what only its owner outside can pass to."""

    def mount_root(self, trees: Sequence[int]) -> None:
        """Stack the layers of each target with what the sandbox wrote on top; stand in it."""
        linux.mount("tmpfs", "root", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=755")
        os.chdir("root")
        places = ["data", *(f"low{n}" for n in range(len(self.request.layers)))]
        for name in ("merged", *places):
            os.mkdir(name)
        if trees:
            for tree, name in zip(trees, places, strict=True):
                linux.move_mount(tree, name)
                os.close(tree)
        else:
            linux.mount(f"{self.request.directory}/data", "data", None, linux.MS_BIND)
            for number, (path, _) in enumerate(self.request.layers):
                linux.mount(path, f"low{number}", None, linux.MS_BIND | linux.MS_REC)
        for number, target in enumerate(self.request.targets):
            layers = enumerate(self.request.layers)
            lower = ":".join(f"low{n}" for n, (_, at) in layers if at == target)
            options = f"lowerdir={lower},upperdir=data/upper/{number},workdir=data/work/{number}"
            linux.mount(
                "overlay",
                "merged" + target.rstrip("/"),
                "overlay",
                linux.MS_NOSUID | linux.MS_NODEV,
                options + ",userxattr",
            )
        os.chdir("merged")

    def enter(self) -> bool:
        """Wait for the name and the limits, and give up what only building needed."""
        self.stage = "enter"
        message = self.setup.recv(MESSAGE_SIZE)
        if not message:
            return False
        words = json.loads(message)
        take_name(str(words["hostname"]))
        hold_to({int(kind): value for kind, value in words["rlimits"].items()})
        for number in (signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        lock_up()
        linux.set_no_new_privileges()
        # What else commands get as stdin, and may open by name, are the host's.
        landlock.confine("/", "/dev/null", f"/proc/self/fd/{self.run}")
        os.close(self.run)
        seccomp.install(seccomp.profile())
        self.report({"entered": True}, [])
        return True

    def report(self, words: dict[str, object], fds: list[int]) -> None:
        # The engine may be gone, and then nobody wants to know.
        with contextlib.suppress(OSError):
            socket.send_fds(self.setup, [json.dumps(words).encode()], fds)
        for fd in fds:
            os.close(fd)


def make_way(*paths: str) -> None:
    """Have a directory at each path, whatever the sandbox left there when it last ran.

    The root of the host is still ours here: a symlink of the sandbox's would lead into it.
    """
    for path in paths:
        try:
            if stat.S_ISDIR(os.lstat(path).st_mode):
                continue
            os.unlink(path)
        except FileNotFoundError:
            pass
        os.mkdir(path, 0o755)


def close_files() -> None:
    """Close what is open save pipes, sockets and terminals.

    A command may start in /proc/self/fd/6, and from a directory of the host all of the host
    is one `..` after the other.
    """
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            mode = os.fstat(int(name)).st_mode
            if stat.S_ISDIR(mode) or stat.S_ISREG(mode) or stat.S_ISBLK(mode):
                os.close(int(name))


def mount_dev(dev: str, *, tty_group: bool) -> None:
    """A /dev with nothing of the host but what every program may have."""
    linux.mount(
        "tmpfs", dev, "tmpfs", linux.MS_NOSUID | linux.MS_NOEXEC, "mode=755,size=64k,nr_inodes=256"
    )
    for name in _DEVICES:
        os.close(os.open(f"{dev}/{name}", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o666))
        linux.mount(f"/dev/{name}", f"{dev}/{name}", None, linux.MS_BIND)
    os.mkdir(f"{dev}/pts")
    os.mkdir(f"{dev}/shm")
    group = f",gid={_TTY_GROUP}" if tty_group else ""
    flags = linux.MS_NOSUID | linux.MS_NOEXEC
    terminals = f"newinstance,ptmxmode=0666,mode=620,max={_MOST_TERMINALS}{group}"
    linux.mount("devpts", f"{dev}/pts", "devpts", flags, terminals)
    linux.mount("tmpfs", f"{dev}/shm", "tmpfs", flags | linux.MS_NODEV, _SHARED_MEMORY)
    for name, target in _LINKS:
        os.symlink(target, f"{dev}/{name}")


def share_watches(settings: str) -> None:
    """Leave others some of what the kernel counts by who made the sandbox, not by sandbox."""
    for kind in ("instances", "watches"):
        most = kernfs.number(f"{settings}/fs/inotify/max_user_{kind}")
        if most is not None:
            share = str(max(_FEWEST_WATCHES, most // 4))
            kernfs.write_if_there(f"{settings}/user/max_inotify_{kind}", share)


def mount_proc(proc: str, null: str) -> None:
    """A /proc of this pid namespace, without what speaks of the host or to it."""
    flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
    linux.mount("proc", proc, "proc", flags)
    share_watches(f"{proc}/sys")
    for name in _HIDDEN_FILES:
        if os.path.lexists(f"{proc}/{name}"):
            linux.mount(null, f"{proc}/{name}", None, linux.MS_BIND)
    for name in _HIDDEN_DIRECTORIES:
        if os.path.lexists(f"{proc}/{name}"):
            linux.mount("tmpfs", f"{proc}/{name}", "tmpfs", flags | linux.MS_RDONLY, "size=0")
    for name in _READ_ONLY:
        path = f"{proc}/{name}"
        if os.path.lexists(path):
            linux.mount(path, path, None, linux.MS_BIND | linux.MS_REC)
            linux.mount(
                None, path, None, linux.MS_BIND | linux.MS_REMOUNT | linux.MS_RDONLY | flags
            )
