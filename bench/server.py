"""What the server and the SDK add to the engine, and how they hold under many clients.

    python bench/server.py [--repeats 200] [--sustained 60] [--gigabyte 1.0]

The server runs in a process of its own, the client in this one, with the unix socket of a
state directory between them. Round trips are measured in turns with the engine alone and with
a bare fork and exec. The scenarios are those that Cloudflare measures its sandbox with, which
asks 70 to 95 % of them to succeed.
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
def serving(home: Path) -> Iterator[int]:
    """A server of a state directory, as a user would start it; its pid."""
    command = [sys.executable, "-m", "smokebox", "serve", "--home", str(home), "--no-tcp"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            while not (home / "server.sock").exists():
                time.sleep(0.01)
            yield server.pid
        finally:
            server.terminate()


async def round_trips(table: Table, client: Client, host: Host, repeats: int) -> None:
    """One command after the other, by the SDK, by the engine, and by nothing at all."""
    remote, local = client.sandbox("trips"), host.sandbox("trips")

    async def by_sdk() -> None:
        await remote.exec(TRUE)

    async def by_engine() -> None:
        await local.exec(TRUE)

    async def ask() -> None:
        await remote.info()

    for work in (by_sdk, by_engine, ask):
        await work()
    bared, sdk, engine, asked = await in_turns(bare, by_sdk, by_engine, ask, repeats=repeats)
    table.line("exec by the engine alone", engine, to="bare", other=bared)
    table.line("exec by the SDK", sdk, to="bare", other=bared)
    table.line("exec by the SDK", sdk, to="engine", other=engine)
    over = (statistics.median(sdk) - statistics.median(engine)) * 1e3
    table.text(f"{'the SDK over the engine':42} {over:9.2f} ms")
    table.line("a request that runs nothing", asked, to="bare", other=bared)


async def crowds(table: Table, client: Client, counts: Sequence[int]) -> None:
    """Many clients at once, each with one request after the other."""
    boxes = [client.sandbox(f"crowd-{number}") for number in range(20)]
    await asyncio.gather(*(box.exec(TRUE) for box in boxes))
    for count in counts:
        for name, share in (("info", 10), ("exec", 4)):
            times: list[float] = []

            async def one(
                number: int, name: str = name, share: int = share, times: list[float] = times
            ) -> None:
                box = boxes[number % len(boxes)]
                for _ in range(share):
                    started = time.perf_counter()
                    await (box.info() if name == "info" else box.exec(TRUE))
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
    """Counts what succeeded, and how long each took."""

    def __init__(self, table: Table, name: str) -> None:
        self.table = table
        self.name = name
        self.times: list[float] = []
        self.failures = 0

    async def run(self, work: Work) -> None:
        """Do one, and note it."""
        started = time.perf_counter()
        try:
            await work()
        except Exception as error:
            self.failures += 1
            sys.stdout.write(f"{self.name}: {error}\n")
        else:
            self.times.append(time.perf_counter() - started)

    def tell(self, more: str = "") -> None:
        """Print what came out."""
        total = len(self.times) + self.failures
        ordered = sorted(self.times)
        self.table.text(
            f"{self.name:42} {100 * len(ordered) / total:8.1f} %   "
            f"p50 {ordered[len(ordered) // 2] * 1e3:.1f} ms, p99 "
            f"{ordered[int(len(ordered) * 0.99)] * 1e3:.1f} ms{more}"
        )


async def scenarios(table: Table, client: Client, sustained: float) -> None:
    """Cold starts, bursts, a steady load, and files of four sizes."""
    cold = Scenario(table, "cold start, 10 times")
    for number in range(10):
        await cold.run(functools.partial(_hello, client.sandbox(f"cold-{number}")))
    cold.tell()
    at_once = Scenario(table, "25 created at once")
    async with asyncio.TaskGroup() as group:
        for number in range(25):
            group.create_task(at_once.run(_greeting(client, f"once-{number}")))
    at_once.tell()
    staggered = Scenario(table, "20 staggered by 10 ms")
    async with asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(staggered.run(_greeting(client, f"late-{number}")))
            await asyncio.sleep(0.01)
    staggered.tell()
    await _steadily(table, client.sandbox("steady"), sustained)
    bursts = Scenario(table, "3 bursts of 50 commands")
    box = client.sandbox("bursts")
    for _ in range(3):
        async with asyncio.TaskGroup() as group:
            for _ in range(50):
                group.create_task(bursts.run(functools.partial(_hello, box)))
    bursts.tell()
    for name, size in (("1 KB", 10**3), ("10 KB", 10**4), ("100 KB", 10**5), ("1 MB", 10**6)):
        files = Scenario(table, f"files of {name}, 20 times")
        for number in range(20):
            await files.run(functools.partial(_file, box, f"file-{number}", size))
        files.tell()


async def _steadily(table: Table, box: Sandbox, seconds: float) -> None:
    steady = Scenario(table, f"5 commands a second for {seconds:g} s")
    await _hello(box)
    began = time.perf_counter()
    for number in range(round(seconds * 5)):
        await asyncio.sleep(max(0.0, began + number / 5 - time.perf_counter()))
        await steady.run(functools.partial(_hello, box))
    quarter = max(1, len(steady.times) // 4)
    first, last = steady.times[:quarter], steady.times[-quarter:]
    change = statistics.median(last) / statistics.median(first)
    steady.tell(f"; last quarter {change:.2f} of the first")


def _greeting(client: Client, id: str) -> Work:
    return functools.partial(_hello, client.sandbox(id))


async def _hello(box: Sandbox) -> None:
    result = await box.exec("echo hello")
    if result.stdout != "hello\n":
        raise ValueError(f"got {result!r}")


async def _file(box: Sandbox, name: str, size: int) -> None:
    data = os.urandom(size)
    await box.write_file(name, data)
    if await box.read_bytes(name) != data:
        raise ValueError(f"{name} is not what was written")


async def streams(table: Table, client: Client, host: Host) -> None:
    """100 MB out of a sandbox: over the wire, from the engine, and by a plain pipe."""
    # Text: JSON makes six bytes of each that is not.
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
    """A file that no memory should hold, up and down, and what the server takes for it."""
    box = client.sandbox("large")
    await box.exec(TRUE)
    piece = os.urandom(1 << 20)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(size >> 20):
            yield piece

    before = resident(server)
    started = time.perf_counter()
    await box.write_stream("large", pieces())
    up, peak = time.perf_counter() - started, resident(server)
    started = time.perf_counter()
    count = 0
    async for data in box.read_stream("large"):
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
    """The most memory that a process has had so far, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


async def main() -> None:
    """Run all comparisons."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--sustained", type=float, default=60.0)
    parser.add_argument("--gigabyte", type=float, default=1.0)
    options = parser.parse_args()
    table = Table()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder, "server")) as pid:
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
