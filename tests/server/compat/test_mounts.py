"""Buckets over the bridge protocol: with credentials of the client, or offered by the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio

from engine.mounts.store import Store
from server.compat.bridge_client import BridgeClient
from smokebox.sandbox.access import Access
from smokebox.server.server import run_server
from smokebox.server.settings import OfferedBucket, ServerSettings
from smokebox.wire.requests import CreateKey

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from smokebox.server.server import RunningServer
    from smokebox.testing import SeaweedServer

Body = dict[str, Any]


@pytest.fixture
def access(seaweed: SeaweedServer) -> Access:
    return Access(
        endpoint=seaweed.endpoint,
        region=seaweed.region,
        access_key=seaweed.access_key,
        secret_key=seaweed.secret_key,
    )


@pytest.fixture
def store(bucket_name: str, access: Access) -> Store:
    return Store.of(bucket_name, access)


@pytest.fixture
def body(seaweed: SeaweedServer, bucket_name: str) -> Body:
    """A mount as clients send it."""
    return {
        "bucket": bucket_name,
        "mountPath": "/workspace/data",
        "options": {
            "endpoint": seaweed.endpoint,
            "readOnly": False,
            "prefix": "/mine/",
            "credentials": {
                "accessKeyId": seaweed.access_key,
                "secretAccessKey": seaweed.secret_key,
            },
        },
    }


async def test_bucket_is_mounted_used_and_unmounted(
    bridge: BridgeClient, body: Body, store: Store
) -> None:
    for _ in range(2):
        async with bridge.request("POST", "/mount", json=body) as response:
            assert (response.status, await response.json()) == (200, {"ok": True})
    done = await bridge.run("sh", "-c", "echo hi > /workspace/data/f; ls /workspace/data")
    assert (done.stdout, store["mine/f"]) == (b"f\n", b"hi\n")
    async with bridge.request(
        "POST", "/unmount", json={"mountPath": "/workspace/data/"}
    ) as response:
        assert (response.status, await response.json()) == (200, {"ok": True})
    assert (await bridge.run("ls", "/workspace/data")).stdout == b""
    assert (await bridge.request_error("POST", "/unmount", json={"mountPath": "/workspace/data"}))[
        :2
    ] == (
        400,
        "unmount_error",
    )


async def test_sandbox_is_created_with_its_mounts_or_not_at_all(
    bridge: BridgeClient, body: Body, server: RunningServer
) -> None:
    async with bridge.http.post("/v1/sandbox", json={"mounts": [body]}) as response:
        assert response.status == 200
        bridge.id = (await response.json())["id"]
    assert b"/workspace/data" in (await bridge.run("cat", "/proc/mounts")).stdout
    invalid = {**body, "bucket": "not-there"}
    async with bridge.http.post("/v1/sandbox", json={"mounts": [invalid]}) as response:
        assert (response.status, (await response.json())["code"]) == (502, "mount_error")
    assert len(await server.state.host.list()) == 1


async def test_mount_in_use_is_not_unmounted(bridge: BridgeClient, body: Body) -> None:
    async with bridge.request("POST", "/mount", json=body) as response:
        assert response.status == 200
    await bridge.run("sh", "-c", "cd /workspace/data && sleep 100 > /dev/null 2>&1 &")
    status, code, text = await bridge.request_error(
        "POST", "/unmount", json={"mountPath": "/workspace/data"}
    )
    assert (status, code) == (502, "unmount_error")
    assert "in use" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mountPath": "/"}, "a system directory"),
        ({"bucket": "No Bucket"}, "not an S3 bucket"),
        ({"bucket": None}, "either bucket or binding"),
        ({"binding": "OTHER"}, "either bucket or binding"),
        ({"options": {}}, "no credentials"),
        ({"options": {"s3fsOptions": ["use_cache=/tmp"]}}, "s3fs"),
        ({"options": {"credentials": {"accessKeyId": "x"}}}, "secretAccessKey"),
        ({"mountPath": 7}, "mountPath"),
    ],
)
async def test_invalid_mounts_are_refused(
    bridge: BridgeClient, body: Body, change: Body, message: str
) -> None:
    status, _, text = await bridge.request_error("POST", "/mount", json={**body, **change})
    assert status == 400
    assert message in text


async def test_wrong_credentials_are_reported(
    bridge: BridgeClient, body: Body, seaweed: SeaweedServer
) -> None:
    body["options"]["credentials"]["secretAccessKey"] = "wrong"
    status, code, text = await bridge.request_error("POST", "/mount", json=body)
    assert (status, code) == (502, "mount_error")
    assert "refused these credentials" in text
    assert seaweed.secret_key not in text


@pytest_asyncio.fixture
async def offering(
    tmp_path: Path, bucket_name: str, access: Access
) -> AsyncIterator[tuple[BridgeClient, RunningServer]]:
    """A server with keys that offers a prefix of a bucket, and a client with a key."""
    offered = OfferedBucket(bucket=bucket_name, prefix="shared", read_only=True, access=access)
    settings = ServerSettings(
        home=str(tmp_path / "home"),
        host="127.0.0.1",
        keys=True,
        pool=0,
        buckets={"SHARED": offered},
    )
    async with run_server(settings) as server:
        key = (await server.state.keys.create(CreateKey(name="team", prefix="team-"))).key
        headers = {"authorization": f"Bearer {key}"}
        assert server.url is not None
        async with aiohttp.ClientSession(server.url, headers=headers) as http:
            yield BridgeClient(http, "box"), server


async def test_offered_bucket_is_mounted_by_name(
    offering: tuple[BridgeClient, RunningServer], store: Store
) -> None:
    bridge, server = offering
    store["shared/f"], store["secret"] = b"shared", b"secret"
    for number, named in enumerate(({"binding": "SHARED"}, {"bucket": "SHARED"})):
        body = {**named, "mountPath": f"/workspace/{number}", "options": {"endpoint": "http://x"}}
        async with bridge.request("POST", "/mount", json=body) as response:
            assert response.status == 200, await response.text()
        done = await bridge.run("sh", "-c", f"cd /workspace/{number}; ls; cat f; echo > f")
        assert done.stdout == b"f\nshared"
        assert b"Read-only" in done.stderr
    [sandbox] = await server.state.host.list()
    listed = await server.state.host.sandbox(sandbox.id).mounts.list()
    assert [(mount.bucket, mount.endpoint) for mount in listed] == [("SHARED", None)] * 2


async def test_server_with_keys_connects_to_public_addresses_only(
    offering: tuple[BridgeClient, RunningServer], body: Body
) -> None:
    bridge, _ = offering
    status, code, text = await bridge.request_error("POST", "/mount", json=body)
    assert (status, code) == (502, "mount_error")
    assert "public address" in text
    status, _, _ = await bridge.request_error(
        "POST", "/mount", json={"binding": "OTHER", "mountPath": "/workspace/x"}
    )
    assert status == 400
