"""The kernel's small text files: the controls of cgroups, and what /proc tells of a process."""

from __future__ import annotations

import errno
import os
import resource

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


def write(path: str, text: str) -> None:
    """Write a control in one call, as the kernel wants it; the file must be there."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def write_if_there(path: str, text: str) -> bool:
    """The same for a control that not every kernel has; whether this one does."""
    try:
        write(path, text)
    except OSError as error:
        # ENODEV: removed while it was open.
        if error.errno not in (errno.ENOENT, errno.ENODEV):
            raise
        return False
    return True


def read(path: str) -> str:
    """A small file of the kernel's, or "" where there is none (or not any more)."""
    try:
        with open(path, "rb", 0) as file:
            return file.readall().decode(errors="replace")
    except OSError:
        return ""


def number(path: str) -> int | None:
    """The one number in a file, or None."""
    text = read(path).strip()
    return int(text) if text.isdigit() else None


def field(path: str, name: str) -> int | None:
    """The number on the line that begins with `name`, or None."""
    for line in read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return None


def stat_fields(pid: int) -> list[str]:
    """The fields of /proc/pid/stat from the state on; a name may hold anything before them."""
    return read(f"/proc/{pid}/stat").rpartition(") ")[2].split()


def state(pid: int) -> str:
    """Its letter in /proc; X when it is gone."""
    return next(iter(stat_fields(pid)), "X")


def threads(pid: int) -> int:
    """How many tasks it has."""
    fields = stat_fields(pid)
    return int(fields[17]) if fields else 0


def cpu_seconds(pid: int) -> float:
    """The time that it and the children it reaped have had."""
    return sum(map(int, stat_fields(pid)[11:15])) / os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> int:
    """The bytes it holds, with its share of what it shares."""
    for line in read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    # Another user's, by setuid: what it shares with others is counted with each.
    pages = read(f"/proc/{pid}/statm").split()[1:2]
    return sum(map(int, pages)) * resource.getpagesize()


def ancestors(pid: int) -> Iterator[int]:
    """The process, its parent, and so on up to the first."""
    while pid:
        yield pid
        fields = stat_fields(pid)
        pid = int(fields[1]) if fields else 0
