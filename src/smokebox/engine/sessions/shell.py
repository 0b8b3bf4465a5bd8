"""One live bash of a session.

What bash and its supervisor say is data from inside: it can be wrong, missing or made up, and
costs the session its shell at most.
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
from smokebox.engine.sessions import driver
from smokebox.engine.sessions.driver import SessionFolder, SessionState, pack_fields
from smokebox.errors import (
    AccessDenied,
    PathNotDirectory,
    PathNotFound,
    Unsupported,
)
from smokebox.runtime import supervisor
from smokebox.runtime.process import encode
from smokebox.runtime.supervisor_client import ANSWER_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.engine.run import Program, Run
    from smokebox.engine.sessions.command import CommandRequest
    from smokebox.errors import PathError

# The script that bash reads is the pipe of that name in the directory where it starts.
SHELL_OPTIONS = ("--norc", "--noprofile", driver.SCRIPT)
LARGEST_STATE = 4 << 20
START_SECONDS = 10.0
SETTLE_SECONDS = 10.0
# How often a silent command is looked after: bash may have lost the lines that follow it.
LOOK_SECONDS = 0.2
_LONGEST_FIELD = 64 << 10
_LONGEST_DUMP = 256 << 20
_MOST_FIELDS = 32
_READ = 1 << 16
_READS = 16

_DIRECTORY_ERRORS: dict[bytes, type[PathError]] = {
    driver.MISSING: PathNotFound,
    driver.NOT_DIRECTORY: PathNotDirectory,
    driver.DENIED: AccessDenied,
}


class CommandNotRead(Exception):
    """The shell could not even read a command, and has not run it."""


class SessionShell:
    """A bash that waits for commands. One at a time."""

    def __init__(self, run: Run, cwd: str, folder: SessionFolder, control: socket.socket) -> None:
        self.run = run
        self.folder = folder
        self.control = control
        self.alive = True
        self.alone = False
        self.broken = False
        self.stopped = False
        self.state: SessionState | None = None
        self.status: int | None = None
        self.exit_status: int | None = None
        self.failure: tuple[int, int] | None = None
        self.told: set[bytes] = set()
        self.last = 0
        self.oversized = False
        self._first_cwd = cwd
        self._cwd = b""
        self._marked = True
        self._dumped = True
        self._field = bytearray()
        self._size = 0
        self._heard = b""
        self._news = asyncio.Event()
        self._settling: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, run: Run, program: Program, state: SessionState | None) -> SessionShell:
        """A bash in the program's directory, or in the state of another one.

        Raises what keeps it from starting, `PathError` for a directory, and `CommandNotRead` for a
        state that cannot be had again.
        """
        folder = SessionFolder(f"{run.directory}/run/io")
        try:
            control = await run.jail.connect()
        except BaseException:
            folder.close()
            raise
        shell = cls(run, program.cwd, folder, control)
        try:
            await shell._begin(program, state)
        except BaseException:
            shell.close()
            raise
        return shell

    @property
    def fit(self) -> bool:
        """Whether it can take another command."""
        return self.alive and not self.broken

    @property
    def cwd(self) -> str:
        """Where it is, as far as it has told."""
        return self._first_cwd if self.state is None else self.state.cwd

    def give(self, order: CommandRequest, stdin: str | None) -> None:
        """Have a command run whose fields are in the folder, and its stdin by that name."""
        self.told.clear()
        self.status = None
        self._dumped = self.oversized = False
        stdout, stderr = self.folder.outputs
        lines = self.folder.driver.run(
            first=order.number,
            last=self.last,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=order.cwd is not None,
            env=tuple(order.env),
        )
        if not self.folder.say(lines):
            self.broken = True

    def settle(self) -> asyncio.Task[None]:
        """Hear the state that follows a command, while nobody waits for it."""
        self._settling = asyncio.create_task(self._settle())
        return self._settling

    async def settled(self) -> None:
        """Wait until the shell can take a command, or has ended."""
        if self._settling is not None:
            await asyncio.wait({self._settling})
        if self.alive:
            self.hear_supervisor()

    def say(self, word: bytes, fds: list[int] | None = None) -> None:
        """Tell the supervisor something; one that is gone needs not know."""
        with contextlib.suppress(OSError):
            socket.send_fds(self.control, [word], fds or [])

    async def kill(self) -> None:
        """Kill the shell and all that it left, and wait for it for a bounded time."""
        if self._settling is not None:
            self._settling.cancel()
            await asyncio.wait({self._settling})
        await kill_all_of(self.control)
        self.close()

    def close(self) -> None:
        """Let go, which kills what is left. Safe to repeat."""
        self.alive = False
        if self._settling is not None and not self._settling.done():
            # Only when nobody listens any more: the numbers of descriptors are reused.
            self._settling.cancel()
            self._settling.add_done_callback(lambda _: self._let_go())
        else:
            self._let_go()

    def stop(self) -> None:
        """Have everything killed, under a command that will notice."""
        self.stopped = True
        self.say(supervisor.KILL)

    def leave(self) -> socket.socket | None:
        """Let the shell end, and let go; what it left ends with the socket that is returned."""
        if self.alive:
            self.say(shell_supervisor.END)
            self.alive = False
        self.folder.close()
        if self.alone:
            self.control.close()
        return None if self.alone else self.control

    def hear_reports(self) -> None:
        """Take what bash tells, as far as it can be bash."""
        with contextlib.suppress(BlockingIOError):
            # Not for ever: whoever writes there could be faster than we.
            for _ in range(_READS):
                if self.broken:
                    break
                data = os.read(self.folder.reports, _READ)
                self.broken = data.count(b"\0") > _MOST_FIELDS
                *ends, rest = data.split(b"\0", _MOST_FIELDS)
                for end in ends:
                    self._extend(end)
                    self._take(bytes(self._field))
                    self._field.clear()
                    self._size = 0
                self._extend(rest)
        self._news.set()

    def hear_supervisor(self) -> None:
        """Take what the supervisor tells. One that has hung up has taken the shell with it."""
        try:
            while self.alive:
                data = self.control.recv(supervisor.MESSAGE.size - len(self._heard))
                self._heard += data
                if len(self._heard) == supervisor.MESSAGE.size:
                    message, self._heard = self._heard, b""
                    self._obey(*supervisor.MESSAGE.unpack(message))
                elif not data:
                    self.alive, self.alone = False, True
        except BlockingIOError:
            pass
        except OSError:
            self.alive, self.alone = False, True
        self._news.set()

    @property
    def ears(self) -> dict[int, Callable[[], None]]:
        """What is to be listened to, and by whom."""
        return {self.folder.reports: self.hear_reports, self.control.fileno(): self.hear_supervisor}

    async def _begin(self, program: Program, state: SessionState | None) -> None:
        cwd = encode(program.cwd, "cwd")
        env = {name: value for name, value in program.env.items() if name != "PWD"}
        # What the shell had not exported, or had unset, shall not come back.
        bare = state is not None and state.script
        inside = replace(program, cwd=self.folder.inside, env={} if bare else env)
        request = inside.pack(guest_init.SHELL)
        request = supervisor.LENGTH.pack(len(request)) + request
        lines = self.folder.driver
        if state is None:
            self.folder.put(pack_fields([cwd]))
            self.folder.say(lines.begin())
        else:
            fields = [encode(state.cwd, "cwd"), cwd]
            self.folder.put(pack_fields([*fields, state.script + lines.finished()]))
            self.folder.say(lines.restore())
        await self._request(request)
        await self._patiently(lambda: self._is_begun(state), START_SECONDS)
        self._check_begun(program, state)

    def _is_begun(self, state: SessionState | None) -> bool:
        return driver.READY in self.told or (state is None and bool(self.told))

    def check_told(self, cwd: str, hint: str) -> None:
        """Raise what the shell has told of a directory."""
        for kind, error in _DIRECTORY_ERRORS.items():
            if kind in self.told:
                raise error(cwd, hint=hint)

    def _check_begun(self, program: Program, state: SessionState | None) -> None:
        if self.failure is not None:
            raise program.explain(*self.failure)
        self.check_told(program.cwd, "The session begins there: make it, or another session.")
        if state is not None and not {driver.RESTORED, driver.READY} <= self.told:
            raise CommandNotRead
        if driver.READY not in self.told:
            if not self.run.jail.alive:
                raise self.run.gone("jail ended")
            raise Unsupported(
                f"{program.argv[0]} does not run the commands of a session.",
                hint="Sessions need bash 4.4 or later in the image; exec without one does not.",
                operation="session",
                sandbox=self.run.id,
            )

    async def _request(self, request: bytes) -> None:
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        try:
            # A supervisor that ends before it has read everything says why.
            with contextlib.suppress(ConnectionError):
                sent = socket.send_fds(self.control, [request], [null] * 3)
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(self.control, request[sent:])
        finally:
            os.close(null)

    async def _settle(self) -> None:
        self._marked = False
        self.say(shell_supervisor.MARK)
        done = await self._patiently(lambda: self._marked and self._dumped, SETTLE_SECONDS)
        # Without a word on its state it may do well otherwise.
        if not done and not (self._marked and self.folder.read):
            self.broken = True

    async def _patiently(self, done: Callable[[], bool], seconds: float) -> bool:
        """Listen until it is so, but not once the shell has passed over all it was told."""
        until = time.monotonic() + seconds
        idle = 0
        while self.fit and idle < 2 and time.monotonic() < until:
            if await self._until(done, LOOK_SECONDS):
                return True
            idle = idle + 1 if self.folder.read else 0
        return done()

    def _let_go(self) -> None:
        self.control.close()
        self.folder.close()

    async def _until(self, done: Callable[[], bool], seconds: float) -> bool:
        """Listen until it is so, or the shell has ended; False when it never came to be."""
        loop = asyncio.get_running_loop()
        for fd, hear in self.ears.items():
            loop.add_reader(fd, hear)
        try:
            async with asyncio.timeout(seconds):
                while self.alive and not self.broken and not done():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            pass
        finally:
            for fd in (self.folder.reports, self.control.fileno()):
                loop.remove_reader(fd)
        self.hear_reports()
        return done()

    def _extend(self, data: bytes) -> None:
        self._size += len(data)
        kind = (self._field or data)[:1]
        if kind != driver.STATE:
            self.broken |= self._size > _LONGEST_FIELD
        elif self._size > LARGEST_STATE:
            self.oversized = True
            self.broken |= self._size > _LONGEST_DUMP
        if not self.broken and not self.oversized:
            self._field += data

    def _take(self, field: bytes) -> None:
        kind, rest = field[:1], field[1:]
        if kind == driver.STATUS and rest.isdigit() and len(rest) <= 3:
            self.status = self.last = int(rest)
        elif kind == driver.CWD:
            self._cwd = rest
        elif kind == driver.STATE:
            self._dumped = True
            if not self.oversized:
                self.state = SessionState.heard(self._cwd, rest)
        elif kind in (driver.READY, driver.RESTORED, driver.UNREAD, *_DIRECTORY_ERRORS):
            self.told.add(kind)
        else:
            self.broken = True

    def _obey(self, kind: bytes, flags: int, value: int) -> None:
        if kind == shell_supervisor.MARKED:
            self._marked = True
            return
        self.alive = False
        if kind == supervisor.FAILED:
            self.failure = (flags, value)
        else:
            self.exit_status = value
        self.alone = kind != supervisor.EXITED or bool(flags & supervisor.ALONE)


async def kill_all_of(control: socket.socket) -> None:
    """Have a supervisor kill all that it has, and wait until it did, for a bounded time."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(TimeoutError, OSError):
        control.send(supervisor.KILL)
        async with asyncio.timeout(ANSWER_SECONDS):
            while await loop.sock_recv(control, supervisor.MESSAGE.size):
                pass


def hung_up(control: socket.socket) -> bool:
    """Close a supervisor's socket if it has nothing left to mind."""
    try:
        while control.recv(supervisor.MESSAGE.size):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    control.close()
    return True
