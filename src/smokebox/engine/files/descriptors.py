"""Opening files below a hostile root: by openat2, never by a path of the host.

The sandbox controls the paths. Files of kernel filesystems (/proc, /sys) may be inspected, but
not read or changed with the privileges of this process.
"""

from __future__ import annotations

import contextlib
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
# Errors of opening a name that was removed or replaced since it was listed.
REPLACED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
# The kernel takes paths of less than 4096 bytes.
MAX_HOP = 4_000
MAX_PATH = 16 * MAX_HOP

# null, zero, full, random and urandom, which every program may write to.
_HARMLESS_DEVICES = {os.makedev(1, minor) for minor in (3, 5, 7, 8, 9)}
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


def open_beneath(top: int, path: str, flags: int) -> int:
    """Open a relative path below a directory, following no symlink.

    Paths longer than the kernel takes are opened in several hops.
    """
    fd = os.dup(top)
    # Limits count bytes, and fsdecode keeps one character for each byte that is not UTF-8.
    rest = os.fsencode(path)
    try:
        if len(rest) > MAX_PATH:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path)
        while len(rest) > MAX_HOP:
            cut = rest.rindex(b"/", 0, MAX_HOP)
            below = openat2(fd, rest[:cut], SEARCH, resolve=BENEATH)
            os.close(fd)
            fd = below
            rest = rest[cut + 1 :]
        return openat2(fd, rest or b".", flags, resolve=BENEATH)
    finally:
        os.close(fd)


def open_child(directory: int, name: str, flags: int, mode: int = 0) -> int:
    """Open one name in a directory; fails with ELOOP or ENOTDIR for a symlink."""
    if "/" in name or name in ("", ".", ".."):
        raise ValueError(f"not the name of one file: {name!r}")
    return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=directory)


@contextlib.contextmanager
def closing(fd: int) -> Iterator[int]:
    """Close a descriptor at the end of the block."""
    try:
        yield fd
    finally:
        os.close(fd)


def is_kernel_file(fd: int) -> bool:
    """Return whether a descriptor is of a filesystem that the kernel generates, such as /proc."""
    return linux.filesystem_of(fd) in _KERNEL_FILESYSTEMS


def refuse_kernel_file(fd: int, path: str) -> None:
    """Raise for a file of a kernel filesystem.

    Most of them check the process, not the file identity of the thread: through a sandbox's
    /proc a privileged engine would change settings of the host.
    """
    if is_kernel_file(fd):
        raise AccessDenied(
            path,
            f"{path} is in a filesystem of the kernel.",
            hint="Use a command for it, such as cat.",
        )


def open_regular(root: int, path: str) -> int:
    """Open a regular file in a root for reading; raises for a directory, pipe or device."""
    fd = openat2(root, path, READ, resolve=IN_ROOT)
    try:
        check_regular(fd, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_regular(fd: int, path: str) -> os.stat_result:
    """Return the status of a regular file; raises for anything else and for kernel files."""
    found = os.fstat(fd)
    if not stat_bits.S_ISREG(found.st_mode):
        raise not_regular(path, found.st_mode)
    refuse_kernel_file(fd, path)
    return found


def not_regular(path: str, mode: int) -> PathError:
    """Return the error for something that is not a regular file."""
    if stat_bits.S_ISDIR(mode):
        return PathIsDirectory(path)
    return PathError(path, f"not a regular file: {path}.", hint="Use a command for it.")


def is_harmless_device(found: os.stat_result) -> bool:
    """Return whether this is /dev/null or a similar device that accepts every write."""
    return stat_bits.S_ISCHR(found.st_mode) and found.st_rdev in _HARMLESS_DEVICES


class path_errors:
    """Translate an OSError in the block into the `PathError` that names `path`."""

    __slots__ = ("_path",)

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, SmokeboxError):
            raise from_os_error(error, self._path) from error
