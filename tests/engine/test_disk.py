"""Measuring the disk usage of hostile trees, and the watch that reports sandboxes over a limit."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from small_disk import small_disk
from smokebox.engine import disk
from smokebox.engine.disk import DiskWatch, measure, measure_deleted
from smokebox.errors import SandboxGone

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from smokebox.engine.host import Host

MB = 10**6
MIB = 1 << 20
DEPTH = 2_500


def du(path: Path) -> int:
    """Return the size that coreutils report."""
    result = subprocess.run(
        ["du", "-s", "--block-size=1", path], capture_output=True, text=True, check=True
    )
    return int(result.stdout.split()[0])


def fill(path: Path, size: int) -> None:
    with open(path, "wb") as file:
        for _ in range(size // MIB):
            file.write(b"x" * MIB)


def test_usage_equals_du(tmp_path: Path) -> None:
    for name in ("a/b/c", "a/d", "e"):
        (tmp_path / name).mkdir(parents=True)
        fill(tmp_path / name / "file", 2 * MIB)
    (tmp_path / "a" / "twice").hardlink_to(tmp_path / "e" / "file")
    (tmp_path / "a" / "link").symlink_to(tmp_path / "e")
    assert measure(str(tmp_path)).bytes == du(tmp_path) > 6 * MIB
    assert measure(str(tmp_path)).complete


def test_holes_are_not_counted(tmp_path: Path) -> None:
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(200 * MB)
    assert measure(str(tmp_path)).bytes < MB


def test_missing_directory_is_empty(tmp_path: Path) -> None:
    assert measure(str(tmp_path / "nowhere")).bytes == 0


def test_many_hard_links_count_once_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_MAX_LINKED", 1)
    for number in range(4):
        fill(tmp_path / f"{number}", MIB)
        for copy in range(3):
            (tmp_path / f"{number}-{copy}").hardlink_to(tmp_path / f"{number}")
    assert measure(str(tmp_path)).bytes == du(tmp_path)


@pytest.fixture
def deep_tree(tmp_path: Path) -> Iterator[Path]:
    """Nested directories deeper than the longest path, with a file at the bottom."""
    top = tmp_path / "deep"
    top.mkdir()
    fd = os.open(top, os.O_RDONLY)
    try:
        for _ in range(DEPTH):
            os.mkdir("d", dir_fd=fd)
            below = os.open("d", os.O_RDONLY, dir_fd=fd)
            os.close(fd)
            fd = below
        with open(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=fd), "wb") as file:
            file.write(b"x" * MIB)
        os.close(fd)
        yield top
    finally:
        # Too deep for pytest to remove.
        subprocess.run(["rm", "-rf", top], check=True)


def test_depth_costs_neither_stack_nor_descriptors(deep_tree: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    seen: list[int] = []

    def count_descriptors() -> bool:
        seen.append(len(os.listdir("/proc/self/fd")) - before)
        return False

    found = measure(str(deep_tree), count_descriptors)
    assert found.complete
    assert found.inodes == DEPTH + 2
    assert found.bytes == du(deep_tree)
    assert max(seen) < 100
    assert len(os.listdir("/proc/self/fd")) <= before


SHUFFLE = """
import os
while True:
    for old, new in (("deep", "moved"), ("moved", "deep")):
        try: os.rename(old + "/in" * 70, "elsewhere")
        except OSError: pass
        try: os.rename("elsewhere", new + "/in" * 70)
        except OSError: pass
        try: os.unlink("swap"); os.symlink("/usr", "swap")
        except OSError: pass
        try: os.unlink("swap")
        except OSError: pass
        try: os.mkdir("swap"); os.rmdir("swap"); os.symlink("/etc", "swap")
        except OSError: pass
