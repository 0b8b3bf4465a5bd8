"""The lifetime of a background process, read from the exit file that its supervisor writes.

The engine locks the exit file before it passes it to the supervisor, which holds the lock until it
ends. So another engine needs neither a pid nor a response to know whether the process runs. The
content comes from inside the sandbox and is validated.
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
from smokebox.engine.run import DESTROYED, EXPIRED
from smokebox.errors import DeadlineExceeded, ProcessEnded, SandboxGone, SandboxRestarted

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.engine.processes.logs import ProcessLog
    from smokebox.engine.record.rows import ProcessRow
    from smokebox.engine.run import Run
    from smokebox.types import ProcessStatus

TIMED_OUT = 124
KILLED = 137
# Exit code for a wait status that no process can have.
INVALID_STATUS = 255
# A supervisor that ends without a report may end with its whole jail, whose owner knows why.
_LOST_SECONDS = 0.25
# The kernel reports that a file was closed just before it releases the lock.
_RECHECK_SECONDS = 0.1
# Time limit for the owner of a sandbox to report why it ended.
_OWNER_SECONDS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExit:
    """The end of a process: exit code as in bash, and whether a signal or the timeout caused it."""

    code: int
    killed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRecord:
    """Content of an exit file: the supervisor, the process once it runs, its exit once it ended."""

    leader: int | None = None
    supervisor_pid: int | None = None
    exit: ProcessExit | None = None


def read_exit_file(path: str) -> ExitRecord:
    """Read an exit file. A missing file is an empty one."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return ExitRecord()
    try:
        return parse_exit_file(
            os.pread(fd, guest_init.START_RECORD.size + guest_init.EXIT_RECORD.size, 0)
        )
    finally:
        os.close(fd)


def parse_exit_file(data: bytes) -> ExitRecord:
    """Parse untrusted content of an exit file. Invalid content counts as absent."""
    if len(data) < guest_init.START_RECORD.size:
        return ExitRecord()
    kind, leader, supervisor_pid = guest_init.START_RECORD.unpack_from(data)
    # In kill(2), pids of 1 and below do not mean one process.
    if kind != guest_init.STARTED or supervisor_pid <= 1:
        return ExitRecord()
    if leader <= 1:
        return ExitRecord(supervisor_pid=supervisor_pid)
    return ExitRecord(
        leader=leader,
        supervisor_pid=supervisor_pid,
        exit=_parse_exit(data[guest_init.START_RECORD.size :]),
    )


def is_locked(path: str) -> bool:
    """Return whether the supervisor that holds an exit file is alive."""
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


def _parse_exit(data: bytes) -> ProcessExit | None:
    if len(data) < guest_init.EXIT_RECORD.size:
        return None
    kind, status = guest_init.EXIT_RECORD.unpack_from(data)
    if kind == guest_init.LATE:
        return ProcessExit(code=TIMED_OUT, killed=True)
    try:
        code = os.waitstatus_to_exitcode(status)
    except ValueError:
        code = INVALID_STATUS
    if kind != guest_init.EXITED or not -64 <= code <= 255:
        return ProcessExit(code=INVALID_STATUS, killed=False)
    return ProcessExit(code=128 - code if code < 0 else code, killed=code < 0)


