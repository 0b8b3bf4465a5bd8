"""Processes: whose they are, how they end, and that nothing of them is left."""

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
from smokebox.runtime.process import Exit, Process
from smokebox.runtime.supervisor_client import SUPERVISOR_CLIENT, CommandGroup

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping
    from pathlib import Path

PATIENCE = 10.0


@pytest_asyncio.fixture
async def commands() -> AsyncIterator[CommandGroup]:
    commands = CommandGroup()
    yield commands
    await commands.aclose()


async def start(
    commands: CommandGroup,
    command: str,
    *,
    cwd: str = "/",
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    stdin: bytes | None = None,
) -> Process:
    return await Process.start(
        ["/bin/bash", "-c", command],
        env={"PATH": os.environ["PATH"], **(env or {})},
        cwd=cwd,
        commands=commands,
        timeout=timeout,
        stdin=stdin,
    )


async def finish(process: Process) -> tuple[Exit, bytes]:
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


async def until(path: Path, lines: int = 1) -> list[str]:
    """The lines of a file, once there are enough of them."""
    deadline = time.monotonic() + PATIENCE
    while len(found := lines_of(path)) < lines:
        assert time.monotonic() < deadline, f"{path} did not get {lines} lines"
        await asyncio.sleep(0.01)
    return found


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


