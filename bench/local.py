"""What `local()` costs over bare subprocesses.

    python bench/local.py [--rounds 5] [--repeats 40] [--megabytes 200]

Each job runs beside the same job without Smokebox, in turns. The ratio is that of the best
rounds' medians. A bare process gives no deadline for the whole tree, no cancellation and no bound
on memory.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable

from smokebox import SandboxApi, local

Work = Callable[[], Awaitable[object]]
PARALLEL = 50


async def bare_exec() -> None:
    """One command by the standard library."""
    subprocess.run(["bash", "-c", "true"], capture_output=True, check=True)


async def bare_async_exec() -> None:
    """One command by asyncio's own subprocesses."""
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", "true", stdin=null, stdout=pipe, stderr=pipe
    )
    await process.communicate()


async def in_parallel(work: Work) -> None:
    """The same work, many times at once."""
    async with asyncio.TaskGroup() as group:
        for _ in range(PARALLEL):
            group.create_task(_run(work))


async def _run(work: Work) -> None:
    await work()


def pour(megabytes: int) -> str:
    """A command that writes so much as fast as it can."""
    return f"head -c {megabytes}000000 /dev/zero"


async def bare_pipe(command: str, *, keep: bool) -> None:
    """Read a pipe to its end, and drop what comes or write it to a file."""
    with (
        tempfile.TemporaryFile(buffering=0) as file,
        subprocess.Popen(["bash", "-c", command], stdout=subprocess.PIPE) as process,
    ):
        assert process.stdout is not None
        while data := os.read(process.stdout.fileno(), 1 << 18):
            if keep:
                file.write(data)


async def drain(sandbox: SandboxApi, command: str) -> None:
    """Read a stream to its end, and drop what comes."""
    async for _ in sandbox.exec_stream(command):
        pass


async def median(work: Work, repeats: int) -> float:
    """The usual seconds of one call."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        await work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


async def compare(name: str, ours: Work, bare: Work, *, rounds: int, repeats: int) -> None:
    """Print how many times as long ours takes."""
    await ours()
    by_us, by_them = [], []
    for _ in range(rounds):
        by_us.append(await median(ours, repeats))
        by_them.append(await median(bare, repeats))
    best, other = min(by_us), min(by_them)
    line = f"{name:34} {best * 1000:9.2f} {other * 1000:9.2f} {best / other:6.2f}\n"
    sys.stdout.write(line)
    sys.stdout.flush()


async def main() -> None:
    """Run all comparisons."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--megabytes", type=int, default=200)
    options = parser.parse_args()
    rounds, repeats, command = options.rounds, options.repeats, pour(options.megabytes)
    sys.stdout.write(f"{'job':34} {'ours ms':>9} {'bare ms':>9} {'ratio':>6}\n")
    with tempfile.TemporaryDirectory() as folder:
        async with local(cwd=folder) as sandbox:

            async def run() -> None:
                await sandbox.exec("true")

            jobs: list[tuple[str, Work, Work, int]] = [
                ("exec true / subprocess.run", run, bare_exec, repeats),
                ("exec true / asyncio subprocess", run, bare_async_exec, repeats),
                (
                    f"{PARALLEL} at once / asyncio subprocess",
                    lambda: in_parallel(run),
                    lambda: in_parallel(bare_async_exec),
                    3,
                ),
                (
                    f"stream {options.megabytes} MB / plain pipe",
                    lambda: drain(sandbox, command),
                    lambda: bare_pipe(command, keep=False),
                    1,
                ),
                (
                    f"exec {options.megabytes} MB / pipe to a file",
                    lambda: sandbox.exec(command),
                    lambda: bare_pipe(command, keep=True),
                    1,
                ),
            ]
            for name, ours, bare, times in jobs:
                await compare(name, ours, bare, rounds=rounds, repeats=times)


if __name__ == "__main__":
    asyncio.run(main())
