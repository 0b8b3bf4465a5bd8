"""Small text files of the kernel: cgroup controls, and processes in /proc."""

from __future__ import annotations

import errno
import os
import resource

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


def write(path: str, text: str) -> None:
    """Write an existing control file in one call, as the kernel requires."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def write_if_exists(path: str, text: str) -> bool:
    """Write a control file that not every kernel has; False if it does not exist."""
    try:
        write(path, text)
    except OSError as error:
        # ENODEV: removed while it was open.
        if error.errno not in (errno.ENOENT, errno.ENODEV):
            raise
        return False
    return True


def read(path: str) -> str:
    """Read a file, or return "" if it cannot be read."""
    try:
        with open(path, "rb", 0) as file:
            return file.readall().decode(errors="replace")
    except OSError:
        return ""


def number(path: str) -> int | None:
    """Return the number in a file, or None."""
    text = read(path).strip()
    return int(text) if text.isdigit() else None


def field(path: str, name: str) -> int | None:
    """Return the number on the line that starts with `name`, or None."""
    for line in read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return None


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/pid/stat after the name, which may hold anything."""
    return read(f"/proc/{pid}/stat").rpartition(") ")[2].split()


def state(pid: int) -> str:
    """Return the state letter of a process; X if it is gone."""
    return next(iter(stat_fields(pid)), "X")


def threads(pid: int) -> int:
    """Return the number of threads of a process."""
    fields = stat_fields(pid)
    return int(fields[17]) if fields else 0


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and the children it has reaped."""
    return sum(map(int, stat_fields(pid)[11:15])) / os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> int:
    """Return the memory of a process in bytes, with its share of shared memory."""
    for line in read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    # A process of another user (setuid): shared memory counts in full.
    pages = read(f"/proc/{pid}/statm").split()[1:2]
    return sum(map(int, pages)) * resource.getpagesize()


def network_buffers() -> int:
    """Return the bytes of memory of all TCP and UDP sockets of the host."""
    pages = 0
    for line in read("/proc/net/sockstat").splitlines():
        name, *fields = line.split()
        if name in ("TCP:", "UDP:") and "mem" in fields:
            pages += int(fields[fields.index("mem") + 1])
    return pages * resource.getpagesize()


def ancestors(pid: int) -> Iterator[int]:
    """Yield a process, its parent, and so on up to the first process."""
    while pid:
        yield pid
        fields = stat_fields(pid)
        pid = int(fields[1]) if fields else 0
