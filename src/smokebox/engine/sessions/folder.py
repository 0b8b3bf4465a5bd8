"""The folder of a session's shell: the pipes and files through which it is spoken to.

It lies in the jail's `run/io`, which is the host's: read-only inside, with a name that
nobody inside can list or guess.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import secrets
import shutil
import termios
from typing import TYPE_CHECKING

from smokebox.engine.jail.cell import IO
from smokebox.engine.sessions.driver import COMMAND, DUMP, REPORTS, SCRIPT, Driver

if TYPE_CHECKING:
    from smokebox.types import Stream

PREFIX = "s-"
_PASSABLE = 0o711
_STDIN = "i"


class Folder:
    """The host's side. No open here can block, whoever has the other end, or nobody."""

    def __init__(self, io: str) -> None:
        name = PREFIX + secrets.token_hex(8)
        self.inside = f"{IO}/{name}"
        self.driver = Driver(self.inside)
        self._path = f"{io}/{name}"
        self._pair = 0
        self._fds: list[int] = []
        # What is in it are names of pipes: whoever has one can speak for another user.
        os.chmod(io, _PASSABLE)
        os.mkdir(self._path)
        try:
            self._fill()
        except OSError:
            self.close()
            raise

    @property
    def reports(self) -> int:
        """The descriptor to read what the shell tells. Never at its end."""
        return self._reports

    @property
    def read(self) -> bool:
        """Whether the shell has read all that was said."""
        count = array.array("i", [0])
        fcntl.ioctl(self._script, termios.FIONREAD, count)
        return count[0] == 0

    def say(self, lines: str) -> bool:
        """Write lines for the shell; False when it does not read any."""
        data = lines.encode()
        try:
            return os.write(self._script, data) == len(data)
        except BlockingIOError:
            return False

    def put(self, fields: bytes) -> None:
        """What the next line reads."""
        os.ftruncate(self._command, 0)
        _write_all(self._command, fields)

    def put_stdin(self, data: bytes | None) -> str | None:
        """The name of a file for the command's stdin, if it has any."""
        if data is None:
            return None
        fd = self._create(_STDIN, 0o644)
        try:
            _write_all(fd, data)
        finally:
            os.close(fd)
        return _STDIN

    def take_stdin_away(self) -> None:
        """Remove that file; whoever has it open keeps it."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self._path}/{_STDIN}")

    @property
    def outputs(self) -> tuple[str, str]:
        """The names of the pipes for stdout and stderr."""
        return f"o{self._pair}", f"e{self._pair}"

    def open_outputs(self) -> dict[int, Stream]:
        """The reading ends of those pipes."""
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        stdout, stderr = self.outputs
        out = os.open(f"{self._path}/{stdout}", flags)
        try:
            return {out: "stdout", os.open(f"{self._path}/{stderr}", flags): "stderr"}
        except OSError:
            os.close(out)
            raise

    def renew_outputs(self) -> None:
        """Other pipes for the next command: somebody still writes to these."""
        for name in self.outputs:
            os.unlink(f"{self._path}/{name}")
        self._pair += 1
        self._make_outputs()

    def close(self) -> None:
        """Remove everything. Safe to repeat."""
        while self._fds:
            os.close(self._fds.pop())
        shutil.rmtree(self._path, ignore_errors=True)

    def _fill(self) -> None:
        os.chmod(self._path, _PASSABLE)
        # As root nobody inside can write what the shell reads.
        self._script = self._pipe(SCRIPT, 0o644)
        self._reports = self._pipe(REPORTS, 0o622)
        self._command = self._keep(self._create(COMMAND, 0o644))
        dump = self._create(DUMP, 0o644)
        try:
            _write_all(dump, self.driver.dump_script().encode())
        finally:
            os.close(dump)
        self._make_outputs()

    def _make_outputs(self) -> None:
        for name in self.outputs:
            os.mkfifo(f"{self._path}/{name}")
            os.chmod(f"{self._path}/{name}", 0o666)

    def _pipe(self, name: str, mode: int) -> int:
        path = f"{self._path}/{name}"
        os.mkfifo(path)
        os.chmod(path, mode)
        # For reading and writing: that neither waits for the shell nor ends with it.
        return self._keep(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))

    def _create(self, name: str, mode: int) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        fd = os.open(f"{self._path}/{name}", flags)
        os.fchmod(fd, mode)
        return fd

    def _keep(self, fd: int) -> int:
        self._fds.append(fd)
        return fd


def sweep(io: str) -> None:
    """Remove the folders of shells that ended with another engine."""
    for name in os.listdir(io):
        if name.startswith(PREFIX):
            shutil.rmtree(f"{io}/{name}", ignore_errors=True)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
