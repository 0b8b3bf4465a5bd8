"""What an engine that is killed leaves among a sandbox's files, and its removal by the next."""

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

from crash.killing import Place, new_place
from engine.traces import processes
from ordinary import LIBRARIES, as_nobody
from smokebox.engine.files import leftovers
from smokebox.engine.files.replacement import TEMPORARY, temporary_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smokebox.engine.workers import Workers

LEFT = ".smokebox-m0123456789abcdef"
LEFT_FRESH = ".smokebox-c0123456789abcdef"
KILLS = 100 if "SMOKEBOX_SOAK" in os.environ else 10

# Runs a script in a sandbox and tells what it printed, then waits to be killed, or closes.
ENGINE = """
import asyncio, sys
from smokebox.engine.host import Host

async def main(home, layers, tier, end, script):
    host = await Host.open(home, images=layers, tier=tier, pool=0)
    sandbox = host.sandbox("box")
    result = await sandbox.exec(script)
    assert result.exit_code == 0, result
    print((await sandbox.info()).generation, result.stdout, "told", sep="\\n", flush=True)
    if end == "wait":
        await asyncio.Event().wait()
    await sandbox.destroy()
    await host.aclose()

asyncio.run(main(*sys.argv[1:]))
"""

# Tells what is beside a file, then overwrites that without an end.
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
    print(found.stdout, "told", sep="\\n", flush=True)
    await asyncio.gather(*(overwrite(sandbox) for _ in range(4)))

asyncio.run(main(*sys.argv[1:]))
"""

MESS = f"""
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
KEPT_IN_WORKSPACE = sorted(
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
LOOK = """
cd /workspace
LC_ALL=C ls -Ab
find / /etc /usr -mindepth 1 -maxdepth 1 -name '.smokebox-*'
find /workspace -mindepth 2 -name '.smokebox-*'
find /workspace -path '*/side' | wc -l
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Who the engines are, and what isolates their sandboxes."""

    ordinary: bool = False
    tier: str = "namespaces"


KINDS = [
    pytest.param(Kind(), id="namespaces"),
    pytest.param(
        Kind(ordinary=True),
        id="ordinary",
        marks=pytest.mark.skipif(os.geteuid() != 0, reason="the others are ordinary already"),
    ),
    pytest.param(Kind(tier="gvisor"), id="gvisor", marks=pytest.mark.gvisor),
]


@contextlib.contextmanager
def engine(
    place: Place, program: str, *arguments: str
) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """An engine in a process of its own that has told what it found; killed at the end."""
    python = [*as_nobody(), "/usr/bin/python3"] if place.ordinary else [sys.executable]
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
                if line == "told\n":
                    break
                found += line.split("\n")
            else:
                pytest.fail(f"the engine ended with {process.wait()}")
            yield process, list(filter(None, found))
        finally:
            process.kill()


def kill_sandboxes(place: Place) -> None:
    while running := list(processes(place.home)):
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("fate", ["adopted", "dead"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_next_engine_removes_what_a_killed_one_left_and_nothing_else(
    kind: Kind, fate: str
) -> None:
    with new_place(ordinary=kind.ordinary) as place:
        bait = Path(place.home).parent / "bait"
        bait.mkdir()
        (bait / LEFT).touch()
        bait.chmod(0o777)
        with engine(place, ENGINE, kind.tier, "wait", MESS.replace("BAIT", str(bait))):
            pass
        if fate == "dead":
            kill_sandboxes(place)
        with engine(place, ENGINE, kind.tier, "close", LOOK) as (process, found):
            assert process.wait() == 0
        assert found == ["1" if fate == "adopted" else "2", *KEPT_IN_WORKSPACE, "100"]
        assert (bait / LEFT).exists()


@pytest.mark.parametrize("kind", KINDS[:2])
def test_what_was_left_in_memory_goes_too(kind: Kind) -> None:
    """In gVisor nobody outside can reach that, so that no engine leaves anything there."""
    with new_place(ordinary=kind.ordinary) as place:
        script = f"cd /dev/shm; mkdir below; touch /dev/{LEFT} {LEFT} below/{LEFT} below/kept"
        with engine(place, ENGINE, kind.tier, "wait", script):
            pass
        look = "find /dev /dev/shm -xdev -name '.smokebox-*' -o -name kept"
        with engine(place, ENGINE, kind.tier, "close", look) as (process, found):
            assert process.wait() == 0
        assert found == ["1", "/dev/shm/below/kept"]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_file_that_is_overwritten_under_kills_stays_alone(kind: Kind) -> None:
    """A kill between the link and the rename of a write used to leave a second name."""
    seed = random.SystemRandom().randrange(10**6)
    chance = random.Random(seed)
    with new_place(ordinary=kind.ordinary) as place:
        for n in range(KILLS):
            with engine(place, OVERWRITE) as (_, found):
                assert found == (["one"] if n else []), f"seed {seed}, round {n}"
                time.sleep(chance.uniform(0, 0.1))
            if chance.random() < 0.3:
                kill_sandboxes(place)


@pytest.fixture
def upper(tmp_path: Path) -> Iterator[Path]:
    """What a sandbox wrote that is not there, at its root."""
    upper = tmp_path / "data" / "upper" / "0"
    upper.mkdir(parents=True)
    yield upper
    # Too deep for what pytest itself would remove it with.
    subprocess.run(["rm", "-rf", upper], check=True)


async def test_a_tree_deeper_than_any_path_is_swept(
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
    await leftovers.sweep_dead(str(tmp_path), workers)
    found = subprocess.run(["find", upper, "-type", "f"], stdout=subprocess.PIPE, check=True)
    assert [os.path.basename(name) for name in found.stdout.split()] == [b"kept"] * 1500


async def test_many_files_are_swept(upper: Path, tmp_path: Path, workers: Workers) -> None:
    for folder in range(20):
        (upper / str(folder)).mkdir()
        fd = os.open(upper / str(folder), os.O_RDONLY)
        for n in range(100):
            os.mknod(temporary_name(fresh=False) if n % 2 else str(n), dir_fd=fd)
        os.close(fd)
    await leftovers.sweep_dead(str(tmp_path), workers)
    names = [name for _, _, files in os.walk(upper) for name in files]
    assert len(names) == 1_000
    assert not any(TEMPORARY.fullmatch(name) for name in names)


async def test_a_sandbox_too_large_to_be_seen_is_given_up_and_said_so(
    upper: Path,
    tmp_path: Path,
    workers: Workers,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(leftovers, "PATIENCE_SECONDS", 0.0)
    (upper / LEFT).touch()
    await leftovers.sweep_dead(str(tmp_path), workers)
    assert "too large" in caplog.text


async def test_only_regular_files_are_removed(
    upper: Path, tmp_path: Path, workers: Workers
) -> None:
    os.mkfifo(upper / LEFT)
    (upper / LEFT_FRESH).symlink_to("/etc")
    (upper / temporary_name(fresh=True)).mkdir()
    before = sorted(os.listdir(upper))
    await leftovers.sweep_dead(str(tmp_path), workers)
    assert sorted(os.listdir(upper)) == before


async def test_a_sandbox_that_has_no_files_yet_is_nothing_to_sweep(
    tmp_path: Path, workers: Workers
) -> None:
    await leftovers.sweep_dead(str(tmp_path / "absent"), workers)
