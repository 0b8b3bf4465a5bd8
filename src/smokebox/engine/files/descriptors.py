"""How a file below a hostile root is opened: by openat2, never by a path of the host.

Paths may be anything that a sandbox made up. What the kernel itself makes up (/proc,
/sys) may be looked at, but not read or changed with the rights of this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat as stat_bits
from typing import TYPE_CHECKING

from smokebox.engine.jail import linux
from smokebox.engine.jail.linux import openat2
from smokebox.errors import AccessDenied, PathError, PathIsDirectory, SmokeboxError, from_os_error

if TYPE_CHECKING:
    from collections.abc import Iterator

IN_ROOT = linux.RESOLVE_IN_ROOT | linux.RESOLVE_NO_MAGICLINKS
BENEATH = linux.RESOLVE_BENEATH | linux.RESOLVE_NO_SYMLINKS | linux.RESOLVE_NO_MAGICLINKS
SEARCH = os.O_PATH | os.O_DIRECTORY
LIST = os.O_RDONLY | os.O_DIRECTORY
# Without O_NONBLOCK, opening a FIFO waits for its other end, and a leased file for its holder.
READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
HOP = 4_000
DEEPEST = 16 * HOP

# null, zero, full, random and urandom: what every program may write to.
_HARMLESS = {os.makedev(1, minor) for minor in (3, 5, 7, 8, 9)}
_KERNEL_FILESYSTEMS = {
    0x9FA0: "proc",
    0x62656572: "sysfs",
    0x27E0EB: "cgroup",
    0x63677270: "cgroup2",
    0x64626720: "debugfs",
    0x74726163: "tracefs",
    0x73636673: "securityfs",
    0xCAFE4A11: "bpf",
    0x62656570: "configfs",
    0x42494E4D: "binfmt_misc",
    0x6E736673: "nsfs",
    0x19800202: "mqueue",
    0xDE5E81E4: "efivarfs",
    0x6165676C: "pstore",
    0xF97CFF8C: "selinuxfs",
    0x43415D53: "smackfs",
    0x5A3C69F0: "apparmorfs",
    0x65735543: "fusectl",
    0x1CD1: "devpts",
}


_libc = ctypes.CDLL(None, use_errno=True)
_fstatfs = _libc["fstatfs"]
_fstatfs.argtypes = (ctypes.c_int, ctypes.c_void_p)


def open_beneath(top: int, path: str, flags: int) -> int:
    """A descriptor of what is at a relative path, through directories only and no link.

    Longer paths than the kernel takes at once are walked in several hops.
    """
    fd = os.dup(top)
    # Names count in bytes, and fsdecode keeps one character for each that is not UTF-8.
    rest = os.fsencode(path)
    if len(rest) > DEEPEST:
        os.close(fd)
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path)
    try:
        while len(rest) > HOP:
            cut = rest.rindex(b"/", 0, HOP)
            fd = _step(fd, rest[:cut], SEARCH)
            rest = rest[cut + 1 :]
        return _step(fd, rest or b".", flags)
    except BaseException:
        os.close(fd)
        raise


def _step(fd: int, path: bytes, flags: int) -> int:
    below = openat2(fd, path, flags, resolve=BENEATH)
    os.close(fd)
    return below


def open_child(directory: int, name: str, flags: int, mode: int = 0) -> int:
    """A descriptor of one name in a directory; ELOOP or ENOTDIR where it is a link."""
    if "/" in name or name in ("", ".", ".."):
        raise ValueError(f"not the name of one file: {name!r}")
    return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=directory)


@contextlib.contextmanager
def closing(fd: int) -> Iterator[int]:
    """Close a descriptor at the end."""
    try:
        yield fd
    finally:
        os.close(fd)


def of_kernel(fd: int) -> bool:
    """Whether a descriptor leads into a filesystem that the kernel makes up."""
    found = ctypes.create_string_buffer(256)
    if _fstatfs(fd, found):
        return False
    return int.from_bytes(found.raw[:4], "little") in _KERNEL_FILESYSTEMS


def refuse_kernel(fd: int, path: str) -> None:
    """Raise for what the kernel makes up.

    Most of it asks who the process is, not who the thread acts as: through a sandbox's
    /proc a privileged engine would set the host's own switches.
    """
    if of_kernel(fd):
        raise AccessDenied(
            path, f"{path} is made up by the kernel.", hint="Use a command, such as cat, for it."
        )


def open_regular(root: int, path: str, flags: int = READ, mode: int = 0) -> int:
    """A descriptor of a regular file in a root; a directory, a pipe or a device is refused."""
    fd = openat2(root, path, flags | os.O_NONBLOCK | os.O_NOCTTY, mode=mode, resolve=IN_ROOT)
    try:
        check_regular(fd, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_regular(fd: int, path: str) -> os.stat_result:
    """What a descriptor is of, which is a regular file of no kernel's making."""
    found = os.fstat(fd)
    if not stat_bits.S_ISREG(found.st_mode):
        raise not_regular(path, found.st_mode)
    refuse_kernel(fd, path)
    return found


def not_regular(path: str, mode: int) -> PathError:
    """The error for what is no regular file."""
    if stat_bits.S_ISDIR(mode):
        return PathIsDirectory(path)
    return PathError(path, f"not a regular file: {path}.", hint="Use a command for it.")


def is_harmless_device(found: os.stat_result) -> bool:
    """Whether this is /dev/null or one of its like, which take whatever is written."""
    return stat_bits.S_ISCHR(found.st_mode) and found.st_rdev in _HARMLESS


class naming:
    """Turn what the operating system raises into the class of ours that names the path."""

    __slots__ = ("_path",)

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, SmokeboxError):
            raise from_os_error(error, self._path) from error
