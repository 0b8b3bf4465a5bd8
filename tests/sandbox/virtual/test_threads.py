"""Threads with deep stacks run work, return results, and exit when idle."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time

import bashkit
import pytest

from smokebox.sandbox.virtual import threads


async def test_work_runs_on_another_thread_and_returns() -> None:
    here = threading.get_ident()
    assert await threads.run(threading.get_ident) != here


async def test_exceptions_of_work_propagate() -> None:
    def fail() -> None:
        raise LookupError("no")

    with pytest.raises(LookupError, match="no"):
        await threads.run(fail)


async def test_slow_work_does_not_block_the_loop() -> None:
    slow = asyncio.create_task(threads.run(lambda: time.sleep(0.2)))
    ticks = 0
    while not slow.done():
        await asyncio.sleep(0.01)
        ticks += 1
    assert ticks > 3


async def test_wait_times_out_and_can_be_repeated() -> None:
    release = threading.Event()
    job = threads.ThreadJob(lambda: release.wait(15))
    threads.start(job)
    assert not job.join(0.01)
    assert not await job.wait(0.01)
    release.set()
    assert await job.wait(15)
    assert job.result() is True


async def test_threads_are_reused() -> None:
    seen = {await threads.run(threading.get_ident) for _ in range(50)}
    assert len(seen) <= 3


async def test_work_does_not_wait_for_other_work() -> None:
    barrier = threading.Barrier(8)
    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(threads.run(lambda: barrier.wait(15)))


async def test_stack_is_deep() -> None:
    bash = bashkit.Bash(profile=bashkit.ExecutionProfile.Interactive)
    script = "jq -n '" + "(" * 5000 + "1" + ")" * 5000 + "'"
    assert (await threads.run(lambda: bash.execute_sync(script))).stdout == "1\n"


def test_other_threads_keep_their_stack() -> None:
    before = threading.stack_size()
    asyncio.run(threads.run(lambda: None))
    assert threading.stack_size() == before


async def test_loop_may_close_before_the_work_is_done() -> None:
    release = threading.Event()
    job = threads.ThreadJob(lambda: release.wait(15))

    def wait_briefly() -> None:
        async def wait() -> None:
            threads.start(job)
            await job.wait(0.01)

        asyncio.run(wait())

    await asyncio.to_thread(wait_briefly)
    release.set()
    assert await asyncio.to_thread(job.join, 15)


def test_idle_threads_exit() -> None:
    program = (
        "import asyncio, threading, time\n"
        "from smokebox.sandbox.virtual import threads\n"
        "threads.IDLE_SECONDS = 0.1\n"
        "asyncio.run(threads.run(lambda: None))\n"
        "assert threading.active_count() == 2\n"
        "deadline = time.monotonic() + 10\n"
        "while threading.active_count() > 1 and time.monotonic() < deadline: time.sleep(0.05)\n"
        "assert threading.active_count() == 1\n"
        "assert asyncio.run(threads.run(lambda: 5)) == 5\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=15)
    assert (done.returncode, done.stderr) == (0, b"")


def test_small_address_space_gets_a_smaller_stack() -> None:
    program = (
        "import asyncio, resource\n"
        "from smokebox import virtual\n"
        "resource.setrlimit(resource.RLIMIT_AS, (900 << 20, 900 << 20))\n"
        "print(asyncio.run(virtual().exec('echo fine')).stdout)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=15)
    assert (done.stdout.strip(), done.stderr) == (b"fine", b"")


def test_forked_child_starts_its_own_threads() -> None:
    program = (
        "import asyncio, os\n"
        "from smokebox import virtual\n"
        "sandbox = virtual()\n"
        "asyncio.run(sandbox.exec('true'))\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    result = asyncio.run(virtual().exec('echo child'))\n"
        "    os._exit(0 if result.stdout == 'child\\n' else 1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        timeout=15,
        env={**os.environ},
    )
    assert (done.stdout.strip(), done.returncode) == (b"0", 0)
