"""The engine of a state directory: options, adoption, closing, the pool and full disks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from engine.leftovers import find_leftovers, sandbox_pids, wait_until_empty
from smokebox.engine.host import Host
from smokebox.engine.jail.cgroup_hierarchy import detect
from smokebox.engine.record.schema import MIGRATIONS
from smokebox.errors import (
    Conflict,
    InvalidOption,
    InvalidPath,
    IsolationUnavailable,
    SandboxGone,
    SandboxRestarted,
    SmokeboxError,
    StorageFull,
    Unsupported,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping
    from pathlib import Path

    from smokebox.types import SandboxInfo

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="other users and mounts need root")


async def info(host: Host, id: str) -> SandboxInfo:
    found = await host.sandbox(id).info()
    assert found is not None
    return found


@pytest_asyncio.fixture
async def pooled(tmp_path: Path, layers: Path) -> AsyncIterator[Host]:
    """Open an engine with a pool of two jails."""
    async with await Host.open(tmp_path / "pooled", pool=2, images=layers) as host:
        yield host


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lables": {}}, "labels"),
        ({"sleepAfter": 1}, "sleep_after"),
        ({"memory": "1GiB"}, "memory"),
        ({"sleep_after": -1}, "-1"),
        ({"sleep_after": True}, "True"),
        ({"sleep_after": "soon"}, "soon"),
        ({"sleep_after": float("nan")}, "nan"),
        ({"keep_alive": "yes"}, "yes"),
        ({"ephemeral": 1}, "ephemeral"),
        ({"labels": {"a b": "c"}}, "a b"),
        ({"labels": {"a": 1}}, "1"),
        ({"env": {"A=B": "c"}}, "A=B"),
        ({"env": {"": "c"}}, "''"),
        ({"env": {"A": "x\0y"}}, "A"),
        ({"user": "a:b"}, "a:b"),
        ({"user": 0}, "int"),
        ({"tier": "docker"}, "docker"),
        ({"image": ""}, "''"),
        ({"limits": "huge"}, "huge"),
        ({"limits": {"memroy": 1}}, "memory"),
        ({"limits": {"memory": "lots"}}, "lots"),
        ({"limits": {"pids": 0}}, "0"),
        ({"cwd": "relative"}, "relative"),
    ],
)
async def test_invalid_option_is_refused_by_name_and_changes_nothing(
    host: Host, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidOption, match=text):
        host.sandbox("options", **options)
    assert await host.list() == []
    assert find_leftovers(host.home) == []


@pytest.mark.parametrize("id", ["", "A", "a_b", "-a", "a" * 64, "root", "a/b", "a\n", 7, None])
async def test_invalid_id_is_refused(host: Host, id: Any) -> None:
    with pytest.raises(InvalidOption) as caught:
        host.sandbox(id)
    assert caught.value.value == id


INVALID_CALLS: Mapping[str, Callable[[Host], Any]] = {
    "user": lambda host: host.sandbox("bad").exec("id", user="not valid"),
    "session": lambda host: host.sandbox("bad").create_session("a/b"),
    "process_id": lambda host: host.sandbox("bad").start_process("true", process_id="../up"),
    "env": lambda host: host.sandbox("bad").exec("true", env={"A-B\0": "1"}),
    "timeout": lambda host: host.sandbox("bad").exec("true", timeout=-1),
    "command": lambda host: host.sandbox("bad").exec([]),
    "memory": lambda host: host.sandbox("bad").exec("true", limits={"memory": -1}),
}


@pytest.mark.parametrize("option", INVALID_CALLS)
async def test_invalid_option_of_a_call_is_named(host: Host, option: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        await INVALID_CALLS[option](host)
    assert caught.value.option == option


async def test_invalid_port_is_named(host: Host) -> None:
    process = await host.sandbox("bad").start_process("sleep 100")
    with pytest.raises(InvalidOption, match="70000"):
        await process.wait_for_port(70000)


async def test_invalid_path_is_refused(host: Host) -> None:
    with pytest.raises(InvalidPath):
        await host.sandbox("bad").read_file("a\0b")


@pytest.mark.parametrize("option", [{"image": "dir:other"}, {"tier": "gvisor"}])
async def test_image_and_tier_cannot_change(host: Host, option: Any) -> None:
    sandbox = await host.create("fixed")
    host.sandbox("fixed", **option)
    with pytest.raises(Conflict, match=next(iter(option.values()))):
        await sandbox.exec("true")
    assert (await sandbox.exec("echo fine")).stdout == "fine\n"


async def test_unknown_tier_is_named(host: Host) -> None:
    with pytest.raises((IsolationUnavailable, Unsupported), match="gvisor"):
        host._context.jailer("gvisor-unknown")


@pytest.mark.skipif(
    detect().enforcement == "rlimits", reason="this host has no cgroup to limit memory"
)
async def test_changed_limits_apply_immediately(host: Host) -> None:
    sandbox = await host.create("limits", limits={"memory": "256MiB"})
    host.sandbox("limits", limits={"memory": "64MiB"})
    assert (await info(host, "limits")).limits["memory"] == 64 << 20
    assert not (await sandbox.exec("tail -c 100M /dev/zero | tail")).success
    host.sandbox("limits", limits={"memory": "512MiB"})
    assert (await sandbox.exec("tail -c 100M /dev/zero | tail | wc -c")).success
    assert (await info(host, "limits")).generation == 1


async def test_env_applies_to_every_command(host: Host) -> None:
    sandbox = host.sandbox("env", env={"A": "1", "B": "two words"})
    assert (await sandbox.exec("echo $A $B")).stdout == "1 two words\n"
    assert (await sandbox.exec("echo $A $B", env={"A": "9"})).stdout == "9 two words\n"
    host.sandbox("env", env={"A": "3"})
    assert (await sandbox.exec("echo $A $B")).stdout == "3\n"


async def test_cwd_applies_to_commands_and_relative_paths(host: Host) -> None:
    sandbox = host.sandbox("cwd", cwd="/srv/app")
    assert (await sandbox.exec("pwd; echo 1 >a")).stdout == "/srv/app\n"
    assert await sandbox.read_file("a") == "1\n"
    assert sandbox.resolve_path("a") == "/srv/app/a"


IGNORED_SIGNALS = "grep SigIgn /proc/self/status"


async def test_signals_ignored_by_the_engine_reach_programs(tmp_path: Path, layers: Path) -> None:
    """Its parent may ignore some, as nohup and shells do for what runs in the background."""
    ignored = [signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1]
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ignored}
    try:
        async with await Host.open(tmp_path / "home", pool=0, images=layers) as host:
            sandbox = host.sandbox("box")
            await sandbox.wake()
            await sandbox.sessions.create("session")
            results = [
                await sandbox.exec(IGNORED_SIGNALS),
                await sandbox.exec(IGNORED_SIGNALS, user="nobody"),
                await sandbox.exec(IGNORED_SIGNALS, session="session"),
            ]
            for result in results:
                found = int(result.stdout.split()[1], 16)
                assert not any(found >> number - 1 & 1 for number in ignored)
            terminal = await sandbox.terminals.create("terminal", command=["cat"])
            await terminal.kill()
            assert terminal.exit_code == 128 + signal.SIGHUP
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@needs_root
async def test_user_applies_unless_a_command_has_another(host: Host) -> None:
    sandbox = host.sandbox("user", user="nobody")
    assert (await sandbox.exec("id -un")).stdout == "nobody\n"
    assert (await sandbox.exec("id -un", user="root")).stdout == "root\n"


async def test_list_filters_by_label_prefix_and_status(host: Host) -> None:
    for id, team in (("web-1", "a"), ("web-2", "b"), ("db-1", "a")):
        await host.create(id, labels={"team": team, "all": "yes"})
    await host.sandbox("db-1").sleep()

    async def ids(**filters: Any) -> list[str]:
        return [one.id for one in await host.list(**filters)]

    assert await ids() == ["db-1", "web-1", "web-2"]
    assert await ids(labels={"team": "a"}) == ["db-1", "web-1"]
    assert await ids(labels={"team": "a", "all": "yes"}, prefix="web") == ["web-1"]
    assert await ids(status="idle") == ["db-1"]
    assert await ids(labels={"team": "c"}) == []


async def test_calls_update_last_active_at_and_info_does_not(host: Host) -> None:
    sandbox = await host.create("box")
    infos = [await info(host, "box")]
    for _ in range(2):
        await sandbox.exec("true")
        infos.append(await info(host, "box"))
        assert await sandbox.info() == infos[-1]
    await sandbox.sleep()
    times = [one.last_active_at for one in infos]
    assert times[0] < times[1] < times[2] == (await info(host, "box")).last_active_at


async def test_info_and_stats_do_not_wake(host: Host) -> None:
    sandbox = host.sandbox("known", labels={"a": "b"}, sleep_after="10m")
    await sandbox.exec("head -c 1M /dev/zero >file; sleep 100 &")
    awake = await sandbox.stats()
    assert awake.disk is not None
    assert awake.disk >= 1 << 20
    assert awake.pids is None or awake.pids >= 2
    await sandbox.sleep()
    asleep = await sandbox.stats()
    assert (asleep.memory, asleep.pids) == (None, None)
    assert asleep.disk is not None
    assert asleep.disk >= 1 << 20
    found = await info(host, "known")
    assert (found.status, found.labels, found.sleep_after) == ("idle", {"a": "b"}, 600.0)


async def test_second_engine_gets_the_pid_of_the_owner(host: Host) -> None:
    with pytest.raises(Conflict) as caught:
        await Host.open(host.home)
    assert caught.value.pid == os.getpid()
    code = f"import asyncio, smokebox.engine.host as h; asyncio.run(h.Host.open({host.home!r}))"
    other = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stderr=subprocess.PIPE)
    _, errors = await other.communicate()
    assert f"process {os.getpid()} uses the state directory {host.home}" in errors.decode()


async def test_close_ends_all_processes_and_keeps_files(tmp_path: Path, layers: Path) -> None:
    home = str(tmp_path / "home")
    async with await Host.open(home, images=layers) as host:
        sandbox = await host.create("box")
        await sandbox.write_file("a", "1")
        process = await sandbox.start_process("sleep 100")
        running = asyncio.create_task(sandbox.exec("sleep 100"))
        await asyncio.sleep(0.05)
    assert wait_until_empty(lambda: [str(pid) for pid in sandbox_pids(home)]) == []
    with pytest.raises(SandboxRestarted, match="the engine was stopped"):
        await process.wait_for_exit()
    with pytest.raises(SandboxGone, match="the engine was stopped"):
        await running
    async with await Host.open(home, images=layers) as host:
        assert await host.sandbox("box").read_file("a") == "1"


ENGINE_SCRIPT = """
import asyncio, os, sys
from smokebox.engine import Host
from smokebox.errors import IsolationUnavailable
if sys.argv[2:]:
    with open(f"/proc/sys/user/{sys.argv[2]}", "w") as limit:
        limit.write("0")
