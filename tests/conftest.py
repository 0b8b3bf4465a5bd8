"""Fixtures for every test: a state directory, a check for leftover processes, an S3 bucket."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from short_directory import PREFIX, short_directory
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
    """Require gVisor if root runs the tests; other users may lack it."""
    runsc = os.environ.get("SMOKEBOX_RUNSC", "runsc")
    if item.get_closest_marker("gvisor") and not shutil.which(runsc):
        missing = f"{runsc} (gVisor) is not installed: apt-get install -y runsc"
        pytest.fail(missing, pytrace=False) if os.geteuid() == 0 else pytest.skip(missing)


@pytest.fixture(autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep history and state out of the home directory of the user who runs the tests."""
    monkeypatch.setenv("SMOKEBOX_HOME", str(tmp_path_factory.getbasetemp() / "smokebox-home"))


@pytest.fixture(autouse=True, scope="session")
def _temporary_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Create temporary directories, also those of child processes, where `orphans` looks."""
    tmp_path_factory.getbasetemp()
    directory = short_directory("tmp")
    os.chmod(directory, 0o1777)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", directory)
        patch.setattr(tempfile, "tempdir", directory)
        yield
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(autouse=True, scope="session")
def _no_process_outlives_the_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail a run that leaves sandboxes of shared fixtures running."""
    yield
    fail_on_leftovers(lambda: orphans(tmp_path_factory))


@pytest.fixture(autouse=True)
def _no_process_outlives_its_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail a test that leaves a child process or a sandbox running."""
    before = descendants() | orphans(tmp_path_factory)
    yield
    fail_on_leftovers(lambda: (descendants() | orphans(tmp_path_factory)) - before)


def fail_on_leftovers(find: Callable[[], set[int]]) -> None:
    """Wait a moment for processes to end; kill those that do not, and fail."""
    deadline = time.monotonic() + GRACE_SECONDS
    while (leftovers := find()) and time.monotonic() < deadline:
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

    A sandbox outlives its engine, so that the next engine can adopt it. The mount of the engine's
    pipes shows its state directory.
    """
    homes = [
        path_in_filesystem(home)
        for home in (f"{tmp_path_factory.getbasetemp()}/", f"/tmp/{PREFIX}")
    ]
    found: set[int] = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().startswith(ENGINE):
                mounts = Path(f"/proc/{pid}/mountinfo").read_text()
                if any(f" {home}" in mounts for home in homes):
                    stat = Path(f"/proc/{pid}/stat").read_text()
                    parent = stat.rpartition(") ")[2].split()[1]
                    if not Path(f"/proc/{parent}/comm").read_text().startswith(ENGINE):
                        found.add(int(pid))
    return found


def path_in_filesystem(path: str) -> str:
    """Return a path as mountinfo shows it: relative to its file system, which may be a tmpfs."""
    mounts = [line.split(" ") for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    points = {fields[4].rstrip("/"): fields[3].rstrip("/") for fields in mounts}
    point = max((point for point in points if path.startswith(f"{point}/")), key=len)
    return points[point] + path[len(point) :]


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
