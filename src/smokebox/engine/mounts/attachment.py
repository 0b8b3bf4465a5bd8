"""Puts a filesystem of ours into a running jail, and takes it out again.

Both enter the mounts of the jail, in a process of their own that has one thread and does
nothing else there. Programs inside cannot see that process, and cannot mount.
"""

from __future__ import annotations

# As `socket.send_fds` does when it is called.
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

# No symlink on the way: programs inside could lead us to what only we may mount on or unmount.
_NO_LINKS = linux.RESOLVE_IN_ROOT | linux.RESOLVE_NO_SYMLINKS | linux.RESOLVE_NO_MAGICLINKS
_UMOUNT_NOFOLLOW = 8
_MESSAGE_SIZE = 512


class MountPoint:
    """Where to mount: a directory of the jail with these namespaces.

    A jail that is `mapped` has ids of its own, and we have the rights to mount for it from
    outside. Any other is of our own user, who may do so inside only.
    """

    def __init__(self, *, user: int, mounts: int, root: int, path: str, mapped: bool) -> None:
        self.path = path
        self.mapped = mapped
        self._user = user
        self._mounts = mounts
        self._root = root

    def become_owner(self) -> None:
        """Have the rights of the user of the jail who may mount in it, if not more."""
        if not self.mapped:
            linux.setns(self._user, linux.NEWUSER)

    def enter(self) -> None:
        """Be among its mounts."""
        linux.setns(self._mounts, linux.NEWNS)

    def open(self) -> int:
        """The directory that is there now."""
        return _open(self._root, self.path)

    def open_above(self) -> int:
        """The directory that it is in."""
        return _open(self._root, self.path.rpartition("/")[0] or "/")


def is_mounted(root: int, path: str) -> bool:
    """Whether a filesystem of this kind is there, and answers."""
    fd = _open(root, path)
    try:
        return linux.filesystem_of(fd) == MAGIC
    finally:
        os.close(fd)


class Attachment:
    """A mount that is ready to be made, by a process that keeps the rights for it."""

    def __init__(self, place: MountPoint, *, read_only: bool) -> None:
        self._control, theirs = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            self._control.close()
            _perform(theirs, lambda: _attach(place, theirs, read_only=read_only))
        theirs.close()

    def make(self) -> int:
        """Mount, and give what the kernel is answered by."""
        with self._control as control:
            control.send(b"go")
            message, fds = receive_fds(control, _MESSAGE_SIZE, 1)
        self._end()
        if not fds:
            raise _refusal(message)
        return fds[0]

    def leave(self) -> None:
        """Do not mount."""
        self._control.close()
        self._end()

    def _end(self) -> None:
        os.waitpid(self._pid, 0)


def detach(place: MountPoint, *, lazy: bool) -> None:
    """Unmount there; raises EBUSY where somebody uses it, unless `lazy`."""
    ours, theirs = socket.socketpair()
    with ours:
        pid = os.fork()
        if pid == 0:
            ours.close()
            _perform(theirs, lambda: _detach(place, theirs, lazy=lazy))
        theirs.close()
        message = ours.recv(_MESSAGE_SIZE)
        os.waitpid(pid, 0)
    if message != b"ok":
        raise _refusal(message)


def _attach(place: MountPoint, control: socket.socket, *, read_only: bool) -> None:
    if not control.recv(2):
        return
    directory = place.open()
    # Whoever opens the device and who mounts have to be of the same user namespace.
    place.become_owner()
    device = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    if not place.mapped:
        place.enter()
    tree = linux.make_filesystem(
        "fuse",
        {
            "source": "bucket",
            "fd": str(device),
            "rootmode": "40000",
            "user_id": "0",
            "group_id": "0",
            "default_permissions": None,
            # All of one user have its ids; for those of many, and for the engine, it is said.
            **({"allow_other": None} if place.mapped else {}),
            **({"ro": None} if read_only else {}),
        },
        linux.ATTR_NOSUID | linux.ATTR_NODEV | (linux.ATTR_RDONLY if read_only else 0),
    )
    if place.mapped:
        place.enter()
    linux.move_mount_onto(tree, directory)
    socket.send_fds(control, [b"ok"], [device])


def _detach(place: MountPoint, control: socket.socket, *, lazy: bool) -> None:
    above = place.open_above()
    place.become_owner()
    place.enter()
    os.fchdir(above)
    linux.umount(
        place.path.rpartition("/")[2], _UMOUNT_NOFOLLOW | (linux.MNT_DETACH if lazy else 0)
    )
    control.send(b"ok")


def _perform(control: socket.socket, work: Callable[[], None]) -> NoReturn:
    """Do it, say what stopped it, and end: nothing of the process that was forked runs here."""
    # Among the mounts of a jail, whatever is imported would be code of its programs.
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
    return linux.openat2(root, path, os.O_PATH | os.O_DIRECTORY, resolve=_NO_LINKS)


def _refusal(message: bytes) -> OSError:
    number, _, text = message.decode(errors="replace").partition(" ")
    code = int(number) if number.isdigit() else errno.EIO
    return OSError(code, text or os.strerror(code))
