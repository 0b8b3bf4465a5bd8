"""Many tenants beside a hostile one: nothing is lost, nothing fails, and nothing is left.

SMOKEBOX_SOAK=1 runs 200 sandboxes of 20 keys for an hour (SMOKEBOX_SOAK_MINUTES), and then the
hostile tenant may not double the latency of the others. That is part of `make soak`. Without it,
the minute and a half say nothing about time, and run after the other tests.
"""

from __future__ import annotations

import os
import sys

import pytest

from smokebox.engine.jail.cgroup_hierarchy import detect
from soak.latencies import ALL
from soak.tenants import SoakOptions, describe, soak

SOAK = "SMOKEBOX_SOAK" in os.environ
MINUTES = float(os.environ.get("SMOKEBOX_SOAK_MINUTES", "60"))
OPTIONS = (
    SoakOptions(minutes=MINUTES, window=min(60.0, MINUTES * 7.5))
    if SOAK
    else SoakOptions(sandboxes=20, keys=5, minutes=0.6, window=9.0, rate=10.0)
)
# Each pair of windows has nine seconds between them, and setting up takes a while.
pytestmark = [
    pytest.mark.timeout(MINUTES * 60 * 1.5 + 900 if SOAK else 420),
    pytest.mark.skipif(
        detect().enforcement == "rlimits",
        reason="without cgroups a fork or memory bomb has only the limits of each process",
    ),
]
# Megabytes. An interpreter returns little memory to the kernel, so the first windows count.
LARGEST_GROWTH = 100.0
MOST_MEMORY = 400.0
# Descriptors of idle connections. Those of sandboxes created ahead are there from the start.
MOST_FILES = 8
LARGEST_RATIO = 2.0


async def test_hostile_tenant_does_not_hurt_others() -> None:
    result = await soak(OPTIONS)
    sys.stderr.write(f"\n{describe(result)}")
    assert result.operations > 100
    assert (result.errors, result.lost, result.leftovers) == ([], [], [])
    assert result.before is not None
    assert result.after is not None
    assert result.after.files <= result.before.files + MOST_FILES
    assert result.after.processes <= result.before.processes
    assert result.after.memory < MOST_MEMORY
    assert result.growth < LARGEST_GROWTH
    if SOAK:
        assert result.latencies[ALL].ratio(99) <= LARGEST_RATIO
