"""Lasting processes and the runs of their sandbox: sleep, death, and the engine's own crash."""

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

from engine.lasting_box import Box, commands, eventually, files, open_box, rows
from ordinary import LIBRARIES, as_nobody
from places import short_directory
from smokebox.engine.jail.api import JailState
from smokebox.engine.processes.lifetime import is_held
from smokebox.engine.record.rows import ProcessRow, put
from smokebox.errors import SandboxGone, SandboxRestarted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TESTS = Path(__file__).parents[1]

# Longer than the waits below, which a busy machine may need.
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[Box]:
    async with open_box(tmp_path) as box:
        yield box


async def test_reading_about_ended_processes_does_not_wake_the_sandbox(box: Box) -> None:
    process = await box.processes.start("echo hi", process_id="job")
    await process.wait_for_exit(30)
    await box.sleep()
    await box.record.aclose()
    await box.open()

    def wake() -> Any:
        raise AssertionError("it was woken")

    box.processes._use = wake
    [found] = await box.processes.list()
    assert (found.status, (await found.logs()).stdout) == ("exited", "hi\n")
    assert [chunk.data async for chunk in found.stream_logs()] == ["hi\n"]
    assert await found.wait_for_exit() == 0
    await box.wake()


async def test_who_waits_when_the_sandbox_sleeps_hears_why(box: Box) -> None:
    process = await box.processes.start("echo hi; sleep 99", process_id="web", stdin=True)
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
    await box.sleep("it was idle")
    await asyncio.wait(waits)
    for wait in waits:
        with pytest.raises(SandboxRestarted, match="it was idle"):
            await wait
    assert (process.status, process.exit_code) == ("killed", 137)
    [row] = await rows(box)
    assert row.status == "killed"
    await box.wake()


async def test_a_handle_of_a_former_run_says_so_and_keeps_its_logs(box: Box) -> None:
    process = await box.processes.start("echo hi; sleep 99", process_id="web", stdin=True)
    await process.wait_for_log("hi", 30)
    await box.sleep()
    await box.wake()
    for call in (process.kill(), process.write_stdin("x"), process.close_stdin()):
        with pytest.raises(SandboxRestarted):
            await call
    assert (await process.logs()).stdout == "hi\n"
    assert (await box.processes.start("true")).generation == 2


async def test_a_process_that_ended_before_the_run_did_keeps_its_exit_code(box: Box) -> None:
    process = await box.processes.start("exit 3")
    await process.wait_for_exit(30)
    await box.sleep()
    assert (await process.wait_for_exit(), process.status) == (3, "exited")
    assert [chunk async for chunk in process.stream_logs()] == []
    with pytest.raises(SandboxRestarted):
        await process.kill()
    await box.wake()


async def test_who_waits_when_the_sandbox_is_destroyed_hears_that(box: Box) -> None:
    process = await box.processes.start("sleep 99")
    waiting = asyncio.create_task(process.wait_for_exit())
    await asyncio.sleep(0.02)
    await box.jail.kill()
    await box.processes.ended("it was destroyed", destroyed=True)
    with pytest.raises(SandboxGone, match="destroyed") as caught:
        await waiting
    assert not isinstance(caught.value, SandboxRestarted)


async def test_a_jail_that_dies_alone_is_noticed_by_its_processes(box: Box) -> None:
    process = await box.processes.start("sleep 99")
    os.kill(box.jail.state.pid, signal.SIGKILL)
    with pytest.raises(SandboxRestarted):
        await process.wait_for_exit(30)
    assert process.status == "killed"


async def test_after_a_crash_everything_goes_on(box: Box) -> None:
    await box.processes.start(
        'for i in $(seq 1 100); do echo $i; sleep 0.001; done; read l; echo "got $l"; exit 7',
        process_id="job",
        stdin=True,
    )
    await box.crash()
    process = await box.processes.get("job")
    assert process.status == "running"
    await process.write_stdin("word\n")
    await process.wait_for_log("got word", 30)
    assert await process.wait_for_exit(30) == 7
    expected = "".join(f"{number}\n" for number in range(1, 101)) + "got word\n"
    assert (await process.logs()).stdout == expected


async def test_after_a_crash_trees_can_be_killed(box: Box) -> None:
    await box.processes.start("setsid sleep 1001 & sleep 1002", process_id="a")
    left = await box.processes.start("sleep 1003 & true", process_id="b")
    await left.wait_for_exit(30)
    await eventually(lambda: len(commands(box)) >= 3)
    await box.crash()
    assert (await box.processes.get("b")).status == "exited"
    assert await box.processes.kill_all() == 2
    assert commands(box) == []