"""


def test_concurrent_renames_do_not_lead_out_of_the_tree(tmp_path: Path) -> None:
    deep = tmp_path / ("deep" + "/in" * 100)
    deep.mkdir(parents=True)
    (tmp_path / ("moved" + "/in" * 69)).mkdir(parents=True)
    fill(deep / "file", MIB)
    fill(tmp_path / "stays", 3 * MIB)
    before = len(os.listdir("/proc/self/fd"))
    with subprocess.Popen([sys.executable, "-Sc", SHUFFLE], cwd=tmp_path) as shuffling:
        found = [measure(str(tmp_path)) for _ in range(100)]
        assert shuffling.poll() is None
        shuffling.kill()
    # /usr has a hundred times as many.
    assert all(3 * MIB < each.bytes < 8 * MIB and each.inodes < 1000 for each in found)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_vanishing_files_are_ignored(tmp_path: Path) -> None:
    stopped = threading.Event()

    def churn() -> None:
        while not stopped.is_set():
            for number in range(50):
                (tmp_path / f"d{number}" / "x").mkdir(parents=True, exist_ok=True)
            subprocess.run(["rm", "-rf", *tmp_path.glob("d*")], check=True)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(100):
            assert measure(str(tmp_path)).bytes < MIB
    finally:
        stopped.set()
        thread.join()


def test_measuring_stops_on_request(tmp_path: Path) -> None:
    for number in range(600):
        (tmp_path / f"{number}").touch()
    found = measure(str(tmp_path), lambda: True)
    assert not found.complete
    assert found.inodes < 600


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every directory")
def test_unreadable_directory_makes_a_lower_bound(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    assert not measure(str(tmp_path)).complete


HOLD = """
import os, sys
fds = [os.open("gone", os.O_CREAT | os.O_WRONLY), os.memfd_create("memory")]
os.unlink("gone")
for fd in fds: os.write(fd, bytes(5 << 20))
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process with 5 MiB in a deleted file, and 5 MiB in memory."""
    with subprocess.Popen(
        [sys.executable, "-Sc", HOLD], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        process.stdout.readline()
        yield process
        process.kill()


def test_deleted_open_file_is_counted(holder: subprocess.Popen[bytes], tmp_path: Path) -> None:
    assert measure(str(tmp_path)).bytes < MIB
    assert 5 * MIB <= measure_deleted([holder.pid, holder.pid]) < 6 * MIB
    assert measure_deleted([]) == 0


def test_ended_process_holds_no_deleted_files() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert measure_deleted([gone.pid]) == 0


class RecordedWatch:
    """A watch with a record of its reports."""

    def __init__(self, directory: Path, *, max_age: float = disk.MAX_AGE_SECONDS) -> None:
        self.over: list[tuple[str, int]] = []
        self.low: list[str] = []
        self.reported = asyncio.Event()
        self.watch = DiskWatch(
            str(directory),
            over=self.on_over,
            low=lambda key, used: self.low.append(key),
            interval=0.01,
            max_age=max_age,
        )

    def on_over(self, key: str, used: int) -> None:
        self.over.append((key, used))
        self.reported.set()


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[RecordedWatch]:
    recorded = RecordedWatch(tmp_path)
    yield recorded
    recorded.watch.close()


async def test_writer_is_reported_while_it_writes(recorded: RecordedWatch, tmp_path: Path) -> None:
    for key in ("writer", "quiet"):
        (tmp_path / key).mkdir()
        recorded.watch.watch(key, str(tmp_path / key), 50 * MB, fresh=True)
    running = asyncio.create_task(recorded.watch.run())
    target = tmp_path / "writer" / "bomb"
    code = f"f = open({str(target)!r}, 'wb')\nfor _ in range(200): f.write(bytes({MB}))"
    writer = await asyncio.create_subprocess_exec(sys.executable, "-Sc", code)
    async with asyncio.timeout(15):
        await writer.wait()
        await recorded.reported.wait()
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    ((key, used),) = recorded.over
    assert key == "writer"
    assert 50 * MB < used <= 201 * MB
    assert recorded.low == []


async def test_sandbox_over_its_limit_is_reported_once_each_time(tmp_path: Path) -> None:
    recorded = RecordedWatch(tmp_path, max_age=0)
    (tmp_path / "box").mkdir()
    recorded.watch.watch("box", str(tmp_path / "box"), MIB)
    file = tmp_path / "box" / "file"
    for present in (True, True, False, True):
        fill(file, 2 * MIB if present else 0)
        await recorded.watch.check()
    assert [key for key, _ in recorded.over] == ["box", "box"]
    assert recorded.watch.used("box") == du(tmp_path / "box")
    recorded.watch.close()


async def test_sparse_file_is_not_over_the_limit(tmp_path: Path) -> None:
    recorded = RecordedWatch(tmp_path, max_age=0)
    (tmp_path / "sparse").write_bytes(b"")
    os.truncate(tmp_path / "sparse", 200 * MB)
    recorded.watch.watch("box", str(tmp_path), 50 * MB)
    await recorded.watch.check()
    assert recorded.over == []
    recorded.watch.close()


async def test_deleted_open_files_count_for_the_limit(
    holder: subprocess.Popen[bytes], recorded: RecordedWatch, tmp_path: Path
) -> None:
    recorded.watch.watch("box", str(tmp_path), MIB, pids=lambda: [holder.pid])
    await recorded.watch.check()
    assert [key for key, _ in recorded.over] == ["box"]


async def test_sandbox_with_deleted_open_files_is_stopped(host: Host) -> None:
    """No directory lists them, and the limit on the size of one file does not bound their sum."""
    sandbox = await host.create("box", limits={"disk": 20 * MB})
    code = """
