"""Rules of snapshots and forks: names, limits, what is kept, and what other features see."""

from __future__ import annotations

import asyncio
import glob
import hashlib
import os
from typing import TYPE_CHECKING

import pytest

from smokebox.egress.policy import Egress
from smokebox.engine.disk import measure
from smokebox.engine.host import Host
from smokebox.engine.snapshots import snapshots as snapshots_module
from smokebox.engine.snapshots.retention import Retention, parse_retention
from smokebox.errors import (
    Conflict,
    InvalidOption,
    LimitReached,
    NotFound,
    SandboxGone,
    Unsupported,
)

if TYPE_CHECKING:
    from pathlib import Path


def layers_of(host: Host) -> list[str]:
    """Return the names of the layers that a host has in the store, complete or not."""
    path = f"{host.images.layer_store.directory}/layers"
    users = f"{path}/.users/{hashlib.sha256(os.fsencode(host.home)).hexdigest()[:16]}"
    own = os.listdir(users) if os.path.isdir(users) else []
    names = os.listdir(path) if os.path.isdir(path) else []
    return sorted(name for name in names if name in own or name.startswith(".making"))


def upper_of(host: Host) -> str:
    """Return the directory of what a sandbox wrote."""
    (found,) = glob.glob(f"{host.home}/boxes/*/data/upper/0")
    return found


async def test_a_name_is_unique_in_its_scope(host: Host) -> None:
    sandbox = await host.create("box")
    await sandbox.snapshots.create("one")
    with pytest.raises(Conflict, match="there is a snapshot 'one' already"):
        await sandbox.snapshots.create("one")
    await sandbox.snapshots.create("one", scope="b")
    assert (await host.snapshots.get("one", scope="b")).name == "one"
    for name in ("snap-" + "0" * 32, "", "a b", "-x"):
        with pytest.raises(InvalidOption):
            await sandbox.snapshots.create(name)


async def test_snapshot_of_a_destroyed_sandbox_is_refused(host: Host) -> None:
    sandbox = await host.create("box")
    await sandbox.destroy()
    with pytest.raises(NotFound, match="no sandbox 'box'"):
        await sandbox.snapshots.create()
    with pytest.raises(NotFound, match="no sandbox 'box'"):
        await host.fork("box")
    with pytest.raises(NotFound, match="no snapshot 'none'"):
        await host.create(snapshot="none")
    assert layers_of(host) == []


async def test_deleting_a_snapshot_keeps_the_files_of_sandboxes_that_use_it(host: Host) -> None:
    sandbox = await host.create("box")
    await sandbox.write_file("f", "x")
    await sandbox.snapshots.create("one")
    created = await host.create("made", snapshot="one")
    await sandbox.destroy()
    await host.snapshots.delete("one")
    await host.snapshots.delete("one")
    assert await host.snapshots.list() == []
    await created.sleep()
    assert await created.read_file("f") == "x"
    await created.destroy()
    await asyncio.sleep(0)
    await host.snapshots.collect()
    assert layers_of(host) == []


async def test_forks_outlive_their_source_and_are_all_or_none(host: Host) -> None:
    sandbox = await host.create("box")
    await sandbox.write_file("f", "x")
    await host.create("taken")
    with pytest.raises(Conflict):
        await host.fork("box", ids=["free", "taken"])
    assert [info.id for info in await host.list()] == ["box", "taken"]
    forks = await host.fork("box", 8)
    assert [one.id.rpartition("-")[2] for one in forks] == [str(n) for n in range(1, 9)]
    await sandbox.destroy()
    found = await asyncio.gather(*(one.exec("cat f") for one in forks))
    assert [one.stdout for one in found] == ["x"] * 8
    with pytest.raises(Unsupported, match="not its processes"):
        await host.fork(forks[0].id, memory=True)
    for count in (0, 257, True):
        with pytest.raises(InvalidOption):
            await host.fork(forks[0].id, count)


