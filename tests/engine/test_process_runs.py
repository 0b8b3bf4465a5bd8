"""Background processes across runs of the sandbox and crashes of the engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from engine.awake_sandbox import (
    AwakeSandbox,
    command_lines,
    eventually,
    open_sandbox,
    process_files,
    process_rows,
)
from short_directory import short_directory
from smokebox.engine.jail.spec import JailState
from smokebox.engine.processes.lifetime import is_locked
from smokebox.engine.record.rows import ProcessRow, put
from smokebox.errors import SandboxGone, SandboxRestarted
from unprivileged import LIBRARIES, as_nobody

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TESTS = Path(__file__).parents[1]

# Longer than the time limits of the waits below.
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def sandbox(tmp_path: Path) -> AsyncIterator[AwakeSandbox]:
    async with open_sandbox(tmp_path) as sandbox:
        yield sandbox


async def test_reading_about_ended_processes_does_not_wake_the_sandbox(
    sandbox: AwakeSandbox,
) -> None:
    process = await sandbox.processes.start("echo hi", process_id="job")
    await process.wait_for_exit(30)
    await sandbox.sleep()
    await sandbox.record.aclose()
    await sandbox.open()

    def wake() -> Any:
        raise AssertionError("the sandbox was woken")

    sandbox.processes._use = wake
    [found] = await sandbox.processes.list()
    assert (found.status, (await found.logs()).stdout) == ("exited", "hi\n")
    assert [chunk.data async for chunk in found.stream_logs()] == ["hi\n"]
    assert await found.wait_for_exit() == 0
    await sandbox.wake()


async def test_sleep_interrupts_waits_with_the_reason(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start("echo hi; sleep 99", process_id="web", stdin=True)
    await process.wait_for_log("hi", 30)

    async def follow() -> None:
        async for _ in process.stream_logs():
            pass

    waits = [
        asyncio.create_task(process.wait_for_exit()),
        asyncio.create_task(process.wait_for_log("never")),
        asyncio.create_task(follow()),
    ]
    await asyncio.sleep(0.1)
    await sandbox.sleep("it was idle")
    await asyncio.wait(waits)
    for wait in waits:
        with pytest.raises(SandboxRestarted, match="it was idle"):
            await wait
    assert (process.status, process.exit_code) == ("killed", 137)
    [row] = await process_rows(sandbox)
    assert row.status == "killed"
    await sandbox.wake()


async def test_handle_of_an_earlier_run_raises_and_keeps_its_logs(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start("echo hi; sleep 99", process_id="web", stdin=True)
    await process.wait_for_log("hi", 30)
    await sandbox.sleep()
    await sandbox.wake()
    for call in (process.kill(), process.write_stdin("x"), process.close_stdin()):
        with pytest.raises(SandboxRestarted):
            await call
    assert (await process.logs()).stdout == "hi\n"
    assert (await sandbox.processes.start("true")).row.generation == 2


async def test_process_that_ended_before_the_run_keeps_its_exit_code(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start("exit 3")
    await process.wait_for_exit(30)
    await sandbox.sleep()
    assert (await process.wait_for_exit(), process.status) == (3, "exited")
    assert [chunk async for chunk in process.stream_logs()] == []
    with pytest.raises(SandboxRestarted):
        await process.kill()
    await sandbox.wake()


async def test_destroy_interrupts_waits_with_sandbox_gone(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start("sleep 99")
    waiting = asyncio.create_task(process.wait_for_exit())
    await asyncio.sleep(0.02)
    await sandbox.jail.kill()
    await sandbox.processes.ended("it was destroyed")
    with pytest.raises(SandboxGone, match="destroyed") as caught:
        await waiting
    assert not isinstance(caught.value, SandboxRestarted)


async def test_processes_notice_a_killed_jail(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start("sleep 99")
    os.kill(sandbox.jail.state.pid, signal.SIGKILL)
    with pytest.raises(SandboxRestarted):
        await process.wait_for_exit(30)
    assert process.status == "killed"


async def test_process_continues_after_an_engine_crash(sandbox: AwakeSandbox) -> None:
    await sandbox.processes.start(
        'for i in $(seq 1 100); do echo $i; sleep 0.001; done; read l; echo "got $l"; exit 7',
        process_id="job",
        stdin=True,
    )
    await sandbox.crash()
    process = await sandbox.processes.get("job")
    assert process.status == "running"
    await process.write_stdin("word\n")
    await process.wait_for_log("got word", 30)
    assert await process.wait_for_exit(30) == 7
    expected = "".join(f"{number}\n" for number in range(1, 101)) + "got word\n"
    assert (await process.logs()).stdout == expected


async def test_trees_can_be_killed_after_an_engine_crash(sandbox: AwakeSandbox) -> None:
    await sandbox.processes.start("setsid sleep 1001 & sleep 1002", process_id="a")
    left = await sandbox.processes.start("sleep 1003 & true", process_id="b")
    await left.wait_for_exit(30)
    await eventually(lambda: len(command_lines(sandbox)) >= 3)
    await sandbox.crash()
    assert (await sandbox.processes.get("b")).status == "exited"
    assert await sandbox.processes.kill_all() == 2
    assert command_lines(sandbox) == []


async def test_exit_without_an_engine_is_found_on_adoption(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start("sleep 0.1; exit 6", process_id="job")
    process.close()
    await eventually(lambda: not is_locked(f"{sandbox.path}/run/job.exit"))
    await sandbox.crash()
    found = await sandbox.processes.get("job")
    assert (found.status, found.exit_code) == ("exited", 6)
    await sandbox.processes.aclose()
    assert (await process_rows(sandbox))[0].exit_code == 6


async def test_start_interrupted_by_a_crash_leaves_nothing(sandbox: AwakeSandbox) -> None:
    row = ProcessRow(
        sandbox_id="box",
        process_id="half",
        generation=1,
        command="x",
        argv=("x",),
        cwd="/",
        user="root",
        started_at=1.0,
    )
    await sandbox.record.write(put(row))
    for suffix in (".out", ".exit"):
        os.mknod(f"{sandbox.path}/run/half{suffix}")
    await sandbox.crash()
    await asyncio.sleep(0.4)
    assert await sandbox.processes.list() == []
    await sandbox.processes.aclose()
    assert (await process_rows(sandbox), process_files(sandbox)) == ([], set())


async def test_process_started_just_before_a_crash_is_adopted(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start("sleep 1001", process_id="job")
    await sandbox.record.write(put(replace(process.row, status="starting", pid=None)))
    await sandbox.crash()
    found = await sandbox.processes.get("job")
    assert (found.status, found.pid) == ("running", process.pid)
    await found.kill()
    assert command_lines(sandbox) == []


async def test_timeout_is_enforced_without_an_engine(sandbox: AwakeSandbox) -> None:
    await sandbox.processes.start("sleep 1001", process_id="job", timeout=0.3)
    await sandbox.crash()
    process = await sandbox.processes.get("job")
    assert await process.wait_for_exit(30) == 124


CRASH = """
import asyncio, dataclasses, json, os, sys
from pathlib import Path
from engine.awake_sandbox import AwakeSandbox, create_skeleton

