"""What a sandbox has on disk, measured while it is hostile, and who is told."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from smokebox.engine import disk
from smokebox.engine.disk import DiskWatch, measure, unlinked, usage

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MB = 10**6
MIB = 1 << 20
DEPTH = 2_500


def du(path: Path) -> int:
    """What coreutils say."""
    told = subprocess.run(
        ["du", "-s", "--block-size=1", path], capture_output=True, text=True, check=True
    )
    return int(told.stdout.split()[0])


def fill(path: Path, size: int) -> None:
    with open(path, "wb") as file:
        for _ in range(size // MIB):
            file.write(b"x" * MIB)


def test_a_tree_is_as_great_as_du_says(tmp_path: Path) -> None:
    for name in ("a/b/c", "a/d", "e"):
        (tmp_path / name).mkdir(parents=True)
        fill(tmp_path / name / "file", 2 * MIB)
    (tmp_path / "a" / "twice").hardlink_to(tmp_path / "e" / "file")
    (tmp_path / "a" / "link").symlink_to(tmp_path / "e")
    assert usage(str(tmp_path)) == du(tmp_path) > 6 * MIB
    assert measure(str(tmp_path)).complete


def test_holes_cost_nothing(tmp_path: Path) -> None:
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(200 * MB)
    assert usage(str(tmp_path)) < MB


def test_a_directory_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert usage(str(tmp_path / "nowhere")) == 0


def test_many_hard_links_count_once_in_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_MOST_LINKED", 1)
    for number in range(4):
        fill(tmp_path / f"{number}", MIB)
        for copy in range(3):
            (tmp_path / f"{number}-{copy}").hardlink_to(tmp_path / f"{number}")
    assert usage(str(tmp_path)) == du(tmp_path)


@pytest.fixture
def abyss(tmp_path: Path) -> Iterator[Path]:
    """More directories within each other than a path has room for, with a file at the bottom."""
    top = tmp_path / "abyss"
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
        # Whatever came between: pytest cannot remove it.
        subprocess.run(["rm", "-rf", top], check=True)


def test_depth_costs_neither_stack_nor_descriptors(abyss: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    seen: list[int] = []

    def watching() -> bool:
        seen.append(len(os.listdir("/proc/self/fd")) - before)
        return False

    found = measure(str(abyss), watching)
    assert found.complete
    assert found.inodes == DEPTH + 2
    assert found.bytes == du(abyss)
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


def test_a_tree_that_is_torn_about_is_measured_and_never_left(tmp_path: Path) -> None:
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


def test_files_that_vanish_are_not_missed(tmp_path: Path) -> None:
    going = threading.Event()

    def churn() -> None:
        while not going.is_set():
            for number in range(50):
                (tmp_path / f"d{number}" / "x").mkdir(parents=True, exist_ok=True)
            subprocess.run(["rm", "-rf", *tmp_path.glob("d*")], check=True)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(100):
            assert usage(str(tmp_path)) < MIB
    finally:
        going.set()
        thread.join()


def test_measuring_stops_when_told(tmp_path: Path) -> None:
    for number in range(600):
        (tmp_path / f"{number}").touch()
    found = measure(str(tmp_path), lambda: True)
    assert not found.complete
    assert found.inodes < 600


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every directory")
def test_what_may_not_be_read_makes_it_a_lower_bound(tmp_path: Path) -> None:
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
    """A process that holds 5 MiB of disk, and of memory, that no directory shows."""
    with subprocess.Popen(
        [sys.executable, "-Sc", HOLD], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        process.stdout.readline()
        yield process
        process.kill()


def test_a_file_that_only_a_process_still_has_is_counted(
    holder: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    assert usage(str(tmp_path)) < MIB
    assert 5 * MIB <= unlinked([holder.pid, holder.pid]) < 6 * MIB
    assert unlinked([]) == 0


def test_what_is_gone_holds_nothing() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert unlinked([gone.pid]) == 0


class Told:
    """A watch, and what it said."""

    def __init__(self, directory: Path, *, every: float = disk.EVERY_SECONDS) -> None:
        self.over: list[tuple[str, int]] = []
        self.low: list[str] = []
        self.news = asyncio.Event()
        self.watch = DiskWatch(
            str(directory),
            over=self.heard,
            low=lambda key, used: self.low.append(key),
            tick=0.01,
            every=every,
        )

    def heard(self, key: str, used: int) -> None:
        self.over.append((key, used))
        self.news.set()


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    told = Told(tmp_path)
    yield told
    told.watch.close()


async def test_a_writer_is_caught_while_it_writes(told: Told, tmp_path: Path) -> None:
    for key in ("writer", "quiet"):
        (tmp_path / key).mkdir()
        told.watch.watch(key, str(tmp_path / key), 50 * MB, fresh=True)
    running = asyncio.create_task(told.watch.run())
    target = tmp_path / "writer" / "bomb"
    code = f"f = open({str(target)!r}, 'wb')\nfor _ in range(200): f.write(bytes({MB}))"
    writer = await asyncio.create_subprocess_exec(sys.executable, "-Sc", code)
    async with asyncio.timeout(15):
        await writer.wait()
        await told.news.wait()
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    ((key, used),) = told.over
    assert key == "writer"
    assert 50 * MB < used <= 201 * MB
    assert told.low == []


async def test_one_that_is_over_is_told_once_and_again_when_it_comes_back(tmp_path: Path) -> None:
    told = Told(tmp_path, every=0)
    (tmp_path / "box").mkdir()
    told.watch.watch("box", str(tmp_path / "box"), MIB)
    file = tmp_path / "box" / "file"
    for present in (True, True, False, True):
        fill(file, 2 * MIB if present else 0)
        await told.watch.look()
    assert [key for key, _ in told.over] == ["box", "box"]
    assert told.watch.used("box") == du(tmp_path / "box")
    told.watch.close()


async def test_holes_are_not_held_against_anybody(tmp_path: Path) -> None:
    told = Told(tmp_path, every=0)
    (tmp_path / "sparse").write_bytes(b"")
    os.truncate(tmp_path / "sparse", 200 * MB)
    told.watch.watch("box", str(tmp_path), 50 * MB)
    await told.watch.look()
    assert told.over == []
    told.watch.close()


async def test_deleted_files_that_are_open_count(
    holder: subprocess.Popen[bytes], told: Told, tmp_path: Path
) -> None:
    told.watch.watch("box", str(tmp_path), MIB, pids=lambda: [holder.pid])
    await told.watch.look()
    assert [key for key, _ in told.over] == ["box"]


async def test_nobody_is_told_of_what_is_forgotten_or_without_a_limit(
    told: Told, tmp_path: Path
) -> None:
    fill(tmp_path / "file", 2 * MIB)
    told.watch.watch("free", str(tmp_path), None)
    told.watch.watch("gone", str(tmp_path), MIB)
    told.watch.forget("gone")
    await told.watch.look()
    assert told.over == []
    assert told.watch.used("gone") is None
    assert (told.watch.used("free") or 0) > 2 * MIB


async def test_a_limit_can_be_lowered(told: Told, tmp_path: Path) -> None:
    fill(tmp_path / "file", 2 * MIB)
    told.watch.watch("box", str(tmp_path), 10 * MIB)
    await told.watch.look()
    told.watch.watch("box", str(tmp_path), MIB)
    await told.watch.look()
    assert [key for key, _ in told.over] == ["box"]


async def test_quiet_means_not_measured(told: Told, tmp_path: Path) -> None:
    (tmp_path / "box").mkdir()
    told.watch.watch("box", str(tmp_path / "box"), 10**15)
    await told.watch.look()
    measured = told.watch.used("box")
    fill(tmp_path / "box" / "file", MIB)
    for _ in range(3):
        await told.watch.look()
    assert told.watch.used("box") == measured


async def test_a_watch_ends_in_the_middle_of_a_great_tree(told: Told, tmp_path: Path) -> None:
    for number in range(3000):
        (tmp_path / f"{number}").touch()
    told.watch.watch("box", str(tmp_path), MIB)
    running = asyncio.create_task(told.watch.run())
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
    """A file system of 64 MiB and 500 files."""
    where = tmp_path / "small"
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m,nr_inodes=500", "tmpfs", str(where)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False).returncode:
        pytest.skip("a file system of our own takes root")
    yield where
    subprocess.run(["umount", where], check=True)


def boxes(told: Told, where: Path, *keys: str, fresh: bool = True) -> None:
    for key in keys:
        (where / key).mkdir(exist_ok=True)
        told.watch.watch(key, str(where / key), None, fresh=fresh)


async def test_when_the_host_runs_out_the_one_that_grows_is_told(small: Path) -> None:
    told = Told(small)
    (small / "old").mkdir()
    fill(small / "old" / "file", 40 * MIB)
    boxes(told, small, "old", fresh=False)
    boxes(told, small, "growing", "quiet")
    await told.watch.look()
    assert told.low == []
    with suppress(OSError):
        fill(small / "growing" / "file", 40 * MIB)
    await told.watch.look()
    assert told.low == ["growing"]
    await told.watch.look()
    assert told.low == ["growing"], "it did not grow any more"
    assert told.over == []
    told.watch.close()


async def test_the_deleting_of_one_does_not_hide_the_writing_of_another(small: Path) -> None:
    told = Told(small)
    for key in ("deletes", "writes"):
        (small / key).mkdir()
    fill(small / "deletes" / "file", 40 * MIB)
    told.watch.watch("writes", str(small / "writes"), 10 * MIB, fresh=True)
    await told.watch.look()
    (small / "deletes" / "file").unlink()
    fill(small / "writes" / "file", 20 * MIB)
    await told.watch.look()
    assert [key for key, _ in told.over] == ["writes"]
    told.watch.close()


async def test_when_the_host_runs_out_of_inodes_the_one_with_most_is_told(small: Path) -> None:
    told = Told(small)
    boxes(told, small, "many", "big")
    fill(small / "big" / "file", 5 * MIB)
    with suppress(OSError):
        for number in range(1000):
            (small / "many" / f"{number}").touch()
    await told.watch.look()
    assert told.low == ["many"]
    told.watch.close()


async def test_another_file_system_below_is_not_counted(small: Path, tmp_path: Path) -> None:
    fill(small / "file", 5 * MIB)
    assert usage(str(tmp_path)) < MIB


async def test_a_full_host_without_sandboxes_is_nobody_s_fault(small: Path) -> None:
    told = Told(small)
    with suppress(OSError):
        fill(small / "file", 80 * MIB)
    await told.watch.look()
    assert told.low == []
    told.watch.close()