async def test_a_fork_has_no_ports_processes_or_snapshots_of_its_source(host: Host) -> None:
    sandbox = await host.create("box", egress=Egress(allowed_hosts=["example.com"]))
    await sandbox.start_process("sleep 1000")
    await sandbox.ports.expose(8080)
    (fork,) = await host.fork("box", ids=["copy"])
    await fork.wake()
    assert await fork.processes.list() == []
    assert await fork.ports.list() == []
    assert await host.snapshots.list() == []
    layers = fork.lifecycle.layers
    assert layers is not None
    assert layers.egress().allowed_hosts == ["example.com"]


async def test_snapshots_count_against_the_disk_limit(host: Host) -> None:
    sandbox = await host.create("box", limits={"disk": 30_000_000})
    await sandbox.exec("head -c 9000000 /dev/urandom > large")
    first = await sandbox.snapshots.create()
    await sandbox.exec("rm large; head -c 9000000 /dev/urandom > large")
    with pytest.raises(LimitReached, match="the limit is 30000000"):
        for _ in range(2):
            await sandbox.snapshots.create()
            await sandbox.exec("head -c 9000000 /dev/urandom > large")
    await host.snapshots.delete(first.id)
    for one in await host.snapshots.list():
        await host.snapshots.delete(one.id)
    await sandbox.snapshots.create()


async def test_restore_can_keep_the_present_state(host: Host) -> None:
    sandbox = await host.create("box")
    await sandbox.write_file("f", "1")
    await sandbox.snapshots.create("one")
    await sandbox.write_file("f", "2")
    await sandbox.snapshots.restore("one", save_as="before")
    assert await sandbox.read_file("f") == "1"
    await sandbox.snapshots.restore("before")
    assert await sandbox.read_file("f") == "2"


async def test_an_image_and_a_snapshot_exclude_each_other(host: Host) -> None:
    sandbox = await host.create("box")
    snapshot = await sandbox.snapshots.create()
    with pytest.raises(InvalidOption, match="from an image or from a snapshot"):
        host.sandbox("x", image="host", snapshot=snapshot.id)
    with pytest.raises(Conflict, match="was not created from snapshot"):
        await host.create("box", snapshot=snapshot.id)


async def test_a_snapshot_of_another_image_is_not_restored(tmp_path: Path, layers: Path) -> None:
    root = tmp_path / "root"
    for name in ("usr", "etc", "bin", "lib", "proc", "dev", "sys", "run", "tmp"):
        (root / name).mkdir(parents=True)
    options = {"images": layers, "directories": {"other": str(root)}}
    async with await Host.open(tmp_path / "home", pool=0, **options) as host:  # type: ignore[arg-type]
        snapshot = await (await host.create("box")).snapshots.create()
        other = await host.create("other", image="dir:other")
        with pytest.raises(Conflict, match="of the image 'host'"):
            await other.snapshots.restore(snapshot.id)
        made = await other.snapshots.create()
        with pytest.raises(Conflict, match="different images"):
            await other.snapshots.diff(snapshot.id, made.id)


async def test_a_write_that_a_command_maps_is_in_the_next_snapshot(host: Host) -> None:
    """A mapping changes a file later than its time says."""
    sandbox = await host.create("box")
    program = (
        "import mmap, os, sys, time\n"
        "f = open('m', 'w+b'); f.truncate(4096); m = mmap.mmap(f.fileno(), 4096)\n"
        "m[0:1] = b'1'\n"
        "while not os.path.exists('go'): time.sleep(0.01)\n"
        "m[0:1] = b'2'\n"
        "open('done', 'w').close()\n"
        "time.sleep(1000)\n"
    )
    await sandbox.write_file("p.py", program)
    await sandbox.start_process("python3 p.py")
    await sandbox.exec("until [ -e m ] && [ $(head -c1 m) = 1 ]; do sleep 0.01; done; sleep 0.1")
    await sandbox.snapshots.create("one")
    await sandbox.exec("touch go; until [ -e done ]; do sleep 0.01; done")
    await sandbox.snapshots.create("two")
    assert (await (await host.create(snapshot="one")).read_bytes("m"))[:1] == b"1"
    assert (await (await host.create(snapshot="two")).read_bytes("m"))[:1] == b"2"


