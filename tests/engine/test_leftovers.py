"""Removal of temporary files that a killed engine left in a sandbox."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from crash.engine_process import StateDirectory, new_state_directory
from engine.leftovers import sandbox_pids
from smokebox.engine.files import leftovers
from smokebox.engine.files.replacement import TEMPORARY, temporary_name
from unprivileged import LIBRARIES, as_nobody

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smokebox.engine.host import Host
    from smokebox.engine.workers import Workers

LEFT = ".smokebox-m0123456789abcdef"
LEFT_FRESH = ".smokebox-c0123456789abcdef"
KILLS = 100 if "SMOKEBOX_SOAK" in os.environ else 10

# Runs a script in a sandbox and prints its output, then waits to be killed, or closes.
ENGINE = """
import asyncio, sys
from smokebox.engine.host import Host

async def main(home, layers, tier, end, script):
    host = await Host.open(home, images=layers, tier=tier, pool=0)
    sandbox = host.sandbox("box")
    result = await sandbox.exec(script)
    assert result.exit_code == 0, result
    print((await sandbox.info()).generation, result.stdout, "ready", sep="\\n", flush=True)
    if end == "wait":
        await asyncio.Event().wait()
    await sandbox.destroy()
    await host.aclose()

asyncio.run(main(*sys.argv[1:]))
"""

# Prints the names in /workspace, then overwrites a file for ever.
OVERWRITE = """
import asyncio, sys
from smokebox.engine.host import Host

async def overwrite(sandbox):
    for n in range(10**9):
        await sandbox.write_file("/workspace/one", str(n))

async def main(home, layers, *_):
    host = await Host.open(home, images=layers, pool=0)
    sandbox = host.sandbox("box")
    found = await sandbox.exec("ls -A /workspace")
    await sandbox.write_file("/workspace/one", "")
    print(found.stdout, "ready", sep="\\n", flush=True)
    await asyncio.gather(*(overwrite(sandbox) for _ in range(4)))

asyncio.run(main(*sys.argv[1:]))
"""

CREATE_FILES = f"""
set -e
cd /workspace
bad=$(printf 'bad\\xff')
mkdir -p "$bad" closed read-only .smokebox-c00000000000000dd
for place in . "$bad" /usr /etc / .smokebox-c00000000000000dd; do
    touch "$place/{LEFT}" "$place/{LEFT_FRESH}"
done
touch closed/kept; chmod 000 closed
touch read-only/kept; chmod 444 read-only
ln -s BAIT link
ln -s BAIT/{LEFT} .smokebox-m1111111111111111
ln -s BAIT .smokebox-m2222222222222222
touch kept {LEFT}0 .smokebox-m0123456789abcde .smokebox-x0123456789abcdef x{LEFT}
down=deep
for level in {{1..100}}; do
    down+=/down
    folders+=("$down/side") files+=("$down/side/{LEFT}" "$down/{LEFT_FRESH}")
done
mkdir -p "${{folders[@]}}"
touch "${{files[@]}}"
"""
EXPECTED_IN_WORKSPACE = sorted(
    (
        ".smokebox-c00000000000000dd",
        ".smokebox-m0123456789abcde",
        ".smokebox-m1111111111111111",
        ".smokebox-m2222222222222222",
        ".smokebox-x0123456789abcdef",
        f"{LEFT}0",
        f"x{LEFT}",
        "bad\\377",
        "closed",
        "deep",
        "kept",
        "link",
        "read-only",
    )
)
LIST_FILES = """
cd /workspace
LC_ALL=C ls -Ab
find / /etc /usr -mindepth 1 -maxdepth 1 -name '.smokebox-*'
find /workspace -mindepth 2 -name '.smokebox-*'
find /workspace -path '*/side' | wc -l
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """User of the engines, and tier of their sandboxes."""

    unprivileged: bool = False
    tier: str = "namespaces"


KINDS = [
    pytest.param(Kind(), id="namespaces"),
    pytest.param(
        Kind(unprivileged=True),
        id="unprivileged",
        marks=pytest.mark.skipif(os.geteuid() != 0, reason="the tests run as an unprivileged user"),
    ),
    pytest.param(Kind(tier="gvisor"), id="gvisor", marks=pytest.mark.gvisor),
]


