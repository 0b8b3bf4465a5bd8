"""Fixtures for every test: a state directory, a check for leftover processes, an S3 bucket."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from places import PREFIX
from smokebox.testing import SeaweedServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# The kernel and the event loop need a moment to reap what has ended.
GRACE_SECONDS = 5.0
# One of each serves the whole Python process and ends with it.
LASTING = re.compile(r"smokebox/runtime/supervisor|multiprocessing\.resource_tracker")
# The title of the engine's processes: the zygote, below it the guest init of each sandbox, and
# below that the supervisors that wait for a command and end with it.
ENGINE = "smokebox"

_numbers = itertools.count(1)

# Shells ignore SIGINT in the background, and so would the programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Require gVisor of root; an ordinary user may lack it."""
    runsc = os.environ.get("SMOKEBOX_RUNSC", "runsc")
    if item.get_closest_marker("gvisor") and not shutil.which(runsc):
        missing = f"{runsc} is not installed, which is gVisor: apt-get install -y runsc"
        pytest.fail(missing, pytrace=False) if os.geteuid() == 0 else pytest.skip(missing)


@pytest.fixture(autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep history and state out of the home directory of the user who runs the tests."""
    monkeypatch.setenv("SMOKEBOX_HOME", str(tmp_path_factory.getbasetemp() / "smokebox-home"))


@pytest.fixture(autouse=True, scope="session")
def _no_process_outlives_the_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail a run that leaves a sandbox running which a fixture of several tests has made."""
    yield
    fail_on_leftovers(lambda: orphans(tmp_path_factory))


@pytest.fixture(autouse=True)
def _no_process_outlives_its_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail a test that leaves a process running, below this one or in a sandbox of its own."""
    before = descendants() | orphans(tmp_path_factory)
    yield
    fail_on_leftovers(lambda: (descendants() | orphans(tmp_path_factory)) - before)


def fail_on_leftovers(look: Callable[[], set[int]]) -> None:
    """Wait a moment for processes to end; kill those that do not, and fail."""
    deadline = time.monotonic() + GRACE_SECONDS
    while (leftovers := look()) and time.monotonic() < deadline:
        time.sleep(0.01)
    lines = [f"{pid} ({command(pid)})" for pid in leftovers]
    for pid in leftovers:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not lines, f"processes were left running: {', '.join(lines)}"


@pytest.fixture(scope="session")
def seaweed() -> Iterator[SeaweedServer]:
    """An S3 server for all tests of buckets."""
    with SeaweedServer() as server:
        yield server


@pytest.fixture
def bucket_name(seaweed: SeaweedServer) -> Iterator[str]:
    """An empty bucket."""
    name = seaweed.create_bucket(f"bucket-{next(_numbers)}")
    yield name
    seaweed.delete_bucket(name)


def orphans(tmp_path_factory: pytest.TempPathFactory) -> set[int]:
    """Return the guest inits of sandboxes in state directories of this run without their engine.

    A sandbox outlives its engine, so that the next engine can adopt it.
    """
    homes = (f"{tmp_path_factory.getbasetemp()}/", f"/tmp/{PREFIX}")
    found: set[int] = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().startswith(ENGINE):
                mounts = Path(f"/proc/{pid}/mountinfo").read_text()
                if "/boxes/" in mounts and any(home in mounts for home in homes):
                    stat = Path(f"/proc/{pid}/stat").read_text()
                    parent = stat.rpartition(") ")[2].split()[1]
                    if not Path(f"/proc/{parent}/comm").read_text().startswith(ENGINE):
                        found.add(int(pid))
    return found


def descendants() -> set[int]:
    """Return the processes below this one, without those that later tests use.

    Guest init is among them, but no supervisor below it.
    """
    found: set[int] = set()
    waiting = [(os.getpid(), 0)]
    while waiting:
        parent, depth = waiting.pop()
        for pid in children(parent):
            line = command(pid)
            in_engine = depth + 1 if line == ENGINE else 0
            waiting.append((pid, in_engine))
            if line and not LASTING.search(line) and in_engine < 3:
                found.add(pid)
    return found


def children(pid: int) -> list[int]:
    """Return the child processes of a process."""
    tasks = Path(f"/proc/{pid}/task")
    found: list[int] = []
    with suppress(OSError):
        for task in os.listdir(tasks):
            found += map(int, (tasks / task / "children").read_text().split())
    return found


def command(pid: int) -> str:
    """Return the command line of a process, empty for one that has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return b" ".join(words).decode(errors="replace").strip()
