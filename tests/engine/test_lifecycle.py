"""The lifecycle of a sandbox: lazy start, sleep, wake, destroy, and failures of a run."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from engine.leftovers import find_leftovers, sandbox_pids, stop_processes
from smokebox.engine import lifecycle
from smokebox.engine.host import Host
from smokebox.engine.jail.cgroup_hierarchy import detect
from smokebox.errors import (
    NotFound,
    PathNotFound,
    SandboxGone,
    SandboxRestarted,
    SmokeboxError,
)
from smokebox.limits import Limits

if TYPE_CHECKING:
    from smokebox.engine.sandbox import Sandbox
    from smokebox.types import SandboxInfo


async def status(sandbox: Sandbox) -> str | None:
    info = await sandbox.info()
    return None if info is None else info.status


async def wait_until_asleep(sandbox: Sandbox) -> SandboxInfo:
    """Wait until a sandbox sleeps, and return its description."""
    async with asyncio.timeout(10):
        while (info := await sandbox.info()) is None or info.status != "idle":
            await asyncio.sleep(0.01)
    return info


async def generation(sandbox: Sandbox) -> int:
    info = await sandbox.info()
    return 0 if info is None else info.generation


def guest_init_pids(host: Host) -> list[int]:
    """Return the host's pids of the guest init of each running sandbox."""
    return [pid for pid in sandbox_pids(host.home) if is_guest_init(pid)]


def is_guest_init(pid: int) -> bool:
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/status").read_text()
        return "\t1\n" in text.partition("NSpid:")[2].partition("NSpgid")[0]
    return False


async def test_nothing_starts_before_the_first_call(host: Host) -> None:
    sandbox = host.sandbox("lazy", labels={"a": "b"})
    assert await sandbox.info() is None
    assert (await sandbox.stats()).disk is None
    assert await host.list() == []
    assert find_leftovers(host.home) == []


async def test_concurrent_first_calls_start_one_sandbox(host: Host) -> None:
    sandbox = host.sandbox("one")
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(host.sandbox("one").exec(f"echo {n}")) for n in range(50)]
    assert [call.result().stdout for call in calls] == [f"{n}\n" for n in range(50)]
    assert await generation(sandbox) == 1
    assert len(os.listdir(f"{host.home}/boxes")) == 1
    assert len(guest_init_pids(host)) == 1


async def test_handles_of_an_id_are_one_object(host: Host) -> None:
    assert host.sandbox("same") is host.sandbox("same")


async def test_unused_handles_are_collected_and_pending_options_kept(
    host: Host,
) -> None:
    for n in range(20):
        await host.sandbox(f"gone-{n}", cwd="/srv").wake()
        await host.sandbox(f"gone-{n}").destroy()
    await host.sandbox("asleep", cwd="/srv", labels={"a": "b"}).wake()
    await host.sandbox("asleep").sleep()
    await host.sandbox("awake").start_process("sleep 100", process_id="p")
    host.sandbox("pending", env={"A": "1"})
    gc.collect()
    assert set(host._sandboxes) == {"awake", "pending"}
    assert host.sandbox("asleep").cwd == "/srv"
    assert (await host.sandbox("pending").exec("echo $A")).stdout == "1\n"
    assert (await host.sandbox("awake").processes.get("p")).running


async def test_files_survive_sleep_and_runs_are_counted(host: Host) -> None:
    sandbox = host.sandbox("sleeper")
    await sandbox.exec("echo kept >file; echo system >/etc/mine")
    await sandbox.sleep()
    assert await status(sandbox) == "idle"
    assert guest_init_pids(host) == []
    assert await sandbox.read_file("file") == "kept\n"
    assert await sandbox.read_file("/etc/mine") == "system\n"
    assert await generation(sandbox) == 2


async def test_sleep_may_be_repeated_and_called_first(host: Host) -> None:
    sandbox = host.sandbox("twice")
    await sandbox.sleep()
    assert await sandbox.info() is None
    await sandbox.wake()
    await asyncio.gather(sandbox.sleep(), sandbox.sleep())
    await sandbox.sleep()
    assert await generation(sandbox) == 1


async def test_idle_sandbox_sleeps_and_the_next_call_wakes_it(host: Host) -> None:
    sandbox = host.sandbox("idle", sleep_after=0.1)
    await sandbox.write_file("a", "1")
    assert (await wait_until_asleep(sandbox)).stop_reason == "it fell asleep"
    assert await sandbox.read_file("a") == "1"
    assert await generation(sandbox) == 2


