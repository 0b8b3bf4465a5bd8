"""Supervised processes: input, output, exit codes, and kills that leave nothing."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from smokebox.errors import (
    InvalidOption,
    PathNotDirectory,
    PathNotFound,
    SandboxGone,
    ServiceUnavailable,
)
from smokebox.runtime.process import Exit, SupervisedProcess
from smokebox.runtime.supervisor_client import SUPERVISOR_CLIENT, RunningCommands

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping
    from pathlib import Path

WAIT_SECONDS = 10.0


@pytest_asyncio.fixture
async def commands() -> AsyncIterator[RunningCommands]:
    commands = RunningCommands()
    yield commands
    await commands.aclose()


async def start(
    commands: RunningCommands,
    command: str,
    *,
    cwd: str = "/",
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    stdin: bytes | None = None,
) -> SupervisedProcess:
    return await SupervisedProcess.start(
        ["/bin/bash", "-c", command],
        env={"PATH": os.environ["PATH"], **(env or {})},
        cwd=cwd,
        commands=commands,
        timeout=timeout,
        stdin=stdin,
    )


async def finish(process: SupervisedProcess) -> tuple[Exit, bytes]:
    async with process:
        data = b""
        while chunk := await process.read():
            data += chunk.data
    assert process.exit is not None
    return process.exit, data


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(") ")[2][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def wait_for_lines(path: Path, lines: int = 1) -> list[str]:
    """Wait until a file has so many lines, and return them."""
    deadline = time.monotonic() + WAIT_SECONDS
    while len(found := read_lines(path)) < lines:
        assert time.monotonic() < deadline, f"{path} did not get {lines} lines"
        await asyncio.sleep(0.01)
    return found


def read_lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


async def wait_for_exit(*pids: int) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, f"still running: {list(filter(is_running, pids))}"
        await asyncio.sleep(0.01)


async def test_arguments_are_passed_unchanged(commands: RunningCommands) -> None:
    words = ["a b", "$HOME", "'", '"', "", "\n", "é", "*"]
    process = await SupervisedProcess.start(
        ["/usr/bin/printf", r"%s\0", *words], env={}, cwd="/", commands=commands
    )
    assert (await finish(process))[1].decode().split("\0")[:-1] == words


async def test_exit_codes_are_those_of_a_shell(commands: RunningCommands) -> None:
    codes = {"true": 0, "exit 7": 7, "exit 300": 44, "kill -9 $$": 137, "kill -TERM $$": 143}
    for command, code in codes.items():
        assert (await finish(await start(commands, command)))[0].code == code


async def test_command_leads_a_new_session(commands: RunningCommands) -> None:
    _, data = await finish(await start(commands, "echo $$; ps -o pid=,pgid=,sid= -p $$"))
    assert len(set(data.split())) == 1


async def test_signal_dispositions_are_reset(commands: RunningCommands) -> None:
    _, data = await finish(await start(commands, "grep -E 'Sig(Blk|Ign)' /proc/self/status"))
    # The C library reserves signals 32 and 33, which cannot be reset.
    masks = [int(line.split()[1], 16) & 0x7FFFFFFF for line in data.splitlines()]
    assert masks == [0, 0]


async def test_only_three_descriptors_are_inherited(commands: RunningCommands) -> None:
    _, data = await finish(await start(commands, "ls /proc/$$/fd; true"))
    assert data.split() == [b"0", b"1", b"2"]


async def test_pipes_are_read_in_the_order_of_writing(commands: RunningCommands) -> None:
    script = "for i in 1 2 3; do echo o$i; sleep 0.05; echo e$i >&2; sleep 0.05; done"
    streams = []
    async with await start(commands, script) as process:
        while chunk := await process.read():
            streams.append(chunk.stream)
    assert streams == ["stdout", "stderr"] * 3


async def test_command_that_closes_its_output_is_waited_for(commands: RunningCommands) -> None:
    exit, _ = await finish(await start(commands, "exec >&- 2>&-; sleep 0.2; exit 5"))
    assert exit.code == 5


async def test_output_shortly_after_exit_is_read(commands: RunningCommands) -> None:
    _, data = await finish(await start(commands, "(sleep 0.05; echo late) & echo early"))
    assert data == b"early\nlate\n"


async def test_slow_reader_gets_all_of_a_full_pipe(commands: RunningCommands) -> None:
    size = 0
    async with await start(commands, "head -c 65536 /dev/zero; sleep 60 & exit 0") as process:
        await asyncio.sleep(0.6)
        while chunk := await process.read():
            size += len(chunk.data)
    assert size == 65536


async def test_writing_background_child_does_not_delay_result(
    commands: RunningCommands,
) -> None:
    exit, _ = await finish(await start(commands, "yes & exit 4"))
    assert (exit.code, exit.childless) == (4, False)


async def test_background_child_can_keep_writing(commands: RunningCommands, tmp_path: Path) -> None:
    script = "(while sleep 0.02; do echo tick && echo tick >> ticks; done) & echo $!"
    await finish(await start(commands, script, cwd=str(tmp_path)))
    ticks = await wait_for_lines(tmp_path / "ticks")
    await wait_for_lines(tmp_path / "ticks", len(ticks) + 3)


async def test_aclose_kills_background_processes(commands: RunningCommands) -> None:
    _, data = await finish(await start(commands, "setsid sleep 300 & echo $!"))
    assert is_running(int(data))
    await commands.aclose()
    assert not is_running(int(data))


async def test_kill_all_ends_a_running_command(commands: RunningCommands) -> None:
    async with await start(commands, "echo $$; sleep 300") as process:
        chunk = await process.read()
        commands.kill_all()
        with pytest.raises(SandboxGone, match="closed"):
            await process.read()
    assert chunk is not None
    assert not is_running(int(chunk.data))


ESCAPES = {
    "child": "sleep 300 & echo $! >> pids; wait",
    "session": "setsid bash -c 'echo $$ >> pids; exec sleep 300'; sleep 300",
    "daemon": "(setsid bash -c 'echo $$ >> pids; exec sleep 300' &) ; sleep 300",
    "stubborn": "trap '' TERM INT HUP; echo $$ >> pids; while :; do sleep 1; done",
    "stopped": "echo $$ >> pids; kill -STOP $$",
    "no environment": "env -i setsid bash -c 'echo $$ >> pids; exec sleep 300' & sleep 300",
}


@pytest.mark.parametrize("script", ESCAPES.values(), ids=ESCAPES)
async def test_nothing_survives_a_kill(
    commands: RunningCommands, tmp_path: Path, script: str
) -> None:
    async with await start(commands, script, cwd=str(tmp_path)):
        pids = await wait_for_lines(tmp_path / "pids")
    assert not any(is_running(int(pid)) for pid in pids)


@pytest.mark.parametrize("script", ESCAPES.values(), ids=ESCAPES)
async def test_nothing_survives_a_timeout(
    commands: RunningCommands, tmp_path: Path, script: str
) -> None:
    exit, _ = await finish(await start(commands, script, cwd=str(tmp_path), timeout=2))
    pids = await wait_for_lines(tmp_path / "pids")
    assert exit.timed_out
    assert not any(is_running(int(pid)) for pid in pids)


RUNNER = """
import os, time
while True:
    if os.fork():
        os._exit(0)
    os.setsid() if {own_session} else None
    with open("beat", "a") as beat:
        beat.write("x\\n")
