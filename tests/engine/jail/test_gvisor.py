"""A jail with a kernel of its own: all that one of namespaces does, through gVisor."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

import smokebox
from engine.lasting_box import Box, lay_skeleton
from ordinary import NOBODY, as_nobody
from places import PREFIX
from smokebox.engine.jail import guest_requests, kernfs
from smokebox.engine.jail.api import JailState
from smokebox.engine.jail.cgroup_hierarchy import detect
from smokebox.engine.jail.guest_interpreter import GuestInterpreter, provide
from smokebox.engine.jail.gvisor import RUNSC, GvisorJailer
from smokebox.engine.jail.zygote_jail import start_time
from smokebox.engine.sessions.sessions import Sessions
from smokebox.errors import IsolationUnavailable, PathNotFound, SandboxGone, Unsupported
from smokebox.limits import Limits
from smokebox.runtime.supervisor import descendants

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from smokebox.types import ExecResult

pytestmark = pytest.mark.gvisor

# What is another matter where there is one id, and there are no cgroups.
AGAIN = (
    "exit_codes or timeout or both_sides or next_run or pipes_of or lasting or killed_leaves"
    " or leaves_nothing or one_id or without_cgroups or stats or fork_bomb or session"
)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="other users and cgroups need root")


class GvisorBox(Box):
    """The box of the tests of lasting processes, in this tier."""

    def __init__(self, home: Path, copies: Path) -> None:
        super().__init__(home, f"g{secrets.token_hex(6)}")
        self.jailer = GvisorJailer(str(copies))  # type: ignore[assignment]

    async def exec(
        self,
        command: str | list[str],
        *,
        user: str | None = None,
        stdin: bytes | None = None,
        timeout: float | None = 15.0,
    ) -> ExecResult:
        run = self.run
        return await run.execute(
            await run.program(command, user=user),
            max_output=1 << 20,
            stdin=stdin,
            timeout=timeout,
        )

    async def tell(self, command: str) -> str:
        """What a command that does well writes."""
        result = await self.exec(command)
        assert (result.exit_code, result.stderr) == (0, "")
        return result.stdout

    def read_file(self, path: str) -> str:
        with open(os.open(path, os.O_RDONLY, dir_fd=self.jail.root)) as file:
            return file.read()


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the copy of the interpreter is, made once."""
    return tmp_path_factory.mktemp("copies")


@pytest_asyncio.fixture
async def box(tmp_path: Path, copies: Path) -> AsyncIterator[GvisorBox]:
    lay_skeleton(tmp_path)
    tmp_path.chmod(0o700)
    box = GvisorBox(tmp_path, copies)
    await box.create()
    yield box
    await box.aclose()


@pytest_asyncio.fixture
async def bare(tmp_path: Path, copies: Path) -> AsyncIterator[GvisorBox]:
    """One that nobody has started."""
    lay_skeleton(tmp_path)
    bare = GvisorBox(tmp_path, copies)
    yield bare
    if hasattr(bare, "jail"):
        await bare.jail.kill()
    await bare.jailer.aclose()


async def test_the_kernel_that_programs_see_is_not_the_hosts(box: GvisorBox) -> None:
    assert await box.tell("hostname; id -u; pwd") == "box\n0\n/workspace\n"
    assert (await box.tell("uname -r")).strip() != os.uname().release
    assert "gVisor" in await box.tell("dmesg")


async def test_what_only_building_needed_is_given_up(box: GvisorBox) -> None:
    status = await box.tell("grep -E 'Cap(Eff|Bnd)' /proc/self/status")
    assert status.split()[1::2] == ["00000000000404fb"] * 2
    assert (await box.exec("mount -t tmpfs none /mnt")).exit_code != 0
    assert await box.tell("cat /proc/mounts | grep -c cgroup || true") == "0\n"


async def test_exit_codes_output_and_stdin(box: GvisorBox) -> None:
    result = await box.exec("cat; echo err >&2; exit 3", stdin=b"from outside\n")
    assert (result.exit_code, result.stdout, result.stderr) == (3, "from outside\n", "err\n")
    assert (await box.exec("kill -9 $$")).exit_code == 137
    assert (await box.exec(["no-such-program"])).exit_code == 127
    assert len((await box.exec("head -c 1000000 /dev/zero | tr '\\0' x")).stdout) == 1000000
    with pytest.raises(PathNotFound):
        await box.run.execute(await box.run.program("true", cwd="/no"), max_output=9)


