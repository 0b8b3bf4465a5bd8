"""Snapshots of sandboxes with many files whose programs write in every way, at every moment."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from engine.snapshots.test_tree_model import listing
from engine.snapshots.tree_model import RandomOperations
from smokebox.engine.snapshots import capture as capture_module
from smokebox.engine.snapshots.capture import Capture
from smokebox.engine.snapshots.tree_watch import TreeWatch
from smokebox.errors import LimitReached

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smokebox.engine.host import Host

FILES = 800
FILL = f"""
import os
os.mkdir("links")
for i in range({FILES}):
    os.makedirs(f"d{{i % 20}}", exist_ok=True)
    with open(f"d{{i % 20}}/{{i}}", "w") as file:
        file.write("0000000000")
"""
# Writes a number to a file, and then to the log: the log never names what is not there yet.
WRITER = f"""
import mmap, os, random, sys
rng = random.Random(int(sys.argv[1]))
log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
kept = [os.open(f"d{{i % 20}}/{{i}}", os.O_RDWR) for i in range(10)]
n = 0
while True:
    n += 1
    how, i = n % 7, rng.randrange(10, {FILES})
    path, data = f"d{{i % 20}}/{{i}}", b"%010d" % n
    if how == 0:
        with open(path, "r+b") as file:
            file.write(data)
    elif how == 1:
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 10) as mapped:
            mapped[:] = data
    elif how == 2:
        with open(f"{{path}}.new", "wb") as file:
            file.write(data)
        os.rename(f"{{path}}.new", path)
    elif how == 3:
        os.link(path, f"links/{{n}}")
        with open(f"links/{{n}}", "r+b") as file:
            file.write(data)
        os.unlink(f"links/{{n}}")
    elif how == 4:
        # Through a descriptor from before.
        i = n % 10
        os.pwrite(kept[i], data, 0)
    elif how == 5:
        os.mkdir(f"new{{n}}")
        with open(f"new{{n}}/f", "wb") as file:
            file.write(data)
        os.rename(f"new{{n}}/f", path)
        os.rmdir(f"new{{n}}")
    else:
        os.rename(f"d{{i % 20}}", "moved")
        with open(f"moved/{{i}}", "r+b") as file:
            file.write(data)
        os.rename("moved", f"d{{i % 20}}")
    os.write(log, b"%d %d\\n" % (i, n))
"""
CHECK = f"""
import os
last, n = {{}}, 0
for line in open("log").read().splitlines():
    i, n = map(int, line.split())
    last[i] = n
for i in range({FILES}):
    path = f"d{{i % 20}}/{{i}}"
    if not os.path.exists(path):
        path = f"moved/{{i}}"
    if os.path.exists(path):
        found = int(open(path).read())
        assert last.get(i, 0) <= found <= n + 1, (i, found, last.get(i), n)
    else:
        raise SystemExit(f"{{path}} is missing")
print(n)
"""


@pytest.fixture
def always_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watch trees with few files too."""
    monkeypatch.setattr(capture_module, "_LISTED_FILES", 0)


