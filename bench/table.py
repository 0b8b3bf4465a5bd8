"""Shared by the benchmarks: measure jobs alternately, and print a line for each comparison."""

from __future__ import annotations

import os
import socket
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
        """Print the median time of a job and its ratio to that of another."""
        ordered = sorted(times)
        tenth = max(1, len(ordered) // 10)
        middle = statistics.median(ordered)
        ratio = middle / statistics.median(other)
        self.text(
            f"{name:42} {middle * 1e3:9.2f} {ordered[tenth - 1] * 1e3:8.2f} "
            f"{ordered[-tenth] * 1e3:8.2f} {ratio:7.2f}  {to}"
        )

    def text(self, line: str) -> None:
        """Print a line."""
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


async def bare() -> None:
    """Run a program with the least possible overhead."""
    os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)


async def in_turns(*works: Work, repeats: int) -> list[list[float]]:
    """Run each job `repeats` times, alternately, and return their times in seconds."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(repeats):
        for work, measured in zip(works, times, strict=True):
            started = time.perf_counter()
            await work()
            measured.append(time.perf_counter() - started)
    return times


async def median(work: Work, repeats: int) -> float:
    """Return the median time of a job in seconds."""
    (times,) = await in_turns(work, repeats=repeats)
    return statistics.median(times)


def free_port() -> int:
    """Return a port that is free."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