async def test_a_timeout_kills_daemons_and_who_ignores_it(box: GvisorBox) -> None:
    hidden = "(setsid setsid sleep 1001 &) ; trap '' TERM; (trap '' TERM; sleep 1001) & sleep 1001"
    result = await box.exec(f"echo before; {hidden}", timeout=0.5)
    assert (result.exit_code, result.timed_out, result.stdout) == (124, True, "before\n")
    assert await running(box, "1001") == 0


async def test_a_command_that_is_let_go_of_is_killed(box: GvisorBox) -> None:
    call = asyncio.create_task(box.exec("setsid sleep 1002 & sleep 1002"))
    await eventually(lambda: sleeps(box, "1002"))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await running(box, "1002") == 0


async def test_a_child_in_the_background_does_not_hold_the_call(box: GvisorBox) -> None:
    async with asyncio.timeout(8):
        assert await box.tell("sleep 1003 & echo done") == "done\n"
    assert await running(box, "1003") == 1
    assert await box.tell("pkill -f '[s]leep 1003'; echo $?") == "0\n"


async def test_many_at_once(box: GvisorBox) -> None:
    results = await asyncio.gather(*(box.exec(f"echo {n}; exit {n}") for n in range(24)))
    assert [(r.exit_code, r.stdout) for r in results] == [(n, f"{n}\n") for n in range(24)]


@as_root
async def test_another_user(box: GvisorBox) -> None:
    await box.tell("mkdir -m 777 /workspace/open")
    result = await box.exec("id -u; touch /workspace/open/mine; touch /workspace/not", user="alice")
    assert (result.exit_code, result.stdout) == (1, "1000\n")
    kept = Path(box.directory, "data/upper/0/workspace/open/mine")
    assert kept.stat().st_uid == 1000
    # What the agent ignores, its commands do not.
    assert (await box.exec("kill -TERM $$; echo ignored", user="alice")).exit_code == 143


@pytest.mark.skipif(os.geteuid() == 0, reason="root has ids to give")
async def test_an_ordinary_user_has_one_id_to_give(box: GvisorBox) -> None:
    with pytest.raises(Unsupported):
        await box.exec("true", user="alice")


async def test_files_are_the_same_on_both_sides_at_once(box: GvisorBox) -> None:
    # Files of the host's root are nobody's to an ordinary user's sandbox.
    paths = ["workspace/file", "tmp/file"] + ["usr/share/made"] * (os.geteuid() == 0)
    for path in paths:
        await box.tell(f"echo inside > /{path}")
        assert box.read_file(path) == "inside\n"
        assert os.stat(path, dir_fd=box.jail.root).st_uid == box.jail.owner.uid
        fd = os.open(path, os.O_WRONLY | os.O_TRUNC, dir_fd=box.jail.root)
        os.write(fd, b"outside\n")
        os.close(fd)
        assert await box.tell(f"cat /{path}") == "outside\n"
        os.unlink(path, dir_fd=box.jail.root)
        assert await box.tell(f"test -e /{path} || echo gone") == "gone\n"


async def test_files_are_kept_for_the_next_run(box: GvisorBox) -> None:
    await box.tell("echo kept > /workspace/file; echo too > /tmp/file")
    await box.sleep()
    await box.wake()
    assert await box.tell("cat /workspace/file /tmp/file") == "kept\ntoo\n"


async def test_a_socket_of_its_network(box: GvisorBox) -> None:
    server = (
        "import socket; s = socket.create_server(('127.0.0.1', 80));"
        " s.accept()[0].send(b'from inside')"
    )
    serving = asyncio.create_task(box.exec(["python3", "-c", server]))
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(10):
        while True:
            with await guest_requests.open_socket(box.jail) as sock:
                try:
                    await loop.sock_connect(sock, ("127.0.0.1", 80))
                except ConnectionRefusedError:
                    await asyncio.sleep(0.05)
                    continue
                assert await loop.sock_recv(sock, 100) == b"from inside"
                break
    assert (await serving).exit_code == 0


async def test_pipes_of_the_engine_can_be_written_and_nothing_else_there(box: GvisorBox) -> None:
    pipe = Path(box.directory, "run/io/pipe")
    os.mkfifo(pipe)
    os.chmod(pipe, 0o666)
    # Not by a thread, which would wait for ever for a writer that does not come.
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        await box.tell("echo through > /run/smokebox/pipe")
        assert os.read(reading, 100) == b"through\n"
    finally:
        os.close(reading)
    for attempt in ("touch x", "rm pipe", "mkdir d", "rm -r agent", "echo > agent/src/main.py"):
        assert (await box.exec(f"cd /run/smokebox && {attempt}")).exit_code != 0


