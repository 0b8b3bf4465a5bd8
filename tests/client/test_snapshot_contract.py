"""One contract of snapshots and forks for Linux and virtual sandboxes."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from smokebox import virtual

if TYPE_CHECKING:
    from smokebox import SnapshotApi
    from smokebox.client.client import Client

T = TypeVar("T")


async def go_back_and_branch(sandbox: SnapshotApi[T]) -> None:
    """Use a sandbox of either kind."""
    assert (await sandbox.capabilities()).snapshots
    await sandbox.write_file("f", "1")
    snapshot = await sandbox.snapshot()
    await sandbox.write_file("f", "2")
    first, second = await sandbox.fork(2)
    await first.write_file("f", "3")
    await sandbox.restore(snapshot)
    found = [await one.read_file("f") for one in (sandbox, first, second)]
    assert found == ["1", "3", "2"]


async def test_virtual_sandboxes_have_the_contract() -> None:
    async with virtual() as sandbox:
        await go_back_and_branch(sandbox)


async def test_linux_sandboxes_have_the_contract(client: Client) -> None:
    async with await client.create() as sandbox:
        await go_back_and_branch(sandbox)
        for snapshot in await sandbox.snapshots():
            await sandbox.delete_snapshot(snapshot)
    for info in await client.list(prefix=sandbox.id):
        await client.sandbox(info.id).destroy()