async def main():
    async with await Host.open(sys.argv[1], pool=0) as host:
        try:
            print((await host.sandbox("box").exec("id -u; hostname")).stdout.split())
        except IsolationUnavailable as error:
            print(error.hint)
        print(os.listdir(f"{sys.argv[1]}/boxes"))
asyncio.run(main())
"""


def run_with_one_id(home: Path, *arguments: str) -> list[str]:
    """Run an engine as root of a user namespace with one id, and return its output."""
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-c", ENGINE_SCRIPT]
    done = subprocess.run(
        [*command, str(home), *arguments], capture_output=True, text=True, timeout=18
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not installed")
def test_root_of_a_container_with_one_id_can_run_sandboxes(tmp_path: Path) -> None:
    assert run_with_one_id(tmp_path / "home")[0] == "['0', 'box']"


@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not installed")
@pytest.mark.parametrize("kind", ["user", "net"])
def test_namespace_limit_of_the_kernel_is_explained(tmp_path: Path, kind: str) -> None:
    name = f"max_{kind}_namespaces"
    output = run_with_one_id(tmp_path / "home", name)
    assert output == [f"Run: sysctl -w user.{name}=15000", "[]"]


async def test_closed_engine_starts_nothing(tmp_path: Path, layers: Path) -> None:
    host = await Host.open(tmp_path / "home", images=layers, pool=0)
    old = host.sandbox("old")
    await old.wake()
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(try_exec(old)) for _ in range(20)]
        await asyncio.sleep(0)
        group.create_task(host.aclose())
    assert {call.result() for call in calls} <= {"done", "gone"}
    assert await try_exec(old) == "gone"
    with pytest.raises(SandboxGone, match="closed"):
        host.sandbox("other")
    await host.aclose()
    assert wait_until_empty(lambda: [str(pid) for pid in sandbox_pids(host.home)]) == []


async def try_exec(sandbox: Any) -> str:
    try:
        await sandbox.exec("true")
    except SandboxGone:
        return "gone"
    return "done"


async def test_next_engine_adopts_everything_of_a_detached_one(
    tmp_path: Path, layers: Path
) -> None:
    home = tmp_path / "home"
    first = await Host.open(home, images=layers)
    sandbox = await first.create("box", cwd="/srv", labels={"a": "b"}, env={"A": "1"})
    process = await sandbox.start_process("while :; do echo x; sleep 0.05; done", process_id="p")
    session = await sandbox.create_session("s")
    await session.exec("N=7; cd /tmp")
    await first.aclose(detach=True)
    async with await Host.open(home, images=layers) as second:
        adopted = second.sandbox("box")
        assert adopted.cwd == "/srv"
        found = await adopted.processes.get("p")
        assert (found.pid, found.status) == (process.pid, "running")
        assert (await adopted.exec("echo $N $PWD $A", session="s")).stdout == "7 /tmp 1\n"
        assert (await info(second, "box")).generation == 1
        await found.kill()
        await adopted.destroy()
        assert find_leftovers(str(home)) == []


async def test_engine_of_an_earlier_version_leaves_sandboxes_running(
    tmp_path: Path, layers: Path
) -> None:
    home = tmp_path / "home"
    first = await Host.open(home, images=layers, pool=0)
    process = await (await first.create("box")).start_process("sleep 100", process_id="p")
    await first.aclose(detach=True)
    set_record_version(home, len(MIGRATIONS) + 1)
    with pytest.raises(Unsupported, match="from a later Smokebox"):
        await Host.open(home, images=layers)
    set_record_version(home, len(MIGRATIONS))
    async with await Host.open(home, images=layers) as second:
        found = await second.sandbox("box").processes.get("p")
        assert (found.pid, found.status) == (process.pid, "running")
        await second.sandbox("box").destroy()


def set_record_version(home: Path, version: int) -> None:
    with contextlib.closing(sqlite3.connect(home / "record.db")) as connection:
        connection.execute(f"PRAGMA user_version = {version}")


async def test_sandbox_that_died_without_an_engine_is_idle(tmp_path: Path, layers: Path) -> None:
    home = str(tmp_path / "home")
    first = await Host.open(home, images=layers, pool=0)
    sandbox = await first.create("box")
    await sandbox.start_process("sleep 100", process_id="p")
    await first.aclose(detach=True)
    for pid in sandbox_pids(home):
        os.kill(pid, signal.SIGKILL)
    async with await Host.open(home, images=layers) as second:
        found = await info(second, "box")
        assert (found.status, found.stop_reason) == (
            "idle",
            "the engine was killed, and the sandbox did not outlive it",
        )
        assert (await second.sandbox("box").processes.get("p")).status == "killed"
        await second.sandbox("box").destroy()
        assert find_leftovers(home) == []


async def test_failed_adoption_of_one_sandbox_does_not_prevent_opening(
    tmp_path: Path, layers: Path
) -> None:
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    directories = {"moves": str(root)}
    first = await Host.open(tmp_path / "home", images=layers, pool=0, directories=directories)
    await first.sandbox("good").write_file("a", "1")
    await first.sandbox("bad", image="dir:moves").write_file("/a", "1")
    await first.aclose(detach=True)
    root.rename(tmp_path / "moved")
    async with await Host.open(tmp_path / "home", images=layers, directories=directories) as second:
        assert (await info(second, "good")).status == "active"
        bad = await info(second, "bad")
        assert bad.status == "idle"
        assert "could not be adopted" in (bad.stop_reason or "")
        await second.sandbox("bad").destroy()


async def test_unknown_directories_are_removed(tmp_path: Path, layers: Path) -> None:
    home = tmp_path / "home"
    await (await Host.open(home, images=layers)).aclose()
    (home / "boxes" / "stray" / "deep").mkdir(parents=True)
    async with await Host.open(home, images=layers):
        assert os.listdir(home / "boxes") == []


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a state directory of 2 MiB."""
    home = tmp_path / "tiny_disk"
    home.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "tmpfs", home], check=True)
    yield home
    subprocess.run(["umount", home], check=True)