async def test_what_ended_while_there_was_no_engine_is_found_out(box: Box) -> None:
    process = await box.processes.start("sleep 0.1; exit 6", process_id="job")
    process.close()
    await eventually(lambda: not is_held(f"{box.directory}/run/job.exit"))
    await box.crash()
    found = await box.processes.get("job")
    assert (found.status, found.exit_code) == ("exited", 6)
    await box.processes.aclose()
    assert (await rows(box))[0].exit_code == 6


async def test_a_start_that_the_crash_cut_short_leaves_nothing(box: Box) -> None:
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
    await box.record.write(put(row))
    for suffix in (".out", ".exit"):
        os.mknod(f"{box.directory}/run/half{suffix}")
    await box.crash()
    await asyncio.sleep(0.4)
    assert await box.processes.list() == []
    await box.processes.aclose()
    assert (await rows(box), files(box)) == ([], set())


async def test_a_start_that_the_crash_cut_after_the_process_began_is_taken_over(box: Box) -> None:
    process = await box.processes.start("sleep 1001", process_id="job")
    await box.record.write(put(replace(process.row, status="starting", pid=None)))
    await box.crash()
    found = await box.processes.get("job")
    assert (found.status, found.pid) == ("running", process.pid)
    await found.kill()
    assert commands(box) == []


async def test_a_lifetime_holds_without_an_engine(box: Box) -> None:
    await box.processes.start("sleep 1001", process_id="job", timeout=0.3)
    await box.crash()
    process = await box.processes.get("job")
    assert await process.wait_for_exit(30) == 124


CRASH = """
import asyncio, dataclasses, json, os, sys
from pathlib import Path
from engine.lasting_box import Box, lay_skeleton

async def main(home, key):
    lay_skeleton(home)
    box = Box(home, key)
    await box.create()
    await box.processes.start(
        "for i in $(seq 1 300); do echo $i; sleep 0.002; done; cat; exit 9",
        process_id="job", stdin=True)
    ended = await box.processes.start("echo done", process_id="ended")
    await ended.wait_for_exit(30)
    print(json.dumps(dataclasses.asdict(box.jail.state)), flush=True)
    os.kill(os.getpid(), 9)

asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
"""

CHECK = """
import asyncio, json, os, sys
from pathlib import Path
from engine.lasting_box import Box
from smokebox.engine.jail.api import JailState

async def main(home, key, state):
    box = Box(home, key)
    await box.adopt(JailState(**json.loads(state)))
    job, ended = await box.processes.get("job"), await box.processes.get("ended")
    assert (job.status, ended.status, ended.exit_code) == ("running", "exited", 0)
    await job.write_stdin("last\\n")
    await job.close_stdin()
    assert await job.wait_for_exit(30) == 9
    text = "".join([chunk.data async for chunk in job.stream_logs()])
    assert text == "".join(f"{n}\\n" for n in range(1, 301)) + "last\\n", text[-200:]
    other = await box.processes.start("echo x >/dev/stderr; setsid sleep 99 & sleep 99")
    await other.wait_for_log("x", 30)
    await other.kill()
    assert other.gone
    await box.aclose()
    print("good")

asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
"""


@pytest.mark.parametrize("who", ["root", "nobody"])
def test_another_engine_takes_over_from_one_that_was_killed(who: str) -> None:
    """Both in processes of their own, as root and as an ordinary user."""
    if os.geteuid() != 0:
        pytest.skip("only root can be both kinds of user")
    uid = pwd.getpwnam(who).pw_uid
    drop = as_nobody() if uid else []
    home = short_directory("crash")
    os.chown(home, uid, uid)
    python = [*drop, "/usr/bin/python3" if uid else sys.executable, "-c"]
    words = [home, f"t{os.getpid()}{who}"]
    env = {**os.environ, "PYTHONPATH": f"{LIBRARIES}:{TESTS}", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        crashed = subprocess.run(
            [*python, CRASH, *words], env=env, capture_output=True, text=True, check=False
        )
        assert crashed.returncode == -9, crashed.stderr
        state = crashed.stdout.strip()
        check = subprocess.run(
            [*python, CHECK, *words, state], env=env, capture_output=True, text=True, check=False
        )
        with contextlib.suppress(ProcessLookupError):
            if check.returncode:
                os.kill(JailState(**json.loads(state)).pid, signal.SIGKILL)
        assert check.stdout == "good\n", check.stderr
    finally:
        subprocess.run(["chmod", "-R", "u+rwx", home], check=True)
        shutil.rmtree(home)
