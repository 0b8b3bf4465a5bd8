"""Mounting and its end: verified, refused with a reason, and there again after every end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from smokebox.engine.host import Host
from smokebox.engine.mounts.request import parse_request
from smokebox.errors import (
    AccessDenied,
    BucketNotFound,
    Conflict,
    InvalidOption,
    InvalidPath,
    NotFound,
    PathNotDirectory,
    ServiceUnavailable,
    SmokeboxError,
    SymlinkLoop,
)
from smokebox.sandbox.access import Access
from smokebox.types import Mount

if TYPE_CHECKING:
    from engine.mounts.conftest import Bucket
    from engine.mounts.store import Store
    from smokebox.engine.sandbox import Sandbox


async def mounted(sandbox: Sandbox) -> list[str]:
    """Where the kernel inside has buckets."""
    result = await sandbox.exec("awk '$3 == \"fuse\" {print $2}' /proc/mounts")
    return result.stdout.split()


def serving(sandbox: Sandbox, path: str = "/data") -> int:
    """The process that serves a mount."""
    return sandbox.mounts._daemons[path].pid


def runs(pid: int) -> bool:
    """Whether a process is there, and no zombie that somebody has yet to see the end of."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_a_mount_is_told_of(sandbox: Sandbox, bucket: Bucket) -> None:
    [found] = await sandbox.mounts.list()
    assert found == Mount(
        path="/data", bucket=bucket.name, endpoint=bucket.access.endpoint, active=True
    )
    assert bucket.access.secret_key is not None
    assert bucket.access.secret_key not in repr(found) + repr(bucket.at())


async def test_a_directory_is_made_and_what_it_held_comes_back(host: Host, bucket: Bucket) -> None:
    sandbox = await host.create("hidden")
    await sandbox.write_file("/workspace/deep/data/own", "own")
    await sandbox.mounts.mount(bucket.at("/workspace/deep/data"))
    await sandbox.mounts.mount(bucket.at("/made/for/it"))
    assert await sandbox.readdir("/workspace/deep/data") == []
    await sandbox.mounts.unmount("/workspace/deep/data")
    assert await sandbox.readdir("/workspace/deep/data") == ["own"]
    assert await mounted(sandbox) == ["/made/for/it"]


async def test_the_same_again_is_fine_and_another_is_not(sandbox: Sandbox, bucket: Bucket) -> None:
    before = serving(sandbox)
    await sandbox.mounts.mount(bucket.at())
    assert serving(sandbox) == before
    with pytest.raises(Conflict, match="/data is taken"):
        await sandbox.mounts.mount(bucket.at(prefix="other"))


async def test_one_bucket_in_two_places_is_the_same(sandbox: Sandbox, bucket: Bucket) -> None:
    await sandbox.mounts.mount(bucket.at("/again"))
    await sandbox.exec("echo x > /data/f")
    async with asyncio.timeout(15):
        while (await sandbox.exec("cat /again/f")).stdout != "x\n":
            await asyncio.sleep(0.1)


async def test_what_is_in_use_is_not_unmounted(sandbox: Sandbox, store: Store) -> None:
    process = await sandbox.start_process("exec 3> /data/open; echo half >&3; sleep 60")
    async with asyncio.timeout(10):
        while await sandbox.readdir("/data") != ["open"]:
            await asyncio.sleep(0.02)
    with pytest.raises(Conflict, match="in use"):
        await sandbox.mounts.unmount("/data")
    assert await mounted(sandbox) == ["/data"]
    await process.kill()
    await process.wait_for_exit()
    await sandbox.mounts.unmount("/data")
    assert (store["open"], await mounted(sandbox)) == (b"half\n", [])


async def test_force_takes_it_off_and_who_uses_it_goes_on(sandbox: Sandbox, store: Store) -> None:
    served = serving(sandbox)
    process = await sandbox.start_process("exec 3> /data/open; sleep 0.5; echo late >&3")
    async with asyncio.timeout(10):
        while await sandbox.readdir("/data") != ["open"]:
            await asyncio.sleep(0.02)
    await sandbox.mounts.unmount("/data", force=True)
    assert (await mounted(sandbox), await sandbox.mounts.list()) == ([], [])
    await process.wait_for_exit()
    async with asyncio.timeout(10):
        while runs(served):
            await asyncio.sleep(0.02)
    assert store["open"] == b"late\n"


