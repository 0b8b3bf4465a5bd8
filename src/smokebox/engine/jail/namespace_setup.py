"""Set-up of a jail by its first process, before it becomes guest init.

It runs in new namespaces, forked from the zygote, and uses nothing of the image: all of its
Python was loaded before the fork.
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
from smokebox.engine.jail.engine_lease import EngineLease
from smokebox.engine.jail.guest_init import (
    GuestInit,
    drop_privileges,
    set_hostname,
    set_rlimits,
)
from smokebox.runtime.supervisor import receive_fds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

# All but the network namespace, which takes the kernel as long as the rest: the child creates it
# while it waits for its id maps.
NAMESPACES = (
    linux.NEWUSER | linux.NEWNS | linux.NEWPID | linux.NEWIPC | linux.NEWUTS | linux.NEWCGROUP
)
# Mount point of the engine's pipes inside.
IO = "/run/smokebox"
MESSAGE_SIZE = 1 << 16
# A request that is longer is in a file in memory, its last descriptor.
IN_FILE = b"file"

_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_LINKS = (
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
)
# Names in /proc that expose the host or control it.
_HIDDEN_FILES = (
    "bootconfig",
    "cgroups",
    "cmdline",
    "config.gz",
    "consoles",
    "diskstats",
    "interrupts",
    "iomem",
    "ioports",
    "kallsyms",
    "kcore",
    "key-users",
    "keys",
    "latency_stats",
    "locks",
    "mdstat",
    "modules",
    "partitions",
    "sched_debug",
    "schedstat",
    "swaps",
    "sysrq-trigger",
    "timer_list",
    "version_signature",
)
_HIDDEN_DIRECTORIES = ("acpi", "asound", "bus", "driver", "dynamic_debug", "fs", "irq", "scsi")
_BOOT_ID = "sys/kernel/random/boot_id"
_TTY_GROUP = 5
_FEWEST_WATCHES = 16
# A message carries at most 253 descriptors.
_MOST_FDS = 128
_MORE, _GO = b"m", b"g"
_SHARED_MEMORY = "mode=1777,size=64m"
# The kernel has a limited number for all sandboxes.
_MOST_TERMINALS = 256


class RequestedLayer:
    """A layer of a request; `owner` is the host id of its files of root."""

    __slots__ = ("owner", "path", "target")

    def __init__(self, path: str, target: str, owner: int) -> None:
        self.path = path
        self.target = target
        self.owner = owner


class JailRequest:
    """Request to the zygote: layers, and the range of ids."""

    def __init__(self, fields: dict[str, object]) -> None:
        self.key = str(fields["key"])
        self.directory = str(fields["directory"])
        layers = fields["layers"]
        assert isinstance(layers, list)
        self.layers = [RequestedLayer(*layer) for layer in layers]
        self.first_uid = int(str(fields["first_uid"]))
        self.uids = int(str(fields["uids"]))
        self.tier = str(fields.get("tier", "namespaces"))
        self.fields = fields
        self.targets = sorted({layer.target for layer in self.layers})

    @property
    def mapped(self) -> bool:
        """True if a range of ids is mapped, and the layers with it."""
        return self.uids > 1


class NamespaceSetup:
    """Builds one jail from the inside. `stage` names the step that failed in an error."""

    def __init__(
        self, request: JailRequest, *, setup: socket.socket, listener: socket.socket
    ) -> None:
        self.request = request
        self.setup = setup
        self.listener = listener
        self.orphan_timeout = 0.0
        self.egress_sockets = network.EgressSockets()
        self.stage = "ids"

    def run(self, go: socket.socket) -> None:
        """Build the jail and serve it until its end."""
        try:
            self.build(go)
            self.report_ready(os.open("/", os.O_PATH | os.O_CLOEXEC))
            if not self.enter():
                return
        except OSError as error:
            self.report_error(error.errno or 0, str(error))
            return
        close_files()
        gc.freeze()
        guest_init = GuestInit(self.listener, self.egress_sockets.sockets)
        guest_init.lease = EngineLease(guest_init.poll, self.setup, self.orphan_timeout)
        guest_init.run()

    def build(self, go: socket.socket) -> None:
        """Mount the root and change into it."""
        trees = self.become_root(go)
        linux.set_process_name("smokebox-init")
        self.stage = "root"
        pipes = linux.open_tree("run/io")
        self.mount_root(trees)
        make_directories("dev", "proc", os.path.dirname(IO[1:]), IO[1:])
        self.stage = "devices"
        mount_dev("dev", tty_group=self.request.mapped)
        mount_proc("proc", "dev/null", boot_id="../boot_id")
        self.stage = "pipes"
        linux.mount_setattr(
            pipes,
            linux.ATTR_RDONLY | linux.ATTR_NOSUID | linux.ATTR_NODEV | linux.ATTR_NOEXEC,
        )
        linux.move_mount(pipes, IO[1:])
        os.close(pipes)
        self.pivot()

    def pivot(self) -> None:
        """Make the current directory the root, and set up the network."""
        self.stage = "pivot"
        linux.pivot_root(".", ".")
        linux.umount(".", linux.MNT_DETACH)
        os.chdir("/")
        self.stage = "network"
        self.egress_sockets = network.set_up()

    def report_ready(self, root: int) -> None:
        """Send the engine the root and the egress sockets."""
        # Duplicates of the sockets stay here, for an engine that adopts the jail.
        fds = [root, *(os.dup(sock.fileno()) for sock in self.egress_sockets.sockets)]
        self.report({"ready": True, "no_egress": self.egress_sockets.reason}, fds)

    def become_root(self, go: socket.socket) -> list[int]:
        """Wait for the id maps and become root inside. Returns the mounts of mapped layers."""
        refusal = None
        try:
            linux.unshare(linux.NEWNET)
        except OSError as error:
            # Raised below: the zygote is busy with us, and would only see that we are gone.
            refusal = error
        trees = receive_trees(go)
        go.close()
        if refusal is not None:
            raise refusal
        os.setsid()
        linux.mount(None, "/", None, linux.MS_REC | linux.MS_PRIVATE)
        # Before the change of ids: only the engine's user can enter the directories above.
        os.chdir(self.request.directory)
        self.open_host_paths()
        if self.request.mapped:
            os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        return trees

    def open_host_paths(self) -> None:
        """Open paths of the host that a tier needs, while they can be reached."""

    def mount_root(self, trees: Sequence[int]) -> None:
        """Mount an overlay per target of the layers, and change into the root."""
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
            for number, layer in enumerate(self.request.layers):
                linux.mount(layer.path, f"low{number}", None, linux.MS_BIND | linux.MS_REC)
        for number, target in enumerate(self.request.targets):
            layers = enumerate(self.request.layers)
            # By short names: the options of a mount fit in one page.
            lower = ":".join(f"low{n}" for n, layer in layers if layer.target == target)
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
        """Wait for the host name and limits, and drop privileges. False if the engine is gone."""
        self.stage = "enter"
        message, tasks = receive_fds(self.setup, MESSAGE_SIZE, 1)
        if not message:
            return False
        for fd in tasks:
            # A thread that moves itself does not wait for the kernel to synchronise its readers.
            os.write(fd, b"0")
            os.close(fd)
        fields = json.loads(message)
        self.orphan_timeout = float(fields["orphan_timeout"])
        set_hostname(str(fields["hostname"]))
        set_rlimits({int(kind): value for kind, value in fields["rlimits"].items()})
        for number in (signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        drop_privileges()
        linux.set_no_new_privileges()
        # The file that commands get as stdin, and may open by name, is the host's.
        landlock.confine("/", "/dev/null")
        seccomp.install(seccomp.profile())
        self.report({"entered": True})
        return True

    def report_error(self, number: int, text: str) -> None:
        self.report({"error": number, "stage": self.stage, "text": text})

    def report(self, message: dict[str, object], fds: Sequence[int] = ()) -> None:
        # The engine may be gone.
        with contextlib.suppress(OSError):
            socket.send_fds(self.setup, [json.dumps(message).encode()], fds)
        for fd in fds:
            os.close(fd)


def send_trees(go: socket.socket, trees: Sequence[int]) -> None:
    """Let the child of a new jail continue, with descriptors of its mounts."""
    for start in range(0, len(trees), _MOST_FDS):
        socket.send_fds(go, [_MORE], trees[start : start + _MOST_FDS])
    go.sendall(_GO)


def receive_trees(go: socket.socket) -> list[int]:
    """Return the descriptors of `send_trees`."""
    trees: list[int] = []
    while True:
        data, fds = receive_fds(go, 1, _MOST_FDS)
        trees += fds
        if data != _MORE:
            return trees


def make_directories(*paths: str) -> None:
    """Create directories, replacing files and symlinks that the sandbox left at those paths.

    The root is still the host's at this point: a symlink of the sandbox would lead into it.
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
    """Close open directories, files and block devices.

    A command may start in /proc/self/fd/6, and from a directory of the host, `..` leads to all of
    the host.
    """
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            mode = os.fstat(int(name)).st_mode
            if stat.S_ISDIR(mode) or stat.S_ISREG(mode) or stat.S_ISBLK(mode):
                os.close(int(name))