class Lifetime:
    """The row of one process, kept up to date from its exit file.

    `exited` is set once the process has ended, `tree_ended` once its background processes have
    too. `run_error` is set when the run of the sandbox ends, for calls that need that run, and
    `interrupted` is the same error where the end of the run also ended the process.
    """

    def __init__(
        self,
        row: ProcessRow,
        path: str,
        log: ProcessLog,
        *,
        on_exit: Callable[[], None],
        on_tree_end: Callable[[], None],
    ) -> None:
        self.row = row
        self.supervisor_pid: int | None = None
        self.interrupted: SandboxGone | None = None
        self.run_error: SandboxGone | None = None
        self.exited = asyncio.Event()
        self.tree_ended = asyncio.Event()
        self._path = path
        self._log = log
        self._on_exit = on_exit
        self._on_tree_end = on_tree_end
        self._run: Run | None = None
        self._watch: InotifyWatch | None = None
        self._timers: list[asyncio.TimerHandle] = []
        if row.status not in ("starting", "running"):
            self.exited.set()
            self.tree_ended.set()
            log.finish()

    @property
    def running(self) -> bool:
        """True until the process ends."""
        return not self.exited.is_set()

    def attach(self, run: Run) -> None:
        """Read and watch the exit file of a process of this run."""
        self._run = run
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            self._supervisor_lost()
            return
        try:
            self.tree_ended.clear()
            self._watch = watch_end(fd, self._check_file)
        finally:
            os.close(fd)
        self._check_file(0)
        if not self.tree_ended.is_set():
            self._call_later(_RECHECK_SECONDS, lambda: self._check_file(0))

    def set_started(self, record: ExitRecord) -> None:
        """Set the pids of a process that runs."""
        self.supervisor_pid = record.supervisor_pid
        if self.row.status == "starting" and record.leader is not None:
            self.row = replace(self.row, status="running", pid=record.leader)

    def run_ended(self, reason: str) -> None:
        """Mark the process as killed if it still ran: the run of the sandbox ended."""
        self.run_error = run_ended_error(self.row, reason)
        if self.running:
            self.interrupted = self.run_error
        self._set_exit("killed", KILLED)
        self._set_tree_ended()
        self.close()

    def close(self) -> None:
        """Stop watching. Safe to repeat."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def _check_file(self, mask: int) -> None:
        if self._watch is None:
            return
        record = read_exit_file(self._path)
        if record.supervisor_pid is not None:
            self.set_started(record)
        if record.exit is not None:
            self._set_exit("killed" if record.exit.killed else "exited", record.exit.code)
        if mask & CLOSE_WRITE or not is_locked(self._path):
            self.close()
            if self.exited.is_set():
                self._set_tree_ended()
            else:
                self._call_later(_LOST_SECONDS, self._supervisor_lost)

    def _supervisor_lost(self) -> None:
        """Handle a supervisor that ended without a report: it was killed with its tree."""
        self.close()
        if self._run is not None and not self._run.jail.alive:
            # The whole sandbox ended; its owner calls `run_ended` with the reason.
            ended = functools.partial(self.run_ended, "it stopped")
            self._call_later(_OWNER_SECONDS, ended)
            return
        self._set_exit("lost", KILLED)
        self._set_tree_ended()

    def _set_exit(self, status: ProcessStatus, code: int) -> None:
        if self.exited.is_set():
            return
        self.row = replace(self.row, status=status, exit_code=code, ended_at=time.time())
        self.exited.set()
        self._log.finish()
        self._on_exit()

    def _set_tree_ended(self) -> None:
        if not self.tree_ended.is_set():
            self.tree_ended.set()
            self._on_tree_end()

    def _call_later(self, seconds: float, call: Callable[[], None]) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(seconds, call))


def ended_before(row: ProcessRow, log: ProcessLog, condition: str) -> ProcessEnded:
    """Return the error of a wait that cannot end, `condition` being "for it to log 'x'"."""
    output = log.last_lines()
    return ProcessEnded(
        f"process {row.process_id} (`{row.command:.80}`) ended with exit code {row.exit_code}. "
        f"A call was waiting {condition}." + (f" Its last lines: {output}" if output else ""),
        hint="See its logs().",
        process=row.process_id,
        exit_code=row.exit_code,
    )


def wait_timed_out(row: ProcessRow, condition: str, timeout: float) -> DeadlineExceeded:
    """Return the error of a wait that took too long, `condition` being "for it to end"."""
    return DeadlineExceeded(
        f"process {row.process_id} (`{row.command:.80}`): waited {timeout:g} s {condition}.",
        hint="Pass a longer timeout, or see its logs().",
        operation=condition,
        process=row.process_id,
        timeout=timeout,
    )


def run_ended_error(row: ProcessRow, reason: str) -> SandboxGone:
    """Return the error for calls to a process whose run of the sandbox ended."""
    destroyed = reason in (DESTROYED, EXPIRED)
    kind = SandboxGone if destroyed else SandboxRestarted
    return kind(
        f"process {row.process_id} (`{row.command:.80}`) ended with a run of the sandbox "
        f"{row.sandbox_id}: {reason}.",
        hint="Start another sandbox." if destroyed else "Start the process again.",
        reason=reason,
        sandbox_id=row.sandbox_id,
        process=row.process_id,
    )
