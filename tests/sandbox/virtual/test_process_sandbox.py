"""isolation="process": the same sandbox in a worker process, and recovery when that dies."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from smokebox import virtual
from smokebox.errors import InvalidOption, PathNotFound, SandboxGone
from smokebox.sandbox.filesystems.memory import MemoryFilesystem
from smokebox.sandbox.virtual.process_sandbox import ProcessSandbox

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import ModuleType

    from smokebox.sandbox.virtual import VirtualSandbox


def worker_pid(sandbox: VirtualSandbox) -> int:
    """Return the process id of a sandbox's worker."""
    assert isinstance(sandbox, ProcessSandbox)
    assert sandbox._worker_ref.worker is not None
    return sandbox._worker_ref.worker.pid


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def has_exited(pid: int) -> bool:
    """Return whether a process exits within a few seconds."""
    for _ in range(500):
        if not is_alive(pid):
            return True
        await asyncio.sleep(0.02)
    return False


COMMANDS = """
import os, signal, time

def shout(call):
    return call.stdin.upper()

def crash(call):
    os.kill(os.getpid(), signal.SIGSEGV)

def freeze(call):
    os.kill(os.getpid(), signal.SIGSTOP)

def ignore_timeout(call):
    time.sleep(15)

def crash_on_load():
    crash(None)

def late():
    return "late\\n"
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Write a module that a worker can import, as a user's own."""
    name = f"commands_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(COMMANDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return importlib.import_module(name)


@pytest_asyncio.fixture
async def sandbox(functions: ModuleType) -> AsyncIterator[VirtualSandbox]:
    names = ("shout", "crash", "freeze", "ignore_timeout")
    commands = {name: getattr(functions, name) for name in names}
    async with virtual(isolation="process", commands=commands) as sandbox:
        yield sandbox


async def test_scripts_and_commands_run_in_another_process(sandbox: VirtualSandbox) -> None:
    assert (await sandbox.exec("echo hi | shout")).stdout == "HI\n"
    assert worker_pid(sandbox) != os.getpid()
    assert (await sandbox.capabilities()).isolation == "process"


async def test_errors_are_raised_as_the_same_class(sandbox: VirtualSandbox) -> None:
    with pytest.raises(PathNotFound) as caught:
        await sandbox.read_file("nope")
    assert (caught.value.path, caught.value.code) == ("/workspace/nope", "path_not_found")
    with pytest.raises(FileNotFoundError):
        await sandbox.exec("true", cwd="nope")


async def test_binary_files_and_stat_pass_between_processes(sandbox: VirtualSandbox) -> None:
    data = bytes(range(256)) * 4_000
    await sandbox.write_file("d/bin", data)
    assert await sandbox.read_bytes("d/bin") == data
    info = await sandbox.stat("d/bin")
    assert (info.path, info.size, info.is_file) == ("/workspace/d/bin", len(data), True)
    assert await sandbox.glob("**/b*") == ["/workspace/d/bin"]


@pytest.mark.parametrize(
    "options", [{"commands": {"x": lambda call: ""}}, {"files": {"f": lambda: ""}}]
)
def test_options_that_cannot_be_pickled_are_refused_at_once(options: dict[str, object]) -> None:
    with pytest.raises(InvalidOption, match="pickled"):
        virtual(isolation="process", **options)  # type: ignore[arg-type]


def test_filesystem_that_cannot_be_pickled_is_refused_at_once() -> None:
    with pytest.raises(InvalidOption):
        virtual(isolation="process", mounts={"/m": MemoryFilesystem()})


