"""Copying of output from the pipes of a background process to its log files, inside the jail.

With the files as stdout and stderr, a program would truncate them by `echo oops > /dev/stderr`,
and could fill the disk of the host. So it gets pipes, and its supervisor, which outlives the
engine, moves their content.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import time

# Size of the end of a log that is kept, and the step in which the rest is removed. Whole blocks
# are removed, so that no zeros replace text.
KEEP = 64 << 20
STEP = 4 << 20

_PIPE_SIZE = 1 << 16
_BUSY_PIPE_SIZE = 1 << 18
_PUNCH_HOLE_KEEP_SIZE = 3


class LogPump:
    """Read ends of pipes, each with its log file.

    With a `rate`, it moves at most so many bytes per second, and the program waits.
    """

    def __init__(self, logs: list[int], uid: int, gid: int, rate: int) -> None:
        self.rate = rate
        # A tenth of a second's worth at a time: the supervisor handles no event meanwhile.
        self.most = min(_BUSY_PIPE_SIZE, rate // 10 or 1) if rate else _BUSY_PIPE_SIZE
        self.logs: dict[int, int] = {}
        self.starts: dict[int, int] = {}
        self.lost: dict[int, int] = {}
        self.writers: list[int] = []
        for log in logs:
            read, write = owned_pipe(uid, gid)
            os.set_blocking(read, False)
            self.logs[read] = log
            self.starts[read] = 0
            self.writers.append(write)

    def move(self, read: int) -> bool:
        """Move the content of a pipe; False if its last writer is gone."""
        count = self.splice(read, self.most)
        if self.rate and count > 0:
            time.sleep(count / self.rate)
        return count != 0

    def drain(self) -> None:
        """Move what an exited program left, at most the capacity of the pipes."""
        for read in self.logs:
            self.splice(read, _BUSY_PIPE_SIZE)

    def splice(self, read: int, most: int) -> int:
        """Return the number of bytes moved; 0 at the end of file, -1 if there are none now."""
        log = self.logs[read]
        try:
            if read in self.lost:
                os.write(log, b"\n[smokebox: %d bytes were lost here]\n" % self.lost[read])
                del self.lost[read]
            count = os.splice(read, log, most, flags=os.SPLICE_F_NONBLOCK)
        except (BlockingIOError, InterruptedError):
            return -1
        except OSError:
            return self.drop(read)
        size = os.lseek(log, 0, os.SEEK_CUR)
        if size - self.starts[read] > KEEP + STEP:
            self.starts[read] = _trim(log, size)
        if count == _PIPE_SIZE:
            with contextlib.suppress(OSError):
                fcntl.fcntl(read, fcntl.F_SETPIPE_SZ, _BUSY_PIPE_SIZE)
        return count

    def drop(self, read: int) -> int:
        # With a full disk output is lost, but the program is not blocked.
        try:
            count = len(os.read(read, _BUSY_PIPE_SIZE))
        except BlockingIOError:
            return -1
        if count:
            self.lost[read] = self.lost.get(read, 0) + count
        return count


def owned_pipe(uid: int, gid: int) -> tuple[int, int]:
    """Create a pipe that the user of the program may open by name, such as /dev/stdout."""
    # Older versions of gVisor lack fchown for pipes.
    if uid or gid:
        os.setegid(gid)
        os.seteuid(uid)
    try:
        return os.pipe2(os.O_CLOEXEC)
    finally:
        if uid or gid:
            os.seteuid(0)
            os.setegid(0)


def _trim(log: int, size: int) -> int:
    """Punch a hole in place of the older part of a log, and return its end.

    Where that is not supported (gVisor, some file systems), all of the log is removed.
    """
    end = (size - KEEP) // STEP * STEP
    if not _libc.fallocate(log, _PUNCH_HOLE_KEEP_SIZE, ctypes.c_long(0), ctypes.c_long(end)):
        return end
    with contextlib.suppress(OSError):
        os.ftruncate(log, 0)
        os.ftruncate(log, size)
    return size


_libc = ctypes.CDLL(None)
