"""Jails with a gVisor kernel: commands, processes, files, adoption and limits."""

from __future__ import annotations

import asyncio
import importlib
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
from engine.awake_sandbox import AwakeSandbox, create_skeleton
from short_directory import PREFIX
from smokebox.engine.jail import guest_interpreter, guest_requests, kernfs
from smokebox.engine.jail.cgroup_hierarchy import detect
from smokebox.engine.jail.guest_interpreter import GuestInterpreter, provide
from smokebox.engine.jail.gvisor import RUNSC, GvisorJailer
from smokebox.engine.jail.jail import start_time
from smokebox.engine.jail.spec import JailState
from smokebox.errors import IsolationUnavailable, PathNotFound, SandboxGone, Unsupported
from smokebox.limits import Limits
from smokebox.runtime.supervisor import descendants
from unprivileged import NOBODY, as_nobody

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from smokebox.types import ExecResult

pytestmark = pytest.mark.gvisor

# Tests that differ for a user with one id and without cgroups.
UNPRIVILEGED = (
    "exit_codes or timeout or both_sides or next_run or engine_pipes or background or adopted"
    " or leaves_nothing or one_id or without_cgroups or stats or fork_bomb or session"
)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for other users and cgroups")


class GvisorSandbox(AwakeSandbox):
    """An awake sandbox of the gVisor tier."""

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

    async def output_of(self, command: str) -> str:
        """Run a command that succeeds, and return its stdout."""
        result = await self.exec(command)
        assert (result.exit_code, result.stderr) == (0, "")
        return result.stdout

    def read_file(self, path: str) -> str:
        with open(os.open(path, os.O_RDONLY, dir_fd=self.jail.root)) as file:
            return file.read()


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the copied interpreter."""
    return tmp_path_factory.mktemp("copies")


@pytest_asyncio.fixture
async def sandbox(tmp_path: Path, copies: Path) -> AsyncIterator[GvisorSandbox]:
    create_skeleton(tmp_path)
    tmp_path.chmod(0o700)
    sandbox = GvisorSandbox(tmp_path, copies)
    await sandbox.create()
    yield sandbox
    await sandbox.aclose()


@pytest_asyncio.fixture
async def stopped(tmp_path: Path, copies: Path) -> AsyncIterator[GvisorSandbox]:
    """Return a sandbox that is not started."""
    create_skeleton(tmp_path)
    stopped = GvisorSandbox(tmp_path, copies)
    yield stopped
    if hasattr(stopped, "jail"):
        await stopped.jail.kill()
    await stopped.jailer.aclose()


async def test_programs_see_gvisor_kernel(sandbox: GvisorSandbox) -> None:
    assert await sandbox.output_of("hostname; id -u; pwd") == "box\n0\n/workspace\n"
    assert (await sandbox.output_of("uname -r")).strip() != os.uname().release
    assert "gVisor" in await sandbox.output_of("dmesg")


async def test_privileges_of_setup_are_dropped(sandbox: GvisorSandbox) -> None:
    status = await sandbox.output_of("grep -E 'Cap(Eff|Bnd)' /proc/self/status")
    assert status.split()[1::2] == ["00000000000404fb"] * 2
    assert (await sandbox.exec("mount -t tmpfs none /mnt")).exit_code != 0
    assert await sandbox.output_of("cat /proc/mounts | grep -c cgroup || true") == "0\n"


async def test_exit_codes_output_and_stdin(sandbox: GvisorSandbox) -> None:
    result = await sandbox.exec("cat; echo err >&2; exit 3", stdin=b"from outside\n")
    assert (result.exit_code, result.stdout, result.stderr) == (3, "from outside\n", "err\n")
    assert (await sandbox.exec("kill -9 $$")).exit_code == 137
    assert (await sandbox.exec(["no-such-program"])).exit_code == 127
    assert len((await sandbox.exec("head -c 1000000 /dev/zero | tr '\\0' x")).stdout) == 1000000
    with pytest.raises(PathNotFound):
        await sandbox.run.execute(await sandbox.run.program("true", cwd="/no"), max_output=9)


async def test_timeout_kills_daemons_and_processes_that_ignore_sigterm(
    sandbox: GvisorSandbox,
) -> None:
    hidden = "(setsid setsid sleep 1001 &) ; trap '' TERM; (trap '' TERM; sleep 1001) & sleep 1001"
    result = await sandbox.exec(f"echo before; {hidden}", timeout=0.5)
    assert (result.exit_code, result.timed_out, result.stdout) == (124, True, "before\n")
    assert await sleepers(sandbox, "1001") == 0


async def test_cancelled_command_is_killed(sandbox: GvisorSandbox) -> None:
    call = asyncio.create_task(sandbox.exec("setsid sleep 1002 & sleep 1002"))
    await eventually(lambda: sleepers(sandbox, "1002"))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await sleepers(sandbox, "1002") == 0


async def test_background_child_does_not_delay_result(sandbox: GvisorSandbox) -> None:
    async with asyncio.timeout(8):
        assert await sandbox.output_of("sleep 1003 & echo done") == "done\n"
    assert await sleepers(sandbox, "1003") == 1
    assert await sandbox.output_of("pkill -f '[s]leep 1003'; echo $?") == "0\n"


async def test_many_commands_at_once(sandbox: GvisorSandbox) -> None:
    results = await asyncio.gather(*(sandbox.exec(f"echo {n}; exit {n}") for n in range(24)))
    assert [(r.exit_code, r.stdout) for r in results] == [(n, f"{n}\n") for n in range(24)]


@as_root
async def test_command_runs_as_another_user(sandbox: GvisorSandbox) -> None:
    await sandbox.output_of("mkdir -m 777 /workspace/open")
    result = await sandbox.exec(
        "id -u; touch /workspace/open/mine; touch /workspace/not", user="alice"
    )
    assert (result.exit_code, result.stdout) == (1, "1000\n")
    path = Path(sandbox.path, "data/upper/0/workspace/open/mine")
    assert path.stat().st_uid == 1000
    # Guest init ignores signals, its commands do not.
    assert (await sandbox.exec("kill -TERM $$; echo ignored", user="alice")).exit_code == 143


@pytest.mark.skipif(os.geteuid() == 0, reason="root has more than one id")
async def test_unprivileged_user_has_one_id(sandbox: GvisorSandbox) -> None:
    with pytest.raises(Unsupported):
        await sandbox.exec("true", user="alice")


async def test_files_are_the_same_on_both_sides(sandbox: GvisorSandbox) -> None:
    # In the sandbox of an unprivileged user, files of the host's root have no owner.
    paths = ["workspace/file", "tmp/file"] + ["usr/share/made"] * (os.geteuid() == 0)
    for path in paths:
        await sandbox.output_of(f"echo inside > /{path}")
        assert sandbox.read_file(path) == "inside\n"
        assert os.stat(path, dir_fd=sandbox.jail.root).st_uid == sandbox.jail.owner.uid
        fd = os.open(path, os.O_WRONLY | os.O_TRUNC, dir_fd=sandbox.jail.root)
        os.write(fd, b"outside\n")
        os.close(fd)
        assert await sandbox.output_of(f"cat /{path}") == "outside\n"
        os.unlink(path, dir_fd=sandbox.jail.root)
        assert await sandbox.output_of(f"test -e /{path} || echo gone") == "gone\n"


async def test_files_are_kept_for_the_next_run(sandbox: GvisorSandbox) -> None:
    await sandbox.output_of("echo kept > /workspace/file; echo too > /tmp/file")
    await sandbox.sleep()
    await sandbox.wake()
    assert await sandbox.output_of("cat /workspace/file /tmp/file") == "kept\ntoo\n"


async def test_open_socket_connects_to_server_inside(sandbox: GvisorSandbox) -> None:
    server = (
        "import socket; s = socket.create_server(('127.0.0.1', 80));"
        " s.accept()[0].send(b'from inside')"
    )
    serving = asyncio.create_task(sandbox.exec(["python3", "-c", server]))
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(10):
        while True:
            with await guest_requests.open_socket(sandbox.jail) as sock:
                try:
                    await loop.sock_connect(sock, ("127.0.0.1", 80))
                except ConnectionRefusedError:
                    await asyncio.sleep(0.05)
                    continue
                assert await loop.sock_recv(sock, 100) == b"from inside"
                break
    assert (await serving).exit_code == 0


async def test_only_engine_pipes_are_writable_in_their_directory(sandbox: GvisorSandbox) -> None:
    pipe = Path(sandbox.path, "run/io/pipe")
    os.mkfifo(pipe)
    os.chmod(pipe, 0o666)
    # Non-blocking: a thread would wait for ever if there is no writer.
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        await sandbox.output_of("echo through > /run/smokebox/pipe")
        assert os.read(reading, 100) == b"through\n"
    finally:
        os.close(reading)
    for attempt in (
        "touch x",
        "rm pipe",
        "mkdir d",
        "rm -r interpreter",
        "echo > interpreter/src/main.py",
    ):
        assert (await sandbox.exec(f"cd /run/smokebox && {attempt}")).exit_code != 0


async def test_background_process_has_logs_stdin_and_exit_code(sandbox: GvisorSandbox) -> None:
    process = await sandbox.processes.start(
        "read word; echo got $word; echo >&2 no; exit 7", stdin=True
    )
    await process.write_stdin("this\n")
    assert await process.wait_for_exit(10) == 7
    logs = await process.logs()
    assert (logs.stdout, logs.stderr) == ("got this\n", "no\n")


async def test_background_process_is_killed_with_its_descendants(sandbox: GvisorSandbox) -> None:
    process = await sandbox.processes.start("(setsid sleep 1004 &); echo up; sleep 1004")
    await process.wait_for_log("up", 10)
    await process.kill()
    assert await sleepers(sandbox, "1004") == 0


async def test_log_of_background_process_is_bounded(sandbox: GvisorSandbox) -> None:
    process = await sandbox.processes.start("head -c 80000000 /dev/zero; echo; echo end")
    assert await process.wait_for_exit(15) == 0
    (log,) = Path(sandbox.path, "run").glob("*.out")
    assert log.stat().st_size == 80000005
    assert log.stat().st_blocks * 512 <= 70 << 20
    assert (await process.logs()).stdout.endswith("end\n")


async def test_background_process_outlives_engine(sandbox: GvisorSandbox) -> None:
    process = await sandbox.processes.start("echo one; read; echo two; exit 5", stdin=True)
    await process.wait_for_log("one", 10)
    await sandbox.crash()
    assert await sandbox.output_of("echo still here") == "still here\n"
    (found,) = await sandbox.processes.list()
    await found.write_stdin("\n")
    assert await found.wait_for_exit(10) == 5
    assert (await found.logs()).stdout == "one\ntwo\n"


async def test_session_keeps_state_when_a_command_times_out(sandbox: GvisorSandbox) -> None:
    session = await sandbox.sessions.create("s")
    await session.exec("cd /tmp; X=1; setsid sleep 1010 >/dev/null 2>&1 &")
    assert (await session.exec("setsid sleep 1011 & sleep 1011", timeout=0.5)).timed_out
    assert (await session.exec("echo $PWD $X")).stdout == "/tmp 1\n"
    assert (await sleepers(sandbox, "1010"), await sleepers(sandbox, "1011")) == (1, 0)
    await sandbox.sessions.delete("s")
    assert await sleepers(sandbox, "1010") == 0


async def test_jail_of_killed_engine_is_adopted(
    stopped: GvisorSandbox, tmp_path: Path, copies: Path
) -> None:
    state = JailState(**await asyncio.to_thread(create_and_die, tmp_path, copies, entered=True))
    stopped.key = state.key
    found = await stopped.jailer.adopt(stopped.spec, state)
    assert found is not None
    stopped.jail = found
    assert await stopped.output_of("cat /workspace/file") == "of the first engine\n"
    assert stopped.read_file("workspace/file") == "of the first engine\n"
    await found.kill()
    assert await stopped.jailer.adopt(stopped.spec, found.state) is None


async def test_orphaned_jail_ends_after_its_timeout(stopped: GvisorSandbox) -> None:
    stopped.jail = await stopped.jailer.make(stopped.spec)
    await stopped.jail.enter("box", Limits(), orphan_timeout=0.5)
    await asyncio.sleep(1)
    assert await stopped.output_of("hostname") == "box\n"
    adopted = await stopped.jailer.adopt(stopped.spec, stopped.jail.state)
    assert adopted is not None
    stopped.jail.close()
    await asyncio.sleep(1)
    assert adopted.alive
    adopted.close()
    await eventually(lambda: is_gone(adopted.state.pid))
    detect().adopt(adopted.state.key, adopted.state.pid).remove()


async def test_jail_that_was_not_entered_ends_with_its_engine(tmp_path: Path, copies: Path) -> None:
    create_skeleton(tmp_path)
    state = await asyncio.to_thread(create_and_die, tmp_path, copies, entered=False)
    await eventually(lambda: is_gone(state["pid"]))
    # The next engine would remove it.
    detect().adopt(state["key"], state["pid"]).remove()


async def test_kill_leaves_nothing(stopped: GvisorSandbox, tmp_path: Path) -> None:
    await stopped.wake()
    jail = stopped.jail
    await stopped.exec("setsid sleep 1005 >/dev/null 2>&1 & true")
    pids = [jail.state.pid, *descendants(jail.state.pid)]
    # The process outside, the kernel, its file server, and programs.
    assert len(pids) > 3
    await jail.kill()
    await jail.kill()
    assert [pid for pid in pids if kernfs.state(pid) not in "ZX"] == []
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
    assert not any(Path(place, stopped.key).exists() for place in detect().placement.directories)
    assert sorted(os.listdir(tmp_path / "box/run")) == ["init.sock", "io"]
    assert os.listdir(tmp_path / "box/root") == []
    with pytest.raises(SandboxGone):
        await jail.connect()


async def test_signals_from_inside_do_not_end_guest_init(sandbox: GvisorSandbox) -> None:
    for number in ("TERM", "HUP", "INT", "USR1", "SEGV"):
        assert (await sandbox.exec(f"kill -{number} 1")).exit_code == 0
    with pytest.raises(SandboxGone):
        await sandbox.exec("kill -9 -1; sleep 9")
    assert await sandbox.output_of("echo works") == "works\n"


async def test_sandbox_that_kills_guest_init_ends(sandbox: GvisorSandbox) -> None:
    with pytest.raises(SandboxGone):
        await sandbox.exec("kill -9 1; sleep 9")
    async with asyncio.timeout(10):
        await sandbox.jail.wait()
    with pytest.raises(SandboxGone):
        await sandbox.exec("true")


async def test_sandbox_that_stops_guest_init_can_be_killed(sandbox: GvisorSandbox) -> None:
    await sandbox.exec("kill -STOP 1", timeout=2)
    await sandbox.sleep()
    await sandbox.wake()
    assert await sandbox.output_of("echo works") == "works\n"


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


async def test_process_that_leaves_cgroup_of_supervisor_is_killed(sandbox: GvisorSandbox) -> None:
    """The cgroups are hidden, but guest init holds them open."""
    result = await sandbox.exec(["python3", "-c", FLEE], timeout=1)
    assert result.timed_out
    await eventually(lambda: no_sleepers(sandbox, "1008"))
    assert await sandbox.output_of("echo works") == "works\n"


async def test_killing_the_supervisor_does_not_free_the_command(sandbox: GvisorSandbox) -> None:
    with pytest.raises(SandboxGone):
        await sandbox.exec("(setsid sleep 1006 &); kill -9 $PPID; sleep 1006")
    await eventually(lambda: no_sleepers(sandbox, "1006"))


@as_root
async def test_freeze_stops_processes_and_thaw_continues_them(sandbox: GvisorSandbox) -> None:
    counting = asyncio.create_task(
        sandbox.exec("for i in 1 2 3 4 5 6; do echo $i >> /workspace/n; sleep 0.2; done")
    )
    await eventually(lambda: size_of(sandbox, "workspace/n"))
    await sandbox.jail.freeze()
    seen = os.stat("workspace/n", dir_fd=sandbox.jail.root).st_size
    await asyncio.sleep(0.6)
    assert os.stat("workspace/n", dir_fd=sandbox.jail.root).st_size == seen
    await sandbox.jail.thaw()
    assert (await counting).exit_code == 0
    assert os.stat("workspace/n", dir_fd=sandbox.jail.root).st_size == 12


@pytest.mark.skipif(detect().enforcement != "rlimits", reason="this host has cgroups for us")
async def test_freeze_is_unsupported_without_cgroups(sandbox: GvisorSandbox) -> None:
    with pytest.raises(Unsupported, match="paused"):
        await sandbox.jail.freeze()


async def test_stats_and_limits_include_the_kernel(sandbox: GvisorSandbox) -> None:
    stats = await sandbox.jail.stats()
    assert stats.memory is not None
    assert stats.memory > 10 << 20
    assert stats.cpu_seconds
    await sandbox.jail.set_limits(Limits(memory=1 << 30, pids=100))
    assert await sandbox.output_of("echo works") == "works\n"


@as_root
async def test_out_of_memory_ends_sandbox_and_is_counted(sandbox: GvisorSandbox) -> None:
    await sandbox.jail.set_limits(Limits(memory=160 << 20))
    with pytest.raises(SandboxGone):
        await sandbox.exec(["python3", "-c", "x = bytearray(400 << 20)"])
    async with asyncio.timeout(10):
        await sandbox.jail.wait()
    assert (await sandbox.jail.stats()).oom_kills


FORK_BOMB = """
import os, time
children = []
try:
    while len(children) < 60:
        children.append(os.fork())
        if not children[-1]:
            time.sleep(1007)
