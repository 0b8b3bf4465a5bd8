"""The engine of a state directory: what sandboxes are asked to be, found again, and let go."""

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

from engine.traces import processes, settled, traces
from smokebox.engine.host import Host
from smokebox.engine.jail.cgroup_hierarchy import detect
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

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give other ids or mount")


async def info(host: Host, id: str) -> SandboxInfo:
    found = await host.sandbox(id).info()
    assert found is not None
    return found


@pytest_asyncio.fixture
async def pooled(tmp_path: Path, layers: Path) -> AsyncIterator[Host]:
    """An engine that makes two sandboxes ahead."""
    async with await Host.open(tmp_path / "pooled", pool=2, images=layers) as host:
        yield host


@pytest.mark.parametrize(
    ("options", "words"),
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
async def test_a_bad_option_is_refused_by_name_and_changes_nothing(
    host: Host, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidOption, match=words):
        host.sandbox("options", **options)
    assert await host.list() == []
    assert traces(host.home) == []


@pytest.mark.parametrize("id", ["", "A", "a_b", "-a", "a" * 64, "root", "a/b", "a\n", 7, None])
async def test_a_bad_id_is_refused(host: Host, id: Any) -> None:
    with pytest.raises(InvalidOption) as caught:
        host.sandbox(id)
    assert caught.value.value == id


BAD_CALLS: Mapping[str, Callable[[Host], Any]] = {
    "user": lambda host: host.sandbox("bad").exec("id", user="no body"),
    "session": lambda host: host.sandbox("bad").create_session("a/b"),
    "process_id": lambda host: host.sandbox("bad").start_process("true", process_id="../up"),
    "env": lambda host: host.sandbox("bad").exec("true", env={"A-B\0": "1"}),
    "timeout": lambda host: host.sandbox("bad").exec("true", timeout=-1),
    "command": lambda host: host.sandbox("bad").exec([]),
    "memory": lambda host: host.sandbox("bad").exec("true", limits={"memory": -1}),
}


@pytest.mark.parametrize("option", BAD_CALLS)
async def test_a_bad_value_of_a_call_is_named(host: Host, option: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        await BAD_CALLS[option](host)
    assert caught.value.option == option


async def test_a_bad_port_is_named(host: Host) -> None:
    process = await host.sandbox("bad").start_process("sleep 100")
    with pytest.raises(InvalidOption, match="70000"):
        await process.wait_for_port(70000)


async def test_a_bad_path_is_named(host: Host) -> None:
    with pytest.raises(InvalidPath):
        await host.sandbox("bad").read_file("a\0b")


@pytest.mark.parametrize("option", [{"image": "dir:/usr"}, {"tier": "gvisor"}])
async def test_what_a_sandbox_is_made_from_cannot_change(host: Host, option: Any) -> None:
    sandbox = await host.create("fixed")
    host.sandbox("fixed", **option)
    with pytest.raises(Conflict, match=next(iter(option.values()))):
        await sandbox.exec("true")
    assert (await sandbox.exec("echo fine")).stdout == "fine\n"


async def test_a_tier_that_is_not_here_is_said(host: Host) -> None:
    with pytest.raises((IsolationUnavailable, Unsupported), match="gvisor"):
        host._context.jailer("gvisor-of-tomorrow")


@pytest.mark.skipif(detect().enforcement == "rlimits", reason="no cgroup holds memory here")
async def test_other_limits_hold_at_once(host: Host) -> None:
    sandbox = await host.create("limits", limits={"memory": "256MiB"})
    host.sandbox("limits", limits={"memory": "64MiB"})
    assert (await info(host, "limits")).limits["memory"] == 64 << 20
    assert not (await sandbox.exec("tail -c 100M /dev/zero | tail")).success
    host.sandbox("limits", limits={"memory": "512MiB"})
    assert (await sandbox.exec("tail -c 100M /dev/zero | tail | wc -c")).success
    assert (await info(host, "limits")).generation == 1


async def test_the_environment_is_there_for_every_command(host: Host) -> None:
    sandbox = host.sandbox("env", env={"A": "1", "B": "two words"})
    assert (await sandbox.exec("echo $A $B")).stdout == "1 two words\n"
    assert (await sandbox.exec("echo $A $B", env={"A": "9"})).stdout == "9 two words\n"
    host.sandbox("env", env={"A": "3"})
    assert (await sandbox.exec("echo $A $B")).stdout == "3\n"


async def test_a_directory_of_its_own(host: Host) -> None:
    sandbox = host.sandbox("cwd", cwd="/srv/app")
    assert (await sandbox.exec("pwd; echo 1 >a")).stdout == "/srv/app\n"
    assert await sandbox.read_file("a") == "1\n"
    assert sandbox.resolve_path("a") == "/srv/app/a"


@needs_root
async def test_a_user_of_its_own(host: Host) -> None:
    sandbox = host.sandbox("user", user="nobody")
    assert (await sandbox.exec("id -un")).stdout == "nobody\n"
    assert (await sandbox.exec("id -un", user="root")).stdout == "root\n"


async def test_a_list_by_label_prefix_and_status(host: Host) -> None:
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


async def test_each_call_is_activity_and_a_look_is_none(host: Host) -> None:
    sandbox = await host.create("box")
    seen = [await info(host, "box")]
    for _ in range(2):
        await sandbox.exec("true")
        seen.append(await info(host, "box"))
        assert await sandbox.info() == seen[-1]
    await sandbox.sleep()
    times = [one.last_active_at for one in seen]
    assert times[0] < times[1] < times[2] == (await info(host, "box")).last_active_at


async def test_info_and_stats_tell_without_waking(host: Host) -> None:
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


async def test_a_second_engine_is_told_who_has_the_home(host: Host) -> None:
    with pytest.raises(Conflict) as caught:
        await Host.open(host.home)
    assert caught.value.pid == os.getpid()
    code = f"import asyncio, smokebox.engine.host as h; asyncio.run(h.Host.open({host.home!r}))"
    other = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stderr=subprocess.PIPE)
    _, errors = await other.communicate()
    assert f"process {os.getpid()} has the state directory {host.home}" in errors.decode()


async def test_closing_leaves_no_process_and_keeps_files(tmp_path: Path, layers: Path) -> None:
    home = str(tmp_path / "home")
    async with await Host.open(home, images=layers) as host:
        sandbox = await host.create("box")
        await sandbox.write_file("a", "1")
        process = await sandbox.start_process("sleep 100")
        running = asyncio.create_task(sandbox.exec("sleep 100"))
        await asyncio.sleep(0.05)
    assert settled(lambda: [str(pid) for pid in processes(home)]) == []
    with pytest.raises(SandboxRestarted, match="the engine was stopped"):
        await process.wait_for_exit()
    with pytest.raises(SandboxGone, match="the engine was stopped"):
        await running
    async with await Host.open(home, images=layers) as host:
        assert await host.sandbox("box").read_file("a") == "1"


ROOT_OF_ONE = """
import asyncio, os, sys
from smokebox.engine import Host
from smokebox.errors import IsolationUnavailable
if sys.argv[2:]:
    with open(f"/proc/sys/user/{sys.argv[2]}", "w") as most:
        most.write("0")
async def main():
    async with await Host.open(sys.argv[1], pool=0) as host:
        try:
            print((await host.sandbox("box").exec("id -u; hostname")).stdout.split())
        except IsolationUnavailable as error:
            print(error.hint)
        print(os.listdir(f"{sys.argv[1]}/boxes"))
asyncio.run(main())
"""


def as_root_of_one_id(home: Path, *words: str) -> list[str]:
    """What an engine says that is root of a user namespace which has no other id."""
    line = ["unshare", "--user", "--map-root-user", sys.executable, "-c", ROOT_OF_ONE]
    done = subprocess.run([*line, str(home), *words], capture_output=True, text=True, timeout=18)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not installed")
def test_root_of_a_container_with_one_id_has_sandboxes_too(tmp_path: Path) -> None:
    assert as_root_of_one_id(tmp_path / "home")[0] == "['0', 'box']"


@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not installed")
@pytest.mark.parametrize("kind", ["user", "net"])
def test_a_kernel_that_gives_no_more_namespaces_is_explained(tmp_path: Path, kind: str) -> None:
    name = f"max_{kind}_namespaces"
    said = as_root_of_one_id(tmp_path / "home", name)
    assert said == [f"Run: sysctl -w user.{name}=15000", "[]"]


async def test_a_closed_engine_starts_nothing(tmp_path: Path, layers: Path) -> None:
    host = await Host.open(tmp_path / "home", images=layers, pool=0)
    old = host.sandbox("old")
    await old.wake()
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(outcome(old)) for _ in range(20)]
        await asyncio.sleep(0)
        group.create_task(host.aclose())
    assert {call.result() for call in calls} <= {"done", "gone"}
    assert await outcome(old) == "gone"
    with pytest.raises(SandboxGone, match="closed"):
        host.sandbox("other")
    await host.aclose()
    assert settled(lambda: [str(pid) for pid in processes(host.home)]) == []


