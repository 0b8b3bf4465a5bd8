"""Overhead of `local()` over bare subprocesses.

    python bench/local.py [--rounds 5] [--repeats 40] [--megabytes 200]

Each job alternates with the same job without Smokebox. The ratio is that of the medians of the
best rounds. A bare process has no timeout for its whole tree, no cancellation and no bound on
memory.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile

from smokebox import SandboxApi, local
from table import Work, median

PARALLEL = 50


async def bare_exec() -> None:
    """Run a command with the standard library."""
    subprocess.run(["bash", "-c", "true"], capture_output=True, check=True)


async def bare_async_exec() -> None:
    """Run a command with asyncio's subprocesses."""
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", "true", stdin=null, stdout=pipe, stderr=pipe
    )
    await process.communicate()


async def in_parallel(work: Work) -> None:
    """Run a job many times at once."""
    async with asyncio.TaskGroup() as group:
        for _ in range(PARALLEL):
            group.create_task(_run(work))


async def _run(work: Work) -> None:
    await work()


def write_command(megabytes: int) -> str:
    """Return a command that writes that much output as fast as possible."""
    return f"head -c {megabytes}000000 /dev/zero"


async def bare_pipe(command: str, *, keep: bool) -> None:
    """Read a pipe to its end, and discard the data or write it to a file."""
    with (
        tempfile.TemporaryFile(buffering=0) as file,
        subprocess.Popen(["bash", "-c", command], stdout=subprocess.PIPE) as process,
    ):
        assert process.stdout is not None
        while data := os.read(process.stdout.fileno(), 1 << 18):
            if keep:
                file.write(data)


async def drain(sandbox: SandboxApi, command: str) -> None:
    """Read a stream to its end, and discard the data."""
    async for _ in sandbox.exec_stream(command):
        pass


async def compare(name: str, ours: Work, bare: Work, *, rounds: int, repeats: int) -> None:
    """Print the ratio of our time to that of the bare job."""
    await ours()
    our_times, bare_times = [], []
    for _ in range(rounds):
        our_times.append(await median(ours, repeats))
        bare_times.append(await median(bare, repeats))
    best, other = min(our_times), min(bare_times)
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
    rounds, repeats, command = options.rounds, options.repeats, write_command(options.megabytes)
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