def mount_dev(dev: str, *, tty_group: bool) -> None:
    """Mount a /dev with the devices that are safe for every program."""
    linux.mount(
        "tmpfs", dev, "tmpfs", linux.MS_NOSUID | linux.MS_NOEXEC, "mode=755,size=64k,nr_inodes=256"
    )
    mount_devices(dev, _DEVICES)
    os.mkdir(f"{dev}/pts")
    os.mkdir(f"{dev}/shm")
    group = f",gid={_TTY_GROUP}" if tty_group else ""
    flags = linux.MS_NOSUID | linux.MS_NOEXEC
    terminals = f"newinstance,ptmxmode=0666,mode=620,max={_MOST_TERMINALS}{group}"
    linux.mount("devpts", f"{dev}/pts", "devpts", flags, terminals)
    linux.mount("tmpfs", f"{dev}/shm", "tmpfs", flags | linux.MS_NODEV, _SHARED_MEMORY)
    for name, target in _LINKS:
        os.symlink(target, f"{dev}/{name}")


def mount_devices(directory: str, names: Sequence[str]) -> None:
    """Mount devices of the host. Programs can use them, and not change their modes or owners.

    Without ids of its own a sandbox could: the root inside is then the owner of the nodes.
    """
    for name in names:
        os.close(os.open(f"{directory}/{name}", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o666))
        device = linux.open_tree(f"/dev/{name}")
        # Devices on a read-only mount are still written to.
        linux.mount_setattr(device, linux.ATTR_RDONLY | linux.ATTR_NOSUID | linux.ATTR_NOEXEC)
        linux.move_mount(device, f"{directory}/{name}")
        os.close(device)