async def test_a_lasting_process_has_logs_stdin_and_an_end(box: GvisorBox) -> None:
    process = await box.processes.start(
        "read word; echo heard $word; echo >&2 no; exit 7", stdin=True
    )
    await process.write_stdin("this\n")
    assert await process.wait_for_exit(10) == 7
    logs = await process.logs()
    assert (logs.stdout, logs.stderr) == ("heard this\n", "no\n")


async def test_a_lasting_process_is_killed_with_all_that_it_started(box: GvisorBox) -> None:
    process = await box.processes.start("(setsid sleep 1004 &); echo up; sleep 1004")
    await process.wait_for_log("up", 10)
    await process.kill()
    assert await running(box, "1004") == 0


async def test_the_log_of_a_lasting_process_is_bounded(box: GvisorBox) -> None:
    process = await box.processes.start("head -c 80000000 /dev/zero; echo; echo end")
    assert await process.wait_for_exit(15) == 0
    (log,) = Path(box.directory, "run").glob("*.out")
    assert log.stat().st_size == 80000005
    assert log.stat().st_blocks * 512 <= 70 << 20
    assert (await process.logs()).stdout.endswith("end\n")


async def test_a_lasting_process_outlives_the_engine(box: GvisorBox) -> None:
    process = await box.processes.start("echo one; read; echo two; exit 5", stdin=True)
    await process.wait_for_log("one", 10)
    await box.crash()
    assert await box.tell("echo still here") == "still here\n"
    (found,) = await box.processes.list()
    await found.write_stdin("\n")
    assert await found.wait_for_exit(10) == 5
    assert (await found.logs()).stdout == "one\ntwo\n"


async def test_a_session_keeps_its_state_and_its_commands_end_alone(box: GvisorBox) -> None:
    sessions = Sessions(id="box", record=box.record, use=box.use)
    session = await sessions.create("s")
    await session.exec("cd /tmp; X=1; setsid sleep 1010 >/dev/null 2>&1 &")
    assert (await session.exec("setsid sleep 1011 & sleep 1011", timeout=0.5)).timed_out
    assert (await session.exec("echo $PWD $X")).stdout == "/tmp 1\n"
    assert (await running(box, "1010"), await running(box, "1011")) == (1, 0)
    await sessions.delete("s")
    assert await running(box, "1010") == 0


async def test_an_engine_that_was_killed_leaves_a_jail_for_the_next(
    bare: GvisorBox, tmp_path: Path, copies: Path
) -> None:
    state = JailState(**await asyncio.to_thread(make_and_die, tmp_path, copies, entered=True))
    bare.key = state.key
    found = await bare.jailer.adopt(bare.spec, state)
    assert found is not None
    bare.jail = found
    assert await bare.tell("cat /workspace/file") == "of the first engine\n"
    assert bare.read_file("workspace/file") == "of the first engine\n"
    await found.kill()
    assert await bare.jailer.adopt(bare.spec, found.state) is None


async def test_a_jail_that_was_not_entered_dies_with_its_engine(
    tmp_path: Path, copies: Path
) -> None:
    lay_skeleton(tmp_path)
    state = await asyncio.to_thread(make_and_die, tmp_path, copies, entered=False)
    await eventually(lambda: is_gone(state["pid"]))
    # As the next engine would.
    detect().adopt(state["key"], state["pid"]).remove()


async def test_killing_it_leaves_nothing(bare: GvisorBox, tmp_path: Path) -> None:
    await bare.wake()
    jail = bare.jail
    await bare.exec("setsid sleep 1005 >/dev/null 2>&1 & true")
    pids = [jail.state.pid, *descendants(jail.state.pid)]
    # The porter, the kernel, who opens files for it, and programs.
    assert len(pids) > 3
    await jail.kill()
    await jail.kill()
    assert [pid for pid in pids if kernfs.state(pid) not in "ZX"] == []
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
    assert not any(Path(place, bare.key).exists() for place in detect().placement.directories)
    assert sorted(os.listdir(tmp_path / "box/run")) == ["init.sock", "io"]
    assert os.listdir(tmp_path / "box/root") == []
    with pytest.raises(SandboxGone):
        await jail.connect()