async def test_keep_alive_prevents_sleep(host: Host) -> None:
    sandbox = host.sandbox("alive", sleep_after=0.05, keep_alive=True)
    await sandbox.wake()
    await asyncio.sleep(0.3)
    assert (await status(sandbox), await generation(sandbox)) == ("active", 1)
    host.sandbox("alive", keep_alive=False)
    await wait_until_asleep(sandbox)


async def test_running_command_keeps_the_sandbox_awake(host: Host) -> None:
    sandbox = host.sandbox("busy", sleep_after=0.1)
    assert (await sandbox.exec("sleep 0.5; echo done")).stdout == "done\n"
    assert await generation(sandbox) == 1
    await wait_until_asleep(sandbox)


async def test_open_stream_keeps_the_sandbox_awake(host: Host) -> None:
    sandbox = host.sandbox("stream", sleep_after=0.1)
    async with sandbox.exec_stream("echo a; sleep 0.5; echo b") as stream:
        text = [chunk.data async for chunk in stream]
    assert "".join(text) == "a\nb\n"
    assert await generation(sandbox) == 1
    await wait_until_asleep(sandbox)


async def test_open_watch_keeps_the_sandbox_awake(host: Host) -> None:
    sandbox = host.sandbox("watch", sleep_after=0.1)
    await sandbox.wake()
    async with await sandbox.files.watch("/workspace") as events:
        await asyncio.sleep(0.4)
        assert await status(sandbox) == "active"
        await sandbox.write_file("seen", "")
        async for event in events:
            assert event.path == "/workspace/seen"
            break


async def test_setting_the_same_options_is_not_activity(host: Host) -> None:
    sandbox = host.sandbox("config", sleep_after=0.3, labels={"a": "b"})
    await sandbox.wake()
    async with asyncio.timeout(10):
        while await status(sandbox) == "active":
            host.sandbox("config", sleep_after=0.3, labels={"a": "b"})
            await asyncio.sleep(0.02)
    assert await generation(sandbox) == 1


async def test_listing_is_not_activity(host: Host) -> None:
    sandbox = host.sandbox("listed", sleep_after=0.2)
    await sandbox.wake()
    async with asyncio.timeout(10):
        while (await host.list())[0].status == "active":
            await sandbox.stats()
            await sandbox.processes.list()
            await asyncio.sleep(0.02)


async def test_new_sleep_after_restarts_the_idle_timer(host: Host) -> None:
    sandbox = host.sandbox("rearmed", sleep_after="1h")
    await sandbox.wake()
    host.sandbox("rearmed", sleep_after=0.1)
    await wait_until_asleep(sandbox)


async def test_ephemeral_sandbox_loses_its_files_when_it_sleeps(host: Host) -> None:
    sandbox = host.sandbox("forgetful", ephemeral=True)
    await sandbox.write_file("a", "1")
    await sandbox.sleep()
    assert find_leftovers(host.home) == []
    assert (await sandbox.stats()).disk == 0
    assert await sandbox.readdir("/workspace") == []
    assert await generation(sandbox) == 2


async def test_sleep_kills_processes_and_their_handles_raise(host: Host) -> None:
    sandbox = host.sandbox("holder")
    process = await sandbox.start_process("echo hi; sleep 100")
    waiting = asyncio.create_task(process.wait_for_exit())
    await process.wait_for_log("hi")
    await sandbox.sleep()
    with pytest.raises(SandboxRestarted) as caught:
        await waiting
    assert caught.value.reason == "it fell asleep"
    assert (process.status, process.exit_code) == ("killed", 137)
    assert (await process.logs()).stdout == "hi\n"
    with pytest.raises(SandboxRestarted):
        await process.kill()
    assert list(sandbox_pids(host.home)) == []


async def test_sleep_interrupts_a_command_with_sandbox_gone(host: Host) -> None:
    sandbox = host.sandbox("cut")
    await sandbox.wake()
    running = asyncio.create_task(sandbox.exec("touch started; sleep 100"))
    await wait_for_file(sandbox, "started")
    await sandbox.sleep()
    with pytest.raises(SandboxGone, match="it fell asleep"):
        await running


async def test_session_keeps_its_state_across_sleep(host: Host) -> None:
    sandbox = host.sandbox("session")
    session = await sandbox.create_session("s")
    for n in range(3):
        await session.exec(f"N={n}; cd /tmp")
        await sandbox.sleep()
        assert (await session.exec("echo $N $PWD")).stdout == f"{n} /tmp\n"


