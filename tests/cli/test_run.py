"""`smokebox run` and `smokebox chat`: an agent in the foreground."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from cli.terminal import Open, Run

# The line editor moves the cursor.
PROMPT = r">[ \x08]*$"
AGENT = """
from smokebox import create_agent
from smokebox.agents.approval import Approval
from smokebox.testing import ScriptedModel, call
from smokebox.testing.scripted import last_returns, last_text

def reply(request):
    if returned := last_returns(request):
        return f"The tool returned {returned[0].text.strip()!r}."
    text = last_text(request)
    if text.startswith("run "):
        return ["Looking. ", call("bash", command=text.removeprefix("run "))]
    return f"You said {text!r}, after {len(request.messages) - 1} messages."

agent = create_agent(model=ScriptedModel(then=reply), name="echo", approval=APPROVAL)
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMOKEBOX_HOME", str(tmp_path / "home"))
    (tmp_path / "echo.py").write_text(AGENT.replace("APPROVAL", "None"))
    (tmp_path / "approval.py").write_text(AGENT.replace("APPROVAL", "Approval(ask=['bash'])"))


def test_text_goes_to_stdout_and_tool_calls_to_stderr(run: Run) -> None:
    done = run("run", "echo.py", "run echo one; echo two >&2")
    assert done.returncode == 0
    assert done.stdout == "Looking. \nThe tool returned 'one\\ntwo'.\n"
    assert "● bash echo one; echo two >&2\n  one\n  two\n" in done.stderr
    assert "2 turns" in done.stderr and "tokens in" in done.stderr


def test_prompt_is_read_from_stdin(run: Run) -> None:
    assert "You said 'long story'" in run("run", "echo.py", "-", stdin="long story").stdout


def test_continue_resumes_the_last_conversation(run: Run) -> None:
    assert "after 0 messages" in run("run", "echo.py", "one").stdout
    assert "after 0 messages" in run("run", "echo.py", "two").stdout
    assert "after 2 messages" in run("run", "echo.py", "three", "--continue").stdout


def test_id_resumes_its_conversation(run: Run) -> None:
    for expected in ("after 0 messages", "after 2 messages"):
        assert expected in run("run", "echo.py", "hello", "--id", "mine").stdout


def test_json_prints_one_event_per_line(run: Run) -> None:
    lines = run("run", "echo.py", "run echo hi", "--json").stdout.splitlines()
    events = [json.loads(line) for line in lines]
    names = [event["event"] for event in events]
    assert [name for name in names if name.startswith("Tool")] == [
        "ToolStart",
        "ToolOutput",
        "ToolEnd",
    ]
    assert events[-1]["event"] == "OperationEnd" and events[-1]["outcome"] == "completed"


def test_local_sandbox_is_this_directory(run: Run, tmp_path: Path) -> None:
    (tmp_path / "here.txt").touch()
    assert "here.txt" in run("run", "echo.py", "run ls", "--sandbox", "local").stdout
    assert "here.txt" not in run("run", "echo.py", "run ls", "--sandbox", "virtual").stdout


def test_call_is_denied_without_a_terminal(run: Run) -> None:
    done = run("run", "approval.py", "run echo hi")
    assert done.returncode == 0
    assert "needs approval" in done.stderr and "denied" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "nosuch.py", "hi"), ["no Python file 'nosuch.py'"]),
        (("run", "broken.py", "hi"), ["broken.py, line 2", "ZeroDivisionError"]),
        (("run", "typo.py", "hi"), ["typo.py, line 1", "SyntaxError"]),
        (("run", "empty.py", "hi"), ["empty.py has no agent", "create_agent"]),
        (("run", "two.py", "hi"), ["several agents: one, other", "agent"]),
        (("run", "echo.py", "hi", "--model", "nosuch/m"), ["nosuch"]),
        (("run", "echo.py", "hi", "--model", "anthropic/m"), ["ANTHROPIC_API_KEY"]),
        (("run", "echo.py", "hi", "--continue"), ["no conversation to continue"]),
        (("chat",), ["no model is configured", "SMOKEBOX_MODEL"]),
    ],
)
def test_mistake_is_one_line_and_a_hint(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], words: list[str]
) -> None:
    agents = "from smokebox import create_agent\none = create_agent()\nother = create_agent()\n"
    for name, text in {
        "broken": "import os\n1 / 0\n",
        "typo": "def (:\n",
        "empty": "",
        "two": agents,
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    os.environ.pop("ANTHROPIC_API_KEY", None)
    done = run(*arguments)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert all(word in done.stderr for word in words), done.stderr


def test_ctrl_c_aborts_and_records_it(open_terminal: Open, run: Run) -> None:
    terminal = open_terminal("run", "echo.py", "run echo started; sleep 1000", "--id", "mine")
    terminal.expect(r"  started")
    terminal.interrupt()
    terminal.expect(r"smokebox: ")
    assert terminal.wait() == 130
    assert "You said 'again'" in run("run", "echo.py", "again", "--id", "mine").stdout


def test_chat_is_one_conversation(open_terminal: Open) -> None:
    terminal = open_terminal("chat", "echo.py")
    terminal.expect(PROMPT)
    terminal.type("one")
    terminal.expect(r"after 0 messages")
    terminal.expect(PROMPT)
    terminal.type("two")
    terminal.expect(r"after 2 messages")
    terminal.expect(PROMPT)
    terminal.press("\x04")
    assert terminal.wait() == 0


def test_call_is_approved_in_the_terminal(open_terminal: Open) -> None:
    terminal = open_terminal("run", "approval.py", "run echo $((6 * 7))")
    terminal.expect(r"Allow bash\?")
    terminal.type("y")
    terminal.expect(r"The tool returned '42'")
    assert terminal.wait() == 0


def test_piped_lines_are_a_conversation(run: Run) -> None:
    done = run("chat", "echo.py", stdin="one\n\ntwo\n")
    assert (done.returncode, done.stdout.count("You said")) == (0, 2)
    assert "'two', after 2 messages" in done.stdout
