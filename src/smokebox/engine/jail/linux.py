"""Linux system calls that Python lacks, one typed function each. No policy lives here.

Numbers from 424 up are the same on every architecture; older calls go through libc.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import signal
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

RESOLVE_NO_XDEV, RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS = 1, 2, 4
RESOLVE_BENEATH, RESOLVE_IN_ROOT = 8, 16

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
_PR_SET_CHILD_SUBREAPER, _PR_SET_PDEATHSIG = 36, 1
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


def syscall(call: str, number: int, *args: object) -> int:
    """Make a system call. Raises OSError with a text that starts with `call`."""
    return _checked(_libc.syscall(number, *args), call)


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


# With fixed argument types, which saves conversions: it opens every file of a sandbox.
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
    """Result of `clone3`: in the child `pid` is 0, in the parent `pidfd` refers to the child."""

    __slots__ = ("pid", "pidfd")

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.pidfd = pidfd


def clone3(namespaces: int, *, cgroup: int | None = None) -> CloneResult:
    """Fork into new namespaces, and into a cgroup of version 2 by its descriptor.

    Python is not notified of the fork, so the caller must be single-threaded.
    """
    pidfd = ctypes.c_int(-1)
    args = _CloneArgs(
        flags=namespaces | _CLONE_PIDFD, pidfd=ctypes.addressof(pidfd), exit_signal=_SIGCHLD
    )
    if cgroup is not None:
        args.flags |= _CLONE_INTO_CGROUP
        args.cgroup = cgroup
    pid = syscall("clone3", _SYS_CLONE3, ctypes.byref(args), ctypes.sizeof(args))
    return CloneResult(pid, pidfd.value)


def unshare(namespaces: int) -> None:
    """Move this process into new namespaces."""
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
    """Return a descriptor of a detached copy of the mount at `path`."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | (_AT_RECURSIVE if recursive else 0)
    return syscall(f"open_tree {path}", _SYS_OPEN_TREE, at, _path(path), flags)


def move_mount(tree: int, target: str) -> None:
    """Attach a detached mount at `target`."""
    call, flags = f"move_mount {target}", _MOVE_MOUNT_F_EMPTY_PATH
    syscall(call, _SYS_MOVE_MOUNT, tree, b"", _AT_FDCWD, _path(target), flags)


def move_mount_onto(tree: int, directory: int) -> None:
    """Attach a detached mount at an open directory."""
    flags = _MOVE_MOUNT_F_EMPTY_PATH | _MOVE_MOUNT_T_EMPTY_PATH
    syscall("move_mount", _SYS_MOVE_MOUNT, tree, b"", directory, b"", flags)


def make_filesystem(kind: str, options: Mapping[str, str | None], attributes: int) -> int:
    """Return a descriptor of a new, detached filesystem; a flag has the value None."""
    context = syscall(f"fsopen {kind}", _SYS_FSOPEN, _path(kind), _FSOPEN_CLOEXEC)
    call = f"fsconfig {kind}"
    try:
        for name, value in options.items():
            command = _FSCONFIG_SET_FLAG if value is None else _FSCONFIG_SET_STRING
            key, text = _path(name), _path(value)
            syscall(f"{call} {name}", _SYS_FSCONFIG, context, command, key, text, 0)
        syscall(call, _SYS_FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0)
        return syscall(f"fsmount {kind}", _SYS_FSMOUNT, context, _FSMOUNT_CLOEXEC, attributes)
    finally:
        os.close(context)


def setns(namespace: int, kind: int) -> None:
    """Enter a namespace of that kind. The process must be single-threaded."""
    _checked(_libc.setns(namespace, kind), "setns")


def mount_setattr(tree: int, attributes: int, *, userns: int | None = None) -> None:
    """Set attributes of a detached mount; with `userns`, map the ids of its files by it."""
    attr = _MountAttr(attr_set=attributes)
    if userns is not None:
        attr.attr_set |= ATTR_IDMAP
        attr.userns_fd = userns
    size = ctypes.sizeof(attr)
    syscall(
        "mount_setattr", _SYS_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, ctypes.byref(attr), size
    )


def openat2(directory: int, path: str | bytes, flags: int, mode: int = 0, *, resolve: int) -> int:
    """Open `path` relative to a directory, under the rules of `resolve`. Always close-on-exec.

    The kernel returns EAGAIN if a directory was renamed while it resolved a `..`, and for a leased
    file. Both are retried, but not for ever: a sandbox can sustain either.
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
    """Return the magic number, as in statfs(2), of the filesystem of an open file."""
    # struct statfs starts with it, and takes 120 bytes.
    statfs = ctypes.create_string_buffer(256)
    _checked(_libc.fstatfs(fd, statfs), "fstatfs")
    (magic,) = struct.unpack_from("@l", statfs)
    return int(magic)


def sethostname(name: str) -> None:
    """Set the host name of this UTS namespace."""
    data = name.encode()
    _checked(_libc.sethostname(data, len(data)), "sethostname")


def set_dumpable(dumpable: bool) -> None:
    """Allow or deny other processes of the same user to trace and inspect this one."""
    _prctl(_PR_SET_DUMPABLE, int(dumpable))


def set_process_name(name: str) -> None:
    """Set the name that `ps` and /proc show, truncated to 15 bytes."""
    buffer = ctypes.create_string_buffer(name.encode()[:15])
    _prctl(_PR_SET_NAME, ctypes.addressof(buffer))


def set_command_line(text: str) -> None:
    """Set the command line in /proc of this process and of those that it forks."""
    with open("/proc/self/stat", "rb") as stat:
        fields = stat.read().rpartition(b") ")[2].split()
    start, end = int(fields[45]), int(fields[46])
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text.encode()[: end - start - 1], min(len(text), end - start - 1))


def set_no_new_privileges() -> None:
    """Prevent every later exec from gaining privileges."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def become_subreaper() -> None:
    """Become the parent of every orphaned descendant."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends. The parent may have ended before."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def limit_capabilities(keep: Iterable[int]) -> None:
    """Remove all capabilities except `keep` from the bounding set."""
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
    """Set the permitted and effective capabilities; none are inheritable."""
    mask = sum(1 << capability for capability in keep)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    _checked(_libc.capset(header, struct.pack("=6I", low, low, 0, high, high, 0)), "capset")


def raise_loopback() -> None:
    """Bring up the loopback interface of this network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = bytearray(struct.pack("16sh22x", b"lo", 0))
        fcntl.ioctl(sock, _SIOCGIFFLAGS, request)
        (flags,) = struct.unpack_from("h", request, 16)
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags | _IFF_UP))


def _prctl(option: int, value: int) -> None:
    _checked(_libc.prctl(option, value, 0, 0, 0), f"prctl {option}")


def _path(path: str | None) -> bytes | None:
    return None if path is None else os.fsencode(path)