async def test_a_long_chain_is_merged(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots_module, "MAX_LAYERS", 8)
    sandbox = await host.create("box")
    await sandbox.exec("for i in $(seq 10); do head -c 40960 /dev/urandom > f$i; done")
    for number in range(21):
        await sandbox.exec(f"head -c 4096 /dev/urandom > f{number}; echo {number} > n")
        await sandbox.snapshots.create(str(number))
    async with asyncio.timeout(10):
        while len((await host.snapshots.row("20")).layers) > 10:
            await asyncio.sleep(0.02)
    for number in (1, 10, 20):
        created = await host.create(snapshot=str(number))
        assert await created.read_file("n") == f"{number}\n"
        await created.destroy()


async def test_the_layers_of_a_sandbox_that_is_forked_often_are_merged(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots_module, "MAX_LAYERS", 4)
    sandbox = await host.create("box")
    for number in range(6):
        await sandbox.exec(f"echo {number} > f{number}; echo {number} > last")
        await sandbox.sleep()
        await host.fork("box", ids=[f"copy-{number}"])
    async with asyncio.timeout(10):
        while not any(row.merged for row in await host.snapshots.record.snapshot_layers()):
            await asyncio.sleep(0.02)
    assert (await sandbox.exec("cat f* last")).stdout.split() == [*"012345", "5"]
    row = await sandbox.lifecycle.row()
    assert row is not None
    assert len(row.layers) <= 4
    for number in (0, 5):
        found = await host.sandbox(f"copy-{number}").exec("cat last; ls | wc -l")
        assert found.stdout.split() == [str(number), str(number + 2)]


@pytest.mark.timeout(120)
async def test_sixty_snapshots_at_one_percent_change_take_at_most_twice_the_base(
    host: Host,
) -> None:
    sandbox = await host.create("box")
    await sandbox.exec("for i in $(seq 100); do head -c 65536 /dev/urandom > f$i; done; sleep 0.05")
    base = (await sandbox.snapshots.create()).size
    for number in range(1, 60):
        # A file that changed in the same clock tick as it was copied is copied once more.
        await sandbox.exec(f"head -c 65536 /dev/urandom > f{number}; sleep 0.03")
        await sandbox.snapshots.create(str(number))
    rows = await host.snapshots.record.snapshot_layers()
    assert sum(row.size for row in rows) <= 2 * base
    store = host.images.layer_store
    usage = [measure(layer.path).bytes for row in rows if (layer := store.get(row.id))]
    assert len(usage) == len(rows)
    assert sum(usage) <= 2 * base


async def test_a_sleeping_sandbox_gives_its_files_without_a_copy(host: Host) -> None:
    sandbox = await host.create("box")
    await sandbox.exec("mkdir -p d/e; echo 1 > d/e/f; ln d/e/f g; chmod 700 d; ln -s g l")
    await sandbox.create_session("s", cwd="/workspace/d")
    await sandbox.sleep()
    inodes = {entry.inode() for entry in os.scandir(upper_of(host) + "/workspace/d")}
    first = await sandbox.snapshots.create("one")
    assert first.files > 2
    (layer,) = (await host.snapshots.row("one")).layers
    found = host.images.layer_store.get(layer)
    assert found is not None
    assert {entry.inode() for entry in os.scandir(f"{found.path}/workspace/d")} == inodes
    assert (await sandbox.exec("echo 2 >> d/e/f; cat d/e/f l; rm l; stat -c %a d")).stdout == (
        "1\n2\n1\n700\n"
    )
    await sandbox.sleep()
    await sandbox.snapshots.create("two")
    unchanged = await sandbox.snapshots.create("three")
    assert (unchanged.size, unchanged.parent) == (0, (await host.snapshots.get("two")).id)
    assert (await sandbox.snapshots.diff("one", "three")).removed == ["/workspace/l"]
    await sandbox.snapshots.restore("one")
    assert (await sandbox.exec("cat d/e/f; ls", session="s", cwd="/workspace")).stdout == (
        "1\nd\ng\nl\n"
    )
    await sandbox.destroy()
    for name in ("one", "two", "three"):
        await host.snapshots.delete(name)
    assert layers_of(host) == []