"""


@pytest.mark.parametrize("own_session", [False, True])
async def test_process_that_forks_and_exits_in_a_loop_is_killed(
    commands: RunningCommands, tmp_path: Path, own_session: bool
) -> None:
    (tmp_path / "runner.py").write_text(RUNNER.format(own_session=own_session))
    script = f"{sys.executable} -I -S runner.py; sleep 300"
    async with await start(commands, script, cwd=str(tmp_path)):
        await wait_for_lines(tmp_path / "beat", 20)
    size = (tmp_path / "beat").stat().st_size
    await asyncio.sleep(0.3)
    assert (tmp_path / "beat").stat().st_size == size


async def test_killing_one_command_leaves_the_others(commands: RunningCommands) -> None:
    other = await start(commands, "sleep 0.5; echo done")
    async with await start(commands, "sleep 300"):
        pass
    assert (await finish(other))[1] == b"done\n"


async def test_timeout_lets_command_clean_up(commands: RunningCommands) -> None:
    script = "trap 'echo bye; exit 0' TERM; echo hi; sleep 300"
    exit, data = await finish(await start(commands, script, timeout=0.5))
    assert exit.timed_out
    assert data.startswith(b"hi\n")
    assert data.endswith(b"bye\n")


async def test_timeout_does_not_wait_for_slow_reader(commands: RunningCommands) -> None:
    async with await start(commands, "echo $$; yes", timeout=0.3) as process:
        chunk = await process.read()
        assert chunk is not None
        await wait_for_exit(int(chunk.data.split()[0]))


async def test_timeout_does_not_apply_to_background(commands: RunningCommands) -> None:
    exit, data = await finish(await start(commands, "sleep 300 & echo $!", timeout=1))
    await asyncio.sleep(1.2)
    assert (exit.timed_out, is_running(int(data))) == (False, True)


async def test_very_long_timeout_is_none(commands: RunningCommands) -> None:
    assert (await finish(await start(commands, "sleep 0.1", timeout=1e300)))[0].code == 0


@pytest.mark.parametrize("size", [0, 1, 10_000_000])
async def test_stdin_is_read_to_its_end(commands: RunningCommands, size: int) -> None:
    exit, data = await finish(await start(commands, "wc -c", stdin=bytes(size)))
    assert (exit.code, int(data)) == (0, size)


async def test_large_stdin_and_output_do_not_deadlock(
    commands: RunningCommands,
) -> None:
    data = os.urandom(5_000_000)
    assert (await finish(await start(commands, "tee /dev/stderr | cat", stdin=data)))[0].code == 0


async def test_unread_stdin_is_not_an_error(commands: RunningCommands) -> None:
    exit, data = await finish(await start(commands, "echo hi", stdin=bytes(5_000_000)))
    assert (exit.code, data) == (0, b"hi\n")


async def test_stdin_is_empty_by_default(commands: RunningCommands) -> None:
    assert (await finish(await start(commands, "cat; echo end")))[1] == b"end\n"


async def test_missing_cwd_raises_path_not_found(commands: RunningCommands, tmp_path: Path) -> None:
    with pytest.raises(PathNotFound, match="absent"):
        await finish(await start(commands, "touch x", cwd=str(tmp_path / "absent")))


async def test_file_as_cwd_raises_path_not_directory(
    commands: RunningCommands, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PathNotDirectory):
        await finish(await start(commands, "touch x", cwd=str(tmp_path / "file")))


async def test_error_for_too_long_command_suggests_stdin(commands: RunningCommands) -> None:
    with pytest.raises(InvalidOption, match="stdin"):
        await finish(await start(commands, "true " + "x" * 200_000))


async def test_large_environment_is_passed(commands: RunningCommands) -> None:
    env = {f"V{n}": "x" * 100_000 for n in range(12)}
    _, data = await finish(await start(commands, "echo ${#V0} ${#V11}", env=env))
    assert data == b"100000 100000\n"


@pytest.mark.parametrize("command", ["echo a\0b", "echo \ud800"])
async def test_command_with_invalid_characters_is_refused(
    commands: RunningCommands, command: str
) -> None:
    with pytest.raises(InvalidOption, match="command"):
        await start(commands, command)


async def test_missing_program_is_an_error(commands: RunningCommands) -> None:
    process = await SupervisedProcess.start(["/absent/program"], env={}, cwd="/", commands=commands)
    with pytest.raises(ServiceUnavailable, match="No such file"):
        await finish(process)


async def test_killing_the_supervisor_kills_the_command(
    commands: RunningCommands, tmp_path: Path
) -> None:
    script = "setsid sleep 300 & echo $! >> pids; echo $$ >> pids; kill -9 $PPID; sleep 300"
    with pytest.raises(SandboxGone, match="supervisor"):
        await finish(await start(commands, script, cwd=str(tmp_path)))
    await wait_for_exit(*map(int, await wait_for_lines(tmp_path / "pids", 2)))


async def test_stopped_supervisor_does_not_block_the_call(commands: RunningCommands) -> None:
    async with await start(commands, "echo $PPID; sleep 300", timeout=1) as process:
        chunk = await process.read()
        assert chunk is not None
        os.kill(int(chunk.data), signal.SIGSTOP)
        with pytest.raises(SandboxGone, match="respond"):
            await process.read()
        os.kill(int(chunk.data), signal.SIGCONT)


async def test_killed_supervisor_pool_is_restarted(commands: RunningCommands) -> None:
    await finish(await start(commands, "true"))
    running = await start(commands, "echo here; sleep 0.5; echo still here")
    await running.read()
    assert SUPERVISOR_CLIENT._process is not None
    os.kill(SUPERVISOR_CLIENT._process.pid, signal.SIGKILL)
    SUPERVISOR_CLIENT._process.wait()
    assert (await finish(await start(commands, "echo again")))[1] == b"again\n"
    assert (await finish(running))[1] == b"still here\n"


def open_descriptors() -> int:
    # Objects of other tests must not be collected meanwhile.
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


async def test_fifty_concurrent_commands_leak_no_descriptor(commands: RunningCommands) -> None:
    await finish(await start(commands, "true"))
    before = open_descriptors()
    async with asyncio.TaskGroup() as group:
        jobs = [
            group.create_task(finish(await start(commands, f"echo {n}; sleep 0.2")))
            for n in range(50)
        ]
    assert [int(job.result()[1]) for job in jobs] == list(range(50))
    assert open_descriptors() <= before


async def test_failures_and_kills_leak_no_descriptor(commands: RunningCommands) -> None:
    await finish(await start(commands, "true"))
    before = open_descriptors()
    async with await start(commands, "sleep 300"):
        pass
    with pytest.raises(PathNotFound):
        await finish(await start(commands, "true", cwd="/absent"))
    await finish(await start(commands, "sleep 300 &"))
    assert open_descriptors() <= before


def test_successive_event_loops_can_run_commands() -> None:
    async def run() -> bytes:
        commands = RunningCommands()
        try:
            return (await finish(await start(commands, "echo hi")))[1]
        finally:
            await commands.aclose()

    assert [asyncio.run(run()) for _ in range(3)] == [b"hi\n"] * 3


async def test_event_loops_in_threads_share_the_supervisor_pool() -> None:
    async def run() -> bytes:
        commands = RunningCommands()
        try:
            return (await finish(await start(commands, "sleep 0.1; echo hi")))[1]
        finally:
            await commands.aclose()

    async with asyncio.TaskGroup() as group:
        jobs = [group.create_task(asyncio.to_thread(asyncio.run, run())) for _ in range(5)]
    assert {job.result() for job in jobs} == {b"hi\n"}


@contextmanager
def script(path: Path, text: str) -> Iterator[subprocess.Popen[str]]:
    """Run Python code in a child process, as it could harm the one that runs the tests."""
    (path / "script.py").write_text(
        "import asyncio, os, sys\nfrom smokebox import SmokeboxError, local\n" + text
    )
    command = [sys.executable, "-W", "error", "script.py"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=path, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


async def output_of(path: Path, text: str) -> str:
    with script(path, text) as process:
        out, err = await asyncio.to_thread(process.communicate, timeout=WAIT_SECONDS)
    assert err == ""
    return out


FOREVER = """
async def main():
    await local().exec("setsid sleep 300 & echo $! >> pids; echo $$ >> pids; sleep 300")
