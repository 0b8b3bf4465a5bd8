"""What every test has: a home of its own, and a look for processes it left behind.

And what any can have: a bucket of a real S3 server.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from smokebox.testing import Seaweed

if TYPE_CHECKING:
    from collections.abc import Iterator

# Reading what has ended takes the kernel and the event loop a moment.
PATIENCE = 5.0
# One of each serves the whole Python process and ends with it.
KEPT = re.compile(r"smokebox/sandbox/keeper|multiprocessing\.resource_tracker")
# What the engine's processes call themselves: the one that forks jails, below it the first
# process of each jail, and below that those which wait for a command, and end with it.
ENGINE = "smokebox"

_numbers = itertools.count(1)

# Shells have it ignored in the background of a script, and so would have what tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps history and state out of the home of whoever runs the tests."""
    monkeypatch.setenv("SMOKEBOX_HOME", str(tmp_path_factory.getbasetemp() / "smokebox-home"))


@pytest.fixture(autouse=True)
def _no_process_outlives_its_test() -> Iterator[None]:
    """Fails a test that leaves a process running, however far down."""
    before = descendants()
    yield
    deadline = time.monotonic() + PATIENCE
    while (left := descendants() - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, f"the test left processes running: {[command(pid) for pid in left]}"


@pytest.fixture(scope="session")
def seaweed() -> Iterator[Seaweed]:
    """One S3 server for all tests of buckets."""
    with Seaweed() as server:
        yield server


@pytest.fixture
def bucket_name(seaweed: Seaweed) -> Iterator[str]:
    """An empty bucket in it."""
    name = seaweed.create_bucket(f"bucket-{next(_numbers)}")
    yield name
    seaweed.delete_bucket(name)


def descendants() -> set[int]:
    """The processes below this one, without those that are kept for the next test.

    A jail is among them, but not what waits in it for a command.
    """
    found: set[int] = set()
    waiting = [(os.getpid(), 0)]
    while waiting:
        parent, depth = waiting.pop()
        for pid in children(parent):
            line = command(pid)
            in_engine = depth + 1 if line == ENGINE else 0
            waiting.append((pid, in_engine))
            if line and not KEPT.search(line) and in_engine < 3:
                found.add(pid)
    return found


def children(pid: int) -> list[int]:
    """The processes that a process has started and not yet seen the end of."""
    tasks = Path(f"/proc/{pid}/task")
    found: list[int] = []
    with suppress(OSError):
        for task in os.listdir(tasks):
            found += map(int, (tasks / task / "children").read_text().split())
    return found


def command(pid: int) -> str:
    """The command line of a process; empty for one that has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return b" ".join(words).decode(errors="replace").strip()
