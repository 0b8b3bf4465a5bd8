"""Snapshots of running and sleeping sandboxes, and what can be done with them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from engine.backups.test_backups import TREE
from engine.backups.trees import listing
from smokebox.engine.host import Host

if TYPE_CHECKING:
    from smokebox.engine.host import Host


async def test_a_snapshot_restores_every_file_and_attribute(host: Host) -> None:
    sandbox = await host.create("box")
    assert (await sandbox.exec(TREE)).success
    before = await listing(sandbox)
    snapshot = await sandbox.snapshots.create("tree", description="all of it")
    assert (snapshot.name, snapshot.sandbox_id, snapshot.parent) == ("tree", "box", None)
    await sandbox.exec("rm -rf deep large; echo x > new; mkdir -p more/and; chmod 700 .")
    await sandbox.snapshots.restore("tree")
    assert await listing(sandbox) == before


async def test_programs_keep_running_during_a_snapshot(host: Host) -> None:
    sandbox = await host.create("box")
    await sandbox.exec("echo kept > kept")
    process = await sandbox.start_process("while :; do date +%s%N >> ticks; sleep 0.01; done")
    await sandbox.snapshots.create("one")
    first = await sandbox.exec("wc -l < ticks")
    await asyncio.sleep(0.2)
    assert int((await sandbox.exec("wc -l < ticks")).stdout) > int(first.stdout)
    assert process.pid is not None


async def test_a_sleeping_sandbox_is_not_woken(host: Host) -> None:
    sandbox = await host.create("box")
    await sandbox.write_file("a", "1")
    await sandbox.sleep()
    await sandbox.snapshots.create("asleep")
    assert sandbox.lifecycle.run is None
    await sandbox.write_file("a", "2")
    await sandbox.snapshots.restore("asleep")
    assert sandbox.lifecycle.run is None
    assert await sandbox.read_file("a") == "1"


async def test_a_fork_goes_on_from_the_present_state(host: Host) -> None:
    sandbox = await host.create("box", env={"A": "1"}, labels={"team": "x"}, limits={"pids": 77})
    session = await sandbox.create_session("s")
    await session.exec("mkdir -p /work; cd /work; echo 1 > f; export B=2")
    first, second = await host.fork("box", 2)
    assert first.id.startswith("box-")
    assert await first.read_file("/work/f") == "1\n"
    shell = await first.sessions.get("s")
    assert (await shell.exec("pwd; echo $A$B")).stdout == "/work\n12\n"
    await first.write_file("/work/f", "changed")
    assert await second.read_file("/work/f") == "1\n"
    assert await sandbox.read_file("/work/f") == "1\n"
    info = await second.info()
    assert info is not None
    assert (info.labels, info.limits["pids"], info.image) == ({"team": "x"}, 77, "host")


async def test_a_sandbox_is_created_from_a_snapshot(host: Host) -> None:
    sandbox = await host.create("box", env={"A": "1"})
    await sandbox.write_file("f", "x")
    snapshot = await sandbox.snapshots.create("prepared")
    await sandbox.destroy()
    for options in ({"snapshot": "prepared"}, {"image": "snapshot:prepared"}):
        created = await host.create(**options)  # type: ignore[arg-type]
        assert (await created.exec("cat f; echo $A")).stdout == "x1\n"
        info = await created.info()
        assert info is not None
        assert info.snapshot == snapshot.id


async def test_second_snapshot_has_only_what_changed(host: Host) -> None:
    sandbox = await host.create("box")
    await sandbox.exec(
        "head -c 2000000 /dev/urandom > large; echo 1 > small; mkdir d; echo x > d/f"
    )
    await asyncio.sleep(0.05)
    first = await sandbox.snapshots.create()
    await sandbox.exec("echo 2 > small; rm -r d")
    second = await sandbox.snapshots.create()
    assert first.size > 2_000_000
    assert second.size < 100_000
    assert second.parent == first.id
    await sandbox.snapshots.restore(first.id)
    assert (await sandbox.exec("cat small d/f; stat -c %s large")).stdout == "1\nx\n2000000\n"
    await sandbox.snapshots.restore(second.id)
    assert (await sandbox.exec("cat small; ls; stat -c %s large")).stdout == (
        "2\nlarge\nsmall\n2000000\n"
    )
