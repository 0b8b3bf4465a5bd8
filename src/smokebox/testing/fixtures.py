"""pytest fixtures for tests of agents: `pytest_plugins = ["smokebox.testing.fixtures"]`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from smokebox.testing.fake.server import FakeModelServer
from smokebox.testing.recorded_models import RecordedModels

if TYPE_CHECKING:
    from pathlib import Path

    from smokebox.testing.fake.server import ScriptItem

ModelServers = Callable[..., FakeModelServer]


@pytest.fixture
def smokebox_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory that no other test uses."""
    home = tmp_path / "smokebox-home"
    monkeypatch.setenv("SMOKEBOX_HOME", str(home))
    return home


@pytest.fixture
def model_server() -> Iterator[ModelServers]:
    """Starts model servers that stop after the test: `model_server("An answer.")`."""
    with contextlib.ExitStack() as servers:

        def start(*script: ScriptItem, then: ScriptItem | None = None) -> FakeModelServer:
            return servers.enter_context(FakeModelServer(*script, then=then))

        yield start


@pytest.fixture
def recorded_models(request: pytest.FixtureRequest) -> Iterator[RecordedModels]:
    """Recorded responses of this test, from the folder `recorded` beside it.

    SMOKEBOX_RECORD=1 records them if the test passes.
    """
    name = re.sub(r"[^\w.-]+", "-", request.node.name).strip("-")
    file = request.path.parent / "recorded" / f"{request.path.stem}-{name}.jsonl"
    with RecordedModels(file) as recorded:
        yield recorded
