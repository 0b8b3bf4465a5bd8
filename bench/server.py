"""Overhead of server and SDK over the engine, and their behaviour with many clients.

    python bench/server.py [--repeats 200] [--sustained 60] [--gigabyte 1.0]

The server runs in a separate process and the client in this one, connected by the unix socket of a
state directory. Round trips alternate with the engine alone and with a bare fork and exec. The
scenarios are those of Cloudflare's benchmark of its sandbox, which requires 70 to 95 % of them to
succeed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from smokebox import Client, Sandbox, connect
from smokebox.engine import Host
from table import Table, Work, bare, in_turns

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

STREAMED = 100_000_000
TRUE = ["/bin/true"]


@contextlib.contextmanager
def run_server(home: Path) -> Iterator[int]:
    """Run a server as a user would start it, and yield its pid."""
    command = [sys.executable, "-m", "smokebox", "serve", "--home", str(home), "--no-tcp"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            while not (home / "server.sock").exists():
                time.sleep(0.01)
            yield server.pid
        finally:
            server.terminate()


async def round_trips(table: Table, client: Client, host: Host, repeats: int) -> None:
    """Measure sequential commands with the SDK, with the engine, and without a sandbox."""
    remote, local = client.sandbox("trips"), host.sandbox("trips")

    async def by_sdk() -> None:
        await remote.exec(TRUE)

    async def by_engine() -> None:
        await local.exec(TRUE)

    async def get_info() -> None:
        await remote.info()

    for work in (by_sdk, by_engine, get_info):
        await work()
    base, sdk, engine, info = await in_turns(bare, by_sdk, by_engine, get_info, repeats=repeats)
    table.line("exec by the engine alone", engine, to="bare", other=base)
    table.line("exec by the SDK", sdk, to="bare", other=base)
    table.line("exec by the SDK", sdk, to="engine", other=engine)
    over = (statistics.median(sdk) - statistics.median(engine)) * 1e3
    table.text(f"{'the SDK over the engine':42} {over:9.2f} ms")
    table.line("a request that runs nothing", info, to="bare", other=base)


async def crowds(table: Table, client: Client, counts: Sequence[int]) -> None:
    """Measure many clients at once, each with sequential requests."""
    sandboxes = [client.sandbox(f"crowd-{number}") for number in range(20)]
    await asyncio.gather(*(one.exec(TRUE) for one in sandboxes))
    for count in counts:
        for name, share in (("info", 10), ("exec", 4)):
            times: list[float] = []

            async def one(
                number: int, name: str = name, share: int = share, times: list[float] = times
            ) -> None:
                sandbox = sandboxes[number % len(sandboxes)]
                for _ in range(share):
                    started = time.perf_counter()
                    await (sandbox.info() if name == "info" else sandbox.exec(TRUE))
                    times.append(time.perf_counter() - started)

            started = time.perf_counter()
            await asyncio.gather(*(one(number) for number in range(count)))
            seconds = time.perf_counter() - started
            ordered = sorted(times)
            table.text(
                f"{f'{count} clients, {name}':42} {len(times) / seconds:9.0f} /s   "
                f"p50 {ordered[len(ordered) // 2] * 1e3:.1f} ms, "
                f"p99 {ordered[int(len(ordered) * 0.99)] * 1e3:.1f} ms"
            )


class Scenario:
    """Counts successes and failures, with the time of each."""

    def __init__(self, table: Table, name: str) -> None:
        self.table = table
        self.name = name
        self.times: list[float] = []
        self.failures = 0

    async def run(self, work: Work) -> None:
        """Run a job and record its outcome."""
        started = time.perf_counter()
        try:
            await work()
        except Exception as error:
            self.failures += 1
            sys.stdout.write(f"{self.name}: {error}\n")
        else:
            self.times.append(time.perf_counter() - started)

    def report(self, more: str = "") -> None:
        """Print a line."""
        total = len(self.times) + self.failures
        ordered = sorted(self.times)
        self.table.text(
            f"{self.name:42} {100 * len(ordered) / total:8.1f} %   "
            f"p50 {ordered[len(ordered) // 2] * 1e3:.1f} ms, p99 "
            f"{ordered[int(len(ordered) * 0.99)] * 1e3:.1f} ms{more}"
        )


async def scenarios(table: Table, client: Client, sustained: float) -> None:
    """Run cold starts, bursts, a steady load, and files of four sizes."""
    cold = Scenario(table, "cold start, 10 times")
    for number in range(10):
        await cold.run(functools.partial(_hello, client.sandbox(f"cold-{number}")))
    cold.report()
    at_once = Scenario(table, "25 created at once")
    async with asyncio.TaskGroup() as group:
        for number in range(25):
            group.create_task(at_once.run(_hello_from(client, f"once-{number}")))
    at_once.report()
    staggered = Scenario(table, "20 staggered by 10 ms")
    async with asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(staggered.run(_hello_from(client, f"late-{number}")))
            await asyncio.sleep(0.01)
    staggered.report()
    await _run_steadily(table, client.sandbox("steady"), sustained)
    bursts = Scenario(table, "3 bursts of 50 commands")
    sandbox = client.sandbox("bursts")
    for _ in range(3):
        async with asyncio.TaskGroup() as group:
            for _ in range(50):
                group.create_task(bursts.run(functools.partial(_hello, sandbox)))
    bursts.report()
    for name, size in (("1 KB", 10**3), ("10 KB", 10**4), ("100 KB", 10**5), ("1 MB", 10**6)):
        files = Scenario(table, f"files of {name}, 20 times")
        for number in range(20):
            await files.run(functools.partial(_file, sandbox, f"file-{number}", size))
        files.report()


async def _run_steadily(table: Table, sandbox: Sandbox, seconds: float) -> None:
    steady = Scenario(table, f"5 commands a second for {seconds:g} s")
    await _hello(sandbox)
    began = time.perf_counter()
    for number in range(round(seconds * 5)):
        await asyncio.sleep(max(0.0, began + number / 5 - time.perf_counter()))
        await steady.run(functools.partial(_hello, sandbox))
    quarter = max(1, len(steady.times) // 4)
    first, last = steady.times[:quarter], steady.times[-quarter:]
    change = statistics.median(last) / statistics.median(first)
    steady.report(f"; last quarter {change:.2f} of the first")


def _hello_from(client: Client, id: str) -> Work:
    return functools.partial(_hello, client.sandbox(id))


async def _hello(sandbox: Sandbox) -> None:
    result = await sandbox.exec("echo hello")
    if result.stdout != "hello\n":
        raise ValueError(f"got {result!r}")


async def _file(sandbox: Sandbox, name: str, size: int) -> None:
    data = os.urandom(size)
    await sandbox.write_file(name, data)
    if await sandbox.read_bytes(name) != data:
        raise ValueError(f"{name} does not have the data that was written")


async def streams(table: Table, client: Client, host: Host) -> None:
    """Measure 100 MB of output: with the SDK, with the engine, and through a plain pipe."""
    # Text, since JSON encodes each other byte as six.
    command = ["sh", "-c", f"yes 'a line of forty characters, as usual ...' | head -c {STREAMED}"]
    remote, local = client.sandbox("stream"), host.sandbox("stream")

    async def by_sdk() -> None:
        async for _ in remote.exec_stream(command):
            pass

    async def by_engine() -> None:
        async for _ in local.exec_stream(command):
            pass

    async def pipe() -> None:
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            while os.read(process.stdout.fileno(), 1 << 18):
                pass

    await by_sdk()
    sdk, engine, plain = await in_turns(by_sdk, by_engine, pipe, repeats=5)
    table.line("100 MB streamed by the SDK", sdk, to="engine", other=engine)
    table.line("100 MB streamed by the SDK", sdk, to="plain pipe", other=plain)


async def large_files(table: Table, client: Client, server: int, size: int) -> None:
    """Measure upload and download of a large file, and the memory of the server."""
    sandbox = client.sandbox("large")
    await sandbox.exec(TRUE)
    piece = os.urandom(1 << 20)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(size >> 20):
            yield piece

    before = resident(server)
    started = time.perf_counter()
    await sandbox.write_stream("large", pieces())
    up, peak = time.perf_counter() - started, resident(server)
    started = time.perf_counter()
    count = 0
    async for data in sandbox.read_stream("large"):
        count += len(data)
    down = time.perf_counter() - started
    peak = max(peak, resident(server))
    if count != size >> 20 << 20:
        raise ValueError(f"{count} bytes came back")
    table.text(
        f"{f'{size / 1e9:.2f} GB up and down':42} {size / up / 1e6:9.0f} and "
        f"{size / down / 1e6:.0f} MB/s; the server grew by {(peak - before) / 1e6:.1f} MB"
    )


def resident(pid: int) -> int:
    """Return the peak memory of a process in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


async def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--sustained", type=float, default=60.0)
    parser.add_argument("--gigabyte", type=float, default=1.0)
    options = parser.parse_args()
    table = Table()
    with tempfile.TemporaryDirectory() as folder, run_server(Path(folder, "server")) as pid:
        client = connect(f"unix:{folder}/server/server.sock")
        async with await Host.open(Path(folder, "engine"), pool=0) as host:
            await round_trips(table, client, host, options.repeats)
            await streams(table, client, host)
        await crowds(table, client, (50, 200))
        await scenarios(table, client, options.sustained)
        await large_files(table, client, pid, round(options.gigabyte * 1e9))
        for info in await client.list():
            await client.sandbox(info.id).destroy()


if __name__ == "__main__":
    uvloop.run(main())
