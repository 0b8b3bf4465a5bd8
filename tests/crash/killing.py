"""Engines that are started to be killed, and a look for what they leave behind."""

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

    from crash.ledger import Ledger

WORKLOAD = Path(__file__).with_name("workload.py")
# For an engine that hangs.
PATIENCE = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A state directory, and who the engines on it are: ourselves, or nobody in particular."""

    home: str
    layers: str
    ordinary: bool

    def command(self, *arguments: str) -> list[str]:
        words = [str(WORKLOAD), self.home, self.layers, *arguments]
        if not self.ordinary:
            return [sys.executable, "-W", "error", *words]
        # The interpreter of a virtualenv may be where others cannot reach.
        return [*as_nobody(), "/usr/bin/python3", *words]


@contextlib.contextmanager
def new_place(*, ordinary: bool) -> Iterator[Place]:
    """A fresh state directory in a short path of its own, gone at the end with all of it."""
    base = short_directory("crash")
    try:
        if ordinary:
            os.chown(base, NOBODY, NOBODY)
        yield Place(home=f"{base}/home", layers=f"{base}/layers", ordinary=ordinary)
    finally:
        # After a failure sandboxes run on, as they should.
        for pid in list(sandbox_pids(f"{base}/home")):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(base, ignore_errors=True)


class Engine:
    """One engine in a process of its own, and what it says."""

    def __init__(self, place: Place, ledger: Ledger, *arguments: str) -> None:
        self.ledger = ledger
        self.looked = False
        self._errors = os.memfd_create("errors")
        self._rest = b""
        self._process = subprocess.Popen(
            place.command(*arguments),
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd="/",
            env={"PATH": os.environ["PATH"], "PYTHONPATH": LIBRARIES},
        )
        assert self._process.stdout is not None
        self._pipe = self._process.stdout

    def listen(self, seconds: float, *, until_looked: bool = False) -> bool:
        """Hear what it says for so long; False when it has ended."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if select.select([self._pipe], [], [], left)[0] and not self._hear():
                return False
            if until_looked and self.looked:
                return True
        return True

    def kill(self) -> list[int]:
        """Kill -9; the zygotes that it leaves, which have to see that themselves."""
        left = zygotes(self._process.pid)
        self._process.kill()
        while self._hear():
            pass
        self._process.wait()
        self.ledger.crash()
        return left

    def finish(self) -> None:
        """Wait for its orderly end."""
        if self.listen(PATIENCE):
            self.ledger.violations.append("the engine hangs")
            self._process.kill()
        if code := self._process.wait():
            self.ledger.violations.append(f"the engine ended with {code}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """See that it is gone, and take note of what went wrong in it."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if text := os.pread(self._errors, 1 << 16, 0).decode():
            self.ledger.violations.append(text)
        os.close(self._errors)
        self._pipe.close()

    def _hear(self) -> bool:
        data = os.read(self._pipe.fileno(), 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            words = json.loads(line)
            self.looked |= "looked" in words
            self.ledger.hear(words)
        return bool(data)


def zygotes(engine: int) -> list[int]:
    """The helper processes of an engine that runs."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{engine}/task"):
            found += map(int, Path(f"/proc/{engine}/task/{task}/children").read_text().split())
    return found


def kill_an_agent(place: Place, ledger: Ledger, chance: random.Random) -> None:
    """Kill the first process of a sandbox that runs without an engine."""
    if not os.path.exists(f"{place.home}/record.db"):
        return
    with contextlib.closing(sqlite3.connect(f"{place.home}/record.db")) as record:
        # The first engine may have been killed between making the file and its tables.
        if not record.execute("SELECT 1 FROM sqlite_master WHERE name = 'sandboxes'").fetchone():
            return
        rows = record.execute(
            "SELECT id, jail FROM sandboxes WHERE status = 'active' ORDER BY id"
        ).fetchall()
    if not rows:
        return
    id, jail = chance.choice(rows)
    pid = json.loads(jail)["pid"]
    if comm(pid) == "smokebox-init":
        os.kill(pid, signal.SIGKILL)
        ledger.agent_killed(id)


def leftovers(place: Place) -> list[str]:
    """What is left of engines that should have left nothing, in the record too."""
    left = find_leftovers(place.home)
    with contextlib.closing(sqlite3.connect(f"{place.home}/record.db")) as record:
        for table in ("sandboxes", "sessions", "processes"):
            if count := record.execute(f"SELECT count(*) FROM {table}").fetchone()[0]:
                left.append(f"{count} rows in {table}")
    return left


def still_there(pids: list[int], name: str) -> list[str]:
    """Those of these processes that have not ended after a moment."""
    return wait_until_empty(lambda: [f"{name} {pid} is left" for pid in pids if comm(pid) == name])


def comm(pid: int) -> str:
    """The short name of a process; empty for one that has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
