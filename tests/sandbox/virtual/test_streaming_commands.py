"""Streaming commands: live output, pipelines, timeouts and cancellation."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from smokebox import virtual

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox import CommandStream
    from smokebox.sandbox.virtual import VirtualSandbox


async def count(ctx: CommandStream) -> None:
    for number in range(3):
        await ctx.write(b"%d\n" % number)
        await asyncio.sleep(0.2)


async def upper(ctx: CommandStream) -> None:
    async for data in ctx.stdin:
        await ctx.write(data.upper())


async def hang(ctx: CommandStream) -> None:
    await ctx.write(b"before\n")
    await asyncio.sleep(60)


@pytest_asyncio.fixture
async def sandbox() -> AsyncIterator[VirtualSandbox]:
    sandbox = virtual(commands={"count": count, "upper": upper, "hang": hang})
    yield sandbox
    await sandbox.aclose()


async def test_output_arrives_while_the_command_runs(sandbox: VirtualSandbox) -> None:
    async with sandbox.exec_stream("hang") as stream:
        assert (await anext(stream)).data == "before\n"


async def test_two_streaming_commands_run_in_a_pipeline(sandbox: VirtualSandbox) -> None:
    result = await sandbox.exec("count | sed s/^/a/ | upper | upper")
    assert (result.exit_code, result.stdout) == (0, "A0\nA1\nA2\n")


async def test_timeout_keeps_partial_output(sandbox: VirtualSandbox) -> None:
    result = await sandbox.exec("hang", timeout=0.5)
    assert (result.exit_code, result.stdout, result.timed_out) == (124, "before\n", True)


async def test_cancelling_stops_commands_at_once(sandbox: VirtualSandbox) -> None:
    task = asyncio.create_task(sandbox.exec("hang | cat"))
    await asyncio.sleep(0.3)
    started = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - started < 5
    assert (await sandbox.exec("echo on | upper")).stdout == "ON\n"


async def test_shell_keeps_its_state(sandbox: VirtualSandbox) -> None:
    await sandbox.exec("echo x | upper; kept=yes; cd /tmp")
    assert (await sandbox.exec('echo "$kept $PWD"')).stdout == "yes /tmp\n"


async def test_bytes_exit_codes_and_errors_pass_through(sandbox: VirtualSandbox) -> None:
    result = await sandbox.exec("cat | upper; nope; exit 3", stdin=b"\xffx\n")
    assert (result.exit_code, result.stdout) == (3, "\ufffdX\n")
    assert "nope" in result.stderr
    assert (await sandbox.exec("upper 'open")).exit_code == 2


async def test_output_past_the_limit_is_cut_and_reported(sandbox: VirtualSandbox) -> None:
    await sandbox.write_file("megabyte", b"0123456789abcde\n" * 62500)
    result = await sandbox.exec("for i in {1..12}; do cat megabyte; done | upper")
    assert (result.exit_code, result.truncated) == (0, True)
    assert len(result.stdout) == 10 << 20


DEEP = """
import asyncio
from smokebox import virtual

async def nothing(ctx):
    return 0

async def main():
    sandbox = virtual(commands={"nothing": nothing})
    await sandbox.exec("ls; tar cf t.tar /etc")
    script = "nothing; jq -n '" + "(" * 5000 + "1" + ")" * 5000 + "'"
    print((await sandbox.exec(script)).stdout)

asyncio.run(main())
"""


def test_deep_recursion_ends_and_the_process_survives() -> None:
    """Runs in a new process, where no thread of the shell has started yet."""
    env = {name: value for name, value in os.environ.items() if name != "RUST_MIN_STACK"}
    done = subprocess.run(
        [sys.executable, "-c", DEEP], capture_output=True, text=True, timeout=20, env=env
    )
    assert (done.returncode, done.stdout) == (0, "1\n\n")
