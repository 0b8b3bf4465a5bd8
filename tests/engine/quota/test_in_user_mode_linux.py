"""The tests of project quotas in a guest kernel that has them: that of this host may not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import user_mode_linux
from quota_file_systems import kernel_has_quotas

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = user_mode_linux.MARKS


@pytest.mark.parametrize(
    "tests",
    [
        "engine/quota/test_project_quota.py",
        "engine/quota/test_storage_pool.py",
        "attack/test_disk_quota.py",
    ],
)
def test_kernel_enforces_limits_in_the_guest(tests: str, tmp_path: Path) -> None:
    if kernel_has_quotas(tmp_path):
        pytest.skip("the kernel of this host runs these tests itself")
    run = user_mode_linux.run_tests(tmp_path, tests)
    assert run.passed, run.output
