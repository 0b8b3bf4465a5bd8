"""SIGKILL or SIGSTOP of single processes of an engine, and full disks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from crash.engine_process import comm
from engine.leftovers import find_leftovers, sandbox_pids, stop_processes
from smokebox.engine.host import Host
from smokebox.errors import SandboxGone, ServiceUnavailable, SmokeboxError, StorageFull

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from smokebox.engine.sandbox import Sandbox


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


@pytest_asyncio.fixture
async def host(tmp_path: Path, layers: Path) -> AsyncIterator[Host]:
    async with await Host.open(tmp_path / "home", pool=0, images=layers) as host:
        yield host


def parent(pid: int) -> int:
    """Return the parent of a process; 0 if it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("PPid:"):
                return int(line.split()[1])
    return 0


async def wait_for_process(host: Host, command: str) -> int:
    """Wait for a process in a sandbox with that command line, and return its pid."""
    line = command.replace(" ", "\0").encode() + b"\0"
    async with asyncio.timeout(10):
        while True:
            for pid in sandbox_pids(host.home):
                if cmdline(pid) == line:
                    return pid
            await asyncio.sleep(0.01)


def supervisor_of(pid: int) -> int:
    """Return the supervisor of a process in a sandbox."""
    while comm(pid) != "smokebox-init":
        pid = parent(pid)
    return pid


async def start_command(sandbox: Sandbox, command: str) -> asyncio.Task[object]:
    """Start a command, and return its task once it runs."""
    task: asyncio.Task[object] = asyncio.create_task(sandbox.exec(f"touch /started; {command}"))
    async with asyncio.timeout(10):
        while not await sandbox.exists("/started"):
            await asyncio.sleep(0.005)
    await sandbox.rm("/started")
    return task


def zygote_pid() -> int:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    [zygote] = [int(pid) for pid in children if comm(int(pid)) == "smokebox-zygote"]
    return zygote


async def test_killed_zygote_affects_no_sandbox(host: Host) -> None:
    sandbox = await host.create("before")
    process = await sandbox.start_process("sleep 100")
    running = await start_command(sandbox, "sleep 0.3; echo whole")
    os.kill(zygote_pid(), signal.SIGKILL)
    assert (await running).stdout == "whole\n"  # type: ignore[attr-defined]
    assert process.status == "running"
    assert (await (await host.create("after")).exec("hostname")).stdout == "after\n"


async def test_zygote_killed_during_start_is_a_retryable_error(
    host: Host,
) -> None:
    await host.create("warm")
    for n in range(10):
        creating = [asyncio.create_task(host.create(f"n-{n}-{m}")) for m in range(3)]
        await asyncio.sleep(0.001 * n)
        with contextlib.suppress(ValueError):
            os.kill(zygote_pid(), signal.SIGKILL)
        for outcome in await asyncio.gather(*creating, return_exceptions=True):
            if isinstance(outcome, BaseException):
                assert isinstance(outcome, SmokeboxError), repr(outcome)
                assert outcome.retryable, repr(outcome)
    created = await host.list()
    assert len(os.listdir(f"{host.home}/boxes")) == len(created)
    for one in created:
        assert (await host.sandbox(one.id).exec("hostname")).stdout == f"{one.id}\n"
        await host.sandbox(one.id).destroy()
    assert find_leftovers(host.home) == []