async def wait_for_file(sandbox: Sandbox, path: str) -> None:
    async with asyncio.timeout(10):
        while not await sandbox.exists(path):
            await asyncio.sleep(0.01)


async def test_destroy_leaves_nothing(host: Host) -> None:
    sandbox = host.sandbox("gone", labels={"a": "b"})
    await sandbox.exec("mkdir -p deep/er; echo 1 >deep/er/file; chmod 0 deep; sleep 100 &")
    await sandbox.start_process("sleep 100")
    await sandbox.create_session("s")
    await sandbox.destroy()
    assert find_leftovers(host.home) == []
    assert await host.list() == []
    assert await sandbox.info() is None
    assert await sandbox.processes.list() == []
    with pytest.raises(NotFound):
        await sandbox.sessions.get("s")


async def test_destroy_may_be_repeated_and_called_concurrently(host: Host) -> None:
    sandbox = host.sandbox("often")
    await sandbox.destroy()
    await sandbox.wake()
    await asyncio.gather(*(sandbox.destroy() for _ in range(10)))
    await sandbox.destroy()
    assert find_leftovers(host.home) == []


async def test_sandbox_with_little_cpu_and_many_processes_is_destroyed(host: Host) -> None:
    """A process needs CPU to exit: with the limit of the sandbox, each took a tenth of a second."""
    sandbox = host.sandbox("slow", limits={"cpu": 2, "pids": 500})
    fork = "import os, time; [os.fork() or time.sleep(1000) for _ in range(100)]; time.sleep(1000)"
    await sandbox.start_process(["python3", "-c", fork])
    async with sandbox.lifecycle.use() as run, asyncio.timeout(15):
        while len(run.jail.pids()) < 100:
            await asyncio.sleep(0.02)
        await run.jail.set_limits(Limits(cpu=0.01, pids=500))
    started = time.monotonic()
    await sandbox.destroy()
    assert time.monotonic() - started < 5
    assert find_leftovers(host.home) == []


async def test_sleeping_sandbox_can_be_destroyed(host: Host) -> None:
    sandbox = host.sandbox("bed")
    await sandbox.write_file("a", "1")
    await sandbox.sleep()
    await sandbox.destroy()
    assert find_leftovers(host.home) == []


async def test_call_after_destroy_gets_an_empty_sandbox(host: Host) -> None:
    sandbox = host.sandbox("again", env={"A": "1"}, labels={"a": "b"}, cwd="/srv")
    await sandbox.write_file("file", "old")
    await sandbox.destroy()
    result = await sandbox.exec("ls -A; echo $A; pwd")
    assert result.stdout == "\n/workspace\n"
    assert sandbox.cwd == "/workspace"
    info = await sandbox.info()
    assert info is not None
    assert (info.labels, info.generation) == ({}, 1)


async def test_destroy_interrupts_a_command_with_sandbox_gone(host: Host) -> None:
    sandbox = host.sandbox("cut")
    await sandbox.wake()
    running = asyncio.create_task(sandbox.exec("touch started; sleep 100"))
    process = await sandbox.start_process("sleep 100")
    await wait_for_file(sandbox, "started")
    await sandbox.destroy()
    with pytest.raises(SandboxGone) as caught:
        await running
    assert caught.value.reason == "it was destroyed"
    assert caught.value.hint == "Run it again: the next sandbox of this id is empty."
    with pytest.raises(SandboxGone, match="destroyed"):
        await process.wait_for_exit()


async def test_cancelled_calls_do_not_cancel_the_start(host: Host) -> None:
    sandbox = host.sandbox("cancelled")
    for delay in (0, 0.002, 0.005, 0.01, 0.02):
        call = asyncio.create_task(sandbox.exec("true"))
        await asyncio.sleep(delay)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
    assert (await sandbox.exec("echo fine")).stdout == "fine\n"
    assert len(guest_init_pids(host)) == 1
    assert await generation(sandbox) == 1


async def test_cancelled_calls_do_not_cancel_sleep_or_destroy(host: Host) -> None:
    sandbox = host.sandbox("cancelled")
    for step in (sandbox.sleep, sandbox.destroy):
        await sandbox.wake()
        call = asyncio.create_task(step())
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    # Steps are serialized: this one runs after the others.
    assert await sandbox.info() is None
    assert find_leftovers(host.home) == []


