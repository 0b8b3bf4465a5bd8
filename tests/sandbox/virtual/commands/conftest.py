"""Fixtures for commands: a virtual shell, the bash of the machine to compare with, and websites."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from sandbox.virtual.commands.gnu import TREE
from sandbox.virtual.commands.website import Running
from smokebox import virtual

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from sandbox.virtual.commands.gnu import Compare, Run
    from sandbox.virtual.commands.website import Website


@pytest.fixture
async def run() -> AsyncIterator[Run]:
    """Run a script in a virtual shell without network access."""
    async with virtual(env={"TZ": "UTC"}) as sandbox:
        yield sandbox.exec


@pytest.fixture
def same_as_gnu(run: Run, tmp_path: Path) -> Compare:
    """Run a script over the same small tree here and in bash, and compare the output."""
    bash = shutil.which("bash")
    version = subprocess.run(["ls", "--version"], capture_output=True, text=True, check=False)
    if bash is None or "GNU" not in version.stdout:
        pytest.skip("there are no GNU tools on this machine to compare with")
    environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "TZ": "UTC", "HOME": "/"}

    def gnu(script: str) -> tuple[str, int]:
        workspace = tmp_path / "workspace"
        shutil.rmtree(workspace, ignore_errors=True)
        workspace.mkdir()
        done = subprocess.run(
            [bash or "bash", "-c", TREE + script],
            cwd=workspace,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=15,
            check=False,
        )
        return done.stdout.decode().replace(str(tmp_path), ""), done.returncode

    async def compare(script: str) -> None:
        expected = gnu(script)
        result = await run(TREE + script)
        if (result.stdout, result.exit_code) != expected:
            # The second may have changed between the two runs.
            expected = gnu(script)
        assert (result.stdout, result.exit_code) == expected, result.stderr

    return compare


@pytest.fixture
def make_site() -> Iterator[Callable[[], Website]]:
    """Start websites, each on its own port."""
    running: list[Running] = []

    def make() -> Website:
        running.append(Running())
        return running[-1].start()

    yield make
    for one in running:
        one.stop()


@pytest.fixture
def site(make_site: Callable[[], Website]) -> Website:
    """Start one website."""
    return make_site()
