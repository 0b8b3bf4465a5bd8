"""Snapshots in a bucket: exported by one engine, imported by another."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from engine.backups.test_backups import TREE
from engine.backups.trees import listing
from smokebox.engine.host import Host
from smokebox.errors import BadSnapshot, Conflict, NotFound, SmokeboxError, Unsupported

if TYPE_CHECKING:
    from pathlib import Path

    from smokebox.types import Snapshot


async def open_host(tmp_path: Path, name: str) -> Host:
    bucket = (tmp_path / "bucket").as_uri()
    (tmp_path / "bucket").mkdir(exist_ok=True)
    return await Host.open(tmp_path / name, pool=0, backups=bucket)


async def export(tmp_path: Path) -> tuple[Snapshot, Snapshot, str]:
    """Export two snapshots of one sandbox, and return them with the files of the second."""
    async with await open_host(tmp_path, "one") as host:
        sandbox = await host.create("box", env={"A": "1"})
        await sandbox.create_session("s", cwd="/tmp")
        assert (await sandbox.exec(TREE)).success
        first = await sandbox.snapshots.create("first")
        await sandbox.exec("rm -r deep; mkdir deep; echo new > deep/fresh; rm /etc/group")
        second = await sandbox.snapshots.create("second")
        # The kernel counts links otherwise in layers.
        tree = await listing(await host.create(snapshot="second"))
        for one in (first, second, second):
            await host.snapshot_archives.export(await host.snapshots.row(one.id))
        assert list((tmp_path / "one" / "backups").iterdir()) == []
    return first, second, tree


async def test_another_engine_has_every_file(tmp_path: Path) -> None:
    first, second, tree = await export(tmp_path)
    async with await open_host(tmp_path, "two") as host:
        archives = host.snapshot_archives
        loaded = await archives.load(await archives.find(second.id), name="other", scope="b")
        assert (loaded.id, loaded.name, loaded.sandbox_id) == (second.id, "other", "box")
        created = await host.create("new", snapshot=second.id)
        assert await listing(created) == tree
        assert not await created.exists("/etc/group")
        assert (await created.exec("echo $A; pwd", session="s")).stdout == "1\n/tmp\n"
        with pytest.raises(Conflict, match="is here already"):
            await archives.load(await archives.find(second.id))
        await archives.load(await archives.find(first.id))
        assert (
            await host.snapshots.diff(
                await host.snapshots.row(first.id), await host.snapshots.row(second.id)
            )
        ).added == ["/workspace/deep/fresh"]


async def test_imports_of_one_snapshot_at_once_make_one(tmp_path: Path) -> None:
    _, second, tree = await export(tmp_path)
    async with await open_host(tmp_path, "two") as host:
        archives = host.snapshot_archives
        found = await archives.find(second.id)
        loading = [asyncio.create_task(archives.load(found)) for _ in range(4)]
        await asyncio.sleep(0.01)
        loading[0].cancel()
        results = await asyncio.gather(*loading, return_exceptions=True)
        made = [one for one in results if not isinstance(one, BaseException)]
        assert [one.id for one in made] == [second.id]
        assert await listing(await host.create(snapshot=second.id)) == tree


async def test_damaged_archives_leave_nothing(tmp_path: Path) -> None:
    _, second, _ = await export(tmp_path)
    bucket = tmp_path / "bucket"
    manifest = bucket / f"{second.id}.json"
    whole = manifest.read_bytes()
    async with await open_host(tmp_path, "two") as host:
        archives = host.snapshot_archives
        parts = json.loads(whole)
        changes: list[dict[str, object]] = [
            {"version": 2},
            {"layers": []},
            {"snapshot": {}},
            {"snapshot": {**parts["snapshot"], "sandbox_id": "../x"}},
        ]
        for change in changes:
            manifest.write_text(json.dumps({**parts, **change}))
            with pytest.raises(BadSnapshot, match="manifest"):
                await archives.find(second.id)
        manifest.write_bytes(whole)
        for id in ("snap-" + "0" * 32, "../../etc/passwd", ""):
            with pytest.raises(NotFound):
                await archives.find(id)
        found = await archives.find(second.id)
        lowest, uppermost = (
            bucket / "layers" / f"{layer.digest[7:]}.tar.zst" for layer in reversed(found.layers)
        )
        data = bytearray(uppermost.read_bytes())
        data[len(data) // 2] ^= 1
        uppermost.write_bytes(data)
        with pytest.raises(SmokeboxError):
            await archives.load(found)
        uppermost.unlink()
        with pytest.raises(SmokeboxError):
            await archives.load(found)
        assert lowest.exists()
        assert await host.snapshots.list() == []
        assert await host.snapshots.record.snapshot_layers() == []
        for layer in found.layers:
            assert host.images.layer_store.get(layer.row.id) is None


async def test_without_a_bucket_nothing_is_exported(host: Host) -> None:
    sandbox = await host.create("box")
    snapshot = await sandbox.snapshots.create()
    with pytest.raises(Unsupported, match="has no bucket"):
        await host.snapshot_archives.export(await host.snapshots.row(snapshot.id))
    with pytest.raises(Unsupported, match="has no bucket"):
        await host.snapshot_archives.find(snapshot.id)
