"""One live bash of a session.

Reports of bash and its supervisor come from inside the sandbox. They can be wrong, missing or
forged, which costs the session its shell at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from smokebox.engine.jail import guest_init, shell_supervisor
from smokebox.engine.run import send_request
from smokebox.engine.sessions import bash_protocol
from smokebox.engine.sessions.bash_protocol import SessionDirectory, SessionState, pack_fields
from smokebox.errors import AccessDenied, PathNotDirectory, PathNotFound, Unsupported
from smokebox.runtime import supervisor
from smokebox.runtime.process import encode
from smokebox.runtime.supervisor_client import RESPONSE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.engine.run import Program, Run
    from smokebox.engine.sessions.command import CommandRequest
    from smokebox.errors import PathError

# The script of bash is the pipe of that name in the directory where it starts.
SHELL_OPTIONS = ("--norc", "--noprofile", bash_protocol.SCRIPT)
MAX_STATE = 4 << 20
START_SECONDS = 10.0
# Silence after which a state is given up, and the time limit for all of it.
STATE_SECONDS = 10.0
LONGEST_STATE_SECONDS = 60.0
# Interval in which a silent shell is checked: a command may have read the lines after it.
CHECK_SECONDS = 0.2
_LONGEST_REPORT = 64 << 10
_LONGEST_DUMP = 256 << 20
_MAX_REPORTS = 32
_READ = 1 << 16
_READS = 16

_DIRECTORY_ERRORS: dict[bytes, type[PathError]] = {
    bash_protocol.MISSING: PathNotFound,
    bash_protocol.NOT_DIRECTORY: PathNotDirectory,
    bash_protocol.DENIED: AccessDenied,
}
_FLAG_REPORTS = {
    bash_protocol.READY,
    bash_protocol.RESTORED,
    bash_protocol.UNREAD,
    *_DIRECTORY_ERRORS,
}


class CommandNotRead(Exception):
    """The shell could not read a command or a state, and did not run it."""


class SessionShell:
    """A bash that runs one command at a time.

    `alive` until bash ends, `childless` once no process of it is left. A `broken` shell cannot run
    commands. `reports` are the kinds reported since the last command started.
    """

    def __init__(
        self, run: Run, cwd: str, directory: SessionDirectory, control: socket.socket
    ) -> None:
        self.run = run
        self.directory = directory
        self.control = control
        self.alive = True
        self.childless = False
        self.broken = False
        self.stopped = False
        self.state: SessionState | None = None
        self.status: int | None = None
        self.exit_status: int | None = None
        self.reports: set[bytes] = set()
        self.oversized = False
        self._failure: tuple[int, int] | None = None
        self._first_cwd = cwd
        self._last_status = 0
        self._cwd = b""
        self._marked = True
        self._dumped = True
        self._report = bytearray()
        self._report_size = 0
        self._skipping = False
        self._message = b""
        self._changed = asyncio.Event()
        self._collecting: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, run: Run, program: Program, state: SessionState | None) -> SessionShell:
        """Start a bash in the directory of the program, or with the state of an earlier one.

        Raises:
            PathError: The directory cannot be entered.
            CommandNotRead: The state cannot be restored.
            Unsupported: The program is not a suitable bash.
        """
        directory = SessionDirectory(f"{run.directory}/run/io")
        try:
            control = await run.jail.connect()
        except BaseException:
            directory.close()
            raise
        shell = cls(run, program.cwd, directory, control)
        try:
            await shell._start(program, state)
        except BaseException:
            shell.close()
            raise
        return shell

    @property
    def usable(self) -> bool:
        """True if it can run another command."""
        return self.alive and not self.broken

    @property
    def cwd(self) -> str:
        """Its working directory, as last reported."""
        return self._first_cwd if self.state is None else self.state.cwd

    @property
    def readers(self) -> dict[int, Callable[[], None]]:
        """The descriptors to wait for, with the methods that read them."""
        return {
            self.directory.reports_fd: self.read_reports,
            self.control.fileno(): self.read_supervisor,
        }

    def run_command(self, request: CommandRequest, stdin: str | None) -> None:
        """Run a command whose fields and stdin are in the directory."""
        self.reports.clear()
        self.status = None
        self._dumped = False
        stdout, stderr = self.directory.output_names
        lines = self.directory.script.run(
            first=request.number,
            last_status=self._last_status,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=request.cwd is not None,
            env=tuple(request.env),
        )
        if not self.directory.send(lines):
            self.broken = True

    def collect_state(self) -> asyncio.Task[None]:
        """Start to read the state that the shell reports after a command."""
        self._collecting = asyncio.create_task(self._collect_state())
        return self._collecting

    async def wait_idle(self) -> None:
        """Wait until the shell can run a command, or has ended."""
        if self._collecting is not None:
            await asyncio.wait({self._collecting})
        if self.alive:
            self.read_supervisor()

    def send(self, message: bytes, fds: list[int] | None = None) -> None:
        """Send a message to the supervisor, if it is still there."""
        with contextlib.suppress(OSError):
            socket.send_fds(self.control, [message], fds or [])

    async def kill(self) -> None:
        """Kill the shell and its background processes, and wait for that for a bounded time."""
        if self._collecting is not None:
            self._collecting.cancel()
            await asyncio.wait({self._collecting})
        await kill_tree(self.control)
        self.close()

    def close(self) -> None:
        """Close everything, which kills all processes. Safe to repeat."""
        self.alive = False
        if self._collecting is not None and not self._collecting.done():
            # The task uses the descriptors, whose numbers are reused.
            self._collecting.cancel()
            self._collecting.add_done_callback(lambda _: self._close_files())
        else:
            self._close_files()

    def stop(self) -> None:
        """Kill all processes while a command runs, which then ends."""
        self.stopped = True
        self.send(supervisor.KILL)

    def detach(self) -> socket.socket | None:
        """End the shell only. Closing the returned socket kills its background processes."""
        if self.alive:
            self.send(shell_supervisor.END)
            self.alive = False
        self.directory.close()
        if self.childless:
            self.control.close()
        return None if self.childless else self.control

    def read_reports(self) -> None:
        """Read pending reports of bash. Invalid ones break the shell."""
        with contextlib.suppress(BlockingIOError):
            # A bounded number of times: a program could write faster than this reads.
            for _ in range(_READS):
                if self.broken:
                    break
                data = os.read(self.directory.reports_fd, _READ)
                self.broken = data.count(b"\0") > _MAX_REPORTS
                *ends, rest = data.split(b"\0", _MAX_REPORTS)
                for end in ends:
                    self._extend_report(end)
                    self._handle_report(bytes(self._report))
                    self._report.clear()
                    self._report_size, self._skipping = 0, False
                self._extend_report(rest)
        self._changed.set()

    def read_supervisor(self) -> None:
        """Read pending messages of the supervisor. At the end of file, the shell has ended too."""
        try:
            while self.alive:
                data = self.control.recv(supervisor.MESSAGE.size - len(self._message))
                self._message += data
                if len(self._message) == supervisor.MESSAGE.size:
                    message, self._message = self._message, b""
                    self._handle_message(*supervisor.MESSAGE.unpack(message))
                elif not data:
                    self.alive, self.childless = False, True
        except BlockingIOError:
            pass
        except OSError:
            self.alive, self.childless = False, True
        self._changed.set()

    def check_directory(self, cwd: str, hint: str) -> None:
        """Raise the error that the shell has reported about a working directory."""
        for kind, error in _DIRECTORY_ERRORS.items():
            if kind in self.reports:
                raise error(cwd, hint=hint)

    async def _start(self, program: Program, state: SessionState | None) -> None:
        cwd = encode(program.cwd, "cwd")
        env = {name: value for name, value in program.env.items() if name != "PWD"}
        if state is not None and state.script:
            # The script sets all variables, and not those that were unset.
            env = {}
        request = replace(program, cwd=self.directory.inside, env=env).pack(guest_init.SHELL)
        script = self.directory.script
        if state is None:
            self.directory.write_fields(pack_fields([cwd]))
            self.directory.send(script.start())
        else:
            fields = [encode(state.cwd, "cwd"), cwd, state.script + script.restored()]
            self.directory.write_fields(pack_fields(fields))
            self.directory.send(script.restore())
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            # A supervisor that has ended is noticed by `_wait_for`.
            with contextlib.suppress(ConnectionError):
                await send_request(self.control, request, [null] * 3)
        finally:
            os.close(null)
        await self._wait_for(lambda: self._has_started(state), START_SECONDS)
        self._check_started(program, state)

    def _has_started(self, state: SessionState | None) -> bool:
        return bash_protocol.READY in self.reports or (state is None and bool(self.reports))

    def _check_started(self, program: Program, state: SessionState | None) -> None:
        if self._failure is not None:
            raise program.exec_error(*self._failure)
        self.check_directory(program.cwd, "The session starts there: create it.")
        if state is not None:
            if not {bash_protocol.RESTORED, bash_protocol.READY} <= self.reports:
                raise CommandNotRead
        elif bash_protocol.READY not in self.reports:
            if not self.run.jail.alive:
                raise self.run.gone("jail ended")
            raise Unsupported(
                f"{program.argv[0]} cannot run the commands of a session.",
                hint="Sessions need bash 4.4 or later in the image; exec without one does not.",
                operation="session",
                sandbox=self.run.id,
            )

    async def _collect_state(self) -> None:
        self._marked = False
        self.send(shell_supervisor.MARK)
        done = await self._wait_for(lambda: self._marked and self._dumped, STATE_SECONDS)
        # A shell that read all lines without reporting its state may still be usable.
        if not done and (self._dumping or not (self._marked and self.directory.all_read)):
            self.broken = True

    async def _wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Read reports until the condition holds, or the shell has read all lines without it.

        `seconds` begin again whenever a part of a state arrives: a large one takes a shell with
        little cpu long.
        """
        last = time.monotonic() + LONGEST_STATE_SECONDS
        until = time.monotonic() + seconds
        idle = size = 0
        while self.usable and idle < 2 and time.monotonic() < min(until, last):
            if await self._read_until(condition, CHECK_SECONDS):
                return True
            if self._dumping and self._report_size != size:
                size, until = self._report_size, time.monotonic() + seconds
            idle = idle + 1 if self.directory.all_read and not self._dumping else 0
        return condition()

    async def _read_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Read reports until the condition holds or the shell ends, and return the condition."""
        loop = asyncio.get_running_loop()
        readers = self.readers
        for fd, read in readers.items():
            loop.add_reader(fd, read)
        try:
            async with asyncio.timeout(seconds):
                while self.usable and not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
        finally:
            for fd in readers:
                loop.remove_reader(fd)
        self.read_reports()
        return condition()

    @property
    def _dumping(self) -> bool:
        """True while a part of a state has arrived."""
        return self._report[:1] == bash_protocol.STATE

    def _close_files(self) -> None:
        self.control.close()
        self.directory.close()

    def _extend_report(self, data: bytes) -> None:
        self._report_size += len(data)
        kind = (self._report or data)[:1]
        if kind != bash_protocol.STATE:
            self.broken |= self._report_size > _LONGEST_REPORT
        elif self._report_size > MAX_STATE:
            self._skipping = True
            self.broken |= self._report_size > _LONGEST_DUMP
        if not self.broken and not self._skipping:
            self._report += data

    def _handle_report(self, report: bytes) -> None:
        kind, value = report[:1], report[1:]
        if kind == bash_protocol.STATUS and value.isdigit() and len(value) <= 3:
            self.status = self._last_status = int(value)
        elif kind == bash_protocol.CWD:
            self._cwd = value
        elif kind == bash_protocol.STATE:
            self._dumped = True
            self.oversized = self._skipping
            if not self.oversized:
                self.state = SessionState.from_reports(self._cwd, value)
        elif kind in _FLAG_REPORTS:
            self.reports.add(kind)
        else:
            self.broken = True

    def _handle_message(self, kind: bytes, flags: int, value: int) -> None:
        if kind == shell_supervisor.MARKED:
            self._marked = True
            return
        self.alive = False
        if kind == supervisor.FAILED:
            self._failure = (flags, value)
        else:
            self.exit_status = value
        self.childless = kind != supervisor.EXITED or bool(flags & supervisor.CHILDLESS)


async def kill_tree(control: socket.socket) -> None:
    """Kill all processes of a supervisor, and wait for that for a bounded time."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(TimeoutError, OSError):
        control.send(supervisor.KILL)
        async with asyncio.timeout(RESPONSE_SECONDS):
            while await loop.sock_recv(control, supervisor.MESSAGE.size):
                pass


def close_if_ended(control: socket.socket) -> bool:
    """Close the socket of a supervisor if that has ended, and return whether it has."""
    try:
        while control.recv(supervisor.MESSAGE.size):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    control.close()
    return True
