"""Random operations on files: every snapshot shows exactly the files of its moment."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import pytest

from engine.snapshots.tree_model import LISTING, RandomOperations
from smokebox.engine.snapshots import snapshots as snapshots_module

if TYPE_CHECKING:
    from smokebox.engine.host import Host
    from smokebox.engine.sandbox import Sandbox

SEED = int(os.environ.get("SMOKEBOX_TREE_SEED", random.randrange(1 << 30)))


async def listing(sandbox: Sandbox) -> str:
    """Return all files of /workspace with their attributes."""
    return (await sandbox.exec(LISTING)).stdout


@pytest.mark.parametrize("merged", [False, True], ids=["stacked", "merged"])
async def test_every_snapshot_equals_the_tree_of_its_moment(
    host: Host, merged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if merged:
        monkeypatch.setattr(snapshots_module, "MAX_LAYERS", 3)
    operations = RandomOperations(SEED)
    sandbox = await host.create("box", snapshot=(await _prepared(host, operations)))
    expected: dict[str, str] = {}
    for step in range(6):
        await sandbox.exec(operations.script(15))
        if step == 4:
            # From here on it is stacked on one of its snapshots.
            await sandbox.snapshots.restore(random.Random(SEED).choice(list(expected)))
        if step in (0, 2, 4):
            await sandbox.sleep()
        snapshot = await sandbox.snapshots.create()
        expected[snapshot.id] = await listing(sandbox)
    for id, tree in expected.items():
        created = await host.create(snapshot=id)
        assert await listing(created) == tree, f"{id}, SMOKEBOX_TREE_SEED={SEED}"
        await created.destroy()
    await sandbox.snapshots.restore(next(iter(expected)))
    assert await listing(sandbox) == next(iter(expected.values()))


async def _prepared(host: Host, operations: RandomOperations) -> str:
    """Return a snapshot of a tree, so that there are files in a layer below to hide."""
    first = await host.create()
    await first.exec(operations.script(40))
    snapshot = await first.snapshots.create()
    await first.destroy()
    return snapshot.id
