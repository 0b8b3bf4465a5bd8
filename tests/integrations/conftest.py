"""Runs each suite once for every sandbox in `sandboxes.py`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from integrations.engine import close_engine
from integrations.sandboxes import SANDBOXES, MakeSandbox

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smokebox import SandboxApi


@pytest.fixture(scope="session", autouse=True)
def _engine_ends() -> Iterator[None]:
    yield
    close_engine()


@pytest.fixture(scope="session", params=SANDBOXES)
def make_sandbox(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> MakeSandbox:
    make = SANDBOXES[request.param]
    # What serves all sandboxes of a kind starts with the first: here, where no test is blamed.
    asyncio.run(use_once(make(tmp_path_factory.mktemp("first"))))
    return make


async def use_once(sandbox: SandboxApi) -> None:
    await sandbox.exec("true")
    await sandbox.aclose()
