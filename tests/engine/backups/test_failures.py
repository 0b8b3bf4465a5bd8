"""Failed backups and restores, which change nothing and leave nothing behind."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from engine.backups.trees import leftovers, listing
from smokebox.engine import disk
from smokebox.engine.backups import restore
from smokebox.engine.files.operations import relocate
from smokebox.engine.host import Host
from smokebox.errors import (
    AccessDenied,
    BadSnapshot,
    Conflict,
    DeadlineExceeded,
    InvalidOption,
    LimitReached,
    PathError,
    PathExists,
    PathNotDirectory,
    PathNotFound,
    SandboxGone,
    SmokeboxError,
    StorageFull,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from smokebox.engine.sandbox import Sandbox


# Files that take longer to back up than any test waits.
ENDLESS = "for i in $(seq 50); do truncate -s 4G $i || exit; done"


def archive(host: Host, id: str) -> Path:
    from pathlib import Path

    return Path(host.home, "backups", f"{id}.tar.zst")


async def fill(sandbox: Sandbox) -> None:
    await sandbox.exec("mkdir -p d/e; echo 1 > d/f; echo 2 > g; ln -s g h; echo 3 > d/e/f")


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"name": ""}, "name"),
        ({"name": "x" * 257}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"ttl": 0}, "ttl"),
        ({"ttl": float("nan")}, "ttl"),
        ({"ttl": float("inf")}, "ttl"),
        ({"ttl": "3d"}, "ttl"),
        ({"compression": 0}, "compression"),
        ({"compression": 20}, "compression"),
        ({"compression": True}, "compression"),
        ({"excludes": "*.pyc"}, "excludes"),
        ({"excludes": ["x"] * 101}, "excludes"),
        ({"timeout": -1}, "timeout"),
    ],
)
async def test_invalid_options(host: Host, options: dict[str, Any], option: str) -> None:
    sandbox = host.sandbox("box")
    with pytest.raises(InvalidOption) as caught:
        await sandbox.backups.create(**options)
    assert caught.value.fields["option"] == option
    # No sandbox was started.
    assert await sandbox.info() is None


async def test_only_directories_can_be_backed_up(host: Host) -> None:
    sandbox = await host.create("box")
    await sandbox.write_file("f", "x")
    with pytest.raises(PathNotFound):
        await sandbox.backups.create("/workspace/none")
    with pytest.raises(PathNotDirectory):
        await sandbox.backups.create("f")
    for path in ("/", "/workspace/.."):
        with pytest.raises(PathError, match="not of the whole sandbox"):
            await sandbox.backups.create(path)
    with pytest.raises(AccessDenied):
        await sandbox.backups.create("/proc")
    assert (await host.backups.list(), os.listdir(f"{host.home}/backups")) == ([], [])


async def test_restore_refuses_files_mount_points_and_the_root(host: Host) -> None:
    sandbox = await host.create("box")
    await sandbox.exec("echo x > f; mkdir d; ln -s d l")
    backup = await sandbox.backups.create()
    for path in ("f", "l"):
        with pytest.raises(PathNotDirectory):
            await sandbox.backups.restore(backup, path=path)
    with pytest.raises(PathExists):
        await sandbox.backups.restore(backup, path="f/below")
    for path in ("/usr", "/dev", "/proc"):
        with pytest.raises(AccessDenied):
            await sandbox.backups.restore(backup, path=path)
    with pytest.raises(PathError, match="cannot be replaced"):
        await sandbox.backups.restore(backup, path="/")
    # The engine has a mount in it.
    with pytest.raises(Conflict, match="mounted at /run/smokebox"):
        await sandbox.backups.restore(backup, path="/run")
    assert (await sandbox.exec("cat f; readlink l; test -d d")).stdout == "x\nd\n"
    assert await leftovers(host, sandbox) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
        lambda path: path.write_bytes(b"\0" + path.read_bytes()[1:]),
        lambda path: path.unlink(),
    ],
)
async def test_damaged_archive_is_refused_before_anything_changes(
    host: Host, damage: Callable[[Path], object]
) -> None:
    sandbox = await host.create("box")
    await fill(sandbox)
    backup = await sandbox.backups.create()
    await sandbox.exec("echo later > g")
    before = await listing(sandbox)
    damage(archive(host, backup.id))
    with pytest.raises(BadSnapshot, match=f"backup {backup.id} is damaged"):
        await sandbox.backups.restore(backup)
    assert await listing(sandbox) == before
    assert await leftovers(host, sandbox) == []


async def test_restore_that_fails_at_any_step_is_undone(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await host.create("box")
    await fill(sandbox)
    backup = await sandbox.backups.create()
    await sandbox.exec("rm -r d; echo other > g; mkdir -p d h2/x; echo y > d/y; chmod 711 .")
    before = await listing(sandbox)
    real, fails_at, failed = relocate, 1, True
    while failed:
        calls = 0

        def failing(*arguments: Any, at: int = fails_at) -> None:
            nonlocal calls
            calls += 1
            if calls == at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(*arguments)

        monkeypatch.setattr(restore, "relocate", failing)
        try:
            await sandbox.backups.restore(backup)
            failed = False
        except StorageFull:
            after = await listing(sandbox)
            # The first line is the directory itself, whose time has changed.
            assert after.splitlines()[1:] == before.splitlines()[1:]
            assert await leftovers(host, sandbox) == []
        fails_at += 1
    # The swap moves four names out and three in.
    assert fails_at == 9
    assert await sandbox.read_file("g") == "2\n"


async def test_cancelled_backup_and_restore_leave_nothing(host: Host) -> None:
    sandbox = await host.create("box")
    await sandbox.exec("for i in $(seq 30); do head -c 5000000 /dev/urandom > $i; done")
    for _ in range(3):
        making = asyncio.create_task(sandbox.backups.create())
        while not any(item.bytes for item in sandbox.backups.progress()):
            await asyncio.sleep(0.001)
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making
        assert (await host.backups.list(), os.listdir(f"{host.home}/backups")) == ([], [])
    backup = await sandbox.backups.create()
    await sandbox.exec("rm *; echo x > x")
    before = await listing(sandbox)
    restoring = asyncio.create_task(sandbox.backups.restore(backup))
    while not any(item.bytes for item in sandbox.backups.progress()):
        await asyncio.sleep(0.001)
    restoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await restoring
    assert await listing(sandbox) == before
    assert await leftovers(host, sandbox) == []
    assert (await sandbox.backups.restore(backup)).files == 30


async def test_timeout(host: Host) -> None:
    sandbox = await host.create("box")
    assert (await sandbox.exec(ENDLESS)).success
    with pytest.raises(DeadlineExceeded, match=r"longer than 0\.3 s") as caught:
        await sandbox.backups.create(timeout=0.3)
    assert caught.value.fields["operation"] == "create_backup"
    assert (await host.backups.list(), os.listdir(f"{host.home}/backups")) == ([], [])


@pytest.mark.parametrize("method", ["sleep", "destroy"])
async def test_stopping_the_sandbox_aborts_a_backup(host: Host, method: str) -> None:
    sandbox = await host.create("box")
    assert (await sandbox.exec(ENDLESS)).success
    making = asyncio.create_task(sandbox.backups.create())
    while not any(item.bytes for item in sandbox.backups.progress()):
        await asyncio.sleep(0.001)
    await getattr(sandbox, method)()
    with pytest.raises(SandboxGone):
        await making
    assert (await host.backups.list(), os.listdir(f"{host.home}/backups")) == ([], [])


async def test_restore_obeys_the_disk_limit(host: Host) -> None:
    sandbox = await host.create("box")
    await sandbox.exec("head -c 30000000 /dev/urandom > f")
    backup = await sandbox.backups.create()
    small = await host.create("small", limits={"disk": 20_000_000})
    await small.write_file("f", "x")
    with pytest.raises(LimitReached, match="disk") as caught:
        await small.backups.restore(backup)
    assert caught.value.fields["limit"] == "disk"
    assert await small.read_file("f") == "x"
    assert await leftovers(host, small) == []


async def test_full_host(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = await host.create("box")
    await sandbox.write_file("f", "x")
    backup = await sandbox.backups.create()
    await sandbox.write_file("f", "y")
    with monkeypatch.context() as full:
        full.setattr(disk, "RESERVE_SHARE", 1.0)
        full.setattr(disk, "RESERVE_BYTES", 1 << 60)
        with pytest.raises(StorageFull, match="no room"):
            await sandbox.backups.create()
        with pytest.raises(StorageFull, match="no room"):
            await sandbox.backups.restore(backup)
    assert await sandbox.read_file("f") == "y"
    assert await leftovers(host, sandbox) == []


async def test_existing_id_is_refused(host: Host) -> None:
    sandbox = await host.create("box")
    backup = await sandbox.backups.create()
    with pytest.raises(Conflict, match="already"):
        await sandbox.backups.create(id=backup.id)
    assert await host.backups.get(backup.id) == backup


async def test_backups_survive_the_loss_of_the_record(tmp_path: Path, layers: Path) -> None:
    home = tmp_path / "home"
    async with await Host.open(home, pool=0, images=layers) as host:
        sandbox = await host.create("box")
        await sandbox.write_file("f", "kept")
        kept = await sandbox.backups.create(name="kept", ttl=3600)
        broken = await sandbox.backups.create()
        (home / "backups" / f"{broken.id}.json").write_text("{}")
        (home / "backups" / "b-garbage.tar.zst").write_text("x")
        (home / "backups" / f"{kept.id}.part").write_text("x")
        await sandbox.destroy()
    for name in ("record.db", "record.db-wal", "record.db-shm"):
        (home / name).unlink(missing_ok=True)
    async with await Host.open(home, pool=0, images=layers) as host:
        assert await host.backups.list() == [kept]
        other = await host.create("other")
        await other.backups.restore(kept.id)
        assert await other.read_file("f") == "kept"
        assert sorted(os.listdir(home / "backups")) == [f"{kept.id}.json", f"{kept.id}.tar.zst"]


async def test_next_engine_removes_unfinished_and_deleted_backups(
    tmp_path: Path, layers: Path
) -> None:
    home = tmp_path / "home"
    async with await Host.open(home, pool=0, images=layers) as host:
        sandbox = await host.create("box")
        created = [await sandbox.backups.create() for _ in range(3)]
    with closing(sqlite3.connect(home / "record.db")) as record, record:
        for backup, status in zip(created, ("making", "deleting", "ready"), strict=True):
            record.execute("UPDATE backups SET status = ? WHERE id = ?", (status, backup.id))
    async with await Host.open(home, pool=0, images=layers) as host:
        assert await host.backups.list() == created[2:]
        assert {name[:34] for name in os.listdir(home / "backups")} == {created[2].id}


async def test_unfinished_backup_cannot_be_deleted(host: Host) -> None:
    sandbox = await host.create("box")
    assert (await sandbox.exec(ENDLESS)).success
    making = asyncio.create_task(sandbox.backups.create())
    while not any(item.bytes for item in sandbox.backups.progress()):
        await asyncio.sleep(0.001)
    [running] = sandbox.backups.progress()
    with pytest.raises(Conflict, match="being made"):
        await host.backups.delete(running.id)
    with pytest.raises(SmokeboxError):
        await host.backups.get(running.id)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
