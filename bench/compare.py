"""Run a benchmark of two checkouts alternately, and print the ratio of their times.

    python bench/compare.py BEFORE AFTER engine [--rounds 7] [-- --repeats 10 --live 1 10]

BEFORE and AFTER are checkouts, each with its own `.venv`; options after `--` are passed to the
benchmark. A round runs before, after, and before again. `ratio` is the median time of after divided
by that of before; rates are converted to times, so that above 1 is always slower. `spread` compares
before with itself: for all splits of its runs into two halves, the 95th percentile of their ratio.
A line is marked SLOWER if its ratio is above both 1.05 and the spread; then the exit code is 1.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

# Width of the names before the numbers: 42 characters, or 20 in virtual.py.
NAME, SHORT_NAME, CELL = 42, 20, 12
NUMBER = re.compile(r"\d+(?:\.\d+)?")
MEDIAN = re.compile(r"p50 (\d+(?:\.\d+)?) ms")
RATE = re.compile(r"/s\b|a second,")
SLOWER = 1.05

Figures = dict[str, float]


def run(checkout: Path, bench: str, options: list[str]) -> Figures:
    """Run the benchmark of a checkout, and return the figure of each line."""
    python = checkout / ".venv/bin/python"
    command = [str(python), str(checkout / "bench" / f"{bench}.py"), *options]
    # A benchmark may exit with 1 because it missed its goal.
    environment = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=checkout, env=environment)
    figures = read(done.stdout)
    if not figures:
        sys.exit(f"{' '.join(command)} printed no figure:\n{done.stdout}{done.stderr}")
    return figures


def read(text: str) -> Figures:
    """Parse the output of a benchmark; a rate becomes a time."""
    figures: Figures = {}
    totals = False
    for line in text.splitlines():
        totals = totals or line.startswith("CPU ms of a turn")
        cells = line[SHORT_NAME : SHORT_NAME + CELL], line[SHORT_NAME + CELL :][:CELL]
        if all(NUMBER.fullmatch(cell.strip()) for cell in cells):
            figures[line[:SHORT_NAME].strip()] = float(cells[0])
            continue
        name, rest = line[:NAME].strip(), line[NAME:]
        if not re.match(r" +\d", rest):
            continue
        numbers = NUMBER.findall(rest)
        median = MEDIAN.search(rest)
        if RATE.search(line):
            figures[name] = 1 / float(numbers[0])
        elif median:
            figures[name] = float(median[1])
        else:
            # The total is at the end of a line of harness.py.
            figures[name] = float(numbers[-1 if totals else 0])
    return {name: figure for name, figure in figures.items() if figure > 0}


def spread(figures: list[float]) -> float:
    """Return the 95th percentile of the ratio between two halves of the figures."""
    ratios = []
    indices = range(len(figures))
    for half in itertools.combinations(indices, len(figures) // 2):
        one = statistics.median(figures[index] for index in half)
        other = statistics.median(figures[index] for index in indices if index not in half)
        ratios.append(max(one / other, other / one))
    return sorted(ratios)[int(len(ratios) * 0.95)]


def report(before: dict[str, list[float]], after: dict[str, list[float]]) -> bool:
    """Print a line for each figure; return True if none is slower."""
    print(f"{'job':{NAME}} {'before':>11} {'after':>11} {'ratio':>6} {'spread':>7}")
    fine = True
    for name, figures in before.items():
        if name not in after:
            print(f"{name:{NAME}} only before")
            continue
        old, new = statistics.median(figures), statistics.median(after[name])
        bound = spread(figures)
        slower = new / old > max(SLOWER, bound)
        fine = fine and not slower
        mark = "  SLOWER" if slower else ""
        print(f"{name:{NAME}} {old:11.5g} {new:11.5g} {new / old:6.2f} {bound:7.2f}{mark}")
    for name in after.keys() - before.keys():
        print(f"{name:{NAME}} only after")
    return fine


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("bench", help="the name of a script in bench/, such as engine")
    parser.add_argument("--rounds", type=int, default=7)
    # argparse would take options after `--` as positional arguments.
    own = list(itertools.takewhile(lambda word: word != "--", sys.argv[1:]))
    arguments, options = parser.parse_args(own), sys.argv[len(own) + 2 :]
    before: dict[str, list[float]] = defaultdict(list)
    after: dict[str, list[float]] = defaultdict(list)
    for number in range(arguments.rounds):
        for checkout, figures in (("before", before), ("after", after), ("before", before)):
            print(f"round {number + 1} of {arguments.rounds}: {checkout}", file=sys.stderr)
            path = getattr(arguments, checkout).resolve()
            for name, figure in run(path, arguments.bench, options).items():
                figures[name].append(figure)
    sys.exit(0 if report(before, after) else 1)


if __name__ == "__main__":
    main()
