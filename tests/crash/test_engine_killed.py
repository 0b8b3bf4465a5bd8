"""Kill -9 of the engine at random moments: nothing is lost, and nothing is left.

SMOKEBOX_CRASH_ROUNDS says how often (`make soak`: 500). What fails prints its seed;
SMOKEBOX_CRASH_SEED begins with that one.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from typing import TYPE_CHECKING

import pytest

from crash.killing import PATIENCE, Engine, Place, kill_an_agent, leftovers, new_place, still_there
from crash.ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Iterator

ROUNDS = int(os.environ.get("SMOKEBOX_CRASH_ROUNDS", "50"))
ROUNDS_EACH = 10
FIRST = int(os.environ.get("SMOKEBOX_CRASH_SEED", random.SystemRandom().randrange(10**6)))
SEEDS = range(ROUNDS // ROUNDS_EACH or 1)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", SEEDS)
def test_nothing_acknowledged_is_lost_and_nothing_is_left(number: int) -> None:
    with new_place(ordinary=False) as place:
        crash(place, FIRST + number, ROUNDS_EACH)


@pytest.mark.timeout(300)
@pytest.mark.skipif(os.geteuid() != 0, reason="the test above is an ordinary user's already")
@pytest.mark.parametrize("number", SEEDS[: -(-len(SEEDS) // 5)])
def test_the_same_holds_for_an_ordinary_user(number: int) -> None:
    with new_place(ordinary=True) as place:
        crash(place, FIRST + number, ROUNDS_EACH)


def crash(place: Place, seed: int, rounds: int) -> None:
    """Kill so many engines on one state directory, and then see that all can be removed."""
    chance, ledger = random.Random(seed), Ledger()
    pool = str(chance.choice((0, 0, 2)))
    for n in range(1, rounds + 1):
        with killed(place, ledger, pool, str(seed), str(n)) as engine:
            live(engine, chance)
        if chance.random() < 0.15:
            kill_an_agent(place, ledger, chance)
    # On a busy machine all of them may be killed, or close, before they did anything.
    deadline = time.monotonic() + 2 * PATIENCE
    while not ledger.steps and time.monotonic() < deadline:
        n += 1
        with killed(place, ledger, pool, str(seed), str(n)) as engine:
            live_until_a_step(engine, deadline)
    with Engine(place, ledger, pool, str(seed), "0", "finish") as engine:
        engine.finish()
    ledger.violations += leftovers(place)
    assert not ledger.violations, f"seed {seed}, at the end:\n" + "\n".join(ledger.violations)
    assert ledger.steps, f"seed {seed}: no engine came to do anything"


@contextlib.contextmanager
def killed(place: Place, ledger: Ledger, pool: str, seed: str, n: str) -> Iterator[Engine]:
    """One engine, killed at the end."""
    with Engine(place, ledger, pool, seed, n) as engine:
        yield engine
        helpers = engine.kill()
    ledger.violations += still_there(helpers, "smokebox-zygote")
    assert not ledger.violations, f"seed {seed}, round {n}:\n" + "\n".join(ledger.violations)


def live(engine: Engine, chance: random.Random) -> None:
    """Let an engine be, for a moment of its start or of its work."""
    if chance.random() < 0.25:
        engine.listen(chance.uniform(0.1, 0.6))
    elif engine.listen(PATIENCE, until_looked=True) and engine.looked:
        engine.listen(chance.choice((0.1, 0.7, 1.5)) * chance.random())
    else:
        engine.ledger.violations.append("the engine did not come up")


def live_until_a_step(engine: Engine, deadline: float) -> None:
    """Let an engine be until it said that it has done something."""
    while not engine.ledger.steps and time.monotonic() < deadline:
        if not engine.listen(0.1):
            break