@pytest.fixture
def listings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Number of captures that list all files while programs are frozen."""
    counted: list[int] = []
    compared = Capture.compared

    def count(self: Capture) -> object:
        counted.append(1)
        return compared(self)

    monkeypatch.setattr(Capture, "compared", count)
    yield counted


@pytest.mark.timeout(120)
async def test_a_snapshot_is_of_one_moment_whatever_programs_do(host: Host) -> None:
    seed = random.randrange(1 << 30)
    sandbox = await host.create("box", keep_alive=True)
    await sandbox.write_file("/writer.py", WRITER)
    await sandbox.write_file("/check.py", CHECK)
    await sandbox.write_file("/fill.py", FILL)
    assert (await sandbox.exec("python3 /fill.py")).success
    await sandbox.start_process(f"nice python3 /writer.py {seed}")
    snapshots = []
    for _ in range(12):
        await asyncio.sleep(0.05)
        snapshots.append(await sandbox.snapshots.create())
    lengths = []
    for snapshot in snapshots:
        created = await host.create(snapshot=snapshot.id)
        result = await created.exec("python3 /check.py")
        assert result.success, f"{result.stderr} seed {seed}"
        lengths.append(int(result.stdout))
        await created.destroy()
    assert lengths == sorted(lengths)
    assert lengths[-1] > lengths[0]


async def test_nothing_is_listed_while_programs_are_frozen(host: Host, listings: list[int]) -> None:
    sandbox = await host.create("box", keep_alive=True)
    await sandbox.write_file("/fill.py", FILL)
    await sandbox.exec("python3 /fill.py; mkfifo d1/fifo; ln d2/2 d3/linked; ln -s d3 d4/link")
    await sandbox.start_process("while :; do date +%N >> log; sleep 0.01; done")
    made = []
    for number in range(3):
        await sandbox.exec(f"echo {number} > d5/5; rm -f d6/{6 + 20 * number}; echo 1 >> /etc/motd")
        made.append(await sandbox.snapshots.create())
    assert listings == []
    created = await host.create(snapshot=made[1].id)
    command = "cat d5/5; ls d6 | wc -l; stat -c %h d3/linked; stat -c %F d1/fifo; readlink d4/link"
    assert (await created.exec(command)).stdout == "1\n38\n2\nfifo\nd3\n"


@pytest.mark.usefixtures("always_watched")
async def test_every_live_snapshot_equals_the_tree_of_its_moment(host: Host) -> None:
    seed = random.randrange(1 << 30)
    operations = RandomOperations(seed)
    sandbox = await host.create("box", keep_alive=True)
    expected = {}
    for _ in range(6):
        await sandbox.exec(operations.script(15))
        snapshot = await sandbox.snapshots.create()
        expected[snapshot.id] = await listing(sandbox)
    for id, tree in expected.items():
        created = await host.create(snapshot=id)
        assert await listing(created) == tree, f"seed {seed}"
        await created.destroy()


@pytest.mark.usefixtures("always_watched")
async def test_all_changes_between_the_copy_and_the_freeze_are_found(
    host: Host, monkeypatch: pytest.MonkeyPatch, listings: list[int]
) -> None:
    """Random operations at the worst moment, once watches are set and everything is copied."""
    seed = random.randrange(1 << 30)
    operations = RandomOperations(seed)
    sandbox = await host.create("box", keep_alive=True)
    await sandbox.exec(operations.script(40))
    loop = asyncio.get_running_loop()
    follow = Capture.follow

    def and_then_change(self: Capture, *args: object) -> None:
        follow(self, *args)  # type: ignore[arg-type]
        work = sandbox.exec(operations.script(15))
        assert asyncio.run_coroutine_threadsafe(work, loop).result(10) is not None

    monkeypatch.setattr(Capture, "follow", and_then_change)
    expected = {}
    for _ in range(8):
        snapshot = await sandbox.snapshots.create()
        expected[snapshot.id] = await listing(sandbox)
    for id, tree in expected.items():
        created = await host.create(snapshot=id)
        assert await listing(created) == tree, f"seed {seed}"
        await created.destroy()
    assert listings == []


@pytest.mark.usefixtures("always_watched")
async def test_without_watches_all_files_are_listed(
    host: Host, monkeypatch: pytest.MonkeyPatch, listings: list[int]
) -> None:
    def refuse(*_: object) -> None:
        raise LimitReached("the host's limit fs.inotify.max_user_watches is reached.")

    sandbox = await host.create("box")
    await sandbox.write_file("f", "1")
    with monkeypatch.context() as patched:
        patched.setattr(TreeWatch, "_watch", refuse)
        first = await sandbox.snapshots.create()
    await sandbox.write_file("f", "2")
    with monkeypatch.context() as patched:
        # The queue of events overflowed.
        patched.setattr(TreeWatch, "_read_events", lambda self: None)
        second = await sandbox.snapshots.create()
    assert len(listings) == 2
    for snapshot, text in ((first, "1"), (second, "2")):
        assert await (await host.create(snapshot=snapshot.id)).read_file("f") == text
