"""The life of a sandbox: lazy, awake once, asleep when idle, destroyed without a trace."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from engine.traces import processes, stop_all, traces
from smokebox.engine import lifecycle
from smokebox.engine.jail.cgroup_hierarchy import detect
from smokebox.errors import (
    NotFound,
    PathNotFound,
    SandboxGone,
    SandboxRestarted,
    SmokeboxError,
)

if TYPE_CHECKING:
    from smokebox.engine.host import Host
    from smokebox.engine.sandbox import Sandbox
    from smokebox.types import SandboxInfo


async def status(sandbox: Sandbox) -> str | None:
    info = await sandbox.info()
    return None if info is None else info.status


async def asleep(sandbox: Sandbox) -> SandboxInfo:
    """What is known of a sandbox once it sleeps, which it has to do soon."""
    async with asyncio.timeout(10):
        while (info := await sandbox.info()) is None or info.status != "idle":
            await asyncio.sleep(0.01)
    return info


async def generation(sandbox: Sandbox) -> int:
    info = await sandbox.info()
    return 0 if info is None else info.generation


def agents(host: Host) -> list[int]:
    """The first process of each sandbox that runs, as the host numbers them."""
    return [pid for pid in processes(host.home) if is_first(pid)]


def is_first(pid: int) -> bool:
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/status").read_text()
        return "\t1\n" in text.partition("NSpid:")[2].partition("NSpgid")[0]
    return False


async def test_nothing_is_made_before_the_first_call(host: Host) -> None:
    sandbox = host.sandbox("lazy", labels={"a": "b"})
    assert await sandbox.info() is None
    assert (await sandbox.stats()).disk is None
    assert await host.list() == []
    assert traces(host.home) == []


async def test_many_first_calls_start_one_sandbox(host: Host) -> None:
    sandbox = host.sandbox("one")
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(host.sandbox("one").exec(f"echo {n}")) for n in range(50)]
    assert [call.result().stdout for call in calls] == [f"{n}\n" for n in range(50)]
    assert await generation(sandbox) == 1
    assert len(os.listdir(f"{host.home}/boxes")) == 1
    assert len(agents(host)) == 1


async def test_every_handle_of_an_id_is_the_same(host: Host) -> None:
    assert host.sandbox("same") is host.sandbox("same")


async def test_what_nobody_holds_takes_no_memory_and_what_was_asked_for_is_kept(
    host: Host,
) -> None:
    for n in range(20):
        await host.sandbox(f"gone-{n}", cwd="/srv").wake()
        await host.sandbox(f"gone-{n}").destroy()
    await host.sandbox("asleep", cwd="/srv", labels={"a": "b"}).wake()
    await host.sandbox("asleep").sleep()
    await host.sandbox("awake").start_process("sleep 100", process_id="p")
    host.sandbox("asked", env={"A": "1"})
    gc.collect()
    assert set(host._sandboxes) == {"awake", "asked"}
    assert host.sandbox("asleep").cwd == "/srv"
    assert (await host.sandbox("asked").exec("echo $A")).stdout == "1\n"
    assert (await host.sandbox("awake").processes.get("p")).running


async def test_files_outlive_sleep_and_runs_are_counted(host: Host) -> None:
    sandbox = host.sandbox("sleeper")
    await sandbox.exec("echo kept >file; echo system >/etc/mine")
    await sandbox.sleep()
    assert await status(sandbox) == "idle"
    assert agents(host) == []
    assert await sandbox.read_file("file") == "kept\n"
    assert await sandbox.read_file("/etc/mine") == "system\n"
    assert await generation(sandbox) == 2


async def test_sleep_is_safe_to_repeat_and_before_the_first_call(host: Host) -> None:
    sandbox = host.sandbox("twice")
    await sandbox.sleep()
    assert await sandbox.info() is None
    await sandbox.wake()
    await asyncio.gather(sandbox.sleep(), sandbox.sleep())
    await sandbox.sleep()
    assert await generation(sandbox) == 1


async def test_an_idle_sandbox_falls_asleep_and_the_next_call_wakes_it(host: Host) -> None:
    sandbox = host.sandbox("idle", sleep_after=0.1)
    await sandbox.write_file("a", "1")
    assert (await asleep(sandbox)).stop_reason == "it fell asleep"
    assert await sandbox.read_file("a") == "1"
    assert await generation(sandbox) == 2


async def test_a_sandbox_that_is_kept_alive_does_not_sleep(host: Host) -> None:
    sandbox = host.sandbox("alive", sleep_after=0.05, keep_alive=True)
    await sandbox.wake()
    await asyncio.sleep(0.3)
    assert (await status(sandbox), await generation(sandbox)) == ("active", 1)
    host.sandbox("alive", keep_alive=False)
    await asleep(sandbox)


async def test_a_running_command_is_activity(host: Host) -> None:
    sandbox = host.sandbox("busy", sleep_after=0.1)
    assert (await sandbox.exec("sleep 0.5; echo done")).stdout == "done\n"
    assert await generation(sandbox) == 1
    await asleep(sandbox)


async def test_an_open_stream_is_activity(host: Host) -> None:
    sandbox = host.sandbox("stream", sleep_after=0.1)
    async with sandbox.exec_stream("echo a; sleep 0.5; echo b") as stream:
        text = [chunk.data async for chunk in stream]
    assert "".join(text) == "a\nb\n"
    assert await generation(sandbox) == 1
    await asleep(sandbox)


async def test_an_open_watch_is_activity(host: Host) -> None:
    sandbox = host.sandbox("watch", sleep_after=0.1)
    await sandbox.wake()
    async with await sandbox.files.watch("/workspace") as events:
        await asyncio.sleep(0.4)
        assert await status(sandbox) == "active"
        await sandbox.write_file("seen", "")
        async for event in events:
            assert event.path == "/workspace/seen"
            break


async def test_sending_the_same_settings_again_is_not_activity(host: Host) -> None:
    sandbox = host.sandbox("config", sleep_after=0.3, labels={"a": "b"})
    await sandbox.wake()
    async with asyncio.timeout(10):
        while await status(sandbox) == "active":
            host.sandbox("config", sleep_after=0.3, labels={"a": "b"})
            await asyncio.sleep(0.02)
    assert await generation(sandbox) == 1


async def test_looking_is_not_activity(host: Host) -> None:
    sandbox = host.sandbox("looked-at", sleep_after=0.2)
    await sandbox.wake()
    async with asyncio.timeout(10):
        while (await host.list())[0].status == "active":
            await sandbox.stats()
            await sandbox.processes.list()
            await asyncio.sleep(0.02)


async def test_another_sleep_after_counts_from_when_it_is_known(host: Host) -> None:
    sandbox = host.sandbox("rearmed", sleep_after="1h")
    await sandbox.wake()
    host.sandbox("rearmed", sleep_after=0.1)
    await asleep(sandbox)


async def test_an_ephemeral_sandbox_forgets_its_files_when_it_sleeps(host: Host) -> None:
    sandbox = host.sandbox("forgetful", ephemeral=True)
    await sandbox.write_file("a", "1")
    await sandbox.sleep()
    assert traces(host.home) == []
    assert (await sandbox.stats()).disk == 0
    assert await sandbox.readdir("/workspace") == []
    assert await generation(sandbox) == 2


async def test_sleep_kills_processes_and_tells_who_holds_them(host: Host) -> None:
    sandbox = host.sandbox("told")
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
    assert list(processes(host.home)) == []


async def test_a_command_that_sleep_cuts_short_says_so(host: Host) -> None:
    sandbox = host.sandbox("cut")
    await sandbox.wake()
    running = asyncio.create_task(sandbox.exec("touch began; sleep 100"))
    await exists(sandbox, "began")
    await sandbox.sleep()
    with pytest.raises(SandboxGone, match="it fell asleep"):
        await running


async def test_a_session_goes_on_after_sleep_with_its_last_state(host: Host) -> None:
    sandbox = host.sandbox("session")
    session = await sandbox.create_session("s")
    for n in range(3):
        await session.exec(f"N={n}; cd /tmp")
        await sandbox.sleep()
        assert (await session.exec("echo $N $PWD")).stdout == f"{n} /tmp\n"


async def exists(sandbox: Sandbox, path: str) -> None:
    async with asyncio.timeout(10):
        while not await sandbox.exists(path):
            await asyncio.sleep(0.01)


async def test_destroy_leaves_no_trace(host: Host) -> None:
    sandbox = host.sandbox("gone", labels={"a": "b"})
    await sandbox.exec("mkdir -p deep/er; echo 1 >deep/er/file; chmod 0 deep; sleep 100 &")
    await sandbox.start_process("sleep 100")
    await sandbox.create_session("s")
    await sandbox.destroy()
    assert traces(host.home) == []
    assert await host.list() == []
    assert await sandbox.info() is None
    assert await sandbox.processes.list() == []
    with pytest.raises(NotFound):
        await sandbox.sessions.get("s")


async def test_destroy_is_safe_to_repeat_and_to_call_at_once(host: Host) -> None:
    sandbox = host.sandbox("often")
    await sandbox.destroy()
    await sandbox.wake()
    await asyncio.gather(*(sandbox.destroy() for _ in range(10)))
    await sandbox.destroy()
    assert traces(host.home) == []


async def test_a_sandbox_that_sleeps_can_be_destroyed(host: Host) -> None:
    sandbox = host.sandbox("bed")
    await sandbox.write_file("a", "1")
    await sandbox.sleep()
    await sandbox.destroy()
    assert traces(host.home) == []


async def test_a_call_after_destroy_gets_an_empty_sandbox(host: Host) -> None:
    sandbox = host.sandbox("again", env={"A": "1"}, labels={"a": "b"}, cwd="/srv")
    await sandbox.write_file("file", "old")
    await sandbox.destroy()
    result = await sandbox.exec("ls -A; echo $A; pwd")
    assert result.stdout == "\n/workspace\n"
    assert sandbox.cwd == "/workspace"
    info = await sandbox.info()
    assert info is not None
    assert (info.labels, info.generation) == ({}, 1)


async def test_a_command_that_destroy_cuts_short_says_so(host: Host) -> None:
    sandbox = host.sandbox("cut")
    await sandbox.wake()
    running = asyncio.create_task(sandbox.exec("touch began; sleep 100"))
    process = await sandbox.start_process("sleep 100")
    await exists(sandbox, "began")
    await sandbox.destroy()
    with pytest.raises(SandboxGone) as caught:
        await running
    assert caught.value.reason == "it was destroyed"
    assert caught.value.hint == "Run it again: the next sandbox of this id is empty."
    with pytest.raises(SandboxGone, match="destroyed"):
        await process.wait_for_exit()


async def test_who_stops_waiting_does_not_stop_a_start(host: Host) -> None:
    sandbox = host.sandbox("impatient")
    for delay in (0, 0.002, 0.005, 0.01, 0.02):
        call = asyncio.create_task(sandbox.exec("true"))
        await asyncio.sleep(delay)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
    assert (await sandbox.exec("echo fine")).stdout == "fine\n"
    assert len(agents(host)) == 1
    assert await generation(sandbox) == 1


async def test_who_stops_waiting_does_not_stop_sleep_or_destroy(host: Host) -> None:
    sandbox = host.sandbox("impatient")
    for step in (sandbox.sleep, sandbox.destroy):
        await sandbox.wake()
        call = asyncio.create_task(step())
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    # One step at a time: this one comes after those.
    assert await sandbox.info() is None
    assert traces(host.home) == []


async def test_options_given_during_a_start_hold(host: Host) -> None:
    sandbox = host.sandbox("start", labels={"a": "first"})
    call = asyncio.create_task(sandbox.wake())
    await asyncio.sleep(0.003)
    host.sandbox("start", labels={"a": "second"})
    await call
    info = await sandbox.info()
    assert info is not None
    assert info.labels == {"a": "second"}


async def test_an_image_that_vanished_leaves_a_sandbox_as_it_was(
    host: Host, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    sandbox = host.sandbox("vanished", image=f"dir:{root}")
    await sandbox.write_file("/kept", "1")
    await sandbox.sleep()
    before = await sandbox.info()
    root.rename(tmp_path / "elsewhere")
    with pytest.raises(SmokeboxError, match="root"):
        await sandbox.exec("true")
    assert before is not None
    assert await sandbox.info() == before
    (tmp_path / "elsewhere").rename(root)
    assert await sandbox.read_file("/kept") == "1"


async def test_an_image_that_is_not_there_leaves_nothing(host: Host) -> None:
    with pytest.raises(SmokeboxError, match="nowhere"):
        await host.create("none", image="dir:/nowhere")
    assert await host.list() == []
    assert traces(host.home) == []
    assert host.sandbox("none").id == "none"


async def test_an_agent_that_is_killed_ends_the_run_and_not_the_sandbox(host: Host) -> None:
    sandbox = host.sandbox("headless")
    await sandbox.write_file("a", "1")
    running = asyncio.create_task(sandbox.exec("touch began; sleep 100"))
    process = await sandbox.start_process("sleep 100")
    await exists(sandbox, "began")
    [agent] = agents(host)
    os.kill(agent, signal.SIGKILL)
    with pytest.raises(SandboxGone, match="its first process was killed"):
        await running
    with pytest.raises(SandboxRestarted):
        await process.wait_for_exit()
    assert (await sandbox.exec("cat a")).stdout == "1"
    assert await generation(sandbox) == 2


async def test_a_stuck_agent_is_an_error_and_not_a_hang(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "PULSE_SECONDS", 0.1)
    monkeypatch.setattr("smokebox.engine.jail.guest_requests.ANSWER_SECONDS", 0.5)
    sandbox = host.sandbox("stuck")
    await sandbox.write_file("a", "1")
    stop_all(host.home)
    with pytest.raises(SandboxGone, match="does not respond"):
        await sandbox.exec("true")
    assert (await sandbox.exec("cat a")).stdout == "1"


async def test_a_long_command_is_not_taken_for_a_stuck_agent(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "PULSE_SECONDS", 0.05)
    assert (await host.sandbox("slow").exec("sleep 0.5; echo ok")).stdout == "ok\n"


@pytest.mark.skipif(detect().enforcement == "rlimits", reason="no cgroup counts memory here")
async def test_a_memory_bomb_is_killed_and_counted(host: Host) -> None:
    sandbox = host.sandbox("bomb", limits={"memory": "64MiB"})
    try:
        result = await sandbox.exec("tail -c 200M /dev/zero | tail")
        assert not result.success
        assert (await sandbox.stats()).oom_kills
    except SandboxGone as gone:
        assert "memory" in str(gone.reason)
    assert (await sandbox.exec("echo fine")).stdout == "fine\n"


async def test_a_disk_bomb_ends_the_run_and_says_why(host: Host) -> None:
    sandbox = host.sandbox("disk", limits={"disk": "20MB"})
    await sandbox.wake()
    with pytest.raises(SandboxGone, match=r"of disk, above 0\.02 GB"):
        await sandbox.exec("head -c 100M /dev/zero >bomb; sleep 15")
    info = await sandbox.info()
    assert info is not None
    assert "of disk" in (info.stop_reason or "")
    # Until its files are fewer, the next run would end the same way.
    await sandbox.rm("bomb")
    [agent] = agents(host)
    os.kill(agent, signal.SIGKILL)
    assert (await asleep(sandbox)).stop_reason == "its first process was killed"


async def test_a_missing_file_of_a_woken_sandbox_is_only_that(host: Host) -> None:
    with pytest.raises(PathNotFound):
        await host.sandbox("plain").read_file("missing")
