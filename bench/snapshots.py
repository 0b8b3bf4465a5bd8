"""Snapshots and forks, compared with copies and with fresh sandboxes.

    python bench/snapshots.py [--rounds 5] [--files 10000] [--bytes 20000]

The first snapshot copies all files of a running sandbox, and is compared with `cp -a` of the same
tree on the same disk. Later ones copy what changed: here 1 %. A ratio is our time divided by
theirs. The last line is how long programs were frozen, while one writes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from smokebox.engine import Host
from smokebox.engine.backups.restore import frozen as freeze
from smokebox.engine.snapshots import capture_job
from table import Table, in_turns

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox.engine import Sandbox
    from smokebox.engine.run import Run

AT_ONCE = 8
EXECS = 20
FILL = """
import os
for number in range({files}):
    folder = f"d{{number // 50}}"
    if number % 50 == 0:
        os.mkdir(folder)
    with open(f"{{folder}}/{{number}}", "wb") as file:
        file.write(os.urandom({bytes}))
"""
CHANGE = "for n in $(seq 0 {share}); do echo changed >> d$((n * 2))/$((n * 100)); done"


WRITE = "while :; do date +%N >> log; sleep 0.01; done"

frozen: list[float] = []
"""Seconds for which programs were frozen, for each snapshot."""


@contextlib.asynccontextmanager
async def timed_freeze(run: Run) -> AsyncIterator[None]:
    """Freeze as the engine does, and note the time."""
    started_at = time.perf_counter()
    async with freeze(run):
        yield
    frozen.append(time.perf_counter() - started_at)


class Bench:
    """A sandbox with many files, and jobs that are measured."""

    def __init__(self, host: Host, sandbox: Sandbox, base: Path, files: int) -> None:
        self._host = host
        self._sandbox = sandbox
        self._base = base
        self._files = files
        self._numbers = iter(range(1 << 30))
        self.fork: Sandbox | None = None

    async def first_fork(self) -> None:
        """Snapshot the whole sandbox, and run a command in a fork."""
        await self._sandbox.snapshots.create("first")
        await self.later_fork()

    async def later_fork(self) -> None:
        """Create another sandbox from the snapshot and run a command in it."""
        created = await self._host.create(f"later-{next(self._numbers)}", snapshot="first")
        assert (await created.exec("true")).success

    async def fresh(self) -> None:
        """Create an empty sandbox and run a command in it."""
        created = await self._host.create(f"fresh-{next(self._numbers)}")
        assert (await created.exec("true")).success

    async def many_forks(self) -> None:
        """Fork the sandbox at once, and run a command in each fork."""
        forks = await self._host.fork("bench", AT_ONCE)
        await asyncio.gather(*(one.exec("true") for one in forks))
        self.fork = forks[0]

    async def many_fresh(self) -> None:
        """Create empty sandboxes at once."""
        await asyncio.gather(*(self.fresh() for _ in range(AT_ONCE)))

    async def copy(self) -> None:
        """Copy the tree by `cp -a`."""
        await asyncio.to_thread(
            subprocess.run,
            ["cp", "-a", self.tree(), str(self._base / "copy")],
            check=True,
        )

    async def change(self) -> None:
        """Change 1 % of the files."""
        share = self._files // 100 - 1
        assert (await self._sandbox.exec(CHANGE.format(share=share))).success
        await asyncio.sleep(0.05)

    async def next_snapshot(self) -> None:
        """Snapshot what changed."""
        await self._sandbox.snapshots.create()

    async def write_and_change(self, rounds: int) -> None:
        """Take snapshots while a program writes, of 1 % of the files changed in between."""
        process = await self._sandbox.start_process(WRITE)
        for _ in range(rounds + 1):
            await self.next_snapshot()
            await self.change()
        await process.kill()

    async def remove_copy(self) -> None:
        """Remove the copy."""
        await asyncio.to_thread(shutil.rmtree, self._base / "copy", ignore_errors=True)

    async def clean(self) -> None:
        """Remove everything but the sandbox."""
        await self.remove_copy()
        for info in await self._host.list():
            if info.id != "bench" and (self.fork is None or info.id != self.fork.id):
                await self._host.sandbox(info.id).destroy()
        for one in await self._host.snapshots.list():
            await self._host.snapshots.delete(one.id)
        await self._host.snapshots.collect()

    def tree(self) -> str:
        """Return the directory on this host that has the files."""
        row = next(iter((self._base / "home" / "boxes").glob("*/data/upper/0/workspace/d0")))
        return str(row.parent)


async def measure(table: Table, bench: Bench, host: Host, rounds: int) -> None:
    """Print the comparisons."""
    first, copies, _ = await in_turns(bench.first_fork, bench.copy, bench.clean, repeats=rounds)
    table.line("snapshot and first fork", first, to="cp -a", other=copies)
    await bench.next_snapshot()
    _, changed, copies, _ = await in_turns(
        bench.change, bench.next_snapshot, bench.copy, bench.remove_copy, repeats=rounds
    )
    table.line("snapshot after 1 % changed", changed, to="cp -a", other=copies)
    await bench.clean()
    await bench.first_fork()
    later, fresh = await in_turns(bench.later_fork, bench.fresh, repeats=rounds * 3)
    table.line("another fork, with a command", later, to="fresh sandbox", other=fresh)
    many, fresh = await in_turns(bench.many_forks, bench.many_fresh, repeats=rounds)
    table.line(f"{AT_ONCE} forks at once", many, to=f"{AT_ONCE} fresh at once", other=fresh)
    assert bench.fork is not None
    empty = await host.create("empty")
    fork = bench.fork
    ours, theirs = await in_turns(
        lambda: fork.exec("true"), lambda: empty.exec("true"), repeats=rounds * EXECS
    )
    table.line("exec in a fork", ours, to="exec in a fresh one", other=theirs)
    await bench.clean()
    frozen.clear()
    await bench.write_and_change(rounds)
    middle, longest = statistics.median(frozen) * 1e3, max(frozen) * 1e3
    table.text(f"{'programs are frozen for':42} {middle:9.2f}  (longest {longest:.2f})")


async def main(rounds: int, files: int, size: int) -> None:
    table = Table()
    setattr(capture_job, "frozen", timed_freeze)  # noqa: B010
    with tempfile.TemporaryDirectory(prefix="smokebox-bench-") as folder:
        base = Path(folder)
        async with await Host.open(base / "home", pool=0) as host:
            sandbox = await host.create("bench", limits={"disk": None})
            await sandbox.write_file("/fill.py", FILL.format(files=files, bytes=size))
            assert (await sandbox.exec("python3 /fill.py")).success
            await measure(table, Bench(host, sandbox, base, files), host, rounds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--bytes", type=int, default=20_000)
    given = parser.parse_args()
    asyncio.run(main(given.rounds, given.files, given.bytes))
