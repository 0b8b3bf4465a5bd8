"""The system calls of Linux that Python lacks, one typed function each. No policy lives here.

Numbers from 424 up are the same on every architecture; older calls go through libc.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import socket
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MNT_DETACH = 2

ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_NOEXEC, ATTR_IDMAP = 1, 2, 4, 8, 0x100000

RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH, RESOLVE_IN_ROOT = 2, 4, 8, 16

CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_FSETID = 0, 1, 3, 4
CAP_KILL, CAP_SETGID, CAP_SETUID, CAP_NET_BIND_SERVICE = 5, 6, 7, 10
CAP_SYS_CHROOT, CAP_SYS_ADMIN = 18, 21

_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_CLONE3 = 428, 429, 435
_SYS_FSOPEN, _SYS_FSCONFIG, _SYS_FSMOUNT = 430, 431, 432
_SYS_OPENAT2, _SYS_MOUNT_SETATTR = 437, 442
_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH, _MOVE_MOUNT_T_EMPTY_PATH = 1, 4, 0x40
_FSOPEN_CLOEXEC, _FSMOUNT_CLOEXEC = 1, 1
_FSCONFIG_SET_FLAG, _FSCONFIG_SET_STRING, _FSCONFIG_CMD_CREATE = 0, 1, 6
_CLONE_PIDFD, _CLONE_INTO_CGROUP, _SIGCHLD = 0x1000, 0x200000000, 17
_PR_SET_DUMPABLE, _PR_SET_NAME, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 4, 15, 24, 38
_PR_SET_CHILD_SUBREAPER = 36
_CAPABILITY_VERSION = 0x20080522
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_OPEN_TRIES = 1_000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)


def _checked(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


class _CloneArgs(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "flags",
            "pidfd",
            "child_tid",
            "parent_tid",
            "exit_signal",
            "stack",
            "stack_size",
            "tls",
            "set_tid",
            "set_tid_size",
            "cgroup",
        )
    ]


class _MountAttr(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")
    ]


class _OpenHow(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("flags", "mode", "resolve")]


# A function of its own, whose types are told once: every file of a sandbox is opened by it.
_openat2 = _libc["syscall"]
_openat2.argtypes = (
    ctypes.c_long,
    ctypes.c_long,
    ctypes.c_char_p,
    ctypes.POINTER(_OpenHow),
    ctypes.c_size_t,
)
_openat2.restype = ctypes.c_long


@functools.lru_cache(maxsize=64)
def _open_how(flags: int, mode: int, resolve: int) -> _OpenHow:
    return _OpenHow(flags | os.O_CLOEXEC, mode, resolve)


class CloneResult:
    """What `clone3` gives: in the child `pid` is 0, in the parent `pidfd` holds the child."""

    __slots__ = ("pid", "pidfd")

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.pidfd = pidfd


def clone3(namespaces: int, *, cgroup: int | None = None) -> CloneResult:
    """Fork into fresh namespaces, and into a cgroup of v2 given by its descriptor.

    Python does not know that it forked, so the caller has one thread only.
    """
    pidfd = ctypes.c_int(-1)
    args = _CloneArgs(
        flags=namespaces | _CLONE_PIDFD, pidfd=ctypes.addressof(pidfd), exit_signal=_SIGCHLD
    )
    if cgroup is not None:
        args.flags |= _CLONE_INTO_CGROUP
        args.cgroup = cgroup
    pid = _libc.syscall(_SYS_CLONE3, ctypes.byref(args), ctypes.sizeof(args))
    return CloneResult(_checked(pid, "clone3"), pidfd.value)


def unshare(namespaces: int) -> None:
    """Leave the namespaces that are named for fresh ones."""
    _checked(_libc.unshare(namespaces), "unshare")


def mount(
    source: str | None, target: str, kind: str | None = None, flags: int = 0, data: str = ""
) -> None:
    """mount(2)."""
    result = _libc.mount(
        _path(source), _path(target), _path(kind), ctypes.c_ulong(flags), _path(data) or None
    )
    _checked(result, f"mount {kind or 'bind'} on {target}")


def umount(target: str, flags: int = 0) -> None:
    """umount2(2)."""
    _checked(_libc.umount2(_path(target), flags), f"umount {target}")


def pivot_root(new_root: str, put_old: str) -> None:
    """Make `new_root` the root of this mount namespace."""
    _checked(_libc.pivot_root(_path(new_root), _path(put_old)), "pivot_root")


def open_tree(path: str, *, at: int = _AT_FDCWD, recursive: bool = False) -> int:
    """A detached copy of the mount at `path`, as a descriptor."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | (_AT_RECURSIVE if recursive else 0)
    return _checked(_libc.syscall(_SYS_OPEN_TREE, at, _path(path), flags), f"open_tree {path}")


def move_mount(tree: int, target: str) -> None:
    """Attach a detached mount at `target`."""
    result = _libc.syscall(
        _SYS_MOVE_MOUNT, tree, b"", _AT_FDCWD, _path(target), _MOVE_MOUNT_F_EMPTY_PATH
    )
    _checked(result, f"move_mount {target}")


