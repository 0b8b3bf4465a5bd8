"""`smokebox run WORKFLOW` and `smokebox sessions`, in the folder of a project."""

from __future__ import annotations

import json
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from cli.command_line import wait_until
from cli.served_project import TIMEOUT, environment, run_project
from cli.terminal import SMOKEBOX

if TYPE_CHECKING:
    from pathlib import Path

    from cli.terminal import Run

pytestmark = pytest.mark.timeout(120)
WORKFLOWS = {
    "double": """
async def run(ctx):
    ctx.log.info("doubling", number=ctx.payload["number"])
    print("printed")
    return {"double": 2 * ctx.payload["number"]}
""",
    "sleepy": """
import asyncio
async def run(ctx):
    ctx.log.info("asleep")
    await asyncio.sleep(1000)
""",
    "wrong": "async def run(ctx):\n    raise RuntimeError('failed')\n",
    "later": """
from smokebox.app import dispatch
async def run(ctx):
    return await dispatch("assistant", id="later", input="Do it.")
""",
}


@pytest.fixture
def project(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the folder of `run` a project."""
    monkeypatch.setenv("MODEL", "scripted")
    monkeypatch.setenv("SMOKEBOX_HOME", str(tmp_path / ".home"))
    assert run("init").returncode == 0
    for name, text in WORKFLOWS.items():
        (tmp_path / "workflows" / f"{name}.py").write_text(text)
    return tmp_path


def test_workflow_runs_and_prints_json(run: Run, project: Path) -> None:
    done = run("run", "double", "--payload", '{"number": 21}')
    assert (done.returncode, json.loads(done.stdout)) == (0, {"double": 42})
    assert "doubling number=21" in done.stderr
    assert "printed" in done.stderr


def test_agents_of_a_workflow_are_shown(run: Run, project: Path) -> None:
    (project / "plan.json").write_text('{"document": "# Plan"}')
    for payload, stdin in (("@plan.json", ""), ("-", '{"document": "# Plan"}')):
        done = run("run", "review", "--payload", payload, stdin=stdin)
        assert json.loads(done.stdout)["review"]
        assert "● write review.md" in done.stderr


def test_queued_work_is_left_to_the_server_of_the_app(run: Run, project: Path) -> None:
    submission = json.loads(run("run", "later").stdout)
    with run_project(project, "app", MODEL="scripted") as app:
        done = app.request(f"/submissions/{submission}?wait=10")
    assert "Do it." in done["result"]["text"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "nosuch"), ["no workflow 'nosuch'", "double"]),
        (("run", "wrong"), ["RuntimeError: failed"]),
        (("run", "double", "--payload", "{"), ["--payload is not JSON"]),
        (("run", "double", "--payload", "@nosuch.json"), ["nosuch.json", "No such file"]),
        (("run", "double"), ["TypeError"]),
        (("run", "agents/assistant.py"), ["no prompt for the agent", '"..."']),
    ],
)
def test_mistake_is_one_line_and_a_hint(
    run: Run, project: Path, arguments: tuple[str, ...], words: list[str]
) -> None:
    done = run(*arguments)
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    assert all(word in done.stderr for word in words), done.stderr


def test_ctrl_c_aborts_a_run(project: Path) -> None:
    process = subprocess.Popen(
        [SMOKEBOX, "run", "sleepy"],
        cwd=project,
        env=environment(project),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    with process.stderr as output:
        lines = iter(output.readline, "")
        assert any("asleep" in line for line in lines)
        process.send_signal(signal.SIGINT)
        assert "aborted" in output.read()
    assert process.wait(TIMEOUT) == 130


def test_project_has_its_own_sessions(run: Run, project: Path, tmp_path: Path) -> None:
    assert run("sessions", "ls", "--json").stdout == "[]\n"
    with run_project(project, "dev", MODEL="scripted") as dev:
        dev.request("/agents/assistant/ada?wait=result", {"message": "Hello"})
        (found,) = json.loads(run("sessions", "ls", "--json").stdout)
        assert found["key"] == {"agent": "assistant", "id": "ada", "session": "default"}
        assert "> Hello" in run("sessions", "show", "assistant/ada").stdout
    lines = run("sessions", "export", "assistant/ada").stdout.splitlines()
    assert all(json.loads(line) for line in lines)
    assert run("sessions", "rm", "assistant/ada").returncode == 0
    assert run("sessions", "ls", "--json").stdout == "[]\n"


def test_session_of_a_project_is_followed_while_it_is_served(project: Path) -> None:
    with run_project(project, "dev", MODEL="scripted") as dev:
        dev.request("/agents/assistant/ada?wait=result", {"message": "one"})
        following = subprocess.Popen(
            [SMOKEBOX, "sessions", "tail", "assistant/ada"],
            cwd=project,
            env=environment(project),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert following.stdout is not None
        with following.stdout as output:
            lines = iter(output.readline, "")
            assert any("> one" in line for line in lines)
            dev.request("/agents/assistant/ada?wait=result", {"message": "two"})
            assert any("> two" in line for line in lines)
            following.kill()
            wait_until(lambda: following.poll() is not None)
