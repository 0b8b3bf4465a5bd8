"""Groups of cgroups in a guest kernel with version 2, which that of this host may not have."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

import user_mode_linux
from smokebox.engine.jail.cgroup_hierarchy import detect

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.skipif(user_mode_linux.MARK in os.environ, reason="this is the guest"),
    pytest.mark.skipif(bool(user_mode_linux.missing()), reason=user_mode_linux.missing() or "none"),
    pytest.mark.timeout(user_mode_linux.SECONDS + 20),
]


@pytest.mark.parametrize(
    "tests",
    [
        "engine/jail/test_cgroup_groups.py",
        "engine/test_cpu_shares.py",
        "attack/test_cpu_groups.py",
    ],
)
def test_groups_work_with_version_2(tests: str, tmp_path: Path) -> None:
    if detect().enforcement == "cgroup-v2":
        pytest.skip("the kernel of this host runs these tests itself")
    run = user_mode_linux.run_tests(tmp_path, tests)
    assert run.passed, run.output
