"""The lifetime of a background process, as told by the file its supervisor writes.

The engine locks the file before it hands it over. The supervisor then holds the lock for as long
as it lives, whatever is written, killed or restarted, so another engine needs neither a pid nor a
response to know whether the process runs. The file's content comes from inside the sandbox and is
validated.
"""

from __future__ import annotations

import asyncio
import fcntl
import functools
import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from smokebox.engine.inotify import CLOSE_WRITE, InotifyWatch, watch_end
from smokebox.engine.jail import guest_init
from smokebox.engine.processes.logs import last_lines
from smokebox.errors import (
    DeadlineExceeded,
    ProcessEnded,
    SandboxGone,
    SandboxRestarted,
    Unsupported,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.engine.processes.logs import ProcessLog
    from smokebox.engine.record.rows import ProcessRow
    from smokebox.engine.run import Run
    from smokebox.types import ProcessStatus

# The exit codes of a process whose time was up, and of one that was killed with its supervisor.
TIMED_OUT = 124
KILLED = 137
# For a wait status that no process can have.
NONSENSE = 255
# A supervisor that ends without a word: its whole jail may be ending, of which others know why.
_LOST_SECONDS = 0.25
# The kernel tells of the closing of a file a moment before it lets go of its lock.
_LOOK_AGAIN_SECONDS = 0.1
# How long the end of a sandbox may take to be told by who ended it.
_OWNER_SECONDS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExit:
    """How a process ended: bash's code, and whether a signal or its lifetime did it."""

    code: int
    killed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRecord:
    """What a supervisor has told: who it is, the process once it runs, the exit once it ended."""

    leader: int | None = None
    supervisor_pid: int | None = None
    exit: ProcessExit | None = None


def read_exit_file(path: str) -> ExitRecord:
    """What is in the file so far; nothing for a file that is not there."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return ExitRecord()
    try:
        return parse_exit_file(os.pread(fd, guest_init.BEGUN.size + guest_init.EXIT.size, 0))
    finally:
        os.close(fd)


def parse_exit_file(data: bytes) -> ExitRecord:
    """What bytes from inside the sandbox mean, or nothing where they mean nothing."""
    if len(data) < guest_init.BEGUN.size:
        return ExitRecord()
    kind, leader, supervisor_pid = guest_init.BEGUN.unpack_from(data)
    # To the kernel's calls 1 and less are not one process, but many.
    if kind != guest_init.STARTED or supervisor_pid <= 1:
        return ExitRecord()
    if leader <= 1:
        return ExitRecord(supervisor_pid=supervisor_pid)
    return ExitRecord(
        leader=leader, supervisor_pid=supervisor_pid, exit=_exit(data[guest_init.BEGUN.size :])
    )


def is_held(path: str) -> bool:
    """Whether the supervisor that was given the file is alive."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _exit(data: bytes) -> ProcessExit | None:
    if len(data) < guest_init.EXIT.size:
        return None
    kind, status = guest_init.EXIT.unpack_from(data)
    if kind == guest_init.LATE:
        return ProcessExit(code=TIMED_OUT, killed=True)
    try:
        code = os.waitstatus_to_exitcode(status)
    except ValueError:
        code = NONSENSE
    if kind != guest_init.ENDED or not -64 <= code <= 255:
        return ProcessExit(code=NONSENSE, killed=False)
    return ProcessExit(code=128 - code if code < 0 else code, killed=code < 0)


class Lifetime:
    """One process's row, kept up to date from the file that its supervisor writes.

    `over` once the process has ended, `gone` once nothing of it is left in the background
    either. `stale` is the error for what needs the run of the sandbox that is over, and
    `cut` the one for who waits, where the end of the run was the end of the process.
    """

    def __init__(
        self,
        row: ProcessRow,
        path: str,
        log: ProcessLog,
        *,
        on_end: Callable[[], None],
        on_gone: Callable[[], None],
    ) -> None:
        self.row = row
        self.supervisor_pid: int | None = None
        self.cut: SandboxGone | None = None
        self.stale: SandboxGone | None = None
        self.over = asyncio.Event()
        self.gone = asyncio.Event()
        self._path = path
        self._log = log
        self._on_end = on_end
        self._on_gone = on_gone
        self._run: Run | None = None
        self._watch: InotifyWatch | None = None
        self._timers: list[asyncio.TimerHandle] = []
        if row.status not in ("starting", "running"):
            self.over.set()
            self.gone.set()
            log.finish()

    def attach(self, run: Run) -> None:
        """Listen to the supervisor, which is of this run. What it has told already counts."""
        self._run = run
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            self._lose()
            return
        try:
            self.gone.clear()
            self._watch = watch_end(fd, self._look)
        finally:
            os.close(fd)
        self._look(0)
        if not self.gone.is_set():
            self._later(_LOOK_AGAIN_SECONDS, lambda: self._look(0))

    def begin(self, told: ExitRecord) -> None:
        """Take the pids of the process, which runs."""
        self.supervisor_pid = told.supervisor_pid
        if self.row.status == "starting" and told.leader is not None:
            self.row = replace(self.row, status="running", pid=told.leader)

    def cut_off(self, sandbox: str, reason: str, *, destroyed: bool = False) -> None:
        """The run of the sandbox is over, and what still ran was killed with it."""
        self.stale = run_ended(self.row, sandbox, reason, destroyed=destroyed)
        if not self.over.is_set():
            self.cut = self.stale
        self._end("killed", KILLED)
        self._vanish()
        self.close()

    def close(self) -> None:
        """Listen no more. Safe to repeat."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def _look(self, mask: int) -> None:
        """See what the file says, and whether the supervisor still has it."""
        if self._watch is None:
            return
        told = read_exit_file(self._path)
        if told.supervisor_pid is not None:
            self.begin(told)
        if told.exit is not None:
            self._exit(told.exit)
        if mask & CLOSE_WRITE or not is_held(self._path):
            self.close()
            if self.over.is_set():
                self._vanish()
            else:
                self._later(_LOST_SECONDS, self._lose)

    def _exit(self, exit: ProcessExit) -> None:
        self._end("killed" if exit.killed else "exited", exit.code)

    def _lose(self) -> None:
        """The supervisor has ended without telling: it was killed, and its tree with it."""
        self.close()
        if self._run is not None and not self._run.jail.alive:
            # With all of the sandbox, whose owner says why when nothing of it is left.
            cut = functools.partial(self.cut_off, self._run.id, "it stopped")
            self._later(_OWNER_SECONDS, cut)
            return
        self._end("lost", KILLED)
        self._vanish()

    def _end(self, status: ProcessStatus, code: int) -> None:
        if self.over.is_set():
            return
        self.row = replace(self.row, status=status, exit_code=code, ended_at=time.time())
        self.over.set()
        self._log.finish()
        self._on_end()

    def _vanish(self) -> None:
        if not self.gone.is_set():
            self.gone.set()
            self._on_gone()

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(seconds, call))


def ended_before(row: ProcessRow, log: ProcessLog, what: str) -> ProcessEnded:
    """It ended while somebody waited for it `what` ("to log 'x'", "for port 80 ...")."""
    said = last_lines(log.path("stderr")) or last_lines(log.path("stdout"))
    return ProcessEnded(
        f"process {row.process_id} (`{row.command:.80}`) ended with exit code {row.exit_code} "
        f"before it came {what}." + (f" Its last lines: {said}" if said else ""),
        hint="Look at its logs().",
        process=row.process_id,
        exit_code=row.exit_code,
    )


def too_late(row: ProcessRow, what: str, timeout: float) -> DeadlineExceeded:
    """It went on for longer than somebody wanted to wait."""
    return DeadlineExceeded(
        f"waited {timeout:g} s for process {row.process_id} (`{row.command:.80}`) {what}.",
        hint="Pass a longer timeout, or look at its logs().",
        operation=what,
        process=row.process_id,
        timeout=timeout,
    )


def run_ended(row: ProcessRow, sandbox: str, reason: str, *, destroyed: bool) -> SandboxGone:
    """Its sandbox stopped, and it with it."""
    kind = SandboxGone if destroyed else SandboxRestarted
    return kind(
        f"process {row.process_id} (`{row.command:.80}`) ended with a run of the sandbox "
        f"{sandbox}: {reason}.",
        hint="Start another sandbox." if destroyed else "Start the process again.",
        reason=reason,
        sandbox_id=sandbox,
        process=row.process_id,
    )


def no_stdin(row: ProcessRow) -> Unsupported:
    """It was started without a stdin to write to."""
    return Unsupported(
        f"process {row.process_id} has no stdin to write to.",
        hint="Start it with stdin=True.",
        operation="write_stdin",
    )
