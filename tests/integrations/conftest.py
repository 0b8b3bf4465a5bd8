"""Runs each suite once for every sandbox in `sandboxes.py`."""

from __future__ import annotations

import pytest

from integrations.sandboxes import SANDBOXES, MakeSandbox


@pytest.fixture(scope="session", params=SANDBOXES)
def make_sandbox(request: pytest.FixtureRequest) -> MakeSandbox:
    return SANDBOXES[request.param]