async def test_option_that_the_worker_cannot_load_is_refused(
    functions: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = virtual(isolation="process", commands={"shout": functions.shout})
    monkeypatch.setattr(sys, "path", sys.path[1:])
    with pytest.raises(InvalidOption, match="worker"):
        await sandbox.exec("true")
    await sandbox.aclose()


async def test_folder_of_the_host_is_mounted_in_the_worker(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("host\n")
    async with virtual(isolation="process", mounts={"/m": tmp_path}) as sandbox:
        assert (await sandbox.exec("cat /m/f")).stdout == "host\n"


async def test_crash_gives_an_exit_code_and_keeps_files(sandbox: VirtualSandbox) -> None:
    await sandbox.exec("echo kept > kept; chmod 751 kept; ln -s kept link; cd /tmp; export A=1")
    result = await sandbox.exec("echo lost > /workspace/lost; crash")
    assert result.exit_code == 128 + signal.SIGSEGV
    assert "SIGSEGV" in result.stderr
    after = await sandbox.exec("pwd; echo $A; cd /workspace; ls; cat link; stat -c %a kept")
    assert after.stdout == "/tmp\n1\nkept\nlink\nkept\n751\n"


async def test_script_of_a_killed_worker_exits_with_137(sandbox: VirtualSandbox) -> None:
    await sandbox.write_file("kept", "x")
    running = asyncio.create_task(sandbox.exec("echo hi; sleep 30"))
    await asyncio.sleep(0.3)
    os.kill(worker_pid(sandbox), signal.SIGKILL)
    assert (await running).exit_code == 137
    assert await sandbox.read_file("kept") == "x"


async def test_stream_of_a_killed_worker_ends_with_137(sandbox: VirtualSandbox) -> None:
    stream = sandbox.exec_stream("echo hi; sleep 30")
    assert (await anext(stream)).data == "hi\n"
    os.kill(worker_pid(sandbox), signal.SIGKILL)
    rest = [chunk async for chunk in stream]
    assert (stream.exit_code, rest[-1].stream) == (137, "stderr")


async def test_worker_killed_between_calls_is_replaced(sandbox: VirtualSandbox) -> None:
    await sandbox.exec("echo a > a; mkdir d; echo b > d/b; rm a; echo c > c")
    await sandbox.rm("c")
    pid = worker_pid(sandbox)
    os.kill(pid, signal.SIGKILL)
    assert await has_exited(pid)
    assert await sandbox.glob("**/*", files_only=True) == ["/workspace/d/b"]


async def test_worker_that_dies_at_startup_is_replaced(sandbox: VirtualSandbox) -> None:
    await sandbox.exec("echo kept > kept")
    os.kill(worker_pid(sandbox), signal.SIGSTOP)
    reading = asyncio.create_task(sandbox.readdir("."))
    await asyncio.sleep(0.1)
    os.kill(worker_pid(sandbox), signal.SIGKILL)
    assert await reading == ["kept"]


async def test_file_call_raises_if_its_worker_dies(functions: ModuleType) -> None:
    async with virtual(isolation="process", files={"file": functions.crash_on_load}) as sandbox:
        with pytest.raises(SandboxGone) as caught:
            await sandbox.read_file("file")
        assert (caught.value.retryable, "SIGSEGV" in str(caught.value)) == (True, True)
        assert await sandbox.readdir(".") == ["file"]


async def test_worker_is_killed_if_a_command_ignores_its_timeout(
    sandbox: VirtualSandbox,
) -> None:
    await sandbox.exec("echo kept > kept")
    pid = worker_pid(sandbox)
    result = await sandbox.exec("echo partial; ignore_timeout", timeout=0.3)
    assert (result.exit_code, result.stdout) == (124, "partial\n")
    assert await has_exited(pid)
    assert (await sandbox.exec("cat kept")).stdout == "kept\n"


async def test_stopped_worker_is_killed(sandbox: VirtualSandbox) -> None:
    await sandbox.exec("echo kept > kept")
    result = await sandbox.exec("freeze", timeout=0.2)
    assert result.exit_code == 124
    assert "killed" in result.stderr
    assert (await sandbox.exec("cat kept")).stdout == "kept\n"


async def test_cancelling_stops_the_script_and_keeps_the_worker(sandbox: VirtualSandbox) -> None:
    await sandbox.exec("n=1")
    pid = worker_pid(sandbox)
    running = asyncio.create_task(sandbox.exec("while :; do echo x; done"))
    await asyncio.sleep(0.3)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await sandbox.exec("echo $n")).stdout == "1\n"
    assert worker_pid(sandbox) == pid


async def test_files_can_be_used_while_a_script_runs(sandbox: VirtualSandbox) -> None:
    running = asyncio.create_task(sandbox.exec("until [ -e go ]; do sleep 0.02; done; cat go"))
    await asyncio.sleep(0.3)
    await sandbox.write_file("go", "went\n")
    assert (await running).stdout == "went\n"


async def test_snapshots_and_forks(sandbox: VirtualSandbox) -> None:
    await sandbox.exec("n=1; f() { echo f$n; }; echo one > f")
    snapshot = await sandbox.snapshot()
    async with (await sandbox.fork())[0] as fork:
        await sandbox.exec("n=2; echo two > f")
        assert (await fork.exec("f; cat f")).stdout == "f1\none\n"
        await sandbox.restore(snapshot)
        assert (await sandbox.exec("f; cat f")).stdout == "f1\none\n"


async def test_snapshot_is_restored_under_another_isolation(functions: ModuleType) -> None:
    commands = {"shout": functions.shout}
    async with virtual(isolation="process", commands=commands) as sandbox:
        await sandbox.exec("f() { echo hi | shout; }; echo one > f")
        plain = virtual(commands=commands)
        await plain.restore(await sandbox.snapshot())
        assert (await plain.exec("f; cat f")).stdout == "HI\none\n"


async def test_lazy_file_stays_lazy_in_the_next_worker(functions: ModuleType) -> None:
    async with virtual(isolation="process", files={"lazy": functions.late}) as sandbox:
        assert (await sandbox.exec("mv lazy moved; ls")).stdout == "moved\n"
        os.kill(worker_pid(sandbox), signal.SIGKILL)
        assert await has_exited(worker_pid(sandbox))
        assert (await sandbox.exec("cat moved")).stdout == "late\n"


async def test_worker_environment_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMOKEBOX_TEST_SECRET", "host-secret")
    async with virtual(isolation="process") as sandbox:
        await sandbox.exec("true")
        environ = await asyncio.to_thread(Path(f"/proc/{worker_pid(sandbox)}/environ").read_bytes)
        assert b"host-secret" not in environ


async def test_closing_ends_the_worker() -> None:
    sandbox = virtual(isolation="process")
    await sandbox.exec("true")
    pid = worker_pid(sandbox)
    await sandbox.aclose()
    assert not is_alive(pid)
    with pytest.raises(SandboxGone):
        await sandbox.exec("true")


async def test_dropped_sandbox_ends_its_worker() -> None:
    sandbox = virtual(isolation="process")
    await sandbox.exec("true")
    pid = worker_pid(sandbox)
    del sandbox
    assert await has_exited(pid)


async def test_worker_exits_with_its_parent() -> None:
    program = (
        "import asyncio, os, signal, smokebox\n"
        "async def main():\n"
        "    s = smokebox.virtual(isolation='process')\n"
        "    await s.exec('true')\n"
        "    print(s._worker_ref.worker.pid, flush=True)\n"
        "    asyncio.get_running_loop().call_later(0.3, os.kill, os.getpid(), signal.SIGKILL)\n"
        "    await s.exec('while :; do :; done')\n"
        "asyncio.run(main())\n"
    )
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", program], capture_output=True, timeout=15
    )
    assert done.returncode == -signal.SIGKILL
    assert await has_exited(int(done.stdout))


def test_sandbox_works_on_several_event_loops() -> None:
    sandbox = virtual(isolation="process")
    assert asyncio.run(sandbox.exec("echo $((n += 1))")).stdout == "1\n"
    assert asyncio.run(sandbox.exec("echo $((n += 1))")).stdout == "2\n"
    asyncio.run(sandbox.aclose())
