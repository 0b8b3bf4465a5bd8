"""Snapshots and forks by the SDK, with `await` and without."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from smokebox import Sandbox, sync
from smokebox.errors import Conflict, NotFound, Unsupported

if TYPE_CHECKING:
    from client.server_process import ServerProcess
    from smokebox.client.client import Client


class Worker(Sandbox):
    limits = "lite"


class Prepared(Sandbox):
    snapshot = "sdk-prepared"  # type: ignore[assignment]


async def test_sandbox_returns_to_a_snapshot(client: Client) -> None:
    async with await client.create() as sandbox:
        await sandbox.write_file("f", "1")
        first = await sandbox.snapshot("sdk-first", description="text")
        with pytest.raises(Conflict):
            await sandbox.snapshot("sdk-first")
        await sandbox.write_file("f", "2")
        assert (await sandbox.diff(first)).changed == ["/workspace/f"]
        await sandbox.restore(first, save_as="sdk-second")
        assert await sandbox.read_file("f") == "1"
        diff = await sandbox.diff("sdk-first", "sdk-second", texts=True)
        assert list(diff.texts) == ["/workspace/f"]
        assert [one.name for one in await sandbox.snapshots()] == ["sdk-first", "sdk-second"]
        assert (await sandbox.capabilities()).snapshots
    assert first in await client.snapshots.list()
    await client.snapshots.delete(first)
    await client.snapshots.delete("sdk-second")
    with pytest.raises(NotFound):
        await client.snapshots.get("sdk-second")


async def test_forks_are_handles_of_the_same_class(client: Client) -> None:
    async with await client.create(Worker) as sandbox:
        await sandbox.write_file("f", "1")
        forks = await sandbox.fork(2)
        assert {type(one) for one in forks} == {Worker}
        for fork in forks:
            assert await fork.read_file("f") == "1"
            await fork.destroy()
        with pytest.raises(Unsupported):
            await sandbox.fork(memory=True)


async def test_a_class_names_the_snapshot_of_its_sandboxes(client: Client) -> None:
    async with await client.create() as sandbox:
        await sandbox.write_file("f", "1")
        made = await sandbox.snapshot("sdk-prepared")
    async with await client.create(Prepared) as created:
        assert await created.read_file("f") == "1"
        await created.delete_snapshot(await created.snapshot())  # type: ignore[operator]
    await client.snapshots.delete(made)


def test_snapshots_without_await(server: ServerProcess) -> None:
    with sync.connect(server.url) as client, client.create() as sandbox:
        sandbox.write_file("f", "1")
        made = sandbox.snapshot()
        sandbox.write_file("f", "2")
        (fork,) = sandbox.fork()
        sandbox.restore(made)
        assert (sandbox.read_file("f"), fork.read_file("f")) == ("1", "2")
        fork.destroy()
        client.snapshots.delete(made)
