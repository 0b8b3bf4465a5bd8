"""The lifetime of a sandbox: destroyed at its end, awake, asleep or without an engine."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from typing import TYPE_CHECKING

import pytest

from engine.leftovers import find_leftovers
from smokebox.engine import expirations
from smokebox.engine.host import Host
from smokebox.errors import InvalidOption, SandboxGone, SmokeboxError

if TYPE_CHECKING:
    from pathlib import Path

    from smokebox.engine.sandbox import Sandbox

# Time that a sandbox still has once it is set up.
SOON = 0.3


async def end_soon(sandbox: Sandbox, host: Host, seconds: float = SOON) -> float:
    """Give an existing sandbox so much more time, and return its end."""
    info = await sandbox.info()
    assert info is not None
    host.sandbox(sandbox.id, lifetime=time.time() - info.created_at + seconds)
    changed = await sandbox.info()
    assert changed is not None
    assert changed.expires_at is not None
    return changed.expires_at


async def wait_until_gone(sandbox: Sandbox) -> None:
    async with asyncio.timeout(10):
        while await sandbox.info() is not None:
            await asyncio.sleep(0.02)


async def test_sandbox_is_destroyed_at_the_end_of_its_lifetime(host: Host) -> None:
    sandbox = host.sandbox("brief", lifetime="1h", keep_alive=True)
    await sandbox.write_file("file", "data")
    info = await sandbox.info()
    assert info is not None
    assert info.expires_at == info.created_at + 3600
    expires_at = await end_soon(sandbox, host)
    await wait_until_gone(sandbox)
    assert time.time() >= expires_at
    assert os.listdir(f"{host.home}/boxes") == []
    assert find_leftovers(host.home) == []


async def test_next_call_after_the_lifetime_makes_an_empty_sandbox_without_it(host: Host) -> None:
    sandbox = host.sandbox("again", env={"A": "1"})
    await sandbox.write_file("file", "data")
    await end_soon(sandbox, host)
    await wait_until_gone(sandbox)
    assert (await sandbox.exec("ls; echo $A")).stdout == "\n"
    info = await sandbox.info()
    assert info is not None
    assert (info.generation, info.expires_at) == (1, None)


async def test_sleeping_sandbox_without_a_handle_is_destroyed(host: Host) -> None:
    await host.sandbox("asleep").wake()
    await host.sandbox("asleep").sleep()
    await end_soon(host.sandbox("asleep"), host)
    # Holds handles whose options are not applied yet.
    host._changed.clear()
    gc.collect()
    assert not set(host._sandboxes)
    async with asyncio.timeout(10):
        while await host.list():
            await asyncio.sleep(0.02)
    assert os.listdir(f"{host.home}/boxes") == []


async def test_command_that_runs_at_the_end_is_told_why_it_stopped(host: Host) -> None:
    sandbox = host.sandbox("used")
    process = await sandbox.start_process("sleep 100")
    await end_soon(sandbox, host, 1.0)
    with pytest.raises(SandboxGone) as caught:
        await sandbox.exec("sleep 100")
    assert caught.value.reason == "its lifetime was over"
    assert "the next sandbox of this id is empty" in str(caught.value.hint)
    with pytest.raises(SmokeboxError):
        await process.wait_for_exit()


async def test_lifetime_counts_from_the_creation_when_it_is_changed(host: Host) -> None:
    sandbox = host.sandbox("changed", lifetime="1h")
    await sandbox.wake()
    created = await sandbox.info()
    await end_soon(sandbox, host, 1.0)
    longer = await host.sandbox("changed", lifetime="1d").info()
    assert created is not None
    assert longer is not None
    assert longer.expires_at == created.created_at + 86400
    await asyncio.sleep(1.0)
    assert await sandbox.info() is not None
    host.sandbox("changed", lifetime=0.1)
    await wait_until_gone(sandbox)


async def test_options_passed_at_the_end_are_those_of_the_next_sandbox(host: Host) -> None:
    sandbox = host.sandbox("late")
    await sandbox.write_file("file", "data")
    await end_soon(sandbox, host)
    # The timer comes too late, as it may on a busy event loop.
    host._context.expirations.set("late", None)
    await asyncio.sleep(SOON)
    assert (await host.sandbox("late", env={"A": "1"}).exec("ls; echo $A")).stdout == "1\n"


async def test_ephemeral_sandbox_has_its_lifetime_over_several_runs(host: Host) -> None:
    sandbox = host.sandbox("ephemeral", lifetime="1h", ephemeral=True)
    await sandbox.write_file("file", "data")
    before = await sandbox.info()
    await sandbox.sleep()
    assert await sandbox.readdir("/workspace") == []
    after = await sandbox.info()
    assert before is not None
    assert after is not None
    assert after.expires_at == before.expires_at
    await end_soon(sandbox, host)
    await wait_until_gone(sandbox)


async def test_backup_outlives_the_lifetime(host: Host) -> None:
    sandbox = host.sandbox("backed")
    await sandbox.write_file("file", "data")
    backup = await sandbox.backups.create("/workspace")
    await end_soon(sandbox, host)
    await wait_until_gone(sandbox)
    other = host.sandbox("other")
    await other.backups.restore(backup.id)
    assert await other.read_file("file") == "data"


@pytest.mark.parametrize("detach", [False, True])
async def test_lifetime_that_ends_without_an_engine_ends_at_the_next_start(
    tmp_path: Path, layers: Path, *, detach: bool
) -> None:
    host = await Host.open(tmp_path / "home", pool=0, images=layers)
    await host.sandbox("brief", keep_alive=True).write_file("file", "data")
    await host.sandbox("kept", keep_alive=True).wake()
    await end_soon(host.sandbox("brief"), host, 1.0)
    await host.aclose(detach=detach)
    await asyncio.sleep(1.0)
    async with await Host.open(tmp_path / "home", pool=0, images=layers) as host:
        assert [one.id for one in await host.list()] == ["kept"]
        assert len(os.listdir(f"{host.home}/boxes")) == 1


async def test_lifetime_goes_on_after_a_restart(tmp_path: Path, layers: Path) -> None:
    host = await Host.open(tmp_path / "home", pool=0, images=layers)
    for id in "asleep", "awake":
        await host.sandbox(id).wake()
        await end_soon(host.sandbox(id), host, 5.0)
    await host.sandbox("asleep").sleep()
    await host.aclose(detach=True)
    async with await Host.open(tmp_path / "home", pool=0, images=layers) as host:
        assert [one.status for one in await host.list()] == ["idle", "active"]
        async with asyncio.timeout(10):
            while await host.list():
                await asyncio.sleep(0.02)
        assert find_leftovers(host.home) == []


async def test_kept_alive_sandbox_ends_without_an_engine_once_its_lifetime_is_over(
    tmp_path: Path, layers: Path
) -> None:
    host = await Host.open(tmp_path / "home", pool=0, images=layers)
    await host.sandbox("brief", keep_alive=True).wake()
    await end_soon(host.sandbox("brief"), host, 1.0)
    await host.aclose(detach=True)
    async with asyncio.timeout(10):
        while any(one.startswith("process") for one in find_leftovers(host.home)):
            await asyncio.sleep(0.05)
    async with await Host.open(tmp_path / "home", pool=0, images=layers) as host:
        assert await host.list() == []


async def test_destruction_that_failed_is_tried_again(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expirations, "RETRY_SECONDS", 0.1)
    failures = [OSError("the disk is gone"), OSError("still")]
    expire = host._expire

    async def fail_first(id: str) -> None:
        if failures:
            raise failures.pop()
        await expire(id)

    await host._context.expirations.aclose()
    host._context.expirations.start(fail_first)
    sandbox = host.sandbox("brief")
    await sandbox.wake()
    await end_soon(sandbox, host)
    await wait_until_gone(sandbox)


@pytest.mark.parametrize("lifetime", [0, -1, "soon", "", True, float("nan"), float("inf"), "1w"])
def test_lifetime_is_a_positive_time(host: Host, lifetime: float | str) -> None:
    with pytest.raises(InvalidOption, match="lifetime must be a positive time"):
        host.sandbox("x", lifetime=lifetime)
