"""Backups of real sandboxes, and exact restores."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest

from engine.backups.trees import leftovers, listing
from smokebox.engine.host import Host
from smokebox.errors import NotFound

if TYPE_CHECKING:
    from pathlib import Path

TREE = """
mkdir -p deep/er .hidden empty 'a name with blanks'
echo one > deep/one; ln deep/one deep/er/same; ln -s ../one deep/er/link; ln -s /nowhere dangling
printf 'new\\nline' > "$(printf 'odd\\nname')"; printf x > "$(printf 'not-utf8-\\377')"
head -c 3000000 /dev/urandom > large; truncate -s 50M sparse; echo end >> sparse
touch -d '2001-02-03 04:05:06.123456789' deep/one; touch -h -d '1999-01-01 00:00:00.5' dangling
touch -d '1969-12-31 23:59:58.25' empty
chmod 4751 deep/one; chmod 500 deep/er; chmod 1777 empty; chmod 2750 /workspace
"""


async def test_restore_reproduces_the_tree_exactly(host: Host) -> None:
    sandbox = await host.create("box")
    assert (await sandbox.exec(TREE)).success
    if sandbox.lifecycle.run is not None and sandbox.lifecycle.run.jail.owner.count > 1:
        await sandbox.exec("chown -h 1000:1001 dangling large; chown 5:6 empty")
    before = await listing(sandbox)
    backup = await sandbox.backups.create("/workspace", name="all of it")
    assert (backup.sandbox_id, backup.path, backup.name) == ("box", "/workspace", "all of it")
    assert backup.size < backup.bytes
    await sandbox.exec("rm -rf deep large; echo x > new; mkdir -p more/and; chmod 700 .")
    restored = await sandbox.backups.restore(backup)
    assert (restored.id, restored.path, restored.files) == (backup.id, "/workspace", backup.files)
    assert await listing(sandbox) == before
    assert await leftovers(host, sandbox) == []


async def test_holes_are_kept(host: Host) -> None:
    sandbox = await host.create("box")
    await sandbox.exec("truncate -s 500M hole; echo end >> hole")
    backup = await sandbox.backups.create()
    assert backup.size < 1 << 20
    await sandbox.backups.restore(backup)
    used = await sandbox.exec("du -k hole | cut -f1; stat -c %s hole")
    blocks, size = map(int, used.stdout.split())
    assert (blocks < 1024, size) == (True, 500 * 1024 * 1024 + 4)


async def test_restore_removes_other_files_under_a_running_shell(host: Host) -> None:
    sandbox = await host.create("box")
    session = await sandbox.create_session()
    await session.exec("echo kept > kept")
    backup = await sandbox.backups.create()
    await session.exec("rm kept; mkdir later; echo x > later/x")
    await sandbox.backups.restore(backup)
    assert (await session.exec("pwd; ls -A; cat kept")).stdout == "/workspace\nkept\nkept\n"


async def test_backup_of_a_destroyed_sandbox_can_be_restored_in_another(host: Host) -> None:
    first = await host.create("first")
    await first.exec("mkdir d; echo hi > d/f")
    backup = await first.backups.create()
    await first.destroy()
    assert [listed.id for listed in await host.backups.list()] == [backup.id]
    second = await host.create("second")
    await second.backups.restore(backup.id)
    assert await second.read_file("d/f") == "hi\n"


async def test_restored_files_survive_sleep_and_restart_of_the_engine(
    tmp_path: Path, layers: Path
) -> None:
    async with await Host.open(tmp_path / "home", pool=0, images=layers) as host:
        sandbox = await host.create("box")
        await sandbox.write_file("f", "kept")
        backup = await sandbox.backups.create()
        await sandbox.rm("f")
        await sandbox.backups.restore(backup)
        await sandbox.sleep()
        assert await sandbox.read_file("f") == "kept"
    async with await Host.open(tmp_path / "home", pool=0, images=layers) as host:
        sandbox = host.sandbox("box")
        assert await sandbox.read_file("f") == "kept"
        await sandbox.rm("f")
        await sandbox.backups.restore(backup.id)
        assert await sandbox.read_file("f") == "kept"


async def test_restore_to_another_path_creates_parents(host: Host) -> None:
    sandbox = await host.create("box")
    await sandbox.exec("echo 1 > f; chmod 750 .")
    backup = await sandbox.backups.create()
    restored = await sandbox.backups.restore(backup, path="copies/one")
    assert restored.path == "/workspace/copies/one"
    # A directory inside the one that was backed up.
    assert (await sandbox.exec("cat copies/one/f; stat -c %a copies/one")).stdout == "1\n750\n"
    await sandbox.backups.restore(backup, path="/elsewhere")
    assert await listing(sandbox, "/elsewhere") != ""
    assert await leftovers(host, sandbox) == []


async def test_directory_of_the_image_is_replaced(host: Host) -> None:
    sandbox = await host.create("box")
    before = await listing(sandbox, "/etc")
    backup = await sandbox.backups.create("/etc")
    await sandbox.exec("rm -rf /etc/ssl /etc/pass*; mkdir /etc/more; echo x > /etc/hostname")
    await sandbox.backups.restore(backup)
    assert await listing(sandbox, "/etc") == before
    # In another sandbox, whose /etc is still only in the image.
    other = await host.create("other")
    await other.backups.restore(backup)
    assert await listing(other, "/etc") == before
    assert await leftovers(host, other) == []


async def test_backup_of_an_empty_directory(host: Host) -> None:
    sandbox = await host.create("box")
    backup = await sandbox.backups.create()
    await sandbox.write_file("later", "x")
    assert (await sandbox.backups.restore(backup)).files == 0
    assert await sandbox.readdir(".") == []


async def test_list_get_and_delete(host: Host) -> None:
    sandbox, other = await host.create("box"), await host.create("other")
    one = await sandbox.backups.create(name="one")
    two = await sandbox.backups.create(name="two")
    third = await other.backups.create()
    assert await host.backups.list() == [one, two, third]
    assert await host.backups.list(sandbox_id="box") == [one, two]
    assert await host.backups.list(prefix="oth") == [third]
    assert await host.backups.get(two.id) == two
    await host.backups.delete(one.id)
    await host.backups.delete(one.id)
    with pytest.raises(NotFound, match="no backup"):
        await host.backups.get(one.id)
    with pytest.raises(NotFound):
        await sandbox.backups.restore(one)
    ids = {name.partition(".")[0] for name in os.listdir(f"{host.home}/backups")}
    assert ids == {two.id, third.id}


async def test_operations_of_a_sandbox_run_in_order(host: Host) -> None:
    sandbox = await host.create("box")
    await sandbox.exec("head -c 20000000 /dev/urandom > a")
    first = await sandbox.backups.create()
    await sandbox.exec("rm a; echo b > b")
    second, _, third = await asyncio.gather(
        sandbox.backups.create(),
        sandbox.backups.restore(first),
        sandbox.backups.create(),
    )
    assert (second.files, second.bytes) == (1, 2)
    assert (third.files, third.bytes) == (1, 20_000_000)
    assert sandbox.backups.progress() == []


async def test_progress(host: Host) -> None:
    sandbox = await host.create("box")
    await sandbox.exec("for i in $(seq 40); do head -c 5000000 /dev/urandom > $i; done")
    making = asyncio.create_task(sandbox.backups.create())
    waiting = asyncio.create_task(sandbox.backups.create("/home"))
    seen: list[int] = []
    while not making.done():
        found = sandbox.backups.progress()
        if found and found[0].begun and found[0].path == "/workspace":
            assert (found[0].operation, found[1].begun) == ("create", False)
            seen.append(found[0].bytes)
        await asyncio.sleep(0.005)
    assert seen == sorted(seen)
    assert len(set(seen)) > 2
    assert (await making).bytes == 200_000_000
    await waiting


async def test_freeze_gives_files_of_one_moment(host: Host) -> None:
    sandbox = await host.create("box")
    script = "while :; do i=$((i+1)); for f in a z; do echo $i > /t; mv /t $f; done; done"
    await sandbox.exec("for i in $(seq 200); do head -c 100000 /dev/urandom > m$i; done")
    process = await sandbox.start_process(script)
    while not await sandbox.exists("z"):
        await asyncio.sleep(0.01)
    backup = await sandbox.backups.create(freeze=True)
    await sandbox.backups.restore(backup, path="/copy")
    first, last = (await sandbox.exec("cat /copy/a /copy/z")).stdout.split()
    assert int(first) - int(last) in (0, 1)
    # The process continues afterwards.
    seen = await sandbox.read_file("a")
    while await sandbox.read_file("a") == seen:
        await asyncio.sleep(0.01)
    await process.kill()
