"""Copying of input from the named pipe of a background process to its stdin, inside the jail.

The named pipe is a file of the host, which another engine can find. With it as stdin, a program
could open it for writing and change its mode. So it gets a pipe without a name.
"""

from __future__ import annotations

import contextlib
import os
import select

from smokebox.engine.jail.log_pump import owned_pipe

_READ = 1 << 16


class StdinPump:
    """The read end of a named pipe, and the write end of the program's stdin, `reader`."""

    def __init__(self, source: int, uid: int, gid: int) -> None:
        self.reader, self.writer = owned_pipe(uid, gid)
        self.source = source
        self.data = b""
        self.closed = False
        for fd in (self.source, self.writer):
            os.set_blocking(fd, False)

    def begin(self, poll: select.poll) -> set[int]:
        """Poll both ends, and return them."""
        poll.register(self.source, select.POLLIN)
        # For the error that tells that the program has closed its stdin.
        poll.register(self.writer, 0)
        return {self.source, self.writer}

    def move(self, ready: int, poll: select.poll) -> None:
        """Move input after an event of an end. Closes both at the end of either."""
        if self.closed:
            return
        full = bool(self.data)
        try:
            if not full:
                self.data = os.read(self.source, _READ) if ready == self.source else b""
                if not self.data:
                    self.close(poll)
                    return
            self.data = self.data[os.write(self.writer, self.data) :]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.close(poll)
            return
        if full != bool(self.data):
            self.wait(poll)

    def wait(self, poll: select.poll) -> None:
        """Wait for the program while its pipe is full, else for input."""
        if self.data:
            poll.unregister(self.source)
            poll.modify(self.writer, select.POLLOUT)
        else:
            poll.register(self.source, select.POLLIN)
            poll.modify(self.writer, 0)

    def close(self, poll: select.poll) -> None:
        """Close both ends: the program reads end of file, and the engine cannot write."""
        self.closed = True
        for fd in (self.source, self.writer):
            # The source is not polled while the program's pipe is full.
            with contextlib.suppress(KeyError):
                poll.unregister(fd)
            os.close(fd)
