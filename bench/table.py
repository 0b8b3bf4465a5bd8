"""What the benchmarks share: jobs measured in turns, and a line for each comparison."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence

Work = Callable[[], Awaitable[object]]


class Table:
    """Prints one line for each comparison."""

    def __init__(self) -> None:
        sys.stdout.write(f"{'job':42} {'ms':>9} {'p10':>8} {'p90':>8} {'ratio':>7}  to\n")

    def line(self, name: str, times: Sequence[float], *, to: str, other: Sequence[float]) -> None:
        """A job's times, and how many times as long as the other's they are."""
        ordered = sorted(times)
        tenth = max(1, len(ordered) // 10)
        middle = statistics.median(ordered)
        ratio = middle / statistics.median(other)
        self.text(
            f"{name:42} {middle * 1e3:9.2f} {ordered[tenth - 1] * 1e3:8.2f} "
            f"{ordered[-tenth] * 1e3:8.2f} {ratio:7.2f}  {to}"
        )

    def text(self, line: str) -> None:
        """A line as it is."""
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


async def bare() -> None:
    """The least that running a program can take."""
    os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)


async def in_turns(*works: Work, repeats: int) -> list[list[float]]:
    """The seconds of each work, measured in turns."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(repeats):
        for work, into in zip(works, times, strict=True):
            started = time.perf_counter()
            await work()
            into.append(time.perf_counter() - started)
    return times
