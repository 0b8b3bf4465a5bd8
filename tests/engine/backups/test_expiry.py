"""Expiry of backups."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING

import pytest

from smokebox.engine.host import Host
from smokebox.errors import NotFound

if TYPE_CHECKING:
    from pathlib import Path


async def test_expired_backup_is_removed(host: Host) -> None:
    sandbox = await host.create("box")
    kept = await sandbox.backups.create(ttl=3600)
    brief = await sandbox.backups.create(ttl=0.2)
    assert brief.expires_at == brief.created_at + 0.2
    while [name for name in os.listdir(f"{host.home}/backups") if brief.id in name]:
        await asyncio.sleep(0.01)
    assert await host.backups.list() == [kept]


async def test_expired_backup_is_refused_and_removed_on_access(
    tmp_path: Path, layers: Path
) -> None:
    async with await Host.open(tmp_path / "home", pool=0, images=layers) as host:
        sandbox = await host.create("box")
        await sandbox.write_file("f", "x")
        backup = await sandbox.backups.create(ttl=1.0)
        # Without the reaper, only access can remove it.
        assert host.backups._reaper is not None
        host.backups._reaper.cancel()
        assert backup.expires_at is not None
        while time.time() < backup.expires_at:
            await asyncio.sleep(0.01)
        assert await host.backups.list() == []
        with pytest.raises(NotFound, match="expired") as caught:
            await sandbox.backups.restore(backup)
        assert caught.value.fields["expired_at"] == backup.expires_at
        assert os.listdir(f"{host.home}/backups") == []


async def test_backup_that_expired_without_an_engine_is_removed_by_the_next(
    tmp_path: Path, layers: Path
) -> None:
    async with await Host.open(tmp_path / "home", pool=0, images=layers) as host:
        backup = await (await host.create("box")).backups.create(ttl=0.3)
    assert backup.expires_at is not None
    while time.time() < backup.expires_at:
        await asyncio.sleep(0.01)
    async with await Host.open(tmp_path / "home", pool=0, images=layers) as host:
        while os.listdir(f"{host.home}/backups"):
            await asyncio.sleep(0.01)