import os, time
for number in range(3):
    fd = os.open(str(number), os.O_CREAT | os.O_WRONLY)
    os.unlink(str(number))
    os.write(fd, bytes(15_000_000))
time.sleep(60)
"""
    with pytest.raises(SandboxGone, match="disk"):
        await sandbox.exec(["python3", "-c", code])


async def test_forgotten_and_unlimited_sandboxes_are_not_reported(
    recorded: RecordedWatch, tmp_path: Path
) -> None:
    fill(tmp_path / "file", 2 * MIB)
    recorded.watch.watch("free", str(tmp_path), None)
    recorded.watch.watch("gone", str(tmp_path), MIB)
    recorded.watch.forget("gone")
    await recorded.watch.check()
    assert recorded.over == []
    assert recorded.watch.used("gone") is None
    assert (recorded.watch.used("free") or 0) > 2 * MIB


async def test_limit_can_be_lowered(recorded: RecordedWatch, tmp_path: Path) -> None:
    fill(tmp_path / "file", 2 * MIB)
    recorded.watch.watch("box", str(tmp_path), 10 * MIB)
    await recorded.watch.check()
    recorded.watch.watch("box", str(tmp_path), MIB)
    await recorded.watch.check()
    assert [key for key, _ in recorded.over] == ["box"]


async def test_sandbox_is_not_measured_without_a_change_of_free_space(
    recorded: RecordedWatch, tmp_path: Path
) -> None:
    (tmp_path / "box").mkdir()
    recorded.watch.watch("box", str(tmp_path / "box"), 10**15)
    await recorded.watch.check()
    measured = recorded.watch.used("box")
    fill(tmp_path / "box" / "file", MIB)
    for _ in range(3):
        await recorded.watch.check()
    assert recorded.watch.used("box") == measured


async def test_watch_can_be_cancelled_while_measuring(
    recorded: RecordedWatch, tmp_path: Path
) -> None:
    for number in range(3000):
        (tmp_path / f"{number}").touch()
    recorded.watch.watch("box", str(tmp_path), MIB)
    running = asyncio.create_task(recorded.watch.run())
    await asyncio.sleep(0.001)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    for thread in threading.enumerate():
        if thread.name.startswith("smokebox-disk"):
            thread.join(5)
            assert not thread.is_alive()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 64 MiB and 500 inodes."""
    with small_disk(tmp_path, "size=64m,nr_inodes=500") as path:
        yield path


