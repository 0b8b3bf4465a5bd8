"""Load of many tenants beside a hostile one: how much it delays the others, and what is lost.

    PYTHONPATH=tests python tests/soak/tenants.py [--sandboxes 200] [--keys 20] [--minutes 60]
        [--window 60] [--rate 40] [--attacks regex,flood]

Quiet and hostile windows of equal length alternate, so that a noisy machine affects both. The
server is killed and started again in the middle. Load and attacks run in processes of their own,
those of the hostile tenant, and the server that it downloads from, with the lowest priority: its
machines are not those of the others.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from engine.leftovers import find_leftovers, sandbox_pids
from short_directory import short_directory
from smokebox import connect
from smokebox.engine.context import tag_of
from smokebox.engine.jail.cgroup_hierarchy import detect
from smokebox.foundation.endpoint import socket_path
from soak.attacks import ATTACKS
from soak.hostile import HostileReport
from soak.latencies import ALL, Latencies, merge, table
from soak.ordinary import OrdinaryReport
from soak.plan import PhaseKind, Setup, Tenant
from soak.server import SoakServer, Usage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

T = TypeVar("T")

_HERE = Path(__file__).parent
_LOAD_PROCESSES = 2
# What is in flight when the attacks begin or end counts for neither.
_SETTLE_SECONDS = 3.0
_DESTROYED_AT_ONCE = 8
_REPORT_SECONDS = 300.0
_LONGEST_LINE = 1 << 28


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakOptions:
    """Size of a run. `rate` is the number of operations that all ordinary tenants begin a second.

    `kill` is whether the server is killed in the middle.
    """

    sandboxes: int = 200
    keys: int = 20
    minutes: float = 60.0
    window: float = 60.0
    rate: float = 40.0
    attacks: tuple[str, ...] = tuple(ATTACKS)
    kill: bool = True

    @property
    def windows(self) -> int:
        """Number of pairs of windows, an even number."""
        return max(2, round(self.minutes * 60 / self.window / 4) * 2)


@dataclass(slots=True, kw_only=True)
class SoakResult:
    """Latencies, errors, losses and the use of the machine.

    `usage` was read after each quiet window, and `before` and `after` without any sandbox.
    """

    latencies: dict[str, Latencies] = field(default_factory=dict)
    operations: int = 0
    errors: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    refusals: dict[str, int] = field(default_factory=dict)
    usage: list[list[Usage]] = field(default_factory=list)
    before: Usage | None = None
    after: Usage | None = None
    leftovers: list[str] = field(default_factory=list)

    @property
    def growth(self) -> float:
        """Greatest growth of memory in a life of the server after its first attacks, in MB."""
        lives = [life for life in self.usage if len(life) > 2]
        return max((life[-1].memory - life[1].memory for life in lives), default=0.0)


class LoadProgram:
    """A program of the load, which is told the phases."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def read(self, kind: type[T]) -> T:
        """Read one line of JSON that it prints."""
        assert self._process.stdout is not None
        async with asyncio.timeout(_REPORT_SECONDS):
            line = await self._process.stdout.readline()
        assert line, "a program of the load has failed"
        return msgspec.json.decode(line, type=kind)

    def tell(self, kind: PhaseKind, number: int) -> None:
        """Tell it the phase."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{kind} {number}\n".encode())

    def finish(self) -> None:
        """Tell it to verify and to report."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    @classmethod
    @contextlib.asynccontextmanager
    async def start(
        cls, name: str, setup: Setup | None = None, *, hostile: bool = False
    ) -> AsyncIterator[LoadProgram]:
        """Run one of the programs in this directory for the duration of the block."""
        words = [str(_HERE / f"{name}.py")]
        if setup is not None:
            words.append(msgspec.json.encode(setup).decode())
        if hostile:
            words = ["-c", f"import os, runpy, sys; os.nice(19); {_RUN}", *words]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LONGEST_LINE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(_HERE.parent), *sys.path[1:]))},
        )
        try:
            yield cls(process)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


_RUN = "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