async def test_signals_of_a_sandbox_do_not_end_its_first_process(box: GvisorBox) -> None:
    for number in ("TERM", "HUP", "INT", "USR1", "SEGV"):
        assert (await box.exec(f"kill -{number} 1")).exit_code == 0
    with pytest.raises(SandboxGone):
        await box.exec("kill -9 -1; sleep 9")
    assert await box.tell("echo works") == "works\n"


async def test_a_sandbox_that_kills_its_first_process_has_ended(box: GvisorBox) -> None:
    with pytest.raises(SandboxGone):
        await box.exec("kill -9 1; sleep 9")
    async with asyncio.timeout(10):
        await box.jail.wait()
    with pytest.raises(SandboxGone):
        await box.exec("true")


async def test_a_sandbox_that_stops_its_first_process_can_be_killed(box: GvisorBox) -> None:
    await box.exec("kill -STOP 1", timeout=2)
    await box.sleep()
    await box.wake()
    assert await box.tell("echo works") == "works\n"


FLEE = """
import os, subprocess, time
child = subprocess.Popen(["setsid", "sleep", "1008"])
for pid in (1, os.getppid()):
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            with open(f"/proc/{pid}/fd/{fd}/cgroup.procs", "w") as file:
                file.write(str(child.pid))
        except OSError:
            pass
time.sleep(1009)
"""


async def test_who_leaves_the_group_of_its_minder_ends_with_the_command(box: GvisorBox) -> None:
    """The cgroups are hidden, but the agent holds them open."""
    result = await box.exec(["python3", "-c", FLEE], timeout=1)
    assert result.timed_out
    await eventually(lambda: sleeps_no_more(box, "1008"))
    assert await box.tell("echo works") == "works\n"


async def test_who_kills_the_minder_does_not_free_the_command(box: GvisorBox) -> None:
    with pytest.raises(SandboxGone):
        await box.exec("(setsid sleep 1006 &); kill -9 $PPID; sleep 1006")
    await eventually(lambda: sleeps_no_more(box, "1006"))


@as_root
async def test_freezing_stops_all_and_thawing_goes_on(box: GvisorBox) -> None:
    counting = asyncio.create_task(
        box.exec("for i in 1 2 3 4 5 6; do echo $i >> /workspace/n; sleep 0.2; done")
    )
    await eventually(lambda: size_of(box, "workspace/n"))
    await box.jail.freeze()
    seen = os.stat("workspace/n", dir_fd=box.jail.root).st_size
    await asyncio.sleep(0.6)
    assert os.stat("workspace/n", dir_fd=box.jail.root).st_size == seen
    await box.jail.thaw()
    assert (await counting).exit_code == 0
    assert os.stat("workspace/n", dir_fd=box.jail.root).st_size == 12


@pytest.mark.skipif(detect().enforcement != "rlimits", reason="this host has cgroups for us")
async def test_without_cgroups_nothing_can_be_frozen(box: GvisorBox) -> None:
    with pytest.raises(Unsupported, match="paused"):
        await box.jail.freeze()


async def test_stats_and_limits_count_the_kernel_too(box: GvisorBox) -> None:
    stats = await box.jail.stats()
    assert stats.memory is not None
    assert stats.memory > 10 << 20
    assert stats.cpu_seconds
    await box.jail.set_limits(Limits(memory=1 << 30, pids=100))
    assert await box.tell("echo works") == "works\n"


@as_root
async def test_out_of_memory_ends_the_sandbox_and_is_counted(box: GvisorBox) -> None:
    await box.jail.set_limits(Limits(memory=160 << 20))
    with pytest.raises(SandboxGone):
        await box.exec(["python3", "-c", "x = bytearray(400 << 20)"])
    async with asyncio.timeout(10):
        await box.jail.wait()
    assert (await box.jail.stats()).oom_kills


async def test_a_fork_bomb_meets_its_limit(bare: GvisorBox) -> None:
    bare.jail = await bare.jailer.make(bare.spec)
    await bare.jail.enter("box", Limits(pids=40))
    bomb = "for i in $(seq 60); do sleep 1007 & done; wait"
    result = await bare.exec(bomb, timeout=2)
    assert "fork" in result.stderr
    assert await bare.tell("echo works") == "works\n"


