"""The conformance suite over Linux sandboxes: in both tiers, by root and by an ordinary user."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

import smokebox
from ordinary import NOBODY, as_nobody
from smokebox.sandbox.conformance import SandboxSuite

if TYPE_CHECKING:
    from smokebox import SandboxApi
    from smokebox.engine.host import Host


class TestNamespaces(SandboxSuite):
    @pytest_asyncio.fixture
    async def sandbox(self, host: Host) -> SandboxApi:
        return host.sandbox("case")


@pytest.mark.skipif("SMOKEBOX_SOAK" not in os.environ, reason="takes minutes: see `make soak`")
@pytest.mark.skipif(not shutil.which("runsc"), reason="there is no runsc")
@pytest.mark.timeout(60)
class TestGvisor(SandboxSuite):
    @pytest_asyncio.fixture
    async def sandbox(self, host: Host) -> SandboxApi:
        return host.sandbox("case", tier="gvisor")


@pytest.mark.skipif(os.geteuid() != 0, reason="this is an ordinary user")
@pytest.mark.timeout(300)
def test_the_same_by_an_ordinary_user() -> None:
    site, source = Path(pytest.__file__).parents[1], Path(smokebox.__file__).parents[1]
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="smokebox-nobody-") as folder:
        os.chown(folder, NOBODY, NOBODY)
        options = ["-p", "no:cacheprovider", f"--basetemp={folder}/t", "-k", "TestNamespaces"]
        done = subprocess.run(
            [*as_nobody(), "/usr/bin/python3", "-m", "pytest", *options, __file__],
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": f"{source}:{site}",
                "PYTHONDONTWRITEBYTECODE": "1",
                "HOME": folder,
            },
            cwd=source.parent,
            capture_output=True,
            text=True,
        )
    if "No module named pytest" in done.stderr:
        pytest.skip("the python that an ordinary user can run here has no pytest")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