except BlockingIOError:
    pass
print(len(children))
for pid in children:
    os.kill(pid, 9)
"""


async def test_fork_bomb_is_limited(stopped: GvisorSandbox) -> None:
    stopped.jail = await stopped.jailer.make(stopped.spec)
    await stopped.jail.enter("box", Limits(pids=40))
    result = await stopped.exec(["python3", "-c", FORK_BOMB])
    assert 20 < int(result.stdout) < 40
    assert await stopped.output_of("echo works") == "works\n"


async def test_interpreter_is_copied_once_and_unused_copies_are_removed(tmp_path: Path) -> None:
    old, used, unfinished = tmp_path / "old", tmp_path / "used", tmp_path / ".unfinished"
    for path in (old, used):
        path.mkdir()
        (path / "argv.json").write_text("[]")
    unfinished.mkdir()
    lock = GuestInterpreter(path=str(used), argv=()).lock()
    copy = await asyncio.to_thread(provide, str(tmp_path))
    assert set(os.listdir(tmp_path)) == {os.path.basename(copy.path), "used", "lock"}
    before = os.stat(copy.path).st_ctime_ns
    assert await asyncio.to_thread(provide, str(tmp_path)) == copy
    assert os.stat(copy.path).st_ctime_ns == before
    os.close(lock)


def test_module_that_replaces_itself_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `collections.abc` does from Python 3.13 on."""
    module = tmp_path / "replaces_itself.py"
    module.write_text("import os, sys\nsys.modules[__name__] = os\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("replaces_itself")
    assert str(module) in guest_interpreter._module_files()
    del sys.modules["replaces_itself"]


async def test_missing_runsc_error_has_install_hint(
    stopped: GvisorSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(RUNSC, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(IsolationUnavailable, match="runsc") as caught:
        await stopped.jailer.make(stopped.spec)
    assert "apt-get install -y runsc" in caught.value.hint
    assert caught.value.fields["tier"] == "gvisor"


async def test_error_shows_last_line_of_runsc(
    stopped: GvisorSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A static program without these options.
    monkeypatch.setenv(RUNSC, "/sbin/ldconfig")
    with pytest.raises(IsolationUnavailable, match="usage") as caught:
        await stopped.jailer.make(stopped.spec)
    assert RUNSC in caught.value.hint


@as_root
@pytest.mark.timeout(300)
def test_gvisor_as_unprivileged_user() -> None:
    if not shutil.which("setpriv"):
        pytest.skip("needs setpriv")
    site, source = Path(pytest.__file__).parents[1], Path(smokebox.__file__).parents[1]
    python = [*as_nobody(), "/usr/bin/python3"]
    variables = {"PYTHONPATH": f"{source}:{site}", "PYTHONDONTWRITEBYTECODE": "1"}
    environ = {name: os.environ[name] for name in ("PATH", RUNSC) if name in os.environ}
    # Other users cannot enter the directories of pytest.
    with tempfile.TemporaryDirectory(dir="/tmp", prefix=PREFIX) as folder:
        os.chown(folder, NOBODY, NOBODY)
        options = ["-p", "no:cacheprovider", f"--basetemp={folder}/t", "-k", UNPRIVILEGED, "-x"]
        done = subprocess.run(
            [*python, "-m", "pytest", *options, __file__],
            env={**environ, **variables},
            cwd=source.parent,
            capture_output=True,
            text=True,
        )
    if "No module named pytest" in done.stderr:
        pytest.skip("the Python that an unprivileged user can run has no pytest")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


def create_and_die(home: Path, copies: Path, *, entered: bool) -> dict[str, Any]:
    """Create a jail in another process that is then killed, and return the state of the jail."""
    script = f"""
        import asyncio, json, os
        from dataclasses import asdict
        from pathlib import Path
        from engine.jail.test_gvisor import GvisorSandbox, Limits
        async def main():
            sandbox = GvisorSandbox(Path({str(home)!r}), Path({str(copies)!r}))
            jail = sandbox.jail = await sandbox.jailer.make(sandbox.spec)
            if {entered}:
                await jail.enter("box", Limits())
                await sandbox.output_of("echo of the first engine > /workspace/file")
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
    """Wait until a condition is true."""
    async with asyncio.timeout(10):
        while not await condition():
            await asyncio.sleep(0.05)


async def sleepers(sandbox: GvisorSandbox, seconds: str) -> int:
    """Return the number of processes that run `sleep` with that argument."""
    return int((await sandbox.exec(["pgrep", "-xfc", f"sleep {seconds}"])).stdout)


async def no_sleepers(sandbox: GvisorSandbox, seconds: str) -> bool:
    return await sleepers(sandbox, seconds) == 0


async def is_gone(pid: int) -> bool:
    return start_time(pid) == 0


async def size_of(sandbox: GvisorSandbox, path: str) -> int:
    try:
        return os.stat(path, dir_fd=sandbox.jail.root).st_size
    except FileNotFoundError:
        return 0
