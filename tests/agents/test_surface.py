"""The public surface of agents: checked by types, without internals, and clear about `await`."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any, cast

import pytest

from agents.scripted_session import scripted_session
from smokebox import Agent, Harness, Session, create_agent, init
from smokebox.errors import NotAwaited
from smokebox.testing import ScriptedModel

if TYPE_CHECKING:
    from pathlib import Path

USES = """\
from smokebox import create_agent, init, local, virtual
from smokebox.agents import AgentContext, AgentOptions


@create_agent
def coder(ctx: AgentContext) -> AgentOptions:
    return {"model": "test/x", "sandbox": local()}


agent = create_agent(model=["test/x"], sandbox=virtual, tools=[print], budget={"turns": 3})
create_agent(model=3)  # BAD
create_agent(sandbx=1)  # BAD
create_agent(cwd=1)  # BAD
create_agent(thinking="very")  # BAD


async def main() -> None:
    harness = await init(agent, id="one", tools=[print])
    await init(model="test/x", cwd="/workspace")
    init(agent, modl="test/x")  # BAD
    init(modl="test/x")  # BAD
    init(agent).session()  # BAD
    session = await harness.session()
    data: int = (await session.prompt("how many?", result=int, timeout=3)).data
    text: str = (await session.prompt("how many?", result=int)).data  # BAD
    session.prompt("how many?", modl="test/x")  # BAD
    session.prompt("how many?").text  # BAD
"""


@pytest.mark.timeout(240)
def test_mypy_catches_unknown_and_wrong_options(tmp_path: Path) -> None:
    file = tmp_path / "uses.py"
    file.write_text(USES)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--config-file="]
    checked = subprocess.run(
        [*command, f"--cache-dir={tmp_path}/cache", str(file)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    lines = [line for line in checked.stdout.splitlines() if ": error:" in line]
    wrong = {int(line.split("uses.py:")[1].split(":")[0]) for line in lines if "uses.py:" in line}
    expected = {n for n, line in enumerate(USES.splitlines(), 1) if line.endswith("# BAD")}
    assert wrong == expected, checked.stdout + checked.stderr


def _public(value: object) -> set[str]:
    return {name for name in dir(value) if not name.startswith("_")}


async def test_agent_harness_and_session_have_no_public_internals() -> None:
    assert _public(Agent) == {"name", "description", "models"}
    async with scripted_session("hi") as session:
        assert _public(session) == _public(Session)
        assert _public(session.harness) == _public(Harness)
        operation = session.prompt("hello")
        assert _public(operation) == {"abort", "done", "id", "wait"}
        await operation
    assert _public(Harness) == {
        *("aclose", "agent", "env", "fs", "id", "sandbox"),
        *("session", "sessions", "shell", "tools"),
    }
    assert _public(Session) == {
        *("approvals", "approve", "checkpoints", "compact", "delete", "deny", "fork", "harness"),
        *("key", "messages", "name", "prompt", "restore", "running", "shell", "skill", "task"),
        "usage",
    }


def test_init_without_await_is_an_error_that_says_so() -> None:
    pending = cast("Any", init(create_agent(model=ScriptedModel("hi"), persist=False)))
    with pytest.raises(NotAwaited, match="harness = await init"):
        pending.session()
    assert not hasattr(pending, "sandbox")


async def test_prompt_without_await_is_an_error_that_says_so() -> None:
    async with scripted_session("hi") as session:
        operation = session.prompt("hello")
        with pytest.raises(NotAwaited, match=r"await session\.prompt"):
            _ = cast("Any", operation).text
        assert (await operation).text == "hi"
