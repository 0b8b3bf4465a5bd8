"""pytest fixtures of `smokebox.testing`, used by the project of a user."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from smokebox.testing import FakeModelServer

if TYPE_CHECKING:
    from pathlib import Path

# The test runs pytest three times and imports the SDK of a provider twice.
pytestmark = pytest.mark.timeout(300)

CONFTEST = 'pytest_plugins = ["smokebox.testing.fixtures"]\n'
TEST = """
import asyncio
import contextlib
import os

from smokebox import init
from smokebox.agents.models import open_model


async def prompt(config, text):
    async with contextlib.aclosing(open_model("anthropic/claude-sonnet-4-6", config)) as model:
        async with init(model=model, sandbox=None) as harness:
            return (await (await harness.session()).prompt(text)).text


def test_model_server(model_server, smokebox_home):
    assert os.environ["SMOKEBOX_HOME"] == str(smokebox_home)
    first, second = model_server("One."), model_server(then="Two.")
    assert asyncio.run(prompt(first.config, "?")) == "One."
    assert asyncio.run(prompt(second.config, "?")) == "Two."
    assert (smokebox_home / "agents.db").exists()


def test_recording(recorded_models, smokebox_home):
    assert asyncio.run(prompt(recorded_models.config, "?")) == "Recorded."
"""


def run_pytest(project: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=project,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )


def test_fixtures_serve_record_and_replay(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_agent.py").write_text(TEST)
    with FakeModelServer("Recorded.") as provider:
        (tmp_path / "smokebox.toml").write_text(
            f'[models.anthropic]\nbase_url = "{provider.url}"\napi_key_env = "THE_KEY"\n'
        )
        result = run_pytest(tmp_path, SMOKEBOX_RECORD="1", THE_KEY=provider.api_key)
    assert result.returncode == 0, result.stdout
    (recorded,) = (tmp_path / "recorded").iterdir()
    assert recorded.name == "test_agent-test_recording.jsonl"
    assert provider.api_key not in recorded.read_text()
    # Replay without the provider and its key.
    replayed = run_pytest(tmp_path, "-k", "recording")
    assert replayed.returncode == 0, replayed.stdout
    recorded.unlink()
    refused = run_pytest(tmp_path, "-k", "recording")
    assert "SMOKEBOX_RECORD=1" in refused.stdout
