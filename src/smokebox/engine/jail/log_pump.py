"""From the pipes of a lasting program to its log files, inside the jail.

A program that had the files themselves would empty them with `echo oops > /dev/stderr`, and
could fill the disk of the host. Pipes are what programs expect, and the supervisor, which
outlives the engine, moves what is in them.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import time

# How much of the end of a log stays, and in which steps the rest goes. Whole blocks go, so
# that no zeros are left where text was.
KEEP = 64 << 20
STEP = 4 << 20

_PIPE_SIZE = 1 << 16
_BUSY_PIPE_SIZE = 1 << 18
_PUNCH_HOLE_KEEP_SIZE = 3


class LogPump:
    """The read ends of pipes, each with the log file that it is moved to.

    With a rate it moves no more bytes a second than that, and the program waits.
    """

    def __init__(self, logs: list[int], uid: int, gid: int, rate: int) -> None:
        self.rate = rate
        # A tenth of a second's worth at a time: so long the supervisor may be deaf.
        self.most = min(_BUSY_PIPE_SIZE, rate // 10 or 1) if rate else _BUSY_PIPE_SIZE
        self.logs: dict[int, int] = {}
        self.starts: dict[int, int] = {}
        self.lost: dict[int, int] = {}
        self.writers: list[int] = []
        for log in logs:
            read, write = _pipe_of(uid, gid)
            os.set_blocking(read, False)
            self.logs[read] = log
            self.starts[read] = 0
            self.writers.append(write)

    def move(self, read: int) -> bool:
        """Move what a pipe holds; False when nobody can write to it any more."""
        count = self.splice(read, self.most)
        if self.rate and count > 0:
            time.sleep(count / self.rate)
        return count != 0

    def drain(self) -> None:
        """Move what a program that has ended left: no more than the pipes can hold."""
        for read in self.logs:
            self.splice(read, _BUSY_PIPE_SIZE)

    def splice(self, read: int, most: int) -> int:
        """How much was moved; 0 at the end, and -1 for nothing at this moment."""
        log = self.logs[read]
        try:
            if read in self.lost:
                os.write(log, b"\n[smokebox: %d bytes were lost here]\n" % self.lost[read])
                del self.lost[read]
            count = os.splice(read, log, most, flags=os.SPLICE_F_NONBLOCK)
        except (BlockingIOError, InterruptedError):
            return -1
        except OSError:
            return self.lose(read)
        size = os.lseek(log, 0, os.SEEK_CUR)
        if size - self.starts[read] > KEEP + STEP:
            self.starts[read] = _forget(log, size)
        if count == _PIPE_SIZE:
            with contextlib.suppress(OSError):
                fcntl.fcntl(read, fcntl.F_SETPIPE_SZ, _BUSY_PIPE_SIZE)
        return count

    def lose(self, read: int) -> int:
        # A full disk costs the log, and never holds the program.
        try:
            count = len(os.read(read, _BUSY_PIPE_SIZE))
        except BlockingIOError:
            return -1
        if count:
            self.lost[read] = self.lost.get(read, 0) + count
        return count


def _pipe_of(uid: int, gid: int) -> tuple[int, int]:
    """A pipe that whoever the program runs as may open by a name, such as /dev/stdout."""
    # Not by fchown, which gVisor has not had for pipes for long.
    if uid or gid:
        os.setegid(gid)
        os.seteuid(uid)
    try:
        return os.pipe2(os.O_CLOEXEC)
    finally:
        if uid or gid:
            os.seteuid(0)
            os.setegid(0)


def _forget(log: int, size: int) -> int:
    """Make a hole of the older part of a log, and return where it ends.

    Where no hole can be made (gVisor, some file systems) all of it goes at once.
    """
    end = (size - KEEP) // STEP * STEP
    if not _libc.fallocate(log, _PUNCH_HOLE_KEEP_SIZE, ctypes.c_long(0), ctypes.c_long(end)):
        return end
    with contextlib.suppress(OSError):
        os.ftruncate(log, 0)
        os.ftruncate(log, size)
    return size


_libc = ctypes.CDLL(None)