@needs_root
async def test_full_disk_is_reported_and_leaves_nothing(tiny_disk: Path, layers: Path) -> None:
    async with await Host.open(tiny_disk, images=layers, pool=0) as host:
        kept = await host.create("kept")
        fill = tiny_disk / "fill"
        with pytest.raises(OSError), fill.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        for n in range(3):
            with pytest.raises(SmokeboxError) as caught:
                await host.create(f"none-{n}")
            assert isinstance(caught.value, StorageFull), caught.value
        fill.unlink()
        assert [one.id for one in await host.list()] == ["kept"]
        assert len(os.listdir(tiny_disk / "boxes")) == 1
        assert (await kept.exec("echo fine")).stdout == "fine\n"
        assert (await host.create("after")).id == "after"


async def test_failed_write_of_the_record_leaves_nothing(host: Host) -> None:
    with contextlib.closing(sqlite3.connect(f"{host.home}/record.db")) as record:
        record.execute(
            "CREATE TRIGGER refuse BEFORE INSERT ON sandboxes "
            "BEGIN SELECT RAISE(ABORT, 'refused'); END"
        )
        with pytest.raises(SmokeboxError, match="refused"):
            await host.create("none")
        assert find_leftovers(host.home) == []
        assert await host.sandbox("none").info() is None
        record.execute("DROP TRIGGER refuse")
    assert (await host.sandbox("none").exec("echo fine")).stdout == "fine\n"