def move_mount_onto(tree: int, place: int) -> None:
    """Attach a detached mount at an open directory."""
    flags = _MOVE_MOUNT_F_EMPTY_PATH | _MOVE_MOUNT_T_EMPTY_PATH
    _checked(_libc.syscall(_SYS_MOVE_MOUNT, tree, b"", place, b"", flags), "move_mount")


def make_filesystem(kind: str, options: Mapping[str, str | None], attributes: int) -> int:
    """A filesystem that is mounted nowhere yet, as a descriptor; flags have the value None."""
    context = _checked(_libc.syscall(_SYS_FSOPEN, _path(kind), _FSOPEN_CLOEXEC), f"fsopen {kind}")
    try:
        for name, value in options.items():
            command = _FSCONFIG_SET_FLAG if value is None else _FSCONFIG_SET_STRING
            result = _libc.syscall(_SYS_FSCONFIG, context, command, _path(name), _path(value), 0)
            _checked(result, f"fsconfig {kind} {name}")
        result = _libc.syscall(_SYS_FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0)
        _checked(result, f"fsconfig {kind}")
        result = _libc.syscall(_SYS_FSMOUNT, context, _FSMOUNT_CLOEXEC, attributes)
        return _checked(result, f"fsmount {kind}")
    finally:
        os.close(context)


def setns(namespace: int, kind: int) -> None:
    """Enter a namespace of that kind. Not with several threads."""
    _checked(_libc.setns(namespace, kind), "setns")


def mount_setattr(tree: int, attributes: int, *, userns: int | None = None) -> None:
    """Set attributes of a detached mount; with `userns`, map the ids of its files by it."""
    attr = _MountAttr(attr_set=attributes)
    if userns is not None:
        attr.attr_set |= ATTR_IDMAP
        attr.userns_fd = userns
    result = _libc.syscall(
        _SYS_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, ctypes.byref(attr), ctypes.sizeof(attr)
    )
    _checked(result, "mount_setattr")


def openat2(directory: int, path: str | bytes, flags: int, mode: int = 0, *, resolve: int) -> int:
    """Open `path` seen from a directory, under the rules of `resolve`. Always close-on-exec.

    The kernel answers EAGAIN where something was renamed while it climbed a `..`, and for a
    leased file. Both are tried again, but not for ever: a sandbox can keep either up.
    """
    how = _open_how(flags, mode, resolve)
    name = os.fsencode(path)
    for _ in range(_OPEN_TRIES):
        fd: int = _openat2(_SYS_OPENAT2, directory, name, how, ctypes.sizeof(_OpenHow))
        if fd >= 0:
            return fd
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.EINTR):
            break
    raise OSError(number, os.strerror(number), os.fsdecode(path))


def filesystem_of(fd: int) -> int:
    """The magic number of the filesystem that an open file is of, as statfs(2) lists them."""
    # struct statfs begins with it, and takes 120 bytes.
    found = ctypes.create_string_buffer(256)
    _checked(_libc.fstatfs(fd, found), "fstatfs")
    (magic,) = struct.unpack_from("@l", found)
    return int(magic)


def sethostname(name: str) -> None:
    """Name this UTS namespace."""
    data = name.encode()
    _checked(_libc.sethostname(data, len(data)), "sethostname")


def set_dumpable(dumpable: bool) -> None:
    """Let processes of the same user look into this one, or not."""
    _prctl(_PR_SET_DUMPABLE, int(dumpable))


def set_process_name(name: str) -> None:
    """The name that `ps` and /proc show, up to 15 bytes of it."""
    buffer = ctypes.create_string_buffer(name.encode()[:15])
    _prctl(_PR_SET_NAME, ctypes.addressof(buffer))


def set_command_line(text: str) -> None:
    """What /proc shows as the command line of this process and of what it forks."""
    with open("/proc/self/stat", "rb") as stat:
        fields = stat.read().rpartition(b") ")[2].split()
    start, end = int(fields[45]), int(fields[46])
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text.encode()[: end - start - 1], min(len(text), end - start - 1))


def set_no_new_privileges() -> None:
    """From here on no exec gains privileges."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def become_subreaper() -> None:
    """Be the parent of every orphan below this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def limit_capabilities(keep: Iterable[int]) -> None:
    """Let no exec from here on give a capability that is not in `keep`."""
    kept = frozenset(keep)
    for capability in range(64):
        if capability not in kept:
            try:
                _prctl(_PR_CAPBSET_DROP, capability)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    return
                raise


def set_capabilities(keep: Iterable[int]) -> None:
    """Hold just these capabilities, permitted and effective, none inheritable."""
    mask = sum(1 << capability for capability in keep)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    _checked(_libc.capset(header, struct.pack("=6I", low, low, 0, high, high, 0)), "capset")


def raise_loopback() -> None:
    """Switch the loopback interface of this network namespace on."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = bytearray(struct.pack("16sh22x", b"lo", 0))
        fcntl.ioctl(sock, _SIOCGIFFLAGS, request)
        (flags,) = struct.unpack_from("h", request, 16)
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags | _IFF_UP))


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl {option}: {os.strerror(number)}")


def _path(path: str | None) -> bytes | None:
    return None if path is None else os.fsencode(path)