asyncio.run(main())
"""


async def test_commands_end_when_their_owner_is_killed(tmp_path: Path) -> None:
    with script(tmp_path, FOREVER) as process:
        pids = [int(pid) for pid in await wait_for_lines(tmp_path / "pids", 2)]
        process.send_signal(signal.SIGKILL)
        await wait_for_exit(*pids)


async def test_fork_of_the_owner_does_not_keep_commands_alive(tmp_path: Path) -> None:
    forked = FOREVER.replace("    await", "    await local().exec('true')\n    fork()\n    await")
    fork = """
def fork():
    if not os.fork():
        print(os.getpid(), file=open("copy", "w"), flush=True)
        os.execv("/bin/sleep", ["sleep", "60"])
"""
    with script(tmp_path, fork + forked) as process:
        pids = [int(pid) for pid in await wait_for_lines(tmp_path / "pids", 2)]
        process.send_signal(signal.SIGKILL)
        await wait_for_exit(*pids)
        os.kill(int(read_lines(tmp_path / "copy")[0]), signal.SIGKILL)


async def test_background_ends_with_its_owner(tmp_path: Path) -> None:
    text = "print(asyncio.run(local().exec('sleep 300 & echo $!')).stdout)"
    await wait_for_exit(int(await output_of(tmp_path, text)))


async def test_forked_process_has_another_supervisor_pool(tmp_path: Path) -> None:
    text = """