async def outcome(sandbox: Any) -> str:
    try:
        await sandbox.exec("true")
    except SandboxGone:
        return "gone"
    return "done"


async def test_an_engine_that_detaches_leaves_everything_to_the_next(
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
        again = second.sandbox("box")
        assert again.cwd == "/srv"
        found = await again.processes.get("p")
        assert (found.pid, found.status) == (process.pid, "running")
        assert (await again.exec("echo $N $PWD $A", session="s")).stdout == "7 /tmp 1\n"
        assert (await info(second, "box")).generation == 1
        await found.kill()
        await again.destroy()
        assert traces(str(home)) == []


async def test_a_sandbox_that_died_with_nobody_watching_is_found_asleep(
    tmp_path: Path, layers: Path
) -> None:
    home = str(tmp_path / "home")
    first = await Host.open(home, images=layers, pool=0)
    sandbox = await first.create("box")
    await sandbox.start_process("sleep 100", process_id="p")
    await first.aclose(detach=True)
    for pid in processes(home):
        os.kill(pid, signal.SIGKILL)
    async with await Host.open(home, images=layers) as second:
        found = await info(second, "box")
        assert (found.status, found.stop_reason) == (
            "idle",
            "the engine was killed, and the sandbox did not outlive it",
        )
        assert (await second.sandbox("box").processes.get("p")).status == "killed"
        await second.sandbox("box").destroy()
        assert traces(home) == []


async def test_one_sandbox_that_cannot_be_adopted_does_not_keep_the_engine_from_opening(
    tmp_path: Path, layers: Path
) -> None:
    root = tmp_path / "root"
    (root / "etc").mkdir(parents=True)
    first = await Host.open(tmp_path / "home", images=layers, pool=0)
    await first.sandbox("good").write_file("a", "1")
    await first.sandbox("bad", image=f"dir:{root}").write_file("/a", "1")
    await first.aclose(detach=True)
    root.rename(tmp_path / "elsewhere")
    async with await Host.open(tmp_path / "home", images=layers) as second:
        assert (await info(second, "good")).status == "active"
        bad = await info(second, "bad")
        assert bad.status == "idle"
        assert "could not be adopted" in (bad.stop_reason or "")
        await second.sandbox("bad").destroy()


async def test_directories_that_nobody_knows_are_swept(tmp_path: Path, layers: Path) -> None:
    home = tmp_path / "home"
    await (await Host.open(home, images=layers)).aclose()
    (home / "boxes" / "stray" / "deep").mkdir(parents=True)
    async with await Host.open(home, images=layers):
        assert os.listdir(home / "boxes") == []


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A home on a disk of 2 MiB."""
    home = tmp_path / "tiny"
    home.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "tmpfs", home], check=True)
    yield home
    subprocess.run(["umount", home], check=True)


@needs_root
async def test_a_full_disk_is_said_and_leaves_nothing_half_made(tiny: Path, layers: Path) -> None:
    async with await Host.open(tiny, images=layers, pool=0) as host:
        kept = await host.create("kept")
        fill = tiny / "fill"
        with pytest.raises(OSError), fill.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        for n in range(3):
            with pytest.raises(SmokeboxError) as caught:
                await host.create(f"none-{n}")
            assert isinstance(caught.value, StorageFull), caught.value
        fill.unlink()
        assert [one.id for one in await host.list()] == ["kept"]
        assert len(os.listdir(tiny / "boxes")) == 1
        assert (await kept.exec("echo fine")).stdout == "fine\n"
        assert (await host.create("room")).id == "room"


async def test_a_record_that_fails_leaves_nothing_half_made(host: Host) -> None:
    with contextlib.closing(sqlite3.connect(f"{host.home}/record.db")) as record:
        record.execute(
            "CREATE TRIGGER refuse BEFORE INSERT ON sandboxes "
            "BEGIN SELECT RAISE(ABORT, 'refused'); END"
        )
        with pytest.raises(SmokeboxError, match="refused"):
            await host.create("none")
        assert traces(host.home) == []
        assert await host.sandbox("none").info() is None
        record.execute("DROP TRIGGER refuse")
    assert (await host.sandbox("none").exec("echo fine")).stdout == "fine\n"


async def test_a_hundred_at_once(host: Host) -> None:
    async with asyncio.TaskGroup() as group:
        made = [group.create_task(host.create(f"n-{n}")) for n in range(100)]
    results = await asyncio.gather(*(task.result().exec("hostname") for task in made))
    assert [result.stdout for result in results] == [f"n-{n}\n" for n in range(100)]
    await asyncio.gather(*(task.result().destroy() for task in made))
    assert traces(host.home) == []


async def test_a_sandbox_without_a_name_gets_one_of_its_own(host: Host) -> None:
    first, second = await host.create(), await host.create()
    assert first.id != second.id
    assert host.sandbox(first.id) is first


async def filled(host: Host) -> set[str]:
    """The directories of what was made ahead, once all of it is."""
    known = {row.key for row in await host._context.record.sandboxes()}
    async with asyncio.timeout(10):
        while len(host._context.pool._ready) < 2:
            await asyncio.sleep(0.01)
    return set(os.listdir(f"{host.home}/boxes")) - known


async def test_a_sandbox_is_taken_from_the_pool(pooled: Host) -> None:
    await pooled.create("first")
    ahead = await filled(pooled)
    sandbox = await pooled.create("second", limits={"memory": "128MiB"}, env={"A": "1"})
    row = await sandbox.life.row()
    assert row is not None
    assert row.key in ahead
    assert (await sandbox.exec("hostname; echo $A")).stdout == "second\n1\n"
    await filled(pooled)


async def test_what_died_in_the_pool_is_not_handed_out(pooled: Host) -> None:
    await pooled.create("first")
    ahead = await filled(pooled)
    for ready in pooled._context.pool._ready:
        os.kill(ready.jail.state.pid, signal.SIGKILL)
        await ready.jail.wait()
    sandbox = await pooled.create("second")
    assert (await sandbox.exec("echo fine")).stdout == "fine\n"
    assert not ahead & await filled(pooled)


async def test_what_is_in_the_pool_goes_with_the_engine(tmp_path: Path, layers: Path) -> None:
    for delay in (0, 0.06, 0.08, 0.1, 0.3):
        home = str(tmp_path / f"home-{delay}")
        async with await Host.open(home, pool=3, images=layers) as host:
            await (await host.create("one")).destroy()
            await asyncio.sleep(delay)
        assert traces(home) == []


async def test_a_zygote_that_is_killed_is_started_again(host: Host) -> None:
    await host.create("before")
    [jailer] = [one for one in host._context.jailers.values() if one.tier == "namespaces"]
    zygote = jailer._zygote._process  # type: ignore[attr-defined]
    zygote.kill()
    await asyncio.gather(*(host.create(f"after-{n}") for n in range(5)), return_exceptions=True)
    for id in ("before", *(f"after-{n}" for n in range(5))):
        assert (await host.sandbox(id).exec("hostname")).stdout == f"{id}\n"
    assert len(os.listdir(f"{host.home}/boxes")) == 6
