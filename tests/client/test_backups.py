"""Backups by the SDK, with `await` and without."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from smokebox import sync
from smokebox.errors import InvalidOption, NotFound, PathNotFound
from smokebox.types import Backup

if TYPE_CHECKING:
    from client.server_process import ServerProcess
    from smokebox.client.client import Client


async def test_directory_is_backed_up_and_restored(client: Client) -> None:
    async with await client.create() as sandbox:
        await sandbox.write_file("d/f", "1")
        backup = await sandbox.create_backup("/workspace", name="one", ttl=3600, excludes=["*.tmp"])
        assert isinstance(backup, Backup)
        assert (backup.sandbox_id, backup.files, backup.name) == (sandbox.id, 1, "one")
        await sandbox.write_file("d/f", "2")
        restored = await sandbox.restore_backup(backup)
        assert (restored.path, restored.files) == ("/workspace", 1)
        assert await sandbox.read_file("d/f") == "1"
        await sandbox.restore_backup(backup.id, path="copy")
        assert await sandbox.read_file("copy/d/f") == "1"
        assert await sandbox.list_backups() == [backup]
        assert await sandbox.get_backup(backup.id) == backup
    # It outlives the sandbox, and can be restored to another.
    assert backup in await client.backups.list()
    async with await client.create() as other:
        assert await other.list_backups() == []
        await other.restore_backup(backup)
        assert await other.read_file("d/f") == "1"
        await other.delete_backup(backup)
        with pytest.raises(NotFound) as caught:
            await other.restore_backup(backup)
        assert caught.value.fields["kind"] == "backup"
        with pytest.raises(PathNotFound):
            await other.create_backup("none")
        with pytest.raises(InvalidOption):
            await other.create_backup(excludes="*.pyc")
    await client.backups.delete(backup)


async def test_cancelling_stops_a_backup(client: Client) -> None:
    async with await client.create() as sandbox:
        await sandbox.exec("for i in $(seq 50); do truncate -s 4G $i || exit; done")
        making = asyncio.create_task(sandbox.create_backup())
        while not any(one.bytes for one in await sandbox.backup_progress()):
            await asyncio.sleep(0.01)
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making
        while await sandbox.backup_progress():
            await asyncio.sleep(0.01)
        assert await sandbox.list_backups() == []


def test_backups_without_await(server: ServerProcess) -> None:
    client = sync.connect(server.url)
    with client.create() as sandbox:
        sandbox.write_file("f", "1")
        backup = sandbox.create_backup(gitignore=True, compression=1, freeze=True)
        sandbox.rm("f")
        sandbox.restore_backup(backup)
        assert sandbox.read_file("f") == "1"
        assert sandbox.list_backups() == [backup]
        assert client.backups.get(backup.id) == backup
        client.backups.delete(backup.id)
        assert sandbox.list_backups() == []