def watch_new(recorded: RecordedWatch, path: Path, *keys: str, fresh: bool = True) -> None:
    for key in keys:
        (path / key).mkdir(exist_ok=True)
        recorded.watch.watch(key, str(path / key), None, fresh=fresh)


async def test_low_disk_reports_the_sandbox_that_grew_most(small: Path) -> None:
    recorded = RecordedWatch(small)
    (small / "old").mkdir()
    fill(small / "old" / "file", 40 * MIB)
    watch_new(recorded, small, "old", fresh=False)
    watch_new(recorded, small, "growing", "quiet")
    await recorded.watch.check()
    assert recorded.low == []
    with suppress(OSError):
        fill(small / "growing" / "file", 40 * MIB)
    await recorded.watch.check()
    assert recorded.low == ["growing"]
    await recorded.watch.check()
    assert recorded.low == ["growing"], "reported again without growth"
    assert recorded.over == []
    recorded.watch.close()


async def test_deletion_in_one_sandbox_does_not_hide_writes_of_another(small: Path) -> None:
    recorded = RecordedWatch(small)
    for key in ("deletes", "writes"):
        (small / key).mkdir()
    fill(small / "deletes" / "file", 40 * MIB)
    recorded.watch.watch("writes", str(small / "writes"), 10 * MIB, fresh=True)
    await recorded.watch.check()
    (small / "deletes" / "file").unlink()
    fill(small / "writes" / "file", 20 * MIB)
    await recorded.watch.check()
    assert [key for key, _ in recorded.over] == ["writes"]
    recorded.watch.close()


async def test_neighbour_of_the_sandbox_that_filled_the_disk_is_not_reported(small: Path) -> None:
    recorded = RecordedWatch(small)
    watch_new(recorded, small, "hog", "neighbour")
    with suppress(OSError):
        fill(small / "hog" / "file", 80 * MIB)
    await recorded.watch.check()
    assert recorded.low == ["hog"]
    # It was stopped, and its files stay: the disk is as full as before.
    recorded.watch.forget("hog")
    os.truncate(small / "hog" / "file", 63 * MIB)
    for number in range(3):
        (small / "neighbour" / f"{number}").write_bytes(bytes(100_000))
        await recorded.watch.check()
    assert recorded.low == ["hog"]
    recorded.watch.close()


async def test_growth_is_compared_over_the_same_time(small: Path) -> None:
    """A sandbox that was measured long ago has grown the most since, but filled nothing lately."""
    recorded = RecordedWatch(small)
    watch_new(recorded, small, "hog", "neighbour")
    neighbour = recorded.watch._sandboxes["neighbour"]
    neighbour.usage_at -= 60
    fill(small / "neighbour" / "file", 40 * MIB)
    with suppress(OSError):
        fill(small / "hog" / "file", 40 * MIB)
    await recorded.watch.check()
    assert neighbour.growth("bytes") > 30 * MIB
    assert recorded.low == ["hog"]
    recorded.watch.close()


async def test_low_inodes_report_the_sandbox_that_created_most(small: Path) -> None:
    recorded = RecordedWatch(small)
    watch_new(recorded, small, "many", "big")
    fill(small / "big" / "file", 5 * MIB)
    with suppress(OSError):
        for number in range(1000):
            (small / "many" / f"{number}").touch()
    await recorded.watch.check()
    assert recorded.low == ["many"]
    recorded.watch.close()


async def test_other_file_systems_are_not_counted(small: Path, tmp_path: Path) -> None:
    fill(small / "file", 5 * MIB)
    assert measure(str(tmp_path)).bytes < MIB


async def test_full_host_without_sandboxes_reports_nothing(small: Path) -> None:
    recorded = RecordedWatch(small)
    with suppress(OSError):
        fill(small / "file", 80 * MIB)
    await recorded.watch.check()
    assert recorded.low == []
    recorded.watch.close()