async def test_100_sandboxes_start_concurrently(host: Host) -> None:
    async with asyncio.TaskGroup() as group:
        creating = [group.create_task(host.create(f"n-{n}")) for n in range(100)]
    results = await asyncio.gather(*(task.result().exec("hostname") for task in creating))
    assert [result.stdout for result in results] == [f"n-{n}\n" for n in range(100)]
    await asyncio.gather(*(task.result().destroy() for task in creating))
    assert find_leftovers(host.home) == []


async def test_create_without_an_id_uses_a_random_one(host: Host) -> None:
    first, second = await host.create(), await host.create()
    assert first.id != second.id
    assert host.sandbox(first.id) is first


async def wait_until_filled(host: Host) -> set[str]:
    """Wait until the pool is full, and return the directories of its jails."""
    known = {row.key for row in await host._context.record.sandboxes()}
    async with asyncio.timeout(10):
        while len(host._context.pool._ready) < 2:
            await asyncio.sleep(0.01)
    return set(os.listdir(f"{host.home}/boxes")) - known


async def test_sandbox_uses_a_jail_from_the_pool(pooled: Host) -> None:
    await pooled.create("first")
    prepared = await wait_until_filled(pooled)
    sandbox = await pooled.create("second", limits={"memory": "128MiB"}, env={"A": "1"})
    row = await sandbox.lifecycle.row()
    assert row is not None
    assert row.key in prepared
    assert (await sandbox.exec("hostname; echo $A")).stdout == "second\n1\n"
    await wait_until_filled(pooled)