async def test_a_conflict_after_the_files_were_taken_loses_nothing(host: Host) -> None:
    sandbox = await host.create("box")
    await sandbox.write_file("f", "1")
    await host.create("taken")
    await sandbox.sleep()
    with pytest.raises(Conflict):
        await host.fork("box", ids=["taken"])
    assert await sandbox.read_file("f") == "1"
    await sandbox.sleep()
    (fork,) = await host.fork("box")
    await sandbox.destroy()
    assert await fork.read_file("f") == "1"


async def test_only_the_last_snapshots_without_a_name_are_kept(host: Host) -> None:
    sandbox = await host.create("box")
    named = await sandbox.snapshots.create("named")
    made = [await sandbox.snapshots.create() for _ in range(3)]
    last = await sandbox.snapshots.create(retention=parse_retention(2, None))
    assert await host.snapshots.list() == [named, made[2], last]
    assert await sandbox.snapshots.prune(Retention(keep_last=1, keep_for=3600)) == []
    assert await sandbox.snapshots.prune(Retention(keep_for=1e-9)) == [made[2], last]
    assert await host.snapshots.list() == [named]
    for rules in ((0, None), (True, None), (None, 0), (None, "soon"), (None, "nan")):
        with pytest.raises(InvalidOption, match="keep_"):
            parse_retention(*rules)


async def test_unused_images_are_pruned_and_layers_of_snapshots_stay(host: Host) -> None:
    sandbox = await host.create("box")
    await sandbox.write_file("f", "1")
    await sandbox.snapshots.create("one")
    await sandbox.sleep()
    (fork,) = await host.fork("box")
    await sandbox.destroy()
    await host.images.prune()
    assert await fork.read_file("f") == "1"
    assert await (await host.create(snapshot="one")).read_file("f") == "1"


async def test_diff_names_what_was_added_changed_and_removed(host: Host) -> None:
    sandbox = await host.create("box")
    await sandbox.exec("mkdir -p d/e; echo 1 > d/e/f; echo a > t; echo x > same; ln -s t link")
    first = await sandbox.snapshots.create("one")
    await sandbox.exec(
        "rm -r d; echo b >> t; touch same; mkdir new; echo 1 > new/f; rm /etc/hosts;"
        "ln -sfn same link"
    )
    await sandbox.snapshots.create("two")
    for after in ("two", None):
        diff = await sandbox.snapshots.diff(first.id, after, texts=True)
        assert (diff.added, diff.changed, diff.removed, diff.complete) == (
            ["/workspace/new", "/workspace/new/f"],
            ["/workspace/link", "/workspace/t"],
            ["/etc/hosts", "/workspace/d", "/workspace/d/e", "/workspace/d/e/f"],
            True,
        )
        assert diff.texts["/workspace/t"].endswith("@@ -1 +1,2 @@\n a\n+b\n")
    back = await sandbox.snapshots.diff("two", "one")
    assert (back.added, back.removed) == (diff.removed, diff.added)


async def test_snapshots_outlive_the_engine(tmp_path: Path, layers: Path) -> None:
    async with await Host.open(tmp_path / "home", pool=0, images=layers) as host:
        sandbox = await host.create("box")
        await sandbox.write_file("f", "1")
        await sandbox.snapshots.create("one")
        await host.fork("box", ids=["copy"])
    async with await Host.open(tmp_path / "home", pool=0, images=layers) as host:
        assert [one.name for one in await host.snapshots.list()] == ["one"]
        assert await host.sandbox("copy").read_file("f") == "1"
        box = host.sandbox("box")
        await box.write_file("f", "2")
        await box.snapshots.restore("one")
        assert await box.read_file("f") == "1"