async def test_the_copy_of_the_interpreter_is_made_once_and_old_ones_go(tmp_path: Path) -> None:
    old, used, broken = tmp_path / "old", tmp_path / "used", tmp_path / ".broken"
    for path in (old, used):
        path.mkdir()
        (path / "argv.json").write_text("[]")
    broken.mkdir()
    holding = GuestInterpreter(path=str(used), argv=()).hold()
    made = await asyncio.to_thread(provide, str(tmp_path))
    assert set(os.listdir(tmp_path)) == {os.path.basename(made.path), "used", "lock"}
    before = os.stat(made.path).st_ctime_ns
    assert await asyncio.to_thread(provide, str(tmp_path)) == made
    assert os.stat(made.path).st_ctime_ns == before
    os.close(holding)


async def test_without_runsc_the_error_says_what_mends_it(
    bare: GvisorBox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(RUNSC, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(IsolationUnavailable, match="runsc") as caught:
        await bare.jailer.make(bare.spec)
    assert "apt-get install -y runsc" in caught.value.hint
    assert caught.value.fields["tier"] == "gvisor"


async def test_a_runsc_that_fails_has_the_last_word(
    bare: GvisorBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A static program that knows none of these options.
    monkeypatch.setenv(RUNSC, "/sbin/ldconfig")
    with pytest.raises(IsolationUnavailable, match="usage") as caught:
        await bare.jailer.make(bare.spec)
    assert RUNSC in caught.value.hint


@as_root
@pytest.mark.timeout(300)
def test_the_same_as_an_ordinary_user() -> None:
    if not shutil.which("setpriv"):
        pytest.skip("becoming an ordinary user takes setpriv")
    site, source = Path(pytest.__file__).parents[1], Path(smokebox.__file__).parents[1]
    who = [*as_nobody(), "/usr/bin/python3"]
    variables = {"PYTHONPATH": f"{source}:{site}", "PYTHONDONTWRITEBYTECODE": "1"}
    environ = {name: os.environ[name] for name in ("PATH", RUNSC) if name in os.environ}
    # Where pytest keeps its folders, others cannot go.
    with tempfile.TemporaryDirectory(dir="/tmp", prefix=PREFIX) as folder:
        os.chown(folder, NOBODY, NOBODY)
        options = ["-p", "no:cacheprovider", f"--basetemp={folder}/again", "-k", AGAIN, "-x"]
        done = subprocess.run(
            [*who, "-m", "pytest", *options, __file__],
            env={**environ, **variables},
            cwd=source.parent,
            capture_output=True,
            text=True,
        )
    if "No module named pytest" in done.stderr:
        pytest.skip("the python that an ordinary user can run here has no pytest")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


def make_and_die(home: Path, copies: Path, *, entered: bool) -> dict[str, Any]:
    """Have another process make a jail and be killed; what it said of the jail."""
    script = f"""
        import asyncio, json, os
        from dataclasses import asdict
        from pathlib import Path
        from engine.jail.test_gvisor import GvisorBox, Limits
        async def main():
            box = GvisorBox(Path({str(home)!r}), Path({str(copies)!r}))
            jail = box.jail = await box.jailer.make(box.spec)
            if {entered}:
                await jail.enter("box", Limits())
                await box.tell("echo of the first engine > /workspace/file")
            print(json.dumps(asdict(jail.state)), flush=True)
            os.kill(os.getpid(), 9)
        asyncio.run(main())
    """
    tests = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), *sys.path])},
        timeout=15,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    state: dict[str, Any] = json.loads(done.stdout)
    return state


async def eventually(condition: Callable[[], Awaitable[object]]) -> None:
    """Return when it is so, which it has to be soon."""
    async with asyncio.timeout(10):
        while not await condition():
            await asyncio.sleep(0.05)


async def running(box: GvisorBox, seconds: str) -> int:
    """How many processes in the box sleep for that long."""
    return int((await box.exec(["pgrep", "-xfc", f"sleep {seconds}"])).stdout)


async def sleeps(box: GvisorBox, seconds: str) -> bool:
    return await running(box, seconds) > 0


async def sleeps_no_more(box: GvisorBox, seconds: str) -> bool:
    return await running(box, seconds) == 0


async def is_gone(pid: int) -> bool:
    return start_time(pid) == 0


async def size_of(box: GvisorBox, path: str) -> int:
    try:
        return os.stat(path, dir_fd=box.jail.root).st_size
    except FileNotFoundError:
        return 0
