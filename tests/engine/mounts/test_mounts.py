"""Mounting and unmounting of buckets, refusals, and mounts restored after restarts."""

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


async def mounted_paths(sandbox: Sandbox) -> list[str]:
    """Return the paths of FUSE mounts in the sandbox."""
    result = await sandbox.exec("awk '$3 == \"fuse\" {print $2}' /proc/mounts")
    return result.stdout.split()


def daemon_pid(sandbox: Sandbox, path: str = "/data") -> int:
    """Return the pid of the daemon of a mount."""
    return sandbox.mounts._daemons[path].pid


def is_running(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_list_shows_mounts_without_secrets(sandbox: Sandbox, bucket: Bucket) -> None:
    [found] = await sandbox.mounts.list()
    assert found == Mount(
        path="/data", bucket=bucket.name, endpoint=bucket.access.endpoint, active=True
    )
    assert bucket.access.secret_key is not None
    assert bucket.access.secret_key not in repr(found) + repr(bucket.at())


async def test_directory_is_created_and_its_files_are_hidden_meanwhile(
    host: Host, bucket: Bucket
) -> None:
    sandbox = await host.create("hidden")
    await sandbox.write_file("/workspace/deep/data/own", "own")
    await sandbox.mounts.mount(bucket.at("/workspace/deep/data"))
    await sandbox.mounts.mount(bucket.at("/made/for/it"))
    assert await sandbox.readdir("/workspace/deep/data") == []
    await sandbox.mounts.unmount("/workspace/deep/data")
    assert await sandbox.readdir("/workspace/deep/data") == ["own"]
    assert await mounted_paths(sandbox) == ["/made/for/it"]


async def test_mount_is_idempotent_and_refuses_another_bucket(
    sandbox: Sandbox, bucket: Bucket
) -> None:
    before = daemon_pid(sandbox)
    await sandbox.mounts.mount(bucket.at())
    assert daemon_pid(sandbox) == before
    with pytest.raises(Conflict, match="/data is taken"):
        await sandbox.mounts.mount(bucket.at(prefix="other"))


async def test_bucket_mounted_twice(sandbox: Sandbox, bucket: Bucket) -> None:
    await sandbox.mounts.mount(bucket.at("/again"))
    await sandbox.exec("echo x > /data/f")
    async with asyncio.timeout(15):
        while (await sandbox.exec("cat /again/f")).stdout != "x\n":
            await asyncio.sleep(0.1)


async def test_mount_in_use_is_not_unmounted(sandbox: Sandbox, store: Store) -> None:
    process = await sandbox.start_process("exec 3> /data/open; echo half >&3; sleep 60")
    async with asyncio.timeout(10):
        while await sandbox.readdir("/data") != ["open"]:
            await asyncio.sleep(0.02)
    with pytest.raises(Conflict, match="in use"):
        await sandbox.mounts.unmount("/data")
    assert await mounted_paths(sandbox) == ["/data"]
    await process.kill()
    await process.wait_for_exit()
    await sandbox.mounts.unmount("/data")
    assert (store["open"], await mounted_paths(sandbox)) == (b"half\n", [])


async def test_force_unmount_keeps_open_files_working(sandbox: Sandbox, store: Store) -> None:
    daemon = daemon_pid(sandbox)
    process = await sandbox.start_process("exec 3> /data/open; sleep 0.5; echo late >&3")
    async with asyncio.timeout(10):
        while await sandbox.readdir("/data") != ["open"]:
            await asyncio.sleep(0.02)
    await sandbox.mounts.unmount("/data", force=True)
    assert (await mounted_paths(sandbox), await sandbox.mounts.list()) == ([], [])
    await process.wait_for_exit()
    async with asyncio.timeout(10):
        while is_running(daemon):
            await asyncio.sleep(0.02)
    assert store["open"] == b"late\n"


async def test_daemon_ends_with_the_mount(sandbox: Sandbox) -> None:
    daemon = daemon_pid(sandbox)
    await sandbox.mounts.unmount("/data")
    assert not is_running(daemon)
    with pytest.raises(NotFound, match="nothing is mounted at /data"):
        await sandbox.mounts.unmount("/data")


@pytest.mark.parametrize("end", ["sleep", "kill"])
async def test_mount_is_restored_after_sleep_and_kill(
    sandbox: Sandbox, store: Store, end: str
) -> None:
    await sandbox.exec("echo before > /data/f")
    daemon = daemon_pid(sandbox)
    if end == "sleep":
        await sandbox.sleep()
        assert [mount.active for mount in await sandbox.mounts.list()] == [False]
        assert not is_running(daemon)
    else:
        assert sandbox.lifecycle.run is not None
        jail = sandbox.lifecycle.run.jail
        os.kill(jail.state.pid, signal.SIGKILL)
        await jail.wait()
    assert (await sandbox.exec("cat /data/f")).stdout == "before\n"
    assert [mount.active for mount in await sandbox.mounts.list()] == [True]
    assert store["f"] == b"before\n"


async def test_sandbox_wakes_although_a_store_is_unreachable(host: Host, bucket: Bucket) -> None:
    sandbox = await host.create("away")
    await sandbox.mounts.mount(bucket.at())
    await sandbox.sleep()
    [row] = sandbox.mounts._rows.values() if sandbox.mounts._rows else []
    with socket.create_server(("127.0.0.1", 0)) as unused:
        gone = f"http://127.0.0.1:{unused.getsockname()[1]}"
    away = replace(row.request, access=replace(row.request.access, endpoint=gone))
    sandbox.mounts._rows = {"/data": replace(row, request=away)}
    assert (await sandbox.exec("echo awake")).stdout == "awake\n"
    result = await sandbox.exec("cat /data/f", timeout=15)
    assert (result.exit_code, "Input/output error" in result.stderr) == (1, True)


async def test_unmount_does_not_wake_the_sandbox(sandbox: Sandbox) -> None:
    await sandbox.sleep()
    await sandbox.mounts.unmount("/data")
    info = await sandbox.info()
    assert (info and info.status, await sandbox.mounts.list()) == ("idle", [])
    assert await mounted_paths(sandbox) == []


async def test_killed_daemon_is_restarted(sandbox: Sandbox) -> None:
    await sandbox.exec("echo kept > /data/f")
    os.kill(daemon_pid(sandbox), signal.SIGKILL)
    async with asyncio.timeout(15):
        while (await sandbox.exec("cat /data/f")).stdout != "kept\n":
            await asyncio.sleep(0.05)


async def test_next_engine_adopts_the_daemon(tmp_path: Path, layers: Path, bucket: Bucket) -> None:
    home = tmp_path / "home"
    host = await Host.open(home, pool=0, images=layers)
    sandbox = await host.create("kept")
    await sandbox.mounts.mount(bucket.at())
    await sandbox.exec("echo 1 > /data/f")
    daemon = daemon_pid(sandbox)
    await host.aclose(detach=True)
    async with await Host.open(home, pool=0, images=layers) as host:
        sandbox = host.sandbox("kept")
        assert (await sandbox.exec("cat /data/f")).stdout == "1\n"
        assert daemon_pid(sandbox) == daemon
        await sandbox.mounts.unmount("/data")
        assert await mounted_paths(sandbox) == []


async def test_destroy_ends_the_daemon_and_keeps_the_bucket(
    host: Host, sandbox: Sandbox, store: Store
) -> None:
    await sandbox.exec("echo 1 > /data/f")
    daemon = daemon_pid(sandbox)
    await sandbox.destroy()
    assert (is_running(daemon), store["f"]) == (False, b"1\n")
    assert await host.sandbox("mounted").mounts.list() == []


async def test_backup_excludes_mounts_and_restore_refuses_them(
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


async def test_hanging_store_blocks_neither_commands_nor_destroy(
    host: Host, bucket: Bucket
) -> None:
    sandbox = await host.create("hanging")
    await sandbox.mounts.mount(bucket.at())
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        [row] = sandbox.mounts._rows.values() if sandbox.mounts._rows else []
        await sandbox.sleep()
        to = f"http://127.0.0.1:{silent.getsockname()[1]}"
        away = replace(row.request, access=replace(row.request.access, endpoint=to))
        sandbox.mounts._rows = {"/data": replace(row, request=away)}
        await sandbox.start_process("cat /data/f")
        assert (await sandbox.exec("echo others")).stdout == "others\n"
        async with asyncio.timeout(15):
            await sandbox.destroy()


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"secret_key": "wrong"}, AccessDenied, "refused these credentials"),
        ({"access_key": "nobody", "secret_key": "x"}, AccessDenied, "refused"),
        ({"endpoint": "http://127.0.0.1:1"}, ServiceUnavailable, "did not respond"),
    ],
)
async def test_inaccessible_bucket_is_not_mounted(
    host: Host, bucket: Bucket, change: dict[str, str], kind: type[SmokeboxError], message: str
) -> None:
    sandbox = await host.create("refused")
    request = replace(bucket.at(), access=replace(bucket.access, **change))  # type: ignore[arg-type]
    with pytest.raises(kind, match=message):
        await sandbox.mounts.mount(request)
    assert (await mounted_paths(sandbox), await sandbox.mounts.list()) == ([], [])