async def gone(*pids: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, f"still running: {list(filter(is_running, pids))}"
        await asyncio.sleep(0.01)


async def test_words_reach_the_program_as_they_are(commands: CommandGroup) -> None:
    words = ["a b", "$HOME", "'", '"', "", "\n", "é", "*"]
    process = await Process.start(
        ["/usr/bin/printf", r"%s\0", *words], env={}, cwd="/", commands=commands
    )
    assert (await finish(process))[1].decode().split("\0")[:-1] == words


async def test_exit_codes_are_those_of_a_shell(commands: CommandGroup) -> None:
    codes = {"true": 0, "exit 7": 7, "exit 300": 44, "kill -9 $$": 137, "kill -TERM $$": 143}
    for command, code in codes.items():
        assert (await finish(await start(commands, command)))[0].code == code


async def test_the_command_leads_a_session_of_its_own(commands: CommandGroup) -> None:
    _, data = await finish(await start(commands, "echo $$; ps -o pid=,pgid=,sid= -p $$"))
    assert len(set(data.split())) == 1


async def test_signals_are_as_in_a_fresh_login(commands: CommandGroup) -> None:
    _, data = await finish(await start(commands, "grep -E 'Sig(Blk|Ign)' /proc/self/status"))
    # The C library keeps signals 32 and 33 for itself, and nobody can reset them.
    masks = [int(line.split()[1], 16) & 0x7FFFFFFF for line in data.splitlines()]
    assert masks == [0, 0]


async def test_no_descriptor_beyond_the_first_three_is_inherited(commands: CommandGroup) -> None:
    _, data = await finish(await start(commands, "ls /proc/$$/fd; true"))
    assert data.split() == [b"0", b"1", b"2"]


async def test_both_pipes_come_in_the_order_of_writing(commands: CommandGroup) -> None:
    script = "for i in 1 2 3; do echo o$i; sleep 0.05; echo e$i >&2; sleep 0.05; done"
    seen = []
    async with await start(commands, script) as process:
        while chunk := await process.read():
            seen.append((chunk.stream, chunk.data))
    expected = [(s, f"{s[3]}{i}\n".encode()) for i in (1, 2, 3) for s in ("stdout", "stderr")]
    assert [stream for stream, _ in seen] == [stream for stream, _ in expected]


async def test_a_command_that_closes_its_output_is_waited_for(commands: CommandGroup) -> None:
    exit, _ = await finish(await start(commands, "exec >&- 2>&-; sleep 0.2; exit 5"))
    assert exit.code == 5


async def test_output_after_the_exit_still_arrives(commands: CommandGroup) -> None:
    _, data = await finish(await start(commands, "(sleep 0.05; echo late) & echo early"))
    assert data == b"early\nlate\n"


async def test_a_full_pipe_is_read_to_the_end_by_a_slow_reader(commands: CommandGroup) -> None:
    size = 0
    async with await start(commands, "head -c 65536 /dev/zero; sleep 60 & exit 0") as process:
        await asyncio.sleep(0.6)
        while chunk := await process.read():
            size += len(chunk.data)
    assert size == 65536


async def test_a_background_child_that_talks_on_does_not_hold_the_call(
    commands: CommandGroup,
) -> None:
    exit, _ = await finish(await start(commands, "yes & exit 4"))
    assert (exit.code, exit.alone) == (4, False)


async def test_what_is_left_in_the_background_can_go_on_writing(
    commands: CommandGroup, tmp_path: Path
) -> None:
    script = "(while sleep 0.02; do echo tick && echo tick >> ticks; done) & echo $!"
    await finish(await start(commands, script, cwd=str(tmp_path)))
    seen = await until(tmp_path / "ticks")
    await until(tmp_path / "ticks", len(seen) + 3)


async def test_closing_the_group_ends_the_background(commands: CommandGroup) -> None:
    _, data = await finish(await start(commands, "setsid sleep 300 & echo $!"))
    assert is_running(int(data))
    await commands.aclose()
    assert not is_running(int(data))


async def test_closing_the_group_ends_a_running_command(commands: CommandGroup) -> None:
    async with await start(commands, "echo $$; sleep 300") as process:
        chunk = await process.read()
        commands.end()
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
async def test_nothing_survives_being_killed(
    commands: CommandGroup, tmp_path: Path, script: str
) -> None:
    async with await start(commands, script, cwd=str(tmp_path)):
        pids = await until(tmp_path / "pids")
    assert not any(is_running(int(pid)) for pid in pids)


@pytest.mark.parametrize("script", ESCAPES.values(), ids=ESCAPES)
async def test_nothing_survives_a_timeout(
    commands: CommandGroup, tmp_path: Path, script: str
) -> None:
    exit, _ = await finish(await start(commands, script, cwd=str(tmp_path), timeout=0.5))
    pids = await until(tmp_path / "pids")
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
async def test_a_process_that_forks_and_exits_without_end_is_caught(
    commands: CommandGroup, tmp_path: Path, own_session: bool
) -> None:
    (tmp_path / "runner.py").write_text(RUNNER.format(own_session=own_session))
    script = f"{sys.executable} -I -S runner.py; sleep 300"
    async with await start(commands, script, cwd=str(tmp_path)):
        await until(tmp_path / "beat", 20)
    size = (tmp_path / "beat").stat().st_size
    await asyncio.sleep(0.3)
    assert (tmp_path / "beat").stat().st_size == size


async def test_killing_one_command_leaves_the_others(commands: CommandGroup) -> None:
    other = await start(commands, "sleep 0.5; echo done")
    async with await start(commands, "sleep 300"):
        pass
    assert (await finish(other))[1] == b"done\n"


async def test_a_timeout_lets_a_command_clean_up(commands: CommandGroup) -> None:
    script = "trap 'echo bye; exit 0' TERM; echo hi; sleep 300"
    exit, data = await finish(await start(commands, script, timeout=0.5))
    assert exit.timed_out
    assert data.startswith(b"hi\n")
    assert data.endswith(b"bye\n")


async def test_a_timeout_does_not_wait_for_a_slow_reader(commands: CommandGroup) -> None:
    async with await start(commands, "echo $$; yes", timeout=0.3) as process:
        chunk = await process.read()
        assert chunk is not None
        await gone(int(chunk.data.split()[0]))


async def test_the_background_is_free_of_the_timeout(commands: CommandGroup) -> None:
    exit, data = await finish(await start(commands, "sleep 300 & echo $!", timeout=1))
    await asyncio.sleep(1.2)
    assert (exit.timed_out, is_running(int(data))) == (False, True)


async def test_a_far_deadline_is_none(commands: CommandGroup) -> None:
    assert (await finish(await start(commands, "sleep 0.1", timeout=1e300)))[0].code == 0


@pytest.mark.parametrize("size", [0, 1, 10_000_000])
async def test_stdin_is_read_to_its_end(commands: CommandGroup, size: int) -> None:
    exit, data = await finish(await start(commands, "wc -c", stdin=bytes(size)))
    assert (exit.code, int(data)) == (0, size)


async def test_large_stdin_and_large_output_do_not_wait_for_each_other(
    commands: CommandGroup,
) -> None:
    data = os.urandom(5_000_000)
    assert (await finish(await start(commands, "tee /dev/stderr | cat", stdin=data)))[0].code == 0


async def test_stdin_that_nobody_reads_is_no_error(commands: CommandGroup) -> None:
    exit, data = await finish(await start(commands, "echo hi", stdin=bytes(5_000_000)))
    assert (exit.code, data) == (0, b"hi\n")


async def test_without_stdin_there_is_nothing_to_read(commands: CommandGroup) -> None:
    assert (await finish(await start(commands, "cat; echo end")))[1] == b"end\n"


async def test_a_missing_cwd_is_not_found(commands: CommandGroup, tmp_path: Path) -> None:
    with pytest.raises(PathNotFound, match="absent"):
        await finish(await start(commands, "touch x", cwd=str(tmp_path / "absent")))


async def test_a_file_as_cwd_is_not_a_directory(commands: CommandGroup, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PathNotDirectory):
        await finish(await start(commands, "touch x", cwd=str(tmp_path / "file")))


async def test_a_command_that_is_too_long_says_what_to_do(commands: CommandGroup) -> None:
    with pytest.raises(InvalidOption, match="stdin"):
        await finish(await start(commands, "true " + "x" * 200_000))


async def test_a_large_environment_arrives(commands: CommandGroup) -> None:
    env = {f"V{n}": "x" * 100_000 for n in range(12)}
    _, data = await finish(await start(commands, "echo ${#V0} ${#V11}", env=env))
    assert data == b"100000 100000\n"


@pytest.mark.parametrize("command", ["echo a\0b", "echo \ud800"])
async def test_a_command_that_no_program_can_be_given_is_refused(
    commands: CommandGroup, command: str
) -> None:
    with pytest.raises(InvalidOption, match="command"):
        await start(commands, command)


async def test_a_program_that_is_missing_is_an_error(commands: CommandGroup) -> None:
    process = await Process.start(["/absent/program"], env={}, cwd="/", commands=commands)
    with pytest.raises(ServiceUnavailable, match="No such file"):
        await finish(process)


async def test_killing_the_supervisor_kills_the_command(
    commands: CommandGroup, tmp_path: Path
) -> None:
    script = "setsid sleep 300 & echo $! >> pids; echo $$ >> pids; kill -9 $PPID; sleep 300"
    with pytest.raises(SandboxGone, match="supervisor"):
        await finish(await start(commands, script, cwd=str(tmp_path)))
    await gone(*map(int, await until(tmp_path / "pids", 2)))


async def test_a_stopped_supervisor_does_not_hold_the_call(commands: CommandGroup) -> None:
    async with await start(commands, "echo $PPID; sleep 300", timeout=1) as process:
        chunk = await process.read()
        assert chunk is not None
        os.kill(int(chunk.data), signal.SIGSTOP)
        with pytest.raises(SandboxGone, match="answer"):
            await process.read()
        os.kill(int(chunk.data), signal.SIGCONT)


async def test_the_supervisor_pool_is_restarted_after_it_died(commands: CommandGroup) -> None:
    await finish(await start(commands, "true"))
    running = await start(commands, "echo here; sleep 0.5; echo still here")
    await running.read()
    assert SUPERVISOR_CLIENT._process is not None
    os.kill(SUPERVISOR_CLIENT._process.pid, signal.SIGKILL)
    SUPERVISOR_CLIENT._process.wait()
    assert (await finish(await start(commands, "echo again")))[1] == b"again\n"
    assert (await finish(running))[1] == b"still here\n"


def open_descriptors() -> int:
    # What other tests left to the collector must not go in between.
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


async def test_fifty_at_a_time_leave_no_descriptor_open(commands: CommandGroup) -> None:
    await finish(await start(commands, "true"))
    before = open_descriptors()
    async with asyncio.TaskGroup() as group:
        jobs = [
            group.create_task(finish(await start(commands, f"echo {n}; sleep 0.2")))
            for n in range(50)
        ]
    assert [int(job.result()[1]) for job in jobs] == list(range(50))
    assert open_descriptors() <= before


async def test_failures_and_kills_leave_no_descriptor_open(commands: CommandGroup) -> None:
    await finish(await start(commands, "true"))
    before = open_descriptors()
    async with await start(commands, "sleep 300"):
        pass
    with pytest.raises(PathNotFound):
        await finish(await start(commands, "true", cwd="/absent"))
    await finish(await start(commands, "sleep 300 &"))
    assert open_descriptors() <= before


def test_each_event_loop_in_turn_can_run_commands() -> None:
    async def run() -> bytes:
        commands = CommandGroup()
        try:
            return (await finish(await start(commands, "echo hi")))[1]
        finally:
            await commands.aclose()

    assert [asyncio.run(run()) for _ in range(3)] == [b"hi\n"] * 3


async def test_threads_with_loops_of_their_own_share_the_keeper() -> None:
    async def run() -> bytes:
        commands = CommandGroup()
        try:
            return (await finish(await start(commands, "sleep 0.1; echo hi")))[1]
        finally:
            await commands.aclose()

    async with asyncio.TaskGroup() as group:
        jobs = [group.create_task(asyncio.to_thread(asyncio.run, run())) for _ in range(5)]
    assert {job.result() for job in jobs} == {b"hi\n"}


@contextmanager
def script(path: Path, text: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process of its own, for what would harm the one that runs the tests."""
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
        out, err = await asyncio.to_thread(process.communicate, timeout=PATIENCE)
    assert err == ""
    return out


FOREVER = """
async def main():
    await local().exec("setsid sleep 300 & echo $! >> pids; echo $$ >> pids; sleep 300")
asyncio.run(main())
"""


async def test_commands_end_when_their_owner_is_killed(tmp_path: Path) -> None:
    with script(tmp_path, FOREVER) as process:
        pids = [int(pid) for pid in await until(tmp_path / "pids", 2)]
        process.send_signal(signal.SIGKILL)
        await gone(*pids)


async def test_a_fork_of_the_owner_does_not_keep_commands_alive(tmp_path: Path) -> None:
    forked = FOREVER.replace("    await", "    await local().exec('true')\n    fork()\n    await")
    fork = """
def fork():
    if not os.fork():
        print(os.getpid(), file=open("copy", "w"), flush=True)
        os.execv("/bin/sleep", ["sleep", "60"])
"""
    with script(tmp_path, fork + forked) as process:
        pids = [int(pid) for pid in await until(tmp_path / "pids", 2)]
        process.send_signal(signal.SIGKILL)
        await gone(*pids)
        os.kill(int(lines_of(tmp_path / "copy")[0]), signal.SIGKILL)


async def test_the_background_ends_with_the_process_that_left_it(tmp_path: Path) -> None:
    text = "print(asyncio.run(local().exec('sleep 300 & echo $!')).stdout)"
    await gone(int(await output_of(tmp_path, text)))


async def test_a_forked_copy_has_a_keeper_of_its_own(tmp_path: Path) -> None:
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


async def test_running_out_of_descriptors_is_an_error_that_a_retry_can_help(
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
    expected = ["service_unavailable", "True", "again"]
    assert (await output_of(tmp_path, text)).split() == expected


async def test_no_thread_is_made_for_a_command(tmp_path: Path) -> None:
    text = """
import threading
async def main():
    for _ in range(20):
        await local().exec("echo hi")
    print(threading.active_count())
asyncio.run(main())
"""
    assert await output_of(tmp_path, text) == "1\n"


async def test_commands_in_turn_share_a_minder(tmp_path: Path) -> None:
    text = """
async def main():
    print(len({(await local().exec("echo $PPID")).stdout for _ in range(10)}))
asyncio.run(main())
"""
    assert await output_of(tmp_path, text) == "1\n"