class Soak:
    """One run."""

    def __init__(self, options: SoakOptions, server: SoakServer) -> None:
        self.result = SoakResult()
        self._options = options
        self._server = server
        self._programs: list[LoadProgram] = []

    async def run(self) -> SoakResult:
        """Run the load, and check what it left."""
        options, server, result = self._options, self._server, self.result
        async with contextlib.AsyncExitStack() as stack:
            origins = [
                await (
                    await stack.enter_async_context(LoadProgram.start("origin", hostile=hostile))
                ).read(int)
                for hostile in (False, True)
            ]
            server.configure(origins=origins, sandboxes=options.sandboxes + 32)
            server.start()
            tenants = await self._tenants()
            await self._fill_pool()
            result.before = server.usage()
            *ordinary, hostile = [
                await stack.enter_async_context(
                    LoadProgram.start(name, setup, hostile=name == "hostile")
                )
                for name, setup in self._setups(tenants, *origins)
            ]
            self._programs = [*ordinary, hostile]
            for program in self._programs:
                assert await program.read(str) == "ready"
            await self._windows()
            hostile.finish()
            report = await hostile.read(HostileReport)
            for program in ordinary:
                program.finish()
            reports = [await program.read(OrdinaryReport) for program in ordinary]
        result.latencies = merge(reports)
        result.operations = sum(one.operations for one in reports)
        result.errors = report.errors + [error for one in reports for error in one.errors]
        result.lost = [lost for one in reports for lost in one.lost]
        result.refusals = report.refusals
        await self._destroy_all()
        return result

    async def _fill_pool(self) -> None:
        """Let the server create sandboxes ahead, as it does from the first one on.

        Each takes seven descriptors of the server: four sockets, two directories and a pidfd.
        """
        async with connect(f"unix:{socket_path(str(self._server.home))}") as operator:
            first = operator.sandbox("first")
            await first.wake()
            await first.destroy()
        await asyncio.sleep(_SETTLE_SECONDS)

    async def _windows(self) -> None:
        """Alternate quiet and hostile windows, and kill the server in the middle."""
        life: list[Usage] = []
        self.result.usage.append(life)
        for number in range(self._options.windows):
            if self._options.kill and number == self._options.windows // 2:
                await self._restart(number)
                life = []
                self.result.usage.append(life)
            for kind in ("quiet", "hostile"):
                await self._phase("settle", number, _SETTLE_SECONDS)
                if kind == "quiet" and number:
                    life.append(self._server.usage())
                    _write(f"{number}: {life[-1]}\n")
                if kind == "hostile":
                    # Attacks begin before their latencies count.
                    self._tell("hostile", -1 - number)
                    await asyncio.sleep(_SETTLE_SECONDS)
                await self._phase(kind, number, self._options.window)
        await self._phase("settle", self._options.windows, _SETTLE_SECONDS)
        life.append(self._server.usage())
        _write(f"{self._options.windows}: {life[-1]}\n")

    async def _phase(self, kind: PhaseKind, number: int, seconds: float) -> None:
        self._tell(kind, number)
        await asyncio.sleep(seconds)

    def _tell(self, kind: PhaseKind, number: int) -> None:
        for program in self._programs:
            program.tell(kind, number)

    async def _restart(self, number: int) -> None:
        """Kill the server while requests run, and start it again."""
        self._tell("down", number)
        self._server.kill()
        # Clients notice that their requests are gone before the server is back.
        await asyncio.sleep(1.0)
        self._server.start()

    async def _tenants(self) -> list[Tenant]:
        """Create the keys, the hostile tenant's last."""
        each = max(4, self._options.sandboxes // self._options.keys)
        async with connect(f"unix:{socket_path(str(self._server.home))}") as operator:
            return [
                Tenant(
                    key=(await operator.keys.create(f"tenant{number}", prefix=f"t{number}-")).key,
                    prefix=f"t{number}-",
                    sandboxes=tuple(f"t{number}-{box}" for box in range(max(each, last))),
                )
                for number in range(self._options.keys)
                # The attacks use eight sandboxes.
                for last in (8 if number == self._options.keys - 1 else 0,)
            ]

    def _setups(
        self, tenants: list[Tenant], origin: int, hostile_origin: int
    ) -> list[tuple[str, Setup]]:
        """Return the programs of the load, with their setup."""
        *ordinary, hostile = tenants
        setups = [
            (
                "ordinary",
                Setup(
                    url=self._server.url,
                    origin=origin,
                    tenants=tuple(ordinary[number::_LOAD_PROCESSES]),
                    rate=self._options.rate / _LOAD_PROCESSES,
                    seed=number,
                ),
            )
            for number in range(_LOAD_PROCESSES)
        ]
        attacks = Setup(
            url=self._server.url,
            origin=hostile_origin,
            tenants=(hostile,),
            attacks=self._options.attacks,
        )
        return [*setups, ("hostile", attacks)]

    async def _destroy_all(self) -> None:
        """Destroy every sandbox, and note what stays."""
        async with connect(f"unix:{socket_path(str(self._server.home))}") as operator:
            turns = asyncio.Semaphore(_DESTROYED_AT_ONCE)

            async def destroy(id: str) -> None:
                async with turns:
                    await operator.sandbox(id).destroy()

            async with asyncio.TaskGroup() as group:
                for one in await operator.list():
                    group.create_task(destroy(one.id))
        # Pools and idle connections end after a while.
        await asyncio.sleep(_SETTLE_SECONDS + 2)
        self.result.after = self._server.usage()
        code = self._server.stop()
        if code:
            self.result.errors.append(f"the server exited with {code}: {self._server.log()}")
        self.result.leftovers = find_leftovers(str(self._server.home))


async def soak(options: SoakOptions) -> SoakResult:
    """Run a soak test in a directory of its own."""
    base = Path(short_directory("soak"))
    server = SoakServer(base / "home", free_port())
    try:
        return await Soak(options, server).run()
    finally:
        with contextlib.suppress(AssertionError):
            server.kill()
        kill_sandboxes(str(server.home))
        shutil.rmtree(base, ignore_errors=True)


def kill_sandboxes(home: str) -> None:
    """Kill the sandboxes of a server that was killed, which keep running otherwise."""
    detect().sweep([], prefix=f"{tag_of(home)}-")
    for pid in list(sandbox_pids(home)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def soak_until_terminated(options: SoakOptions) -> SoakResult:
    """Run a soak test that SIGTERM cancels, so that it leaves nothing running."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await soak(options)


def free_port() -> int:
    """Return a port that no program listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def describe(result: SoakResult) -> str:
    """Return the result as text."""
    lines = [table(result.latencies)]
    lines.append(f"{result.operations} operations, {len(result.errors)} errors, ")
    lines.append(f"{len(result.lost)} lost; refusals of the hostile tenant: {result.refusals}\n")
    lines.append(f"server at first: {result.before}; at last: {result.after}; ")
    lines.append(f"memory grew by {result.growth:.0f} MB\n")
    lines += [f"{one}\n" for one in (*result.errors[:20], *result.lost[:20], *result.leftovers)]
    return "".join(lines)


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def main() -> int:
    """Run a soak test with the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    for option in ("sandboxes", "keys"):
        parser.add_argument(f"--{option}", type=int, default=getattr(SoakOptions(), option))
    for option in ("minutes", "window", "rate"):
        parser.add_argument(f"--{option}", type=float, default=getattr(SoakOptions(), option))
    parser.add_argument("--attacks", default=",".join(ATTACKS))
    parser.add_argument("--no-kill", action="store_true")
    words = vars(parser.parse_args())
    kill, attacks = not words.pop("no_kill"), tuple(words.pop("attacks").split(","))
    options = SoakOptions(**words, attacks=attacks, kill=kill)
    try:
        result = asyncio.run(soak_until_terminated(options))
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    sys.stdout.write(describe(result))
    return bool(result.errors or result.lost or result.latencies[ALL].ratio(99) > 2)


if __name__ == "__main__":
    sys.exit(main())
