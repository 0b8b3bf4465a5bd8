"""Groups of cgroups in a guest kernel with version 2, which that of this host may not have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import user_mode_linux
from smokebox.engine.jail.cgroup_hierarchy import detect

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = user_mode_linux.MARKS


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