async def test_missing_bucket(host: Host, bucket: Bucket) -> None:
    sandbox = await host.create("refused")
    with pytest.raises(BucketNotFound, match="no bucket s3://not-there"):
        await sandbox.mounts.mount(replace(bucket.at(), bucket="not-there"))
    assert await mounted_paths(sandbox) == []


async def test_path_that_is_not_a_directory(host: Host, bucket: Bucket) -> None:
    sandbox = await host.create("refused")
    await sandbox.exec("echo 1 > /file; ln -s /tmp /link")
    with pytest.raises(SmokeboxError) as refusal:
        await sandbox.mounts.mount(bucket.at("/file"))
    assert isinstance(refusal.value, (PathNotDirectory, Conflict)) or "/file" in str(refusal.value)
    with pytest.raises(SymlinkLoop):
        await sandbox.mounts.mount(bucket.at("/link/data"))
    assert (await mounted_paths(sandbox), await sandbox.mounts.list()) == ([], [])


@pytest.mark.parametrize("path", ["/", "/proc/x", "/dev", "/sys/fs", "/usr", "/run/smokebox/io"])
def test_system_directories_are_refused(path: str) -> None:
    with pytest.raises(InvalidPath, match="a system directory"):
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
def test_invalid_requests(bucket: str, prefix: str, access: Access, option: str) -> None:
    with pytest.raises(InvalidOption) as refusal:
        parse_request(bucket, "/data", cwd="/", prefix=prefix, access=access)
    assert refusal.value.fields["option"] == option


async def test_private_address_needs_permission(host: Host, bucket: Bucket) -> None:
    sandbox = await host.create("outside")
    with pytest.raises(InvalidOption, match="public address"):
        await sandbox.mounts.mount(replace(bucket.at(), private=False))
    assert await mounted_paths(sandbox) == []
