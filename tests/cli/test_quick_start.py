"""Quick start of docs/app.md: it is short and works as written."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cli.served_project import environment, run_project
from cli.terminal import SMOKEBOX

pytestmark = pytest.mark.timeout(120)
PAGE = (Path(__file__).parents[2] / "docs" / "app.md").read_text()
QUICK_START = PAGE.partition("## Quick start")[2].partition("\n## ")[0]
COMMANDS, PYTHON = re.findall(r"^```\w+\n(.*?)^```$", QUICK_START, re.MULTILINE | re.DOTALL)


def test_quick_start_has_at_most_six_lines_and_three_commands() -> None:
    assert len([line for line in PYTHON.splitlines() if line.strip()]) <= 6
    assert len(COMMANDS.splitlines()) <= 3


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_quick_start_works_without_an_api_key(tmp_path: Path) -> None:
    create, serve, prompt = COMMANDS.splitlines()
    env = environment(tmp_path)
    env["PATH"] = f"{Path(SMOKEBOX).parent}:{env['PATH']}"
    created = subprocess.run(
        ["bash", "-c", f"{create} && pwd"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    demo = Path(created.stdout.splitlines()[-1])
    assert serve == "smokebox dev"
    with run_project(demo, *serve.split()[1:]) as dev:
        line = prompt.replace("http://127.0.0.1:8600", dev.url)
        # The page shows what the command prints.
        dev.expect(re.escape(line))
        done = subprocess.run(["bash", "-c", line], env=env, capture_output=True, text=True)
    assert "You said 'Hello'" in json.loads(done.stdout)["result"]["text"]