async def test_a_second_snapshot_without_changes_makes_no_layer(host: Host) -> None:
    sandbox = await host.create("box")
    await sandbox.exec("echo 1 > f; sleep 0.1")
    await sandbox.snapshots.create()
    before = layers_of(host)
    second = await sandbox.snapshots.create()
    assert (second.size, second.files) == (0, 0)
    await host.fork("box", 2)
    assert layers_of(host) == before


async def test_backups_restores_and_snapshots_take_turns(host: Host) -> None:
    sandbox = await host.create("box")
    await sandbox.exec("for i in $(seq 200); do echo 1 > f$i; done")
    backup = await sandbox.backups.create()
    await sandbox.exec("for i in $(seq 200); do echo 2 > f$i; done")
    restoring = asyncio.create_task(sandbox.backups.restore(backup))
    made = [await sandbox.snapshots.create() for _ in range(3)]
    await restoring
    for one in made:
        created = await host.create(snapshot=one.id)
        values = (await created.exec("cat f* | sort | uniq -c")).stdout.split()
        assert values in (["200", "1"], ["200", "2"])
        assert ".smokebox" not in (await created.exec("ls -A / /workspace")).stdout


async def test_a_snapshot_during_destroy_leaves_nothing(host: Host) -> None:
    sandbox = await host.create("box")
    await sandbox.exec("for i in $(seq 500); do echo $i > f$i; done")
    making = asyncio.create_task(sandbox.snapshots.create("one"))
    await asyncio.sleep(0.02)
    await sandbox.destroy()
    result = (await asyncio.gather(making, return_exceptions=True))[0]
    if isinstance(result, BaseException):
        assert layers_of(host) == []
        assert await host.snapshots.list() == []
    else:
        created = await host.create(snapshot="one")
        assert (await created.exec("ls | wc -l")).stdout == "500\n"


async def test_cancelling_a_snapshot_leaves_nothing_and_thaws(host: Host) -> None:
    sandbox = await host.create("box")
    await sandbox.exec("for i in $(seq 500); do echo $i > f$i; done")
    for pause in (0.0, 0.01, 0.03, 0.06):
        making = asyncio.create_task(sandbox.snapshots.create("one"))
        await asyncio.sleep(pause)
        making.cancel()
        await asyncio.wait([making])
        assert (await sandbox.exec("echo alive", timeout=5)).stdout == "alive\n"
        await host.snapshots.delete("one")
        assert [name for name in layers_of(host) if name.startswith(".")] == []


async def test_a_snapshot_after_destroyed_forks_has_only_what_changed(host: Host) -> None:
    sandbox = await host.create("box")
    await sandbox.exec("head -c 2000000 /dev/urandom > large; sleep 0.05")
    await sandbox.snapshots.create()
    await sandbox.exec("echo 1 > f; sleep 0.05")
    for fork in await host.fork("box", 2):
        await fork.destroy()
    await sandbox.snapshots.diff((await host.snapshots.list())[0].id)
    await host.snapshots.collect()
    assert (await sandbox.snapshots.create()).size < 100_000


async def test_restore_ends_what_runs(host: Host) -> None:
    sandbox = await host.create("box")
    session = await sandbox.create_session("s")
    await session.exec("mkdir d; cd d")
    await sandbox.snapshots.create("one")
    running = asyncio.create_task(sandbox.exec("sleep 1000"))
    process = await sandbox.start_process("sleep 1000")
    await asyncio.sleep(0.1)
    await sandbox.snapshots.restore("one")
    with pytest.raises(SandboxGone, match="restored to a snapshot"):
        await running
    assert (await session.exec("pwd")).stdout == "/workspace/d\n"
    assert [one.id for one in await sandbox.processes.list()] in ([], [process.id])
