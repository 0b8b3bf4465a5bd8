"""From the start of a lasting process to its end, as its minder tells of it."""

from __future__ import annotations

import asyncio
import functools
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from smokebox.engine.processes import endings
from smokebox.engine.processes.endings import KILLED, Exit
from smokebox.engine.processes.faults import run_ended
from smokebox.engine.processes.inbox import CLOSE_WRITE, Watch, watch_end

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.engine.processes.endings import Told
    from smokebox.engine.processes.logs import Log
    from smokebox.engine.record.rows import ProcessRow
    from smokebox.engine.run import Run
    from smokebox.errors import SandboxGone
    from smokebox.types import ProcessStatus

# A minder that ends without a word: its whole jail may be ending, of which others know why.
_LOST_SECONDS = 0.25
# The kernel tells of the closing of a file a moment before it lets go of its lock.
_LOOK_AGAIN_SECONDS = 0.1
# How long the end of a sandbox may take to be told by who ended it.
_OWNER_SECONDS = 3.0


class Lifetime:
    """One process's row, kept up to date from the file that its minder writes.

    `over` once the process has ended, `gone` once nothing of it is left in the background
    either. `stale` is the error for what needs the run of the sandbox that is over, and
    `cut` the one for who waits, where the end of the run was the end of the process.
    """

    def __init__(
        self,
        row: ProcessRow,
        path: str,
        log: Log,
        *,
        on_end: Callable[[], None],
        on_gone: Callable[[], None],
    ) -> None:
        self.row = row
        self.minder: int | None = None
        self.cut: SandboxGone | None = None
        self.stale: SandboxGone | None = None
        self.over = asyncio.Event()
        self.gone = asyncio.Event()
        self._path = path
        self._log = log
        self._on_end = on_end
        self._on_gone = on_gone
        self._run: Run | None = None
        self._watch: Watch | None = None
        self._timers: list[asyncio.TimerHandle] = []
        if row.status not in ("starting", "running"):
            self.over.set()
            self.gone.set()
            log.finish()

    def attach(self, run: Run) -> None:
        """Listen to the minder, which is of this run. What it has told already counts."""
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

    def begin(self, told: Told) -> None:
        """Take the pids of the process, which runs."""
        self.minder = told.minder
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
        """See what the file says, and whether the minder still has it."""
        if self._watch is None:
            return
        told = endings.read(self._path)
        if told.minder is not None:
            self.begin(told)
        if told.exit is not None:
            self._exit(told.exit)
        if mask & CLOSE_WRITE or not endings.is_held(self._path):
            self.close()
            if self.over.is_set():
                self._vanish()
            else:
                self._later(_LOST_SECONDS, self._lose)

    def _exit(self, exit: Exit) -> None:
        self._end("killed" if exit.killed else "exited", exit.code)

    def _lose(self) -> None:
        """The minder has ended without telling: it was killed, and its tree with it."""
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
