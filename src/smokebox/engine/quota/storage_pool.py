"""The storage pool: a file system with project quotas in one sparse file of the state directory.

It is for hosts where the state directory's own file system has no project quotas.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from typing import TYPE_CHECKING, NoReturn

from smokebox.engine.jail import linux
from smokebox.engine.quota import kernel, loop_device
from smokebox.errors import InvalidOption, IsolationUnavailable, StorageFull
from smokebox.limits import parse_size

if TYPE_CHECKING:
    from collections.abc import Sequence

OPTION = "storage_pool"
# mkfs.xfs refuses less than 300 MiB.
SMALLEST = 512 << 20
IMAGE, MOUNT_POINT = "pool.xfs", "pool"

_SECONDS = 120.0
# Space that is freed inside is given back to the host.
_MOUNT_OPTIONS = "pquota,discard"
_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
_HINT = (
    f"Leave the pool out ([storage] of server.toml, {OPTION}=): disk use is then measured, and a "
    "sandbox above its limit is stopped."
)


class StoragePool:
    """A mounted pool."""

    def __init__(self, mount_point: str) -> None:
        self._mount_point = mount_point

    @property
    def sandboxes(self) -> str:
        """The directory that holds one directory per sandbox."""
        return os.path.join(self._mount_point, "boxes")

    def close(self) -> None:
        """Unmount it, unless programs still use it."""
        with contextlib.suppress(OSError):
            linux.umount(self._mount_point)


def kernel_lacks_quotas() -> bool:
    """Return whether the kernel has XFS, but no quotas in it, so that no pool can be mounted."""
    return os.path.exists("/proc/fs/xfs/stat") and not os.path.exists("/proc/fs/xfs/xqmstat")


def parse_pool_size(value: object, option: str = OPTION) -> int:
    """Return the bytes of a pool. Raises `InvalidOption` with the name of the option."""
    size = parse_size(value, option)
    if size < SMALLEST:
        raise InvalidOption(
            f"{option} must be at least {SMALLEST >> 20} MiB, not {value!r}.",
            hint='Pass for example "50GiB". It takes only the space of the files in it.',
            option=option,
            value=value,
        )
    # The file system works in whole blocks.
    return size >> 12 << 12


def open_pool(home: str, size: int | None) -> StoragePool | None:
    """Mount the pool of a state directory. The caller holds the lock of the directory.

    A size creates the pool, or grows it. Without one, an existing pool is mounted for the
    sandboxes in it.

    Raises:
        InvalidOption: The pool is larger than the size.
        IsolationUnavailable: This host cannot mount one; the hint has the next step.
    """
    image, mount_point = os.path.join(home, IMAGE), os.path.join(home, MOUNT_POINT)
    found = _size(image)
    if size is None and not found:
        return None
    if size is not None and size < found:
        raise InvalidOption(
            f"the storage pool {image} has {found} bytes, and cannot shrink to {size}.",
            hint=f"Set {OPTION} to at least {found}, or destroy its sandboxes and remove the file "
            "while no engine runs.",
            option=OPTION,
            value=size,
        )
    if os.geteuid() != 0:
        _refuse(f"only root can mount the storage pool {image}", "Run the engine as root.")
    created, mounted = not found, os.path.ismount(mount_point)
    if created:
        assert size is not None
        _create(image, size)
    try:
        if not mounted:
            _mount(image, mount_point)
        if size is not None:
            _grow(image, mount_point, size)
        _check(mount_point)
        os.makedirs(os.path.join(mount_point, "boxes"), mode=0o700, exist_ok=True)
    except BaseException:
        if not mounted:
            with contextlib.suppress(OSError):
                linux.umount(mount_point)
        if created:
            os.unlink(image)
            with contextlib.suppress(OSError):
                os.rmdir(mount_point)
        raise
    return StoragePool(mount_point)


def _size(image: str) -> int:
    try:
        return os.stat(image).st_size
    except FileNotFoundError:
        return 0


def _create(image: str, size: int) -> None:
    """Create a sparse file with an empty file system, under its name only when it is complete."""
    partial = f"{image}.partial"
    with open(partial, "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.truncate(size)
    try:
        _run(["mkfs.xfs", "-q", "-f", "-m", "reflink=1", partial])
        os.rename(partial, image)
    except BaseException:
        os.unlink(partial)
        raise


def _mount(image: str, mount_point: str) -> None:
    os.makedirs(mount_point, mode=0o700, exist_ok=True)
    held = -1
    device = loop_device.find(image)
    try:
        if device is None:
            fd = os.open(image, os.O_RDWR | os.O_CLOEXEC)
            try:
                # Held open until it is mounted: a device without users is detached.
                held = loop_device.attach(fd, image)
            finally:
                os.close(fd)
            device = os.readlink(f"/proc/self/fd/{held}")
        flags = linux.MS_NOSUID | linux.MS_NODEV
        linux.mount(device, mount_point, "xfs", flags, _MOUNT_OPTIONS)
    except OSError as error:
        _refuse_mount(error, image)
    finally:
        if held >= 0:
            os.close(held)


def _grow(image: str, mount_point: str, size: int) -> None:
    """Grow the pool, also after a crash between the two steps."""
    if _size(image) < size:
        os.truncate(image, size)
    device = loop_device.find(image)
    if device is not None:
        loop_device.refresh_size(device)
        _run(["xfs_growfs", "-d", mount_point])


def _check(mount_point: str) -> None:
    fd = os.open(mount_point, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not kernel.is_enforced(fd):
            _refuse(
                f"{mount_point} is mounted without project quotas",
                f"Unmount it with `umount {mount_point}`, and start again.",
            )
    finally:
        os.close(fd)


def _run(command: Sequence[str]) -> None:
    program = shutil.which(command[0], path=_PATH)
    if program is None:
        _refuse(
            f"the storage pool needs {command[0]}, which is not installed",
            "Install it: `apt-get install xfsprogs`.",
        )
    done = subprocess.run(
        [program, *command[1:]],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=_SECONDS,
    )
    if done.returncode:
        text = done.stderr.decode(errors="replace").strip()
        if "No space left" in text:
            raise StorageFull(command[-1], hint="Free space on the disk of the state directory.")
        _refuse(f"{command[0]} failed for the storage pool: {text:.300}", _HINT)


def _refuse_mount(error: OSError, image: str) -> NoReturn:
    hint = _HINT
    if error.errno in (errno.ENOENT, errno.ENXIO):
        hint = f"This host has no loop devices: run `modprobe loop`. {_HINT}"
    elif error.errno == errno.ENODEV:
        hint = f"The kernel has no XFS: run `modprobe xfs`. {_HINT}"
    elif error.errno == errno.EINVAL:
        hint = f"The kernel's XFS has no quotas (CONFIG_XFS_QUOTA). {_HINT}"
    elif error.errno in (errno.EPERM, errno.EACCES):
        hint = f"Root of a container needs --privileged to mount it. {_HINT}"
    raise IsolationUnavailable(
        f"the storage pool {image} cannot be mounted: {error.strerror}.", hint=hint
    ) from error


def _refuse(message: str, hint: str) -> NoReturn:
    raise IsolationUnavailable(f"{message}.", hint=hint)
