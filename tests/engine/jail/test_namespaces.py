"""Jails of namespaces: created, entered, frozen, adopted, killed, without leftovers."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import pytest
import pytest_asyncio

import smokebox
from smokebox.engine.images.image import Layer
from smokebox.engine.images.store import open_store
from smokebox.engine.jail import guest_init, guest_requests
from smokebox.engine.jail.cgroup_hierarchy import detect
from smokebox.engine.jail.jail import Jail, start_time
from smokebox.engine.jail.namespaces import NamespaceJailer
from smokebox.engine.jail.spec import JailSpec, JailState
from smokebox.errors import IsolationUnavailable, SandboxGone, SmokeboxError, StorageFull
from smokebox.limits import Limits
from smokebox.runtime.process import SupervisedProcess

MakeSpec: TypeAlias = Callable[[str], JailSpec]


@pytest_asyncio.fixture
async def jailer() -> AsyncIterator[NamespaceJailer]:
    jailer = NamespaceJailer()
    yield jailer
    await jailer.aclose()


@pytest_asyncio.fixture
async def spec(tmp_path: Path, layers: Path) -> MakeSpec:
    image = await open_store(str(layers)).get("host")
    tmp_path.chmod(0o700)

    def make(key: str) -> JailSpec:
        return JailSpec(
            key=f"test{os.getpid()}-{key}",
            directory=str(tmp_path / key),
            layers=image.layers,
            limits=Limits(),
        )

    return make


@pytest_asyncio.fixture
async def jail(jailer: NamespaceJailer, spec: MakeSpec) -> AsyncIterator[Jail]:
    jail = await jailer.make(spec("a"))
    await jail.enter("box-a", Limits())
    yield jail
    await jail.kill()


async def run(jail: Jail, *argv: str) -> str:
    """Run a program in the jail, and return its output."""
    body = guest_init.pack_program(
        verb=guest_init.RUN,
        argv=[word.encode() for word in argv],
        env=[b"PATH=/usr/bin:/bin"],
        cwd=b"/",
        timeout=10,
    )
    output = b""
    async with await SupervisedProcess.start_through(
        await jail.connect(), body, explain=lambda stage, number: OSError(number, str(stage))
    ) as process:
        while chunk := await process.read():
            output += chunk.data
    return output.decode()


async def test_hostname_user_and_hosts_file(jail: Jail) -> None:
    assert await run(jail, "hostname") == "box-a\n"
    assert await run(jail, "id", "-u") == "0\n"
    assert await run(jail, "cat", "/etc/hostname") == "box-a\n"
    assert "127.0.0.1 localhost box-a" in await run(jail, "cat", "/etc/hosts")
    assert await run(jail, "sh", "-c", "ls /sys; ls /proc/sys/kernel/hostname") != ""


async def test_privileges_of_setup_are_dropped(jail: Jail) -> None:
    status = await run(jail, "grep", "-E", "NoNewPrivs|^Seccomp:|CapEff", "/proc/self/status")
    assert status.split() == ["CapEff:", "00000000000404fb", "NoNewPrivs:", "1", "Seccomp:", "2"]


async def test_executable_of_first_process_cannot_be_written(jail: Jail) -> None:
    exe = f"/proc/{jail.state.pid}/exe"
    if os.geteuid() == 0:
        assert os.readlink(exe).startswith("/memfd:smokebox")
        with pytest.raises(OSError, match=r"busy|permitted"):
            os.open(exe, os.O_WRONLY)
    assert await run(jail, "sh", "-c", "readlink /proc/1/exe; true") == ""


async def test_files_are_accessible_from_outside(jail: Jail) -> None:
    await run(jail, "sh", "-c", "echo written inside > /workspace/file")
    fd = os.open("workspace/file", os.O_RDONLY, dir_fd=jail.root)
    with open(fd) as file:
        assert file.read() == "written inside\n"
        assert os.fstat(fd).st_uid == jail.owner.uid


async def test_files_on_disk_have_the_ids_they_have_inside(
    jailer: NamespaceJailer, spec: MakeSpec
) -> None:
    """Another run may have other ids outside."""
    for hostname in ("first", "second"):
        jail = await jailer.make(spec("b"))
        await jail.enter(hostname, Limits())
        await run(jail, "sh", "-c", f"echo {hostname} >> /workspace/file")
        path = Path(spec("b").directory, "data/upper/0/workspace/file")
        assert path.stat().st_uid == os.geteuid()
        ids = await run(jail, "stat", "-c", "%u %g", "/workspace/file")
        assert ids == "0 0\n"
        await jail.kill()
    assert path.read_text() == "first\nsecond\n"


async def test_open_socket_connects_to_server_inside(jail: Jail) -> None:
    async with asyncio.timeout(10):
        server = asyncio.create_task(
            run(
                jail,
                "python3",
                "-c",
                "import socket; s = socket.create_server(('127.0.0.1', 80));"
                " s.accept()[0].send(b'from inside')",
            )
        )
        while True:
            with await guest_requests.open_socket(jail) as sock:
                try:
                    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", 80))
                except ConnectionRefusedError:
                    await asyncio.sleep(0.02)
                    continue
                assert await asyncio.get_running_loop().sock_recv(sock, 100) == b"from inside"
                break
        await server


async def test_freeze_stops_processes_and_thaw_continues_them(jail: Jail) -> None:
    counting = asyncio.create_task(
        run(jail, "sh", "-c", "for i in 1 2 3 4 5 6; do echo $i >> /workspace/n; sleep 0.2; done")
    )
    await asyncio.sleep(0.5)
    await jail.freeze()
    size = os.stat("workspace/n", dir_fd=jail.root).st_size
    await asyncio.sleep(0.6)
    assert os.stat("workspace/n", dir_fd=jail.root).st_size == size
    await jail.thaw()
    await counting
    assert os.stat("workspace/n", dir_fd=jail.root).st_size == 12


async def test_frozen_jail_can_be_killed(jailer: NamespaceJailer, spec: MakeSpec) -> None:
    jail = await jailer.make(spec("frozen"))
    await jail.enter("frozen", Limits())
    await jail.freeze()
    await jail.kill()
    assert start_time(jail.state.pid) != jail.state.started


async def test_stats_report_usage(jail: Jail) -> None:
    stats = await jail.stats()
    assert stats.pids is not None
    assert stats.pids >= 1
    assert stats.memory


async def test_kill_leaves_no_process_and_is_safe_to_repeat(
    jailer: NamespaceJailer, spec: MakeSpec
) -> None:
    jail = await jailer.make(spec("k"))
    await jail.enter("k", Limits())
    pid = await run(jail, "sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 & echo $!")
    assert pid
    await jail.kill()
    await jail.kill()
    assert not jail.alive
    assert start_time(jail.state.pid) != jail.state.started
    with pytest.raises(SandboxGone):
        await jail.connect()


async def test_exit_of_first_process_is_noticed(jailer: NamespaceJailer, spec: MakeSpec) -> None:
    jail = await jailer.make(spec("end"))
    await jail.enter("end", Limits())
    os.kill(jail.state.pid, signal.SIGKILL)
    async with asyncio.timeout(5):
        await jail.wait()
    assert not jail.alive
    await jail.kill()


async def test_another_engine_adopts_jail(jailer: NamespaceJailer, spec: MakeSpec) -> None:
    jail = await jailer.make(spec("c"))
    await jail.enter("c", Limits())
    await run(jail, "sh", "-c", "echo kept > /workspace/file")
    jail.close()
    other = NamespaceJailer()
    found = await other.adopt(spec("c"), jail.state)
    assert found is not None
    assert await run(found, "cat", "/workspace/file") == "kept\n"
    with open(os.open("workspace/file", os.O_RDONLY, dir_fd=found.root)) as file:
        assert file.read() == "kept\n"
    await found.kill()
    assert await other.adopt(spec("c"), jail.state) is None
    await other.aclose()


async def test_orphaned_jail_ends_after_its_timeout(
    jailer: NamespaceJailer, spec: MakeSpec
) -> None:
    jail = await jailer.make(spec("orphan"))
    await jail.enter("orphan", Limits(), orphan_timeout=0.5)
    await run(jail, "sh", "-c", "echo kept > /workspace/file; setsid sleep 1000 >/dev/null 2>&1 &")
    jail.close()
    await gone(jail)
    assert await jailer.adopt(spec("orphan"), jail.state) is None
    path = Path(spec("orphan").directory, "data/upper/0/workspace/file")
    assert path.read_text() == "kept\n"
    detect().adopt(jail.state.key, jail.state.pid).remove()


async def test_attached_engine_keeps_jail_running(jailer: NamespaceJailer, spec: MakeSpec) -> None:
    jail = await jailer.make(spec("attached"))
    await jail.enter("attached", Limits(), orphan_timeout=0.3)
    await asyncio.sleep(0.6)
    adopted = await jailer.adopt(spec("attached"), jail.state)
    assert adopted is not None
    jail.close()
    await asyncio.sleep(0.6)
    assert await run(adopted, "hostname") == "attached\n"
    adopted.set_orphan_timeout(0.1)
    adopted.close()
    await gone(jail)
    detect().adopt(jail.state.key, jail.state.pid).remove()


async def test_orphaned_jail_without_timeout_keeps_running(
    jailer: NamespaceJailer, spec: MakeSpec
) -> None:
    jail = await jailer.make(spec("lasting"))
    await jail.enter("lasting", Limits(), orphan_timeout=0.1)
    jail.set_orphan_timeout(None)
    jail.close()
    await asyncio.sleep(0.5)
    adopted = await jailer.adopt(spec("lasting"), jail.state)
    assert adopted is not None
    await adopted.kill()


async def test_reused_pid_is_not_adopted(
    jailer: NamespaceJailer, spec: MakeSpec, jail: Jail
) -> None:
    # Start times have a resolution of 10 ms.
    time.sleep(0.03)
    with subprocess.Popen(["sleep", "100"]) as other:
        reused = replace(jail.state, pid=other.pid)
        assert await jailer.adopt(spec("a"), reused) is None
        assert other.poll() is None
        other.kill()


async def test_jail_that_was_not_entered_ends_with_its_engine(
    tmp_path: Path, layers: Path, spec: MakeSpec
) -> None:
    script = f"""
        import asyncio, os, sys
        from smokebox.engine.images.store import open_store
        from smokebox.engine.jail.spec import JailSpec, JailState
        from smokebox.engine.jail.namespaces import NamespaceJailer
        from smokebox.limits import Limits
        async def main():
            image = await open_store({str(layers)!r}).get("host")
            spec = JailSpec(key="{spec("d").key}", directory={str(tmp_path / "d")!r},
                            layers=image.layers, limits=Limits())
            jail = await NamespaceJailer().make(spec)
            print(jail.state.pid, flush=True)
            os.kill(os.getpid(), 9)
        asyncio.run(main())
    """
    source = str(Path(smokebox.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        env={"PYTHONPATH": source},
        timeout=15,
    )
    pid = int(done.stdout)
    async with asyncio.timeout(5):
        while start_time(pid):
            await asyncio.sleep(0.01)


async def test_failed_setup_is_explained_and_leaves_nothing(
    jailer: NamespaceJailer, spec: MakeSpec, tmp_path: Path
) -> None:
    before = descriptors()
    broken = replace(spec("broken"), layers=(Layer(path=str(tmp_path / "absent")),))
    with pytest.raises(IsolationUnavailable, match="absent"):
        await jailer.make(broken)
    # The zygote's socket is kept for the next jail.
    assert len(descriptors()) <= len(before) + 1


async def test_failed_on_fork_callback_leaves_nothing(
    jailer: NamespaceJailer, spec: MakeSpec, jail: Jail
) -> None:
    before = descriptors()
    states: list[JailState] = []

    async def refuse(state: JailState) -> None:
        states.append(state)
        await asyncio.sleep(0)
        raise StorageFull("record")

    with pytest.raises(StorageFull):
        await jailer.make(spec("unwritten"), on_fork=refuse)
    async with asyncio.timeout(10):
        while start_time(states[0].pid) == states[0].started:
            await asyncio.sleep(0.01)
    assert len(descriptors()) == len(before)


async def test_on_fork_receives_state_of_jail(jailer: NamespaceJailer, spec: MakeSpec) -> None:
    states: list[JailState] = []

    async def note(state: JailState) -> None:
        states.append(state)

    jail = await jailer.make(spec("known"), on_fork=note)
    assert states == [jail.state]
    await jail.kill()


async def test_exit_during_setup_is_noticed_at_once(
    jailer: NamespaceJailer, spec: MakeSpec, jail: Jail
) -> None:
    process = jailer._zygote._process
    assert process is not None
    before = children(process.pid)
    making = asyncio.create_task(jailer.make(spec("dies")))
    async with asyncio.timeout(10):
        while not (forked := children(process.pid) - before):
            await asyncio.sleep(0)
        os.kill(forked.pop(), signal.SIGKILL)
        try:
            created = await making
        except SmokeboxError:
            return
        # Its set-up was faster.
        await created.wait()
        await created.kill()


async def test_jail_is_not_alive_during_kill(jailer: NamespaceJailer, spec: MakeSpec) -> None:
    """Its processes exit first, and a caller must not report them as lost."""
    jail = await jailer.make(spec("killed"))
    killing = asyncio.create_task(jail.kill())
    await asyncio.sleep(0)
    assert not killing.done()
    assert not jail.alive
    await killing


async def test_twenty_jails_at_once(jailer: NamespaceJailer, spec: MakeSpec) -> None:
    async def one(number: int) -> str:
        jail = await jailer.make(spec(f"n{number}"))
        await jail.enter(f"n{number}", Limits())
        try:
            return await run(jail, "hostname")
        finally:
            await jail.kill()

    names = await asyncio.gather(*(one(number) for number in range(20)))
    assert sorted(names) == sorted(f"n{number}\n" for number in range(20))


@pytest.mark.skipif(os.geteuid() != 0, reason="ranges of ids need root")
async def test_jails_have_disjoint_ids(jailer: NamespaceJailer, spec: MakeSpec, jail: Jail) -> None:
    other = await jailer.make(spec("other"))
    try:
        first, second = jail.owner.uid, other.owner.uid
        assert abs(first - second) >= 0x10000
        # The lock works between engines that do not know of each other, while the jail runs.
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lock, pytest.raises(OSError):
            lock.bind(f"\0smokebox-ids-{second:x}")
    finally:
        await other.kill()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lock:
        lock.bind(f"\0smokebox-ids-{second:x}")


async def test_killed_zygote_is_replaced(
    jailer: NamespaceJailer, spec: MakeSpec, jail: Jail
) -> None:
    process = jailer._zygote._process
    assert process is not None
    process.kill()
    process.wait()
    other = await jailer.make(spec("after"))
    await other.enter("after", Limits())
    assert await run(other, "hostname") == "after\n"
    assert await run(jail, "hostname") == "box-a\n"
    await other.kill()


async def gone(jail: Jail) -> None:
    """Wait until the first process of a jail is gone."""
    async with asyncio.timeout(10):
        while start_time(jail.state.pid) == jail.state.started:
            await asyncio.sleep(0.01)


def children(pid: int) -> set[int]:
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def descriptors() -> list[str]:
    return os.listdir("/proc/self/fd")