async def test_its_process_ends_with_the_mount(sandbox: Sandbox) -> None:
    served = serving(sandbox)
    await sandbox.mounts.unmount("/data")
    assert not runs(served)
    with pytest.raises(NotFound, match="nothing is mounted at /data"):
        await sandbox.mounts.unmount("/data")


@pytest.mark.parametrize("end", ["sleep", "kill"])
async def test_it_is_there_again_after_a_sleep(sandbox: Sandbox, store: Store, end: str) -> None:
    await sandbox.exec("echo before > /data/f")
    served = serving(sandbox)
    if end == "sleep":
        await sandbox.sleep()
        assert [one.active for one in await sandbox.mounts.list()] == [False]
        assert not runs(served)
    else:
        assert sandbox.life.run is not None
        jail = sandbox.life.run.jail
        os.kill(jail.state.pid, signal.SIGKILL)
        await jail.wait()
    assert (await sandbox.exec("cat /data/f")).stdout == "before\n"
    assert [one.active for one in await sandbox.mounts.list()] == [True]
    assert store["f"] == b"before\n"


async def test_a_bucket_that_is_away_does_not_keep_a_sandbox_asleep(
    host: Host, bucket: Bucket
) -> None:
    sandbox = await host.create("away")
    await sandbox.mounts.mount(bucket.at())
    await sandbox.sleep()
    [row] = sandbox.mounts._rows.values() if sandbox.mounts._rows else []
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        gone = f"http://127.0.0.1:{nobody.getsockname()[1]}"
    away = replace(row.request, access=replace(row.request.access, endpoint=gone))
    sandbox.mounts._rows = {"/data": replace(row, request=away)}
    assert (await sandbox.exec("echo awake")).stdout == "awake\n"
    result = await sandbox.exec("cat /data/f", timeout=15)
    assert (result.exit_code, "Input/output error" in result.stderr) == (1, True)


async def test_an_unmount_wakes_nothing(sandbox: Sandbox) -> None:
    await sandbox.sleep()
    await sandbox.mounts.unmount("/data")
    info = await sandbox.info()
    assert (info and info.status, await sandbox.mounts.list()) == ("idle", [])
    assert await mounted(sandbox) == []


async def test_a_killed_process_is_replaced(sandbox: Sandbox) -> None:
    await sandbox.exec("echo kept > /data/f")
    os.kill(serving(sandbox), signal.SIGKILL)
    async with asyncio.timeout(15):
        while (await sandbox.exec("cat /data/f")).stdout != "kept\n":
            await asyncio.sleep(0.05)


async def test_another_engine_finds_it(tmp_path: Path, layers: Path, bucket: Bucket) -> None:
    home = tmp_path / "home"
    host = await Host.open(home, pool=0, images=layers)
    sandbox = await host.create("kept")
    await sandbox.mounts.mount(bucket.at())
    await sandbox.exec("echo 1 > /data/f")
    served = serving(sandbox)
    await host.aclose(detach=True)
    async with await Host.open(home, pool=0, images=layers) as host:
        sandbox = host.sandbox("kept")
        assert (await sandbox.exec("cat /data/f")).stdout == "1\n"
        assert serving(sandbox) == served
        await sandbox.mounts.unmount("/data")
        assert await mounted(sandbox) == []


async def test_a_destroyed_sandbox_leaves_the_bucket_and_nothing_else(
    host: Host, sandbox: Sandbox, store: Store
) -> None:
    await sandbox.exec("echo 1 > /data/f")
    served = serving(sandbox)
    await sandbox.destroy()
    assert (runs(served), store["f"]) == (False, b"1\n")
    assert await host.sandbox("mounted").mounts.list() == []


async def test_a_backup_has_none_of_it_and_a_restore_leaves_it_alone(
    host: Host, bucket: Bucket, store: Store
) -> None:
    sandbox = await host.create("kept")
    await sandbox.write_file("/workspace/own", "own")
    await sandbox.mounts.mount(bucket.at("/workspace/deep/data"))
    await sandbox.exec("echo theirs > /workspace/deep/data/f")
    backup = await sandbox.backups.create("/workspace")
    assert backup.files == 1
    with pytest.raises(Conflict, match="mounted at /workspace/deep/data"):
        await sandbox.backups.restore(backup)
    await sandbox.mounts.unmount("/workspace/deep/data")
    await sandbox.backups.restore(backup)
    assert await sandbox.readdir("/workspace/deep/data") == []
    assert store["f"] == b"theirs\n"


