"""Automatic checkpoints: when they are made, which are kept, and what they do not disturb."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

import pytest

from smokebox.engine.host import Host
from smokebox.engine.snapshots.sandbox_snapshots import SandboxSnapshots
from smokebox.errors import InvalidOption, LimitReached, StorageFull

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from smokebox.engine.record.rows import SandboxRow
    from smokebox.engine.sandbox import Sandbox
    from smokebox.types import Snapshot


async def checkpoints_of(host: Host, id: str = "box") -> list[Snapshot]:
    return [one for one in await host.snapshots.list(sandbox_id=id) if one.origin == "interval"]


async def until(host: Host, count: int, *, id: str = "box") -> list[Snapshot]:
    """Wait for so many checkpoints."""
    async with asyncio.timeout(15):
        while len(found := await checkpoints_of(host, id)) < count:
            await asyncio.sleep(0.05)
    return found


async def error_of(sandbox: Sandbox, *, exists: bool = True) -> str | None:
    """Wait until the last attempt failed, or no longer did."""
    async with asyncio.timeout(15):
        while True:
            info = await sandbox.info()
            assert info is not None
            if (info.checkpoint_error is not None) == exists:
                return info.checkpoint_error
            await asyncio.sleep(0.05)


async def test_a_sandbox_returns_to_a_checkpoint(host: Host) -> None:
    sandbox = await host.create("box", checkpoints="1s")
    await sandbox.write_file("f", "1")
    (made,) = await until(host, 1)
    assert (made.name, made.origin, made.sandbox_id) == (None, "interval", "box")
    await sandbox.write_file("f", "2")
    await sandbox.snapshots.restore(made.id)
    assert await sandbox.read_file("f") == "1"


async def test_nothing_is_made_while_nothing_changes(host: Host) -> None:
    sandbox = await host.create("box", checkpoints=1)
    await sandbox.exec("echo 1 > f; touch /tmp/x")
    await until(host, 1)
    # Commands that leave no trace do not count.
    await sandbox.exec("cat f; touch /tmp/y y; rm /tmp/y y")
    await asyncio.sleep(2.5)
    assert len(await checkpoints_of(host)) == 1
    await sandbox.exec("mkdir empty")
    assert len(await until(host, 2)) == 2


async def test_the_last_ones_are_kept_and_other_snapshots_are_not_counted(host: Host) -> None:
    sandbox = await host.create("box", checkpoints={"every": 1, "keep_last": 2})
    mine = await sandbox.snapshots.create()
    await sandbox.start_process("while :; do date +%N > now; sleep 0.1; done")
    first = await until(host, 2)
    async with asyncio.timeout(15):
        while first[0] in (found := await checkpoints_of(host)):
            await asyncio.sleep(0.1)
    assert len(found) == 2
    assert mine in await host.snapshots.list()


async def test_checkpoints_neither_wake_a_sandbox_nor_keep_it_awake(host: Host) -> None:
    sandbox = await host.create("box", checkpoints=1, sleep_after=2.5)
    await sandbox.start_process("while :; do date +%N > now; sleep 0.1; done")
    async with asyncio.timeout(15):
        while sandbox.lifecycle.run is not None:
            await asyncio.sleep(0.05)
    before = await checkpoints_of(host)
    assert before
    await asyncio.sleep(1.5)
    assert sandbox.lifecycle.run is None
    assert await checkpoints_of(host) == before


async def test_the_interval_goes_on_across_sleep(host: Host) -> None:
    sandbox = await host.create("box", checkpoints=2)
    for number in range(3):
        # Never awake for a whole interval.
        await sandbox.write_file("f", str(number))
        await asyncio.sleep(1.3)
        await sandbox.sleep()
        await asyncio.sleep(1)
    assert await checkpoints_of(host)


async def test_the_option_can_be_changed_and_switched_off(host: Host) -> None:
    sandbox = await host.create("box", checkpoints="1h")
    info = await sandbox.info()
    assert info is not None
    assert info.checkpoints == {"every": 3600.0, "keep_last": 10, "keep_for": None}
    await sandbox.write_file("f", "1")
    await host.create("box", checkpoints="1s")
    await until(host, 1)
    await host.create("box", checkpoints=False)
    await sandbox.write_file("f", "2")
    await asyncio.sleep(1.5)
    assert len(await checkpoints_of(host)) == 1
    info = await sandbox.info()
    assert info is not None
    assert info.checkpoints is None


async def test_an_invalid_rule_names_the_value(host: Host) -> None:
    for value in (0, "often", "100ms", True, {}, {"every": 5, "keep_last": 0}, {"each": 5}):
        with pytest.raises(InvalidOption):
            await host.create("box", checkpoints=value)
    with pytest.raises(InvalidOption, match=r"at least 1 s apart, not 0\.5"):
        await host.create("box", checkpoints=0.5)


async def test_a_refused_checkpoint_is_reported_and_disturbs_nothing(
    tmp_path: Path, layers: Path
) -> None:
    refused = True

    @contextlib.asynccontextmanager
    async def admit(row: SandboxRow, id: str, freed: set[str]) -> AsyncIterator[None]:
        if refused:
            raise LimitReached("the quota is used up.", limit="snapshots")
        yield

    home = tmp_path / "home"
    async with await Host.open(home, pool=0, images=layers, admit_snapshot=admit) as host:
        sandbox = await host.create("box", checkpoints=1)
        await sandbox.write_file("f", "1")
        assert "the quota is used up" in (await error_of(sandbox) or "")
        assert (await sandbox.exec("cat f")).stdout == "1"
        assert await host.snapshots.list() == []
        refused = False
        await error_of(sandbox, exists=False)
        assert len(await checkpoints_of(host)) == 1


async def test_checkpoints_stop_at_the_disk_limit(host: Host) -> None:
    sandbox = await host.create("box", checkpoints=1, limits={"disk": 20_000_000})
    await sandbox.start_process("while :; do head -c 4000000 /dev/urandom > f; sleep 0.2; done")
    assert "the limit is 20000000" in (await error_of(sandbox) or "")
    assert (await sandbox.exec("echo on")).stdout == "on\n"
    assert all(one.size < 20_000_000 for one in await checkpoints_of(host))


async def test_a_full_disk_leaves_nothing_half_made(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise StorageFull("/", "the host's disk has no room.")

    monkeypatch.setattr("smokebox.engine.snapshots.capture_job.check_room", full)
    sandbox = await host.create("box", checkpoints=1)
    await sandbox.write_file("f", "1")
    assert "no room" in (await error_of(sandbox) or "")
    assert await host.snapshots.list() == []
    assert await host.snapshots.record.snapshots() == []
    assert await host.snapshots.record.snapshot_layers() == []


async def test_checkpoints_go_on_in_the_next_engine(tmp_path: Path, layers: Path) -> None:
    home = tmp_path / "home"
    host = await Host.open(home, pool=0, images=layers)
    sandbox = await host.create("box", checkpoints=1)
    await sandbox.start_process("while :; do date +%N > now; sleep 0.1; done")
    await until(host, 1)
    await host.aclose(detach=True)
    async with await Host.open(home, pool=0, images=layers) as host:
        count = len(await checkpoints_of(host))
        await until(host, count + 1)


async def test_forks_have_checkpoints_of_their_own(host: Host) -> None:
    await (await host.create("box", checkpoints=1)).write_file("f", "1")
    await until(host, 1)
    (fork,) = await host.fork("box", ids=["copy"])
    await fork.write_file("f", "2")
    (made,) = await until(host, 1, id="copy")
    assert made.sandbox_id == "copy"


async def test_a_slow_checkpoint_is_not_repeated_at_once(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that sandboxes with many files do not keep the engine busy."""
    starts: list[float] = []
    make: Callable[..., object] = SandboxSnapshots.checkpoint

    async def slow(self: SandboxSnapshots, *args: object) -> object:
        starts.append(time.monotonic())
        await asyncio.sleep(0.4)
        return await make(self, *args)  # type: ignore[misc]

    monkeypatch.setattr(SandboxSnapshots, "checkpoint", slow)
    sandbox = await host.create("box", checkpoints=1)
    await sandbox.start_process("while :; do date +%N > now; sleep 0.1; done")
    async with asyncio.timeout(15):
        while len(starts) < 2:
            await asyncio.sleep(0.1)
    assert starts[1] - starts[0] > 4
