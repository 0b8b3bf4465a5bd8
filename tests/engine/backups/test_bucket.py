"""Backups in an object store: an S3 server, and file:// URLs."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import obstore
import pytest

from engine.backups.trees import leftovers, listing
from smokebox.engine.host import Host
from smokebox.errors import (
    AccessDenied,
    BadSnapshot,
    BucketNotFound,
    InvalidOption,
    NotFound,
    ServiceUnavailable,
)

if TYPE_CHECKING:
    from pathlib import Path

    from obstore.store import S3Store

PREFIX = "some/folder"


def url(bucket: S3Store) -> str:
    return f"s3://{bucket.config['bucket']}/{PREFIX}"


def keys(bucket: S3Store) -> list[str]:
    return sorted(meta["path"] for page in obstore.list(bucket) for meta in page)


async def test_backup_and_restore(tmp_path: Path, layers: Path, bucket: S3Store) -> None:
    home = tmp_path / "home"
    async with await Host.open(home, pool=0, images=layers, backups=url(bucket)) as host:
        sandbox = await host.create("box")
        # Larger than one part of an upload.
        await sandbox.exec("mkdir d; head -c 40000000 /dev/urandom > d/large; echo x > small")
        before = await listing(sandbox)
        backup = await sandbox.backups.create(name="far away")
        assert keys(bucket) == [f"{PREFIX}/{backup.id}.json", f"{PREFIX}/{backup.id}.tar.zst"]
        manifest = json.loads(bytes(obstore.get(bucket, keys(bucket)[0]).bytes()))
        assert (manifest["sandbox_id"], manifest["checksum"]) == ("box", backup.checksum)
        # No file stays on the host, and no credentials are in the sandbox.
        assert os.listdir(home / "backups") == []
        await sandbox.exec("rm -r d small; echo y > y")
        await sandbox.backups.restore(backup)
        assert await listing(sandbox) == before
        assert os.listdir(home / "backups") == []
        assert "AWS" not in (await sandbox.exec("env; cat /proc/*/environ")).stdout
        await host.backups.delete(backup.id)
        assert keys(bucket) == []


async def test_another_server_finds_backups_by_id(
    tmp_path: Path, layers: Path, bucket: S3Store
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    async with await Host.open(one, pool=0, images=layers, backups=url(bucket)) as host:
        sandbox = await host.create("box")
        await sandbox.write_file("f", "from there")
        backup = await sandbox.backups.create()
    async with await Host.open(two, pool=0, images=layers, backups=url(bucket)) as host:
        assert await host.backups.get(backup.id) == backup
        sandbox = await host.create("elsewhere")
        await sandbox.backups.restore(backup.id)
        assert await sandbox.read_file("f") == "from there"
        with pytest.raises(NotFound):
            await host.backups.get("b-" + "0" * 32)


async def test_damaged_object_is_refused_before_anything_changes(
    tmp_path: Path, layers: Path, bucket: S3Store
) -> None:
    async with await Host.open(
        tmp_path / "home", pool=0, images=layers, backups=url(bucket)
    ) as host:
        sandbox = await host.create("box")
        await sandbox.write_file("f", "1")
        backup = await sandbox.backups.create()
        await sandbox.write_file("f", "2")
        key = f"{PREFIX}/{backup.id}.tar.zst"
        whole = bytes(obstore.get(bucket, key).bytes())
        for damaged in (whole[:-1], whole + b"x", b"\0" + whole[1:]):
            obstore.put(bucket, key, damaged)
            with pytest.raises(BadSnapshot, match="damaged"):
                await sandbox.backups.restore(backup)
        obstore.delete(bucket, key)
        with pytest.raises(BadSnapshot, match="is missing in"):
            await sandbox.backups.restore(backup)
        assert await sandbox.read_file("f") == "2"
        assert await leftovers(host, sandbox) == []


async def test_refusing_store_leaves_nothing(
    tmp_path: Path, layers: Path, bucket: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    async with await Host.open(
        home, pool=0, images=layers, backups="s3://there-is-no-such-bucket"
    ) as host:
        sandbox = await host.create("box")
        with pytest.raises((BucketNotFound, AccessDenied)):
            await sandbox.backups.create()
        assert (await host.backups.list(), os.listdir(home / "backups")) == ([], [])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    async with await Host.open(home, pool=0, images=layers, backups=url(bucket)) as host:
        with pytest.raises(AccessDenied):
            await host.sandbox("box").backups.create()
        assert (await host.backups.list(), os.listdir(home / "backups")) == ([], [])


async def test_backup_in_a_store_that_the_server_lacks(tmp_path: Path, layers: Path) -> None:
    folder, home = tmp_path / "folder", tmp_path / "home"
    folder.mkdir()
    place = f"file://{folder}"
    async with await Host.open(home, pool=0, images=layers, backups=place) as host:
        sandbox = await host.create("box")
        await sandbox.write_file("f", "1")
        backup = await sandbox.backups.create()
        assert sorted(os.listdir(folder)) == [f"{backup.id}.json", f"{backup.id}.tar.zst"]
    async with await Host.open(home, pool=0, images=layers) as host:
        sandbox = host.sandbox("box")
        local = await sandbox.backups.create()
        with pytest.raises(ServiceUnavailable, match="was not started with"):
            await sandbox.backups.restore(backup)
    async with await Host.open(home, pool=0, images=layers, backups=place) as host:
        # Backups in the state directory can still be restored.
        for stored in (backup, local):
            await host.sandbox("box").backups.restore(stored)


async def test_invalid_url_is_refused_at_start(tmp_path: Path) -> None:
    for bad in ("ftp://x/y", "s3://A_B", ""):
        with pytest.raises(InvalidOption):
            await Host.open(tmp_path / "home", pool=0, backups=bad)
    async with await Host.open(tmp_path / "home", pool=0):
        pass