async def test_options_set_during_a_start_are_applied(host: Host) -> None:
    sandbox = host.sandbox("start", labels={"a": "first"})
    call = asyncio.create_task(sandbox.wake())
    await asyncio.sleep(0.003)
    host.sandbox("start", labels={"a": "second"})
    await call
    info = await sandbox.info()
    assert info is not None
    assert info.labels == {"a": "second"}


async def test_missing_image_leaves_a_sandbox_unchanged(tmp_path: Path, layers: Path) -> None:
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    async with await Host.open(
        tmp_path / "home", pool=0, images=layers, directories={"vanishes": str(root)}
    ) as host:
        sandbox = host.sandbox("vanished", image="dir:vanishes")
        await sandbox.write_file("/kept", "1")
        await sandbox.sleep()
        before = await sandbox.info()
        root.rename(tmp_path / "elsewhere")
        with pytest.raises(NotFound, match="vanishes") as caught:
            await sandbox.exec("true")
        assert str(tmp_path) not in str(caught.value)
        assert before is not None
        assert await sandbox.info() == before
        (tmp_path / "elsewhere").rename(root)
        assert await sandbox.read_file("/kept") == "1"


async def test_create_with_a_missing_image_leaves_nothing(host: Host) -> None:
    with pytest.raises(SmokeboxError, match="nowhere"):
        await host.create("none", image="dir:nowhere")
    assert await host.list() == []
    assert find_leftovers(host.home) == []
    assert host.sandbox("none").id == "none"


async def test_killed_guest_init_ends_the_run_but_not_the_sandbox(host: Host) -> None:
    sandbox = host.sandbox("headless")
    await sandbox.write_file("a", "1")
    running = asyncio.create_task(sandbox.exec("touch started; sleep 100"))
    process = await sandbox.start_process("sleep 100")
    await wait_for_file(sandbox, "started")
    [pid] = guest_init_pids(host)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SandboxGone, match="its first process was killed"):
        await running
    with pytest.raises(SandboxRestarted):
        await process.wait_for_exit()
    assert (await sandbox.exec("cat a")).stdout == "1"
    assert await generation(sandbox) == 2


async def test_stuck_guest_init_raises_instead_of_hanging(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "PROBE_SECONDS", 0.1)
    monkeypatch.setattr("smokebox.engine.jail.guest_requests.RESPONSE_SECONDS", 0.5)
    sandbox = host.sandbox("stuck")
    await sandbox.write_file("a", "1")
    stop_processes(host.home)
    with pytest.raises(SandboxGone, match="does not respond"):
        await sandbox.exec("true")
    assert (await sandbox.exec("cat a")).stdout == "1"


async def test_long_command_does_not_look_like_a_stuck_guest_init(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "PROBE_SECONDS", 0.05)
    assert (await host.sandbox("slow").exec("sleep 0.5; echo ok")).stdout == "ok\n"


@pytest.mark.skipif(
    detect().enforcement == "rlimits", reason="this host has no cgroup to count memory"
)
async def test_oom_kill_is_counted(host: Host) -> None:
    sandbox = host.sandbox("bomb", limits={"memory": "64MiB"})
    try:
        result = await sandbox.exec("tail -c 200M /dev/zero | tail")
        assert not result.success
        assert (await sandbox.stats()).oom_kills
    except SandboxGone as gone:
        assert "memory" in str(gone.reason)
    assert (await sandbox.exec("echo fine")).stdout == "fine\n"


async def test_disk_limit_ends_the_run_with_the_reason(host: Host) -> None:
    sandbox = host.sandbox("disk", limits={"disk": "20MB"})
    await sandbox.wake()
    with pytest.raises(SandboxGone, match=r"of disk, above 0\.02 GB"):
        await sandbox.exec("head -c 100M /dev/zero >bomb; sleep 15")
    info = await sandbox.info()
    assert info is not None
    assert "of disk" in (info.stop_reason or "")
    # Otherwise the next run would end the same way.
    await sandbox.rm("bomb")
    [pid] = guest_init_pids(host)
    os.kill(pid, signal.SIGKILL)
    assert (await wait_until_asleep(sandbox)).stop_reason == "its first process was killed"


async def test_missing_file_does_not_look_like_a_dead_sandbox(host: Host) -> None:
    with pytest.raises(PathNotFound):
        await host.sandbox("plain").read_file("missing")
