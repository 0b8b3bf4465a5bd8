"""Snapshots in a bucket of an S3 server, and failures of the bucket and its network."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import obstore
import pytest
import zstandard

from engine.backups.trees import listing
from smokebox.engine.host import Host
from smokebox.errors import AccessDenied, BadSnapshot, ServiceUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from obstore.store import S3Store

    from smokebox.types import Snapshot

PREFIX = "some/folder"
# More than one part of an upload, and nothing that compresses.
LARGE = "mkdir d; head -c 20000000 /dev/urandom > d/large; echo x > small; ln -s small link"


@dataclass
class Bucket:
    """A bucket, and engines that use it."""

    store: S3Store
    homes: Path
    layers: Path

    def open(self, name: str) -> contextlib.AbstractAsyncContextManager[Host]:
        """Open the engine with that state directory."""
        return self._open(name)

    @contextlib.asynccontextmanager
    async def _open(self, name: str) -> AsyncIterator[Host]:
        url = f"s3://{self.store.config['bucket']}/{PREFIX}"
        home = self.homes / name
        async with await Host.open(home, pool=0, images=self.layers, backups=url) as host:
            yield host

    def objects(self) -> list[str]:
        """Return the keys below the prefix."""
        found = [meta["path"] for page in obstore.list(self.store) for meta in page]
        return sorted(key.removeprefix(f"{PREFIX}/") for key in found)

    def layer(self) -> str:
        """Return the key of the only layer."""
        (key,) = (key for key in self.objects() if key.startswith("layers/"))
        return f"{PREFIX}/{key}"


@pytest.fixture
def remote(bucket: S3Store, tmp_path: Path, layers: Path) -> Bucket:
    return Bucket(bucket, tmp_path, layers)


async def export(host: Host, snapshot: Snapshot) -> None:
    await host.snapshot_archives.export(await host.snapshots.row(snapshot.id))


async def load(host: Host, id: str) -> Snapshot:
    return await host.snapshot_archives.load(await host.snapshot_archives.find(id))


async def make(remote: Bucket) -> tuple[Snapshot, str]:
    """Export a snapshot, and return it with its files."""
    async with remote.open("one") as host:
        sandbox = await host.create("box")
        assert (await sandbox.exec(LARGE)).success
        # What changes in the moment of a snapshot is in the next one too.
        await asyncio.sleep(0.1)
        snapshot = await sandbox.snapshots.create("state")
        await export(host, snapshot)
        return snapshot, await listing(await host.create(snapshot=snapshot.id))


def left(host: Host) -> list[str]:
    """Return files of archives and incomplete layers that are on the disk."""
    parts = os.listdir(f"{host.home}/backups")
    return [
        *parts,
        *(name for name in os.listdir(host.images.layer_store.directory) if "." in name[1:]),
    ]


async def nothing_is_here(host: Host) -> bool:
    """Return whether an engine has nothing of a snapshot."""
    rows = await host.snapshots.record.snapshot_layers()
    return (await host.snapshots.list(), rows, os.listdir(f"{host.home}/backups")) == ([], [], [])


async def test_another_engine_imports_what_one_exported(remote: Bucket) -> None:
    snapshot, tree = await make(remote)
    layer = remote.layer().removeprefix(f"{PREFIX}/")
    assert remote.objects() == sorted([layer, f"{snapshot.id}.json"])
    async with remote.open("two") as host:
        await load(host, snapshot.id)
        assert await listing(await host.create(snapshot=snapshot.id)) == tree
        assert os.listdir(f"{host.home}/backups") == []
        # From where it was imported, it is exported again.
        await export(host, snapshot)
        assert {layer, f"{snapshot.id}.json"} <= set(remote.objects())
    async with remote.open("three") as host:
        await load(host, snapshot.id)
        assert await listing(await host.create(snapshot=snapshot.id)) == tree


async def test_next_export_sends_only_what_changed(
    remote: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    await make(remote)
    async with open_network(monkeypatch) as network, remote.open("one") as host:
        sandbox = host.sandbox("box")
        await sandbox.exec("echo more > more")
        before = network.left
        await export(host, await sandbox.snapshots.create())
        assert before - network.left < 1_000_000
    assert len(remote.objects()) == 4


async def test_wrong_credentials_are_named_and_leave_nothing(
    remote: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot, _ = await make(remote)
    before = remote.objects()
    async with remote.open("two") as host:
        found = await host.snapshot_archives.find(snapshot.id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    async with remote.open("two") as host:
        with pytest.raises(AccessDenied, match="refused these credentials"):
            await host.snapshot_archives.find(snapshot.id)
        with pytest.raises(AccessDenied, match="refused these credentials"):
            await host.snapshot_archives.load(found)
        assert await nothing_is_here(host)
    async with remote.open("one") as host:
        other = await host.sandbox("box").snapshots.create()
        with pytest.raises(AccessDenied, match="refused these credentials"):
            await export(host, other)
        assert os.listdir(f"{host.home}/backups") == []
    assert remote.objects() == before


@pytest.mark.parametrize("damage", ["truncated", "empty", "longer", "changed", "other", "missing"])
async def test_damaged_layer_is_refused_until_it_is_exported_again(
    remote: Bucket, damage: str
) -> None:
    snapshot, tree = await make(remote)
    key = remote.layer()
    whole = bytes(obstore.get(remote.store, key).bytes())
    changed = bytearray(whole)
    changed[len(whole) // 2] ^= 1
    # Whole, and not what the manifest says.
    plain = bytearray(zstandard.decompress(whole, max_output_size=1 << 26))
    plain[plain.index(b"ustar")] ^= 0
    other = zstandard.ZstdCompressor().compress(bytes(plain[:-10240]) + b"\1" * 10240)
    contents = {"truncated": whole[:-1000], "empty": b"", "longer": whole + whole}
    contents |= {"changed": bytes(changed), "other": other}
    if damage == "missing":
        obstore.delete(remote.store, key)
    else:
        obstore.put(remote.store, key, contents[damage])
    async with remote.open("two") as host:
        with pytest.raises(BadSnapshot, match=r"xport the snapshot again") as caught:
            await load(host, snapshot.id)
        assert key in caught.value.message
        assert await nothing_is_here(host)
    if "Delete it there" in caught.value.hint:
        obstore.delete(remote.store, key)
    async with remote.open("one") as host:
        await export(host, snapshot)
    async with remote.open("two") as host:
        await load(host, snapshot.id)
        assert await listing(await host.create(snapshot=snapshot.id)) == tree


async def test_damaged_manifest_is_replaced_by_the_next_export(remote: Bucket) -> None:
    snapshot, _ = await make(remote)
    key = f"{PREFIX}/{snapshot.id}.json"
    whole = bytes(obstore.get(remote.store, key).bytes())
    for damaged in (whole[:-10], b"", b"{}", b"\xff"):
        obstore.put(remote.store, key, damaged)
        async with remote.open("two") as host:
            with pytest.raises(BadSnapshot, match=r"manifest.*Export the snapshot again"):
                await load(host, snapshot.id)
        async with remote.open("one") as host:
            await export(host, snapshot)
        assert bytes(obstore.get(remote.store, key).bytes()) == whole


@dataclass
class Network:
    """A connection to an S3 server that stops to transfer after some bytes, or ends.

    `left` counts the bytes that it still transfers, and `stalled` is set after the last.
    """

    endpoint: str
    port: int = 0
    left: int = 1 << 60
    ends: bool = False
    stalled: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = urlsplit(self.endpoint)
        upstream, sink = await asyncio.open_connection(target.hostname, target.port)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self.copy(reader, sink))
                both.create_task(self.copy(upstream, writer))
        except* OSError:
            pass
        finally:
            sink.close()
            writer.close()

    async def copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            self.left -= len(data)
            if self.left < 0:
                self.stalled.set()
                if self.ends:
                    raise ConnectionError("cut")
                await asyncio.Event().wait()
            sink.write(data)
            await sink.drain()
        sink.close()


@contextlib.asynccontextmanager
async def open_network(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Network]:
    """Put a network between engines that are opened and the bucket of the environment."""
    network = Network(os.environ["AWS_ENDPOINT_URL"])
    connections: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        with contextlib.suppress(asyncio.CancelledError):
            await network.serve(reader, writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        yield network
    server.close()
    for task in connections:
        task.cancel()
    await asyncio.gather(*connections, return_exceptions=True)


async def test_cancelled_export_leaves_no_snapshot_in_the_bucket(
    remote: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with remote.open("one") as host:
        sandbox = await host.create("box")
        await sandbox.exec(LARGE)
        snapshot = await sandbox.snapshots.create()
    for transferred in (0, 1_000_000, 19_000_000):
        async with open_network(monkeypatch) as network, remote.open("one") as host:
            network.left = transferred
            exporting = asyncio.create_task(export(host, snapshot))
            await asyncio.wait_for(network.stalled.wait(), 15)
            exporting.cancel()
            await asyncio.wait([exporting], timeout=5)
            assert exporting.cancelled()
            assert os.listdir(f"{host.home}/backups") == []
        assert f"{snapshot.id}.json" not in remote.objects()
    async with remote.open("one") as host:
        await export(host, snapshot)
    async with remote.open("two") as host:
        await load(host, snapshot.id)


async def test_cancelled_import_leaves_nothing(
    remote: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot, tree = await make(remote)
    for transferred in (0, 10_000, 10_000_000):
        async with open_network(monkeypatch) as network, remote.open("two") as host:
            network.left = transferred
            loading = asyncio.create_task(load(host, snapshot.id))
            await asyncio.wait_for(network.stalled.wait(), 15)
            loading.cancel()
            await asyncio.wait([loading], timeout=5)
            assert loading.cancelled()
            assert await nothing_is_here(host)
    async with remote.open("two") as host:
        await load(host, snapshot.id)
        assert await listing(await host.create(snapshot=snapshot.id)) == tree


async def test_lost_connection_is_named_and_leaves_nothing(
    remote: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot, _ = await make(remote)
    async with open_network(monkeypatch) as network, remote.open("two") as host:
        network.left, network.ends = 5_000_000, True
        with pytest.raises(ServiceUnavailable):
            await load(host, snapshot.id)
        assert await nothing_is_here(host)
