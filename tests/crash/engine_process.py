"""Engines in child processes that are killed, and checks for what they leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from engine.leftovers import find_leftovers, sandbox_pids, wait_until_empty
from short_directory import short_directory
from unprivileged import LIBRARIES, NOBODY, as_nobody

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from crash.sandbox_model import SandboxModel

WORKLOAD = Path(__file__).with_name("workload.py")
# Longer means that the engine hangs.
HANG_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDirectory:
    """A state directory, whose engines run as this user or as an unprivileged one."""

    home: str
    layers: str
    unprivileged: bool

    def command(self, *arguments: str) -> list[str]:
        script = [str(WORKLOAD), self.home, self.layers, *arguments]
        if not self.unprivileged:
            return [sys.executable, "-W", "error", *script]
        # Other users may not reach the interpreter of a virtualenv.
        return [*as_nobody(), "/usr/bin/python3", *script]


@contextlib.contextmanager
def new_state_directory(*, unprivileged: bool) -> Iterator[StateDirectory]:
    """Create a state directory with a short path, and remove it afterwards."""
    base = short_directory("crash")
    try:
        if unprivileged:
            os.chown(base, NOBODY, NOBODY)
        yield StateDirectory(
            home=f"{base}/home", layers=f"{base}/layers", unprivileged=unprivileged
        )
    finally:
        # After a failure sandboxes keep running.
        for pid in list(sandbox_pids(f"{base}/home")):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(base, ignore_errors=True)


class Engine:
    """One engine in a child process, whose reports go to a model."""

    def __init__(self, directory: StateDirectory, model: SandboxModel, *arguments: str) -> None:
        self.model = model
        self.inspected = False
        self._errors = os.memfd_create("errors")
        self._rest = b""
        self._process = subprocess.Popen(
            directory.command(*arguments),
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd="/",
            env={"PATH": os.environ["PATH"], "PYTHONPATH": LIBRARIES},
        )
        assert self._process.stdout is not None
        self._pipe = self._process.stdout

    def read(self, seconds: float, *, until_inspected: bool = False) -> bool:
        """Read its reports for so long; False when it has exited."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if select.select([self._pipe], [], [], left)[0] and not self._read_once():
                return False
            if until_inspected and self.inspected:
                return True
        return True

    def kill(self) -> list[int]:
        """Kill it, and return its helper processes, which have to exit by themselves."""
        helpers = children(self._process.pid)
        self._process.kill()
        while self._read_once():
            pass
        self._process.wait()
        self.model.crash()
        return helpers

    def finish(self) -> None:
        """Wait for its orderly exit."""
        if self.read(HANG_SECONDS):
            self.model.violations.append("the engine hangs")
            self._process.kill()
        if code := self._process.wait():
            self.model.violations.append(f"the engine exited with {code}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill it if it still runs, and record its error output."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if text := os.pread(self._errors, 1 << 16, 0).decode():
            self.model.violations.append(text)
        os.close(self._errors)
        self._pipe.close()

    def _read_once(self) -> bool:
        data = os.read(self._pipe.fileno(), 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            report = json.loads(line)
            self.inspected |= "inspected" in report
            self.model.apply_report(report)
        return bool(data)


def children(engine: int) -> list[int]:
    """Return the child processes of a running engine."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{engine}/task"):
            found += map(int, Path(f"/proc/{engine}/task/{task}/children").read_text().split())
    return found


def kill_guest_init(directory: StateDirectory, model: SandboxModel, rng: random.Random) -> None:
    """Kill the guest init of a sandbox that runs without an engine."""
    if not os.path.exists(f"{directory.home}/record.db"):
        return
    with contextlib.closing(sqlite3.connect(f"{directory.home}/record.db")) as record:
        # The first engine may have been killed after creating the file and before its tables.
        if not record.execute("SELECT 1 FROM sqlite_master WHERE name = 'sandboxes'").fetchone():
            return
        rows = record.execute(
            "SELECT id, jail FROM sandboxes WHERE status = 'active' ORDER BY id"
        ).fetchall()
    if not rows:
        return
    id, jail = rng.choice(rows)
    pid = json.loads(jail)["pid"]
    if comm(pid) == "smokebox-init":
        os.kill(pid, signal.SIGKILL)
        model.guest_init_killed(id)


def leftovers(directory: StateDirectory) -> list[str]:
    """Return what engines left on the host and in the record, which should be nothing."""
    left = find_leftovers(directory.home)
    with contextlib.closing(sqlite3.connect(f"{directory.home}/record.db")) as record:
        for table in ("sandboxes", "sessions", "processes"):
            if count := record.execute(f"SELECT count(*) FROM {table}").fetchone()[0]:
                left.append(f"{count} rows in {table}")
    return left


def still_running(pids: list[int], name: str) -> list[str]:
    """Return those of these processes that do not exit within a moment."""
    return wait_until_empty(lambda: [f"{name} {pid} is left" for pid in pids if comm(pid) == name])


def comm(pid: int) -> str:
    """Return the name of a process; empty if it has exited."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