async def test_a_store_that_hangs_holds_up_neither_others_nor_the_end(
    host: Host, bucket: Bucket
) -> None:
    sandbox = await host.create("hanging")
    await sandbox.mounts.mount(bucket.at())
    with socket.create_server(("127.0.0.1", 0), backlog=64) as deaf:
        [row] = sandbox.mounts._rows.values() if sandbox.mounts._rows else []
        await sandbox.sleep()
        to = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        away = replace(row.request, access=replace(row.request.access, endpoint=to))
        sandbox.mounts._rows = {"/data": replace(row, request=away)}
        await sandbox.start_process("cat /data/f")
        assert (await sandbox.exec("echo others")).stdout == "others\n"
        async with asyncio.timeout(15):
            await sandbox.destroy()


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ({"secret_key": "wrong"}, AccessDenied, "refused these credentials"),
        ({"access_key": "nobody", "secret_key": "x"}, AccessDenied, "refused"),
        ({"endpoint": "http://127.0.0.1:1"}, ServiceUnavailable, "did not answer"),
    ],
)
async def test_a_bucket_that_does_not_open_is_not_mounted(
    host: Host, bucket: Bucket, change: dict[str, str], kind: type[SmokeboxError], says: str
) -> None:
    sandbox = await host.create("refused")
    request = replace(bucket.at(), access=replace(bucket.access, **change))  # type: ignore[arg-type]
    with pytest.raises(kind, match=says):
        await sandbox.mounts.mount(request)
    assert (await mounted(sandbox), await sandbox.mounts.list()) == ([], [])


async def test_a_bucket_that_is_not_there(host: Host, bucket: Bucket) -> None:
    sandbox = await host.create("refused")
    with pytest.raises(BucketNotFound, match="no bucket s3://not-there"):
        await sandbox.mounts.mount(replace(bucket.at(), bucket="not-there"))
    assert await mounted(sandbox) == []


async def test_a_place_that_is_no_directory(host: Host, bucket: Bucket) -> None:
    sandbox = await host.create("refused")
    await sandbox.exec("echo 1 > /file; ln -s /tmp /link")
    with pytest.raises(SmokeboxError) as refusal:
        await sandbox.mounts.mount(bucket.at("/file"))
    assert isinstance(refusal.value, (PathNotDirectory, Conflict)) or "/file" in str(refusal.value)
    with pytest.raises(SymlinkLoop):
        await sandbox.mounts.mount(bucket.at("/link/data"))
    assert (await mounted(sandbox), await sandbox.mounts.list()) == ([], [])


@pytest.mark.parametrize("path", ["/", "/proc/x", "/dev", "/sys/fs", "/usr", "/run/smokebox/io"])
def test_the_systems_own_places_are_not_for_mounts(path: str) -> None:
    with pytest.raises(InvalidPath, match="the system's"):
        parse_request("data", path, cwd="/", access=Access(anonymous=True))


@pytest.mark.parametrize(
    ("bucket", "prefix", "access", "option"),
    [
        ("Upper", "", Access(anonymous=True), "bucket"),
        ("a/b", "", Access(anonymous=True), "bucket"),
        ("file:///etc", "", Access(anonymous=True), "bucket"),
        ("gs://data", "", Access(anonymous=True), "bucket"),
        ("data", "../up", Access(anonymous=True), "prefix"),
        ("s3://data/a/../..", "", Access(anonymous=True), "prefix"),
        ("data", "", Access(), "access_key"),
    ],
)
def test_what_cannot_be_mounted_is_said_before_anything_is_done(
    bucket: str, prefix: str, access: Access, option: str
) -> None:
    with pytest.raises(InvalidOption) as refusal:
        parse_request(bucket, "/data", cwd="/", prefix=prefix, access=access)
    assert refusal.value.fields["option"] == option


async def test_an_address_inside_is_not_asked_unless_it_may_be(host: Host, bucket: Bucket) -> None:
    sandbox = await host.create("outside")
    with pytest.raises(InvalidOption, match="public address"):
        await sandbox.mounts.mount(replace(bucket.at(), private=False))
    assert await mounted(sandbox) == []
