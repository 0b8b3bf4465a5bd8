"""Snapshots of gVisor sandboxes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from smokebox.errors import Unsupported

if TYPE_CHECKING:
    from smokebox.engine.host import Host

pytestmark = pytest.mark.gvisor


async def test_snapshots_and_forks_of_a_gvisor_sandbox(host: Host) -> None:
    sandbox = await host.create("box", tier="gvisor")
    await sandbox.exec("mkdir d; echo 1 > d/f; ln -s d l; rm /etc/hosts; rm -rf /srv; mkdir /srv")
    process = await sandbox.start_process("while :; do echo tick; sleep 0.05; done")
    await sandbox.snapshots.create("one")
    await sandbox.exec("echo 2 > d/f; rm l")
    (fork,) = await host.fork("box")
    listing = "cat d/f; ls; ls /etc/hosts"
    assert (await fork.exec(listing)).stdout == "2\nd\n"
    assert (await sandbox.exec("echo alive")).stdout == "alive\n"
    assert process.id in [one.id for one in await sandbox.processes.list()]
    await sandbox.snapshots.restore("one")
    assert (await sandbox.exec(listing)).stdout == "1\nd\nl\n"
    info = await fork.info()
    assert info is not None
    assert info.tier == "gvisor"


async def test_processes_of_a_gvisor_sandbox_are_not_copied(host: Host) -> None:
    await host.create("box", tier="gvisor")
    with pytest.raises(Unsupported, match="runsc saves no sandbox with open host sockets"):
        await host.fork("box", memory=True)


async def test_checkpoints_of_a_gvisor_sandbox(host: Host) -> None:
    sandbox = await host.create("box", tier="gvisor", checkpoints=1)
    await sandbox.write_file("f", "1")
    async with asyncio.timeout(15):
        while not (made := await host.snapshots.list()):
            await asyncio.sleep(0.1)
    await sandbox.write_file("f", "2")
    await sandbox.snapshots.restore(made[0].id)
    assert await sandbox.read_file("f") == "1"
