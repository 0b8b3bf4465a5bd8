"""Fixtures of attacks: a sandbox of the attacker, another one, and files of the host."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from attack.sandbox_code import Canary
from registry_server import RegistryProxy
from smokebox.engine.host import Host

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from smokebox.engine.sandbox import Sandbox
    from smokebox.isolation import Tier

TIERS = ["namespaces", pytest.param("gvisor", marks=pytest.mark.gvisor)]


@pytest.fixture(scope="session")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of image layers, shared by all tests."""
    return tmp_path_factory.mktemp("images")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every attack on every tier, except those on the host's kernel."""
    if "tier" in metafunc.fixturenames:
        tiers = TIERS[:1] if "host_kernel" in metafunc.fixturenames else TIERS
        metafunc.parametrize("tier", tiers, indirect=True)


@pytest.fixture
def host_kernel() -> None:
    """Mark attacks that the host's kernel must refuse; gVisor may allow them in its own kernel."""


@pytest.fixture
def tier(request: pytest.FixtureRequest) -> Tier:
    """Return the isolation tier."""
    tier: Tier = request.param
    return tier


@pytest_asyncio.fixture
async def host(tmp_path: Path, layers: Path, tier: Tier) -> AsyncIterator[Host]:
    """Open an engine in an empty state directory."""
    async with await Host.open(tmp_path / "home", tier=tier, pool=0, images=layers) as host:
        yield host


@pytest_asyncio.fixture
async def sandbox(host: Host, tier: Tier) -> Sandbox:
    """Create the sandbox in which the attacker is root."""
    return await host.create("attacker")


@pytest_asyncio.fixture
async def neighbour(sandbox: Sandbox, host: Host) -> Sandbox:
    """Create another sandbox on the same host."""
    return await host.create("neighbour")


@pytest_asyncio.fixture
async def hostile() -> AsyncIterator[RegistryProxy]:
    """A web server or registry of the attacker, at the only loopback port that is granted."""
    async with RegistryProxy(None).open() as server:
        yield server


@pytest.fixture
def canary(tmp_path: Path) -> Canary:
    """Create a directory of the host with a file that every user can read and write."""
    folder = tmp_path / "canary"
    folder.mkdir()
    (folder / "secret").write_text(Canary.TEXT)
    os.chmod(folder, 0o777)
    os.chmod(folder / "secret", 0o666)
    for above in (tmp_path, *tmp_path.parents):
        if above.stat().st_uid == os.geteuid() and above.is_relative_to("/tmp"):
            os.chmod(above, above.stat().st_mode | 0o011)
    return Canary(folder)
