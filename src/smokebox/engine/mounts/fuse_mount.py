"""Mounting of a FUSE filesystem into a running jail, and unmounting.

Both enter the mount namespace of the jail in a forked process that has one thread and does nothing
else. Programs in the jail can neither see that process nor mount themselves.
"""

from __future__ import annotations

# Imported by `socket.send_fds` on its first call, when imports are no longer possible.
import array  # noqa: F401
import contextlib
import errno
import os
import socket
import sys
from typing import NoReturn

from smokebox.engine.jail import linux
from smokebox.engine.mounts.fuse_protocol import DEVICE, MAGIC
from smokebox.runtime.supervisor import receive_fds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# A symlink in the path could lead us to a mount point that only we may change.
_NO_SYMLINKS = linux.RESOLVE_IN_ROOT | linux.RESOLVE_NO_SYMLINKS | linux.RESOLVE_NO_MAGICLINKS
_UMOUNT_NOFOLLOW = 8
_MESSAGE_SIZE = 512


class MountPoint:
    """A directory of the jail with these namespaces.

    A `mapped` jail has its own ids, and we may mount in it from outside. Any other belongs to our
    user, who may mount only inside its user namespace.
    """

    def __init__(
        self, *, user_namespace: int, mount_namespace: int, root: int, path: str, mapped: bool
    ) -> None:
        self.path = path
        self.mapped = mapped
        self._user_namespace = user_namespace
        self._mount_namespace = mount_namespace
        self._root = root

    def enter_user_namespace(self) -> None:
        """Acquire the privilege to mount in the jail, unless we have it outside."""
        if not self.mapped:
            linux.setns(self._user_namespace, linux.NEWUSER)

    def enter_mount_namespace(self) -> None:
        """Enter the mount namespace of the jail."""
        linux.setns(self._mount_namespace, linux.NEWNS)

    def open(self) -> int:
        """Open the directory."""
        return _open(self._root, self.path)

    def open_parent(self) -> int:
        """Open the parent of the directory."""
        return _open(self._root, self.path.rpartition("/")[0] or "/")


def is_mounted(root: int, path: str) -> bool:
    """Return whether a FUSE filesystem is mounted there; blocks until its server responds."""
    fd = _open(root, path)
    try:
        return linux.filesystem_of(fd) == MAGIC
    finally:
        os.close(fd)


class PendingMount:
    """A mount that is ready to be made, by a forked process that keeps the privileges for it."""

    def __init__(self, point: MountPoint, *, read_only: bool) -> None:
        self._control, theirs = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            self._control.close()
            _run(theirs, lambda: _mount(point, theirs, read_only=read_only))
        theirs.close()

    def mount(self) -> int:
        """Mount, and return the descriptor of the FUSE connection."""
        with self._control as control:
            control.send(b"go")
            message, fds = receive_fds(control, _MESSAGE_SIZE, 1)
        os.waitpid(self._pid, 0)
        if not fds:
            raise _decode_error(message)
        return fds[0]

    def cancel(self) -> None:
        """End the process without mounting."""
        self._control.close()
        os.waitpid(self._pid, 0)


def unmount(point: MountPoint, *, lazy: bool) -> None:
    """Unmount; raises EBUSY while the mount is in use, unless `lazy`."""
    ours, theirs = socket.socketpair()
    with ours:
        pid = os.fork()
        if pid == 0:
            ours.close()
            _run(theirs, lambda: _unmount(point, theirs, lazy=lazy))
        theirs.close()
        message = ours.recv(_MESSAGE_SIZE)
        os.waitpid(pid, 0)
    if message != b"ok":
        raise _decode_error(message)


def _mount(point: MountPoint, control: socket.socket, *, read_only: bool) -> None:
    if not control.recv(2):
        return
    directory = point.open()
    # The device must be opened and mounted in the same user namespace.
    point.enter_user_namespace()
    device = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    if not point.mapped:
        point.enter_mount_namespace()
    tree = linux.make_filesystem(
        "fuse",
        {
            "source": "bucket",
            "fd": str(device),
            "rootmode": "40000",
            "user_id": "0",
            "group_id": "0",
            "default_permissions": None,
            # Needed by the other users of a mapped jail, and by the engine.
            **({"allow_other": None} if point.mapped else {}),
            **({"ro": None} if read_only else {}),
        },
        linux.ATTR_NOSUID | linux.ATTR_NODEV | (linux.ATTR_RDONLY if read_only else 0),
    )
    if point.mapped:
        point.enter_mount_namespace()
    linux.move_mount_onto(tree, directory)
    socket.send_fds(control, [b"ok"], [device])


def _unmount(point: MountPoint, control: socket.socket, *, lazy: bool) -> None:
    parent = point.open_parent()
    point.enter_user_namespace()
    point.enter_mount_namespace()
    os.fchdir(parent)
    linux.umount(
        point.path.rpartition("/")[2], _UMOUNT_NOFOLLOW | (linux.MNT_DETACH if lazy else 0)
    )
    control.send(b"ok")


def _run(control: socket.socket, work: Callable[[], None]) -> NoReturn:
    """Run `work` in a forked process, report its error, and exit without any cleanup."""
    # In the mount namespace of a jail, imports would load code of its programs.
    sys.meta_path.clear()
    try:
        work()
    except BaseException as error:
        number = (isinstance(error, OSError) and error.errno) or errno.EIO
        text = f"{number} {getattr(error, 'strerror', None) or error}"
        with contextlib.suppress(OSError):
            control.send(text.encode(errors="replace")[:_MESSAGE_SIZE])
    finally:
        os._exit(0)


def _open(root: int, path: str) -> int:
    return linux.openat2(root, path, os.O_PATH | os.O_DIRECTORY, resolve=_NO_SYMLINKS)


def _decode_error(message: bytes) -> OSError:
    number, _, text = message.decode(errors="replace").partition(" ")
    code = int(number) if number.isdigit() else errno.EIO
    return OSError(code, text or os.strerror(code))
