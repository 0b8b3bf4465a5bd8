"""The virtual sandbox compared with just-bash under Node: 19 scripts.

    python bench/virtual.py [--rounds 3] [--only NAME] [--cache FOLDER]

Needs `node` and `npm`. just-bash is installed from the npm registry into a cache folder
outside the repository on the first run, in the version named below and with its default
settings, except for the same limits of commands and loops as ours. It runs in one Node process
for the whole benchmark and measures its own times, without the start of Node and the pipe to it.
Ours are measured around `await sandbox.exec(script)`, including the switch to the thread of the
shell.

Rounds alternate between the two. The time of a script is the best median of the rounds. Every
output is compared with one computed here in Python; just-bash groups wrongly in `jq_5mb_group`,
which is reported and does not stop the run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from smokebox import virtual

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PEER = "just-bash@3.4.2"
GOAL = 8.0
RUNNER = Path(__file__).with_name("virtual_justbash.mjs")
CACHE = Path(tempfile.gettempdir()) / "smokebox-bench" / PEER


@dataclass(frozen=True, slots=True)
class Case:
    """A script, the number of its runs in a round, and its expected output."""

    name: str
    script: str
    repeats: int
    expected: Callable[[Mapping[str, str]], str]


def make_data() -> dict[str, str]:
    """Return files: lines, a table, a folder of small files, and people as JSON."""
    rng = random.Random(7)
    words = ["foo", "bar", "baz", "qux", "lorem", "ipsum", "dolor", "amet"]
    lines = (
        f"{rng.choice(words)}{rng.randrange(40)} {rng.randrange(10_000)} "
        f"some text {rng.choice(words)}\n"
        for _ in range(10_000)
    )
    table = (
        f"w{rng.randrange(500)} {rng.randrange(1_000_000)} value {rng.randrange(1_000_000_000)}\n"
        for _ in range(36_000)
    )
    people = [
        {"id": n, "name": f"person {n}", "age": rng.randrange(18, 90), "city": rng.choice(words)}
        | {"email": f"person{n}@example.org", "note": "x" * rng.randrange(20, 60)}
        for n in range(45_000)
    ]
    files = {
        f"/d/folder{n % 20}/file{n}.txt": f"file {n}\n"
        + ("a needle here\n" if n % 7 == 0 else "only hay\n")
        + "more text\n" * (n % 5)
        for n in range(1000)
    }
    return files | {
        "/data/lines.txt": "".join(lines),
        "/data/t.txt": "".join(table),
        "/data/big.json": json.dumps(people, indent=1),
    }


def _rows(text: str) -> list[list[str]]:
    return [line.split(" ") for line in text.splitlines()]


def _top_foo(data: Mapping[str, str]) -> str:
    counts = Counter(line for line in data["/data/lines.txt"].splitlines() if "foo" in line)
    # `sort -rn` compares whole lines in reverse if counts are equal.
    ranked = sorted(counts.items(), key=lambda pair: (pair[1], pair[0]), reverse=True)
    return "".join(f"{count:7} {line}\n" for line, count in ranked[:3])


def _first_words(data: Mapping[str, str]) -> str:
    return f"{len({row[0] for row in _rows(data['/data/lines.txt'])})}\n"


def _needles(data: Mapping[str, str]) -> str:
    return f"{sum('needle' in text for path, text in data.items() if path.startswith('/d/'))}\n"


def _folder_lines(data: Mapping[str, str]) -> str:
    total = sum(text.count("\n") for path, text in data.items() if path.startswith("/d/"))
    return f"{total} total\n"


def _sum_and_kinds(data: Mapping[str, str]) -> str:
    rows = _rows(data["/data/t.txt"])
    return f"{sum(int(row[1]) for row in rows)}\n{len({row[0] for row in rows})}\n"


def _bracketed(data: Mapping[str, str]) -> str:
    # Each `w1` becomes `<` and `>`: the length stays.
    return f"{len(data['/data/t.txt'])}\n"


def _largest(data: Mapping[str, str]) -> str:
    rows = _rows(data["/data/t.txt"])
    largest = max(rows, key=lambda row: (int(row[1]), row))
    return " ".join(largest) + "\n"


def _counts(data: Mapping[str, str]) -> str:
    text = data["/data/t.txt"]
    return f"{text.count(chr(10))} {len(text.split())} {len(text)} /data/t.txt\n"


def _over_thirty(data: Mapping[str, str]) -> str:
    return f"{sum(person['age'] > 30 for person in json.loads(data['/data/big.json']))}\n"


def _ages(data: Mapping[str, str]) -> str:
    counts = Counter(person["age"] for person in json.loads(data["/data/big.json"]))
    first = [{"age": age, "n": counts[age]} for age in sorted(counts)[:2]]
    return json.dumps(first, separators=(",", ":")) + "\n"


def _prints(text: str) -> Callable[[Mapping[str, str]], str]:
    return lambda data: f"{text}\n"


CASES = [
    Case("echo", "echo hi", 300, _prints("hi")),
    Case(
        "pipeline_10k",
        "grep foo /data/lines.txt | sort | uniq -c | sort -rn | head -3",
        10,
        _top_foo,
    ),
    Case(
        "cut_sort_uniq_10k",
        "cut -d' ' -f1 /data/lines.txt | sort | uniq | wc -l",
        10,
        _first_words,
    ),
    Case("loop_100k_noop", "for i in $(seq 100000); do :; done; echo $i", 3, _prints("100000")),
    Case(
        "loop_100k_arith",
        "x=0; for i in $(seq 100000); do x=$((x+i)); done; echo $x",
        3,
        _prints("5000050000"),
    ),
    Case(
        "while_10k_arith",
        "i=0; while [ $i -lt 10000 ]; do i=$((i+1)); done; echo $i",
        3,
        _prints("10000"),
    ),
    Case(
        "func_calls_10k",
        "f() { r=$(($1*2)); }; for i in $(seq 10000); do f $i; done; echo $r",
        3,
        _prints("20000"),
    ),
    Case("cmdsub_1k", "for i in $(seq 1000); do x=$(echo $i); done; echo $x", 3, _prints("1000")),
    Case(
        "strops_20k",
        "s=abcdef; n=0; for i in $(seq 20000); do t=${s/c/X}; u=${t:2:3}; "
        "[[ $u == Xde ]] && n=$((n+1)); done; echo $n",
        3,
        _prints("20000"),
    ),
    Case("find_xargs_1k", "find /d -name '*.txt' | xargs grep -l needle | wc -l", 10, _needles),
    Case("find_exec_1k", "find /d -type f -exec wc -l {} + | tail -1", 10, _folder_lines),
    Case("grep_r_1k", "grep -rl needle /d | wc -l", 10, _needles),
    Case("rg_1k", "rg -l needle /d | wc -l", 10, _needles),
    Case(
        "awk_1mb",
        "awk '{s+=$2; c[$1]++} END{print s; n=0; for(k in c) n++; print n}' /data/t.txt",
        5,
        _sum_and_kinds,
    ),
    Case("sed_1mb", r"sed 's/w1\([0-9]*\)/<\1>/g' /data/t.txt | wc -c", 5, _bracketed),
    Case("sort_n_1mb", "sort -k2,2n /data/t.txt | tail -1", 5, _largest),
    Case("wc_1mb", "wc /data/t.txt", 10, _counts),
    Case("jq_5mb", "jq '[.[] | select(.age>30) | .name] | length' /data/big.json", 3, _over_thirty),
    Case(
        "jq_5mb_group",
        "jq -c 'group_by(.age) | map({age: .[0].age, n: length}) | .[0:2]' /data/big.json",
        3,
        _ages,
    ),
]


@dataclass(frozen=True, slots=True)
class Timing:
    """Output of a script in one round, and the time of its median run."""

    stdout: str
    milliseconds: float


class Engine(Protocol):
    """An engine that runs cases."""

    async def run(self, case: Case) -> Timing:
        """Run the script `repeats` times."""
        ...


class Ours:
    """The virtual sandbox, through the public API."""

    def __init__(self, data: Mapping[str, str]) -> None:
        self._sandbox = virtual(files=data)

    async def run(self, case: Case) -> Timing:
        times = []
        for _ in range(case.repeats):
            start = time.perf_counter()
            result = await self._sandbox.exec(case.script)
            times.append(time.perf_counter() - start)
        return Timing(result.stdout, statistics.median(times) * 1000)


class JustBash:
    """just-bash in a Node process."""

    def __init__(self, data: Mapping[str, str], cache: Path) -> None:
        self._folder = tempfile.TemporaryDirectory()
        file = Path(self._folder.name) / "data.json"
        file.write_text(json.dumps(data))
        self._process = subprocess.Popen(
            ["node", str(RUNNER), str(cache), str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    async def run(self, case: Case) -> Timing:
        return await asyncio.to_thread(self._request, case)

    def _request(self, case: Case) -> Timing:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"script": case.script, "repeats": case.repeats}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        response = json.loads(self._process.stdout.readline())
        return Timing(response["stdout"], statistics.median(response["milliseconds"]))

    def close(self) -> None:
        """End Node and remove the data."""
        self._process.communicate()
        self._folder.cleanup()


def install_peer(cache: Path) -> None:
    """Install just-bash into `cache`, unless it is installed."""
    if (cache / "node_modules" / "just-bash").is_dir():
        return
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        sys.exit("bench/virtual.py needs node and npm: install Node.js 20 or later.")
    cache.mkdir(parents=True, exist_ok=True)
    command = [npm, "install", "--prefix", str(cache), "--no-audit", "--no-fund", "--silent", PEER]
    subprocess.run(command, check=True, timeout=600)


def _line(*cells: str) -> None:
    sys.stdout.write(f"{cells[0]:<20}{cells[1]:>12}{cells[2]:>12}{cells[3]:>8}  {cells[4]}\n")


async def compare(cases: list[Case], *, rounds: int, cache: Path) -> bool:
    """Print the table; return True if our outputs are correct and the goal is met."""
    data = make_data()
    ours, peer = Ours(data), JustBash(data, cache)
    ratios, all_correct = [], True
    _line("script", "smokebox ms", "just-bash ms", "ratio", "")
    try:
        for case in cases:
            mine, theirs = [], []
            for _ in range(rounds):
                mine.append(await ours.run(case))
                theirs.append(await peer.run(case))
            expected = case.expected(data)
            correct = all(timing.stdout.split() == expected.split() for timing in mine)
            all_correct = all_correct and correct
            note = "" if correct else f"WRONG: {mine[-1].stdout!r}, expected {expected!r}"
            if any(timing.stdout.split() != expected.split() for timing in theirs):
                note += " (the output of just-bash is wrong)"
            a = min(timing.milliseconds for timing in mine)
            b = min(timing.milliseconds for timing in theirs)
            ratios.append(b / a)
            _line(case.name, f"{a:.3f}", f"{b:.3f}", f"{b / a:.1f}", note)
    finally:
        peer.close()
    mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
    sys.stdout.write(f"geometric mean: {mean:.2f} times as fast (goal {GOAL:g})\n")
    return all_correct and mean >= GOAL


def main() -> None:
    """Run the benchmark, and exit with 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description="Compare the virtual sandbox with just-bash.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=[case.name for case in CASES], action="append")
    parser.add_argument("--cache", type=Path, default=CACHE)
    options = parser.parse_args()
    install_peer(options.cache)
    cases = [case for case in CASES if not options.only or case.name in options.only]
    met = asyncio.run(compare(cases, rounds=options.rounds, cache=options.cache))
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