async def main(home, key):
    create_skeleton(home)
    sandbox = AwakeSandbox(home, key)
    await sandbox.create()
    await sandbox.processes.start(
        "for i in $(seq 1 300); do echo $i; sleep 0.002; done; cat; exit 9",
        process_id="job", stdin=True)
    ended = await sandbox.processes.start("echo done", process_id="ended")
    await ended.wait_for_exit(30)
    print(json.dumps(dataclasses.asdict(sandbox.jail.state)), flush=True)
    os.kill(os.getpid(), 9)

asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
"""

CHECK = """
import asyncio, json, os, sys
from pathlib import Path
from engine.awake_sandbox import AwakeSandbox
from smokebox.engine.jail.spec import JailState

async def main(home, key, state):
    sandbox = AwakeSandbox(home, key)
    await sandbox.adopt(JailState(**json.loads(state)))
    job, ended = await sandbox.processes.get("job"), await sandbox.processes.get("ended")
    assert (job.status, ended.status, ended.exit_code) == ("running", "exited", 0)
    await job.write_stdin("last\\n")
    await job.close_stdin()
    assert await job.wait_for_exit(30) == 9
    text = "".join([chunk.data async for chunk in job.stream_logs()])
    assert text == "".join(f"{n}\\n" for n in range(1, 301)) + "last\\n", text[-200:]
    other = await sandbox.processes.start("echo x >/dev/stderr; setsid sleep 99 & sleep 99")
    await other.wait_for_log("x", 30)
    await other.kill()
    assert other.tree_ended
    await sandbox.aclose()
    print("passed")

asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
"""


@pytest.mark.parametrize("user", ["root", "nobody"])
def test_another_engine_adopts_processes_of_a_killed_engine(user: str) -> None:
    """Both engines are separate processes, of root and of an ordinary user."""
    if os.geteuid() != 0:
        pytest.skip("only root can be both kinds of user")
    uid = pwd.getpwnam(user).pw_uid
    drop = as_nobody() if uid else []
    home = short_directory("crash")
    os.chown(home, uid, uid)
    python = [*drop, "/usr/bin/python3" if uid else sys.executable, "-c"]
    arguments = [home, f"t{os.getpid()}{user}"]
    env = {**os.environ, "PYTHONPATH": f"{LIBRARIES}:{TESTS}", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        crashed = subprocess.run(
            [*python, CRASH, *arguments], env=env, capture_output=True, text=True, check=False
        )
        assert crashed.returncode == -9, crashed.stderr
        state = crashed.stdout.strip()
        check = subprocess.run(
            [*python, CHECK, *arguments, state],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        with contextlib.suppress(ProcessLookupError):
            if check.returncode:
                os.kill(JailState(**json.loads(state)).pid, signal.SIGKILL)
        assert check.stdout == "passed\n", check.stderr
    finally:
        subprocess.run(["chmod", "-R", "u+rwx", home], check=True)
        shutil.rmtree(home)
