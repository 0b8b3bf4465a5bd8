"""Snapshots by an engine of an ordinary user, whose sandboxes have files that it may not read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from unprivileged import rerun_as_nobody

if TYPE_CHECKING:
    from smokebox.engine.host import Host

HERE = Path(__file__).parent


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run tests as another user")
@pytest.mark.timeout(120)
def test_snapshots_as_an_ordinary_user() -> None:
    rerun_as_nobody(
        HERE,
        "restores_every_file or fork_goes_on or closed_to_their_owner or stacked or keep_running "
        "or sleeping_sandbox_gives or another_engine",
    )


async def test_files_that_are_closed_to_their_owner(host: Host) -> None:
    sandbox = await host.create("box")
    await sandbox.exec(
        "mkdir -p d/e; echo 1 > d/e/f; echo 2 > g; chmod 0 d/e/f d/e; chmod 100 d; chmod 200 g"
    )
    modes = "stat -c '%a %n' d d/e d/e/f g; cat d/e/f g"
    before = (await sandbox.exec(modes)).stdout
    await sandbox.snapshots.create("one")
    assert (await sandbox.exec(modes)).stdout == before
    await sandbox.exec("rm -rf d g")
    await sandbox.snapshots.create("two")
    created = await host.create(snapshot="one")
    assert (await created.exec(modes)).stdout == before
    assert (await sandbox.snapshots.diff("one", "two")).removed == [
        "/workspace/d",
        "/workspace/d/e",
        "/workspace/d/e/f",
        "/workspace/g",
    ]
    await created.destroy()
    for name in ("one", "two"):
        await host.snapshots.delete(name)