sandbox = local()
run = lambda: asyncio.run(sandbox.exec("echo hi")).stdout
print(run(), flush=True)
child = os.fork()
if not child:
    print(run(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(run(), flush=True)
"""
    assert (await output_of(tmp_path, text)).split() == ["hi"] * 3


async def test_running_out_of_descriptors_is_a_retryable_error(
    tmp_path: Path,
) -> None:
    text = """
import resource
async def main():
    sandbox = local()
    await sandbox.exec("true")
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 2, 4096))
    try:
        await sandbox.exec("true")
    except SmokeboxError as error:
        print(error.code, error.retryable)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))
    print((await sandbox.exec("echo again")).stdout)
asyncio.run(main())
"""
    assert (await output_of(tmp_path, text)).split() == ["service_unavailable", "True", "again"]


async def test_commands_start_no_threads(tmp_path: Path) -> None:
    text = """
import threading
async def main():
    for _ in range(20):
        await local().exec("echo hi")
    print(threading.active_count())
asyncio.run(main())
"""
    assert await output_of(tmp_path, text) == "1\n"


async def test_successive_commands_share_a_supervisor(tmp_path: Path) -> None:
    text = """
async def main():
    print(len({(await local().exec("echo $PPID")).stdout for _ in range(10)}))
asyncio.run(main())
"""
    assert await output_of(tmp_path, text) == "1\n"
