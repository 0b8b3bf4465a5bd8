"""Try eight solutions at once in forks of one sandbox, and keep the best.

    python examples/explore_solutions.py

The project is prepared once. Each fork starts from it, and cannot disturb the others.
"""

from __future__ import annotations

import asyncio

from smokebox import Sandbox

MEASURE = """
import time
from work import work
start = time.perf_counter()
found = work(100_000)
seconds = time.perf_counter() - start
assert found == sum(n * n for n in range(100_000))
print(seconds)
"""
LOOP = "def work(n):\n    total = 0\n    for i in range(n): total += i * i\n    return total\n"
SOLUTIONS = [
    LOOP,
    LOOP.replace("i * i", "i ** 2"),
    "def work(n):\n    return sum([i * i for i in range(n)])\n",
    "def work(n):\n    return sum(i * i for i in range(n))\n",
    "def work(n):\n    return sum(map(lambda i: i * i, range(n)))\n",
    "def work(n):\n    return (n - 1) * n * (2 * n - 1) // 6\n",
    "def work(n):\n    return n * n\n",
    "def work(n) return 1\n",
]


async def score(sandbox: Sandbox, solution: str) -> float:
    """Return the seconds that a solution takes; infinity if it is wrong."""
    await sandbox.write_file("work.py", solution)
    result = await sandbox.exec("python3 measure.py", timeout=30)
    return float(result.stdout) if result.success else float("inf")


async def main() -> None:
    async with await Sandbox.create() as sandbox:
        await sandbox.write_file("measure.py", MEASURE)
        forks = await sandbox.fork(len(SOLUTIONS))
        scores = await asyncio.gather(*map(score, forks, SOLUTIONS))
        best = min(range(len(scores)), key=scores.__getitem__)
        # The best one goes on: its state becomes that of the sandbox.
        kept = await forks[best].snapshot()
        await sandbox.restore(kept)
        print((await sandbox.exec("cat work.py")).stdout, end="")
        print(f"{sum(one < float('inf') for one in scores)} of {len(scores)} are right")
        await asyncio.gather(*(fork.destroy() for fork in forks))
        await sandbox.delete_snapshot(kept)
    assert "// 6" in SOLUTIONS[best]


asyncio.run(main())