def limit_watches(settings: str) -> None:
    """Limit inotify to a share of what the kernel allows the user who created the sandbox."""
    for kind in ("instances", "watches"):
        most = kernfs.number(f"{settings}/fs/inotify/max_user_{kind}")
        if most is not None:
            share = str(max(_FEWEST_WATCHES, most // 4))
            kernfs.write_if_exists(f"{settings}/user/max_inotify_{kind}", share)


def mount_proc(proc: str, null: str, boot_id: str) -> None:
    """Mount a /proc of this pid namespace, without names that expose or control the host.

    Args:
        proc: Mount point.
        null: Empty file that covers others.
        boot_id: Path of a new file with the boot id of the sandbox, outside of its root.
    """
    flags = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
    linux.mount("proc", proc, "proc", flags)
    limit_watches(f"{proc}/sys")
    names = set(os.listdir(proc))
    for name in names.intersection(_HIDDEN_FILES):
        linux.mount(null, f"{proc}/{name}", None, linux.MS_BIND)
    first, *others = (f"{proc}/{name}" for name in names.intersection(_HIDDEN_DIRECTORIES))
    linux.mount("tmpfs", first, "tmpfs", flags | linux.MS_RDONLY, "size=0")
    for path in others:
        linux.mount(first, path, None, linux.MS_BIND)
    bind_read_only(f"{proc}/sys", f"{proc}/sys", flags)
    if os.path.exists(f"{proc}/{_BOOT_ID}"):
        with open(boot_id, "x") as file:
            file.write(f"{random_uuid()}\n")
        bind_read_only(boot_id, f"{proc}/{_BOOT_ID}", flags)


def bind_read_only(source: str, target: str, flags: int) -> None:
    """Mount a file or directory at another path, read-only."""
    linux.mount(source, target, None, linux.MS_BIND | linux.MS_REC)
    linux.mount(None, target, None, linux.MS_BIND | linux.MS_REMOUNT | linux.MS_RDONLY | flags)


def random_uuid() -> str:
    """Return a random UUID, of version 4."""
    # The module `uuid` takes longer to import than the set-up of a jail.
    data = bytearray(os.urandom(16))
    data[6], data[8] = data[6] & 0x0F | 0x40, data[8] & 0x3F | 0x80
    text = data.hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