async def test_stopped_zygote_is_an_error_after_timeout(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smokebox.engine.jail.zygote_client.RESPONSE_SECONDS", 0.5)
    await host.create("warm")
    os.kill(zygote_pid(), signal.SIGSTOP)
    with pytest.raises(ServiceUnavailable):
        await host.create("stuck")
    assert (await (await host.create("next")).exec("hostname")).stdout == "next\n"


async def test_killed_supervisor_ends_only_its_command(host: Host) -> None:
    sandbox = await host.create("box")
    process = await sandbox.start_process("sleep 200")
    running = await start_command(sandbox, "sleep 100")
    sleeper = await wait_for_process(host, "sleep 100")
    os.kill(supervisor_of(sleeper), signal.SIGKILL)
    with pytest.raises(SandboxGone):
        await running
    await eventually(lambda: not comm(sleeper))
    assert process.status == "running"
    assert (await sandbox.exec("echo fine")).stdout == "fine\n"
    info = await sandbox.info()
    assert info is not None
    assert info.generation == 1


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


async def eventually(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def test_background_process_of_killed_supervisor_is_lost(host: Host) -> None:
    sandbox = await host.create("box")
    process = await sandbox.start_process("echo hi; sleep 100")
    await process.wait_for_log("hi")
    sleeper = await wait_for_process(host, "sleep 100")
    os.kill(supervisor_of(sleeper), signal.SIGKILL)
    await process.wait_for_exit(timeout=10)
    assert (process.status, process.exit_code) == ("lost", 137)
    await eventually(lambda: not comm(sleeper))


async def test_killed_guest_init_under_load_raises_only_typed_errors(host: Host) -> None:
    sandbox = await host.create("box")
    await sandbox.write_file("kept", "1")

    async def call(n: int) -> str:
        try:
            match n % 4:
                case 0:
                    return (await sandbox.exec("cat kept")).stdout
                case 1:
                    return await sandbox.read_file("kept")
                case 2:
                    process = await sandbox.start_process("cat kept")
                    await process.wait_for_exit()
                    return (await process.logs()).stdout
                case _:
                    async with sandbox.exec_stream("cat kept") as stream:
                        return "".join([chunk.data async for chunk in stream])
        except SandboxGone:
            return "gone"

    for round in range(5):
        calls = [asyncio.create_task(call(n)) for n in range(20)]
        await asyncio.sleep(0.01 * round)
        for pid in list(sandbox_pids(host.home)):
            if parent(pid) == os.getpid() or comm(parent(pid)) == "smokebox-zygote":
                os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(15):
            assert set(await asyncio.gather(*calls)) <= {"1", "gone"}
    assert await sandbox.read_file("kept") == "1"


async def test_stopped_guest_init_is_an_error_for_every_call(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smokebox.engine.lifecycle.PROBE_SECONDS", 0.2)
    monkeypatch.setattr("smokebox.engine.jail.guest_requests.RESPONSE_SECONDS", 0.5)
    sandbox = await host.create("box")
    session = await sandbox.create_session("s")
    process = await sandbox.start_process("sleep 100")
    await sandbox.write_file("kept", "1")
    stop_processes(host.home)
    # All calls start at once: after the next pulse the sandbox restarts, and exec would succeed.
    async with asyncio.timeout(10):
        kept, *results = await asyncio.gather(
            sandbox.read_file("kept"),
            sandbox.exec("true"),
            session.exec("true"),
            sandbox.start_process("true"),
            process.kill(),
            process.wait_for_exit(),
            return_exceptions=True,
        )
    assert kept == "1", "files need no process inside"
    assert all(isinstance(one, SmokeboxError) for one in results), results
    assert (await sandbox.exec("cat kept")).stdout == "1"
    await sandbox.destroy()
    assert find_leftovers(host.home) == []


async def test_stopped_sandbox_can_sleep_and_be_destroyed(host: Host) -> None:
    for step in ("sleep", "destroy"):
        sandbox = await host.create("box")
        stop_processes(host.home)
        async with asyncio.timeout(10):
            await getattr(sandbox, step)()
    assert find_leftovers(host.home) == []


async def test_sandbox_without_engine_stops_after_sleep_after(tmp_path: Path, layers: Path) -> None:
    home = str(tmp_path / "home")
    host = await Host.open(home, pool=0, images=layers)
    sandbox = await host.create("box", sleep_after=600)
    await sandbox.write_file("kept", "1")
    host.sandbox("box", sleep_after=0.5)
    await sandbox.start_process("sleep 100")
    await host.aclose(detach=True)
    await eventually(lambda: not list(sandbox_pids(home)))
    async with await Host.open(home, pool=0, images=layers) as host:
        [info] = await host.list()
        assert info.status == "idle"
        assert await host.sandbox("box").read_file("kept") == "1"
        await host.sandbox("box").destroy()
    assert find_leftovers(home) == []


async def test_sandbox_with_keep_alive_outlives_its_engine(tmp_path: Path, layers: Path) -> None:
    home = tmp_path / "home"
    host = await Host.open(home, pool=0, images=layers)
    await host.create("box", sleep_after=0.2, keep_alive=True)
    await host.aclose(detach=True)
    await asyncio.sleep(1)
    async with await Host.open(home, pool=0, images=layers) as host:
        [info] = await host.list()
        assert (info.status, info.generation) == ("active", 1)


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """Create a state directory on a disk of 4 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    home = tmp_path / "tiny"
    home.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m,mode=700", "tmpfs", home], check=True)
    yield home
    subprocess.run(["umount", home], check=True)


async def test_full_disk_loses_nothing_acknowledged(tiny: Path, layers: Path) -> None:
    async with await Host.open(tiny, images=layers, pool=0) as host:
        sandbox = await host.create("box", labels={"n": "0"})
        session = await sandbox.create_session("s")
        await sandbox.write_file("small", "1")
        with (tiny / "fill").open("wb", buffering=0) as fill, contextlib.suppress(OSError):
            while True:
                fill.write(bytes(4096))
        acknowledged = "0"
        for n in range(1, 20):
            host.sandbox("box", labels={"n": str(n)})
            with contextlib.suppress(StorageFull):
                await sandbox.info()
                acknowledged = str(n)
        with pytest.raises(StorageFull):
            await sandbox.write_file("big", bytes(1 << 20))
        with contextlib.suppress(SmokeboxError):
            await sandbox.start_process("sleep 100")
        with pytest.raises(StorageFull):
            await session.exec("N=1")
        with contextlib.suppress(SmokeboxError):
            await sandbox.sleep()
        (tiny / "fill").unlink()
        assert await sandbox.read_file("small") == "1"
        assert not await sandbox.exists("big")
        found = await sandbox.info()
        assert found is not None
        assert found.labels == {"n": acknowledged}
    async with await Host.open(tiny, images=layers, pool=0) as host:
        [found] = await host.list()
        assert (found.labels, found.status) == ({"n": acknowledged}, "idle")
        await host.sandbox("box").destroy()
        assert find_leftovers(host.home) == []


async def test_sandbox_that_filled_the_disk_can_be_destroyed(tiny: Path, layers: Path) -> None:
    async with await Host.open(tiny, images=layers, pool=0) as host:
        kept = await host.create("kept")
        greedy = await host.create("greedy")
        await greedy.start_process("sleep 100")
        # Its run may be ended for exceeding a limit.
        with contextlib.suppress(SandboxGone):
            await greedy.exec("for n in {1..100}; do cat /dev/zero >bomb-$n; done")
        with contextlib.suppress(OSError), (tiny / "fill").open("wb", buffering=0) as fill:
            while True:
                fill.write(b"x")
        await greedy.destroy()
        assert [one.id for one in await host.list()] == ["kept"]
        assert (await kept.exec("echo fine")).stdout == "fine\n"


WRITER = """
    import asyncio, sys
    from smokebox.engine.record.record import Record
    from smokebox.engine.record.rows import SandboxRow, put

    async def main():
        record = await Record.open(sys.argv[1])
        for n in range(10**9):
            rows = [
                put(SandboxRow(
                    id=f"b{n}-{m}", key=f"k{n}-{m}", image="host", digest="", tier="namespaces",
                    created_at=0, last_active_at=0,
                ))
                for m in range(3)
            ]
            await record.write(*rows)
            print(n, flush=True)

    asyncio.run(main())
"""


def test_killed_writer_of_the_record_loses_no_row(
    tmp_path: Path,
) -> None:
    path = tmp_path / "record.db"
    for n in range(5):
        path.unlink(missing_ok=True)
        writer = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WRITER), str(path)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout is not None
        last = -1
        for line in writer.stdout:
            last = int(line)
            if last == 37 * n:
                writer.kill()
        writer.wait()
        writer.stdout.close()
        with contextlib.closing(sqlite3.connect(path)) as record:
            assert record.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            [(count,)] = record.execute("SELECT count(*) FROM sandboxes")
        assert count % 3 == 0
        assert count >= 3 * (last + 1)
        for beside in tmp_path.glob("record.db-*"):
            beside.unlink()
