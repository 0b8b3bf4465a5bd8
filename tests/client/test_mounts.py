"""Bucket mounts by the SDK; credentials never enter the sandbox."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from engine.mounts.store import Store
from smokebox.client.bindings import Environment
from smokebox.errors import Conflict, InvalidOption, NotFound
from smokebox.sandbox.access import Access
from smokebox.sync import connect as connect_sync

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from client.server_process import ServerProcess
    from smokebox.client.client import Client
    from smokebox.client.sandbox import Sandbox
    from smokebox.testing import SeaweedServer


@pytest.fixture
async def sandbox(client: Client) -> AsyncIterator[Sandbox]:
    async with client, await client.create() as sandbox:
        yield sandbox


@pytest.fixture
def store(seaweed: SeaweedServer, bucket_name: str) -> Store:
    access = Access(
        endpoint=seaweed.endpoint,
        region=seaweed.region,
        access_key=seaweed.access_key,
        secret_key=seaweed.secret_key,
    )
    return Store.of(bucket_name, access)


async def test_bucket_is_mounted_and_unmounted(
    sandbox: Sandbox, seaweed: SeaweedServer, bucket_name: str, store: Store
) -> None:
    mount = await sandbox.mount_bucket(
        bucket_name,
        "data",
        endpoint=seaweed.endpoint,
        access_key=seaweed.access_key,
        secret_key=seaweed.secret_key,
    )
    assert (mount.path, mount.bucket, mount.active) == ("/workspace/data", bucket_name, True)
    assert await sandbox.list_mounts() == [mount]
    await sandbox.exec("echo hello > data/f")
    assert (store["f"], await sandbox.read_file("data/f")) == (b"hello\n", "hello\n")
    await sandbox.unmount_bucket("data")
    assert (await sandbox.list_mounts(), await sandbox.readdir("data")) == ([], [])
    with pytest.raises(NotFound, match="nothing is mounted"):
        await sandbox.unmount_bucket("data")


async def test_credentials_come_from_the_environment(
    sandbox: Sandbox, seaweed: SeaweedServer, bucket_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", seaweed.endpoint)
    monkeypatch.setenv("R2_ACCESS_KEY_ID", seaweed.access_key)
    monkeypatch.setenv("R2_SECRET_ACCESS_KEY", seaweed.secret_key)
    await sandbox.mount_bucket(f"s3://{bucket_name}/folder", "/data")
    found = await sandbox.exec("env; touch /data/f")
    assert seaweed.secret_key not in found.stdout
    [mount] = await sandbox.list_mounts()
    assert (mount.bucket, mount.prefix) == (bucket_name, "folder")


async def test_bucket_of_the_project_is_mounted_with_its_options(
    sandbox: Sandbox, seaweed: SeaweedServer, bucket_name: str, store: Store, tmp_path: Path
) -> None:
    (tmp_path / "smokebox.toml").write_text(
        f'[buckets.DATA]\nbucket = "{bucket_name}"\nprefix = "a"\nread_only = true\n'
        f'endpoint = "{seaweed.endpoint}"\n'
    )
    (tmp_path / ".env").write_text(
        f"AWS_ACCESS_KEY_ID={seaweed.access_key}\nAWS_SECRET_ACCESS_KEY={seaweed.secret_key}\n"
    )
    store["a/b/f"] = b"deep"
    env = Environment(tmp_path)
    mount = await sandbox.mount_bucket(env.DATA, "/data", prefix="b")
    assert (mount.prefix, mount.read_only) == ("a/b", True)
    assert await sandbox.read_file("/data/f") == "deep"
    with pytest.raises(InvalidOption, match="its own access options"):
        await sandbox.mount_bucket(env.DATA, "/other", endpoint="http://127.0.0.1:1")


async def test_second_mount_at_a_path_is_refused(
    sandbox: Sandbox, seaweed: SeaweedServer, bucket_name: str
) -> None:
    for prefix in ("", "other"):
        work = sandbox.mount_bucket(
            bucket_name,
            "/data",
            prefix=prefix,
            endpoint=seaweed.endpoint,
            access_key=seaweed.access_key,
            secret_key=seaweed.secret_key,
        )
        if prefix:
            with pytest.raises(Conflict, match="/data is taken"):
                await work
        else:
            await work


async def test_mount_in_use_is_unmounted_only_by_force(
    sandbox: Sandbox, seaweed: SeaweedServer, bucket_name: str
) -> None:
    await sandbox.mount_bucket(
        bucket_name,
        "/data",
        endpoint=seaweed.endpoint,
        access_key=seaweed.access_key,
        secret_key=seaweed.secret_key,
    )
    process = await sandbox.start_process("cd /data && echo there && sleep 60")
    await process.wait_for_log("there")
    with pytest.raises(Conflict, match="in use"):
        await sandbox.unmount_bucket("/data")
    await sandbox.unmount_bucket("/data", force=True)
    assert await sandbox.list_mounts() == []


async def test_mount_without_credentials_uses_a_bucket_of_the_server(sandbox: Sandbox) -> None:
    with pytest.raises(InvalidOption, match="no credentials for the bucket 'data'"):
        await sandbox.mount_bucket("data", "/data")


def test_mounts_without_await(
    server: ServerProcess, seaweed: SeaweedServer, bucket_name: str
) -> None:
    with connect_sync(server.url) as client, client.create() as sandbox:
        sandbox.mount_bucket(
            bucket_name,
            "/data",
            endpoint=seaweed.endpoint,
            access_key=seaweed.access_key,
            secret_key=seaweed.secret_key,
        )
        sandbox.write_file("/data/f", "x")
        assert sandbox.exec("cat /data/f").stdout == "x"
        assert [one.path for one in sandbox.list_mounts()] == ["/data"]
        sandbox.unmount_bucket("/data")
