"""Runs each suite once for every sandbox in `sandboxes.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from integrations.engine import close_engine, engine
from integrations.sandboxes import SANDBOXES, MakeSandbox
from integrations.sdk import close_sdk, sdk

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session", autouse=True)
def _engine_ends() -> Iterator[None]:
    yield
    close_engine()
    close_sdk()


@pytest.fixture(scope="session", params=SANDBOXES)
def make_sandbox(request: pytest.FixtureRequest) -> MakeSandbox:
    if request.param == "linux":
        engine()
    if request.param == "sdk":
        sdk()
    return SANDBOXES[request.param]
