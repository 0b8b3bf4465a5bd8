"""SIGKILL of the engine at random moments: nothing acknowledged is lost, and nothing is left.

SMOKEBOX_CRASH_ROUNDS is the number of kills (`make soak`: 500). A failure prints its seed;
SMOKEBOX_CRASH_SEED starts with that one.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from typing import TYPE_CHECKING

import pytest

from crash.engine_process import (
    HANG_SECONDS,
    Engine,
    StateDirectory,
    kill_guest_init,
    leftovers,
    new_state_directory,
    still_running,
)
from crash.sandbox_model import SandboxModel

if TYPE_CHECKING:
    from collections.abc import Iterator

ROUNDS = int(os.environ.get("SMOKEBOX_CRASH_ROUNDS", "50"))
ROUNDS_EACH = 10
FIRST = int(os.environ.get("SMOKEBOX_CRASH_SEED", random.SystemRandom().randrange(10**6)))
SEEDS = range(ROUNDS // ROUNDS_EACH or 1)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", SEEDS)
def test_killed_engine_loses_and_leaves_nothing(number: int) -> None:
    with new_state_directory(unprivileged=False) as directory:
        crash(directory, FIRST + number, ROUNDS_EACH)


@pytest.mark.timeout(300)
@pytest.mark.skipif(os.geteuid() != 0, reason="the test above runs as an unprivileged user already")
@pytest.mark.parametrize("number", SEEDS[: -(-len(SEEDS) // 5)])
def test_killed_engine_of_unprivileged_user_loses_and_leaves_nothing(number: int) -> None:
    with new_state_directory(unprivileged=True) as directory:
        crash(directory, FIRST + number, ROUNDS_EACH)


def crash(directory: StateDirectory, seed: int, rounds: int) -> None:
    """Kill so many engines of one state directory, then check that all of it can be removed."""
    rng, model = random.Random(seed), SandboxModel()
    pool = str(rng.choice((0, 0, 2)))
    for n in range(1, rounds + 1):
        with killed(directory, model, pool, str(seed), str(n)) as engine:
            run_for_a_while(engine, rng)
        if rng.random() < 0.15:
            kill_guest_init(directory, model, rng)
    # On a busy machine all of them may be killed, or close, before their first step.
    deadline = time.monotonic() + 2 * HANG_SECONDS
    while not model.steps and time.monotonic() < deadline:
        n += 1
        with killed(directory, model, pool, str(seed), str(n)) as engine:
            run_until_a_step(engine, deadline)
    with Engine(directory, model, pool, str(seed), "0", "finish") as engine:
        engine.finish()
    model.violations += leftovers(directory)
    assert not model.violations, f"seed {seed}, at the end:\n" + "\n".join(model.violations)
    assert model.steps, f"seed {seed}: no engine did a step"


@contextlib.contextmanager
def killed(
    directory: StateDirectory, model: SandboxModel, pool: str, seed: str, n: str
) -> Iterator[Engine]:
    """Start an engine, and kill it after the block."""
    with Engine(directory, model, pool, seed, n) as engine:
        yield engine
        helpers = engine.kill()
    model.violations += still_running(helpers, "smokebox-zygote")
    assert not model.violations, f"seed {seed}, round {n}:\n" + "\n".join(model.violations)


def run_for_a_while(engine: Engine, rng: random.Random) -> None:
    """Run an engine for a part of its start or of its work."""
    if rng.random() < 0.25:
        engine.read(rng.uniform(0.1, 0.6))
    elif engine.read(HANG_SECONDS, until_inspected=True) and engine.inspected:
        engine.read(rng.choice((0.1, 0.7, 1.5)) * rng.random())
    else:
        engine.model.violations.append("the engine did not start")


def run_until_a_step(engine: Engine, deadline: float) -> None:
    """Run an engine until it has done a step."""
    while not engine.model.steps and time.monotonic() < deadline:
        if not engine.read(0.1):
            break