@contextlib.contextmanager
def engine(
    place: StateDirectory, program: str, *arguments: str
) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Start an engine process and yield it with its output once it is ready; kill it at the end."""
    python = [*as_nobody(), "/usr/bin/python3"] if place.unprivileged else [sys.executable]
    with subprocess.Popen(
        [*python, "-c", program, place.home, place.layers, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
        env={"PATH": os.environ["PATH"], "PYTHONPATH": LIBRARIES},
    ) as process:
        assert process.stdout is not None
        try:
            found: list[str] = []
            for line in process.stdout:
                if line == "ready\n":
                    break
                found += line.split("\n")
            else:
                pytest.fail(f"the engine ended with {process.wait()}")
            yield process, list(filter(None, found))
        finally:
            process.kill()


def kill_sandboxes(place: StateDirectory) -> None:
    while running := list(sandbox_pids(place.home)):
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("state", ["adopted", "stopped"])
@pytest.mark.parametrize("kind", KINDS)
def test_next_engine_removes_temporary_files_and_nothing_else(kind: Kind, state: str) -> None:
    with new_state_directory(unprivileged=kind.unprivileged) as place:
        bait = Path(place.home).parent / "bait"
        bait.mkdir()
        (bait / LEFT).touch()
        bait.chmod(0o777)
        with engine(place, ENGINE, kind.tier, "wait", CREATE_FILES.replace("BAIT", str(bait))):
            pass
        if state == "stopped":
            kill_sandboxes(place)
        with engine(place, ENGINE, kind.tier, "close", LIST_FILES) as (process, found):
            assert process.wait() == 0
        assert found == ["1" if state == "adopted" else "2", *EXPECTED_IN_WORKSPACE, "100"]
        assert (bait / LEFT).exists()


@pytest.mark.parametrize("kind", KINDS[:2])
def test_temporary_files_in_memory_are_removed(kind: Kind) -> None:
    """Not in gVisor, where the engine cannot access those file systems."""
    with new_state_directory(unprivileged=kind.unprivileged) as place:
        script = f"cd /dev/shm; mkdir below; touch /dev/{LEFT} {LEFT} below/{LEFT} below/kept"
        with engine(place, ENGINE, kind.tier, "wait", script):
            pass
        list_files = "find /dev /dev/shm -xdev -name '.smokebox-*' -o -name kept"
        with engine(place, ENGINE, kind.tier, "close", list_files) as (process, found):
            assert process.wait() == 0
        assert found == ["1", "/dev/shm/below/kept"]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", KINDS[:2])
def test_kills_during_overwrites_leave_no_second_name(kind: Kind) -> None:
    """A kill between the link and the rename of a write leaves a temporary name."""
    seed = random.SystemRandom().randrange(10**6)
    rng = random.Random(seed)
    with new_state_directory(unprivileged=kind.unprivileged) as place:
        for n in range(KILLS):
            with engine(place, OVERWRITE) as (_, found):
                assert found == (["one"] if n else []), f"seed {seed}, round {n}"
                time.sleep(rng.uniform(0, 0.1))
            if rng.random() < 0.3:
                kill_sandboxes(place)


@pytest.fixture
def upper(tmp_path: Path) -> Iterator[Path]:
    """Upper layer of a sandbox that does not run."""
    upper = tmp_path / "data" / "upper" / "0"
    upper.mkdir(parents=True)
    yield upper
    # Too deep for pytest to remove.
    subprocess.run(["rm", "-rf", upper], check=True)


async def test_tree_deeper_than_the_longest_path_is_swept(
    upper: Path, tmp_path: Path, workers: Workers
) -> None:
    fd = os.open(upper, os.O_RDONLY)
    for _ in range(1500):
        for name in ("down", "side"):
            os.mkdir(name, dir_fd=fd)
        os.close(os.open(f"side/{LEFT}", os.O_CREAT, dir_fd=fd))
        os.close(os.open("kept", os.O_CREAT, dir_fd=fd))
        below = os.open("down", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    await leftovers.sweep_stopped(str(tmp_path), workers)
    found = subprocess.run(["find", upper, "-type", "f"], stdout=subprocess.PIPE, check=True)
    assert [os.path.basename(name) for name in found.stdout.split()] == [b"kept"] * 1500


async def test_many_files_are_swept(upper: Path, tmp_path: Path, workers: Workers) -> None:
    for folder in range(20):
        (upper / str(folder)).mkdir()
        fd = os.open(upper / str(folder), os.O_RDONLY)
        for n in range(100):
            os.mknod(temporary_name(fresh=False) if n % 2 else str(n), dir_fd=fd)
        os.close(fd)
    await leftovers.sweep_stopped(str(tmp_path), workers)
    names = [name for _, _, files in os.walk(upper) for name in files]
    assert len(names) == 1_000
    assert not any(TEMPORARY.fullmatch(name) for name in names)


async def test_sweep_of_a_huge_sandbox_times_out_with_a_warning(
    upper: Path,
    tmp_path: Path,
    workers: Workers,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(leftovers, "SWEEP_SECONDS", 0.0)
    (upper / LEFT).touch()
    await leftovers.sweep_stopped(str(tmp_path), workers)
    assert "too large" in caplog.text


async def test_only_regular_files_are_removed(
    upper: Path, tmp_path: Path, workers: Workers
) -> None:
    os.mkfifo(upper / LEFT)
    (upper / LEFT_FRESH).symlink_to("/etc")
    (upper / temporary_name(fresh=True)).mkdir()
    before = sorted(os.listdir(upper))
    await leftovers.sweep_stopped(str(tmp_path), workers)
    assert sorted(os.listdir(upper)) == before


async def test_sandbox_without_files_is_fine(tmp_path: Path, workers: Workers) -> None:
    await leftovers.sweep_stopped(str(tmp_path / "absent"), workers)


async def test_output_that_a_killed_engine_spilled_is_removed_at_the_next_start(
    host: Host,
) -> None:
    sandbox = await host.create("box")
    async with sandbox.lifecycle.use() as run:
        output = Path(run.directory, "run", "io", "output")
    await sandbox.sleep()
    (output / "smokebox-output-old").mkdir()
    (output / "smokebox-output-old" / "stream-1.txt").write_text("old")
    await sandbox.exec("true")
    assert list(output.iterdir()) == []