async def test_pool_discards_dead_jails(pooled: Host) -> None:
    await pooled.create("first")
    prepared = await wait_until_filled(pooled)
    for ready in pooled._context.pool._ready:
        os.kill(ready.jail.state.pid, signal.SIGKILL)
        await ready.jail.wait()
    sandbox = await pooled.create("second")
    assert (await sandbox.exec("echo fine")).stdout == "fine\n"
    assert not prepared & await wait_until_filled(pooled)


async def test_pooled_jails_end_with_the_engine(tmp_path: Path, layers: Path) -> None:
    for delay in (0, 0.06, 0.08, 0.1, 0.3):
        home = str(tmp_path / f"home-{delay}")
        async with await Host.open(home, pool=3, images=layers) as host:
            await (await host.create("one")).destroy()
            await asyncio.sleep(delay)
        assert find_leftovers(home) == []


async def test_killed_zygote_is_restarted(host: Host) -> None:
    await host.create("before")
    [jailer] = [one for one in host._context.jailers.values() if one.tier == "namespaces"]
    zygote = jailer._zygote._process
    assert zygote is not None
    zygote.kill()
    await asyncio.gather(*(host.create(f"after-{n}") for n in range(5)), return_exceptions=True)
    for id in ("before", *(f"after-{n}" for n in range(5))):
        assert (await host.sandbox(id).exec("hostname")).stdout == f"{id}\n"
    assert len(os.listdir(f"{host.home}/boxes")) == 6
