"""`smokebox sessions`: list, show, follow, export and remove conversations."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from cli.terminal import SMOKEBOX, TIMEOUT
from smokebox.agents.log.records import (
    AbortRequested,
    ApprovalDecided,
    ApprovalRequested,
    Compacted,
    MessageAdded,
    Record,
    ReplyDelta,
    ReplyEnded,
    ReplyFailed,
    ReplyStarted,
    ResourcesChanged,
    SessionCreated,
    TaskEnded,
    TaskStarted,
    ToolEnded,
    ToolStarted,
    WorkAccepted,
    WorkEnded,
    WorkStarted,
)
from smokebox.agents.log.sqlite import SqliteStore
from smokebox.agents.log.store import SessionKey
from smokebox.agents.messages import (
    AssistantMessage,
    ImagePart,
    Text,
    Thinking,
    ToolCall,
    ToolReturn,
    Usage,
    UserMessage,
)

if TYPE_CHECKING:
    from pathlib import Path

    from cli.terminal import Run

KEY = SessionKey("helper", "one", "default")
CALL = ToolCall("c", "bash", '{"command": "make test"}')
SESSION: list[Record] = [
    SessionCreated("You are a helper.", model="test/model"),
    WorkAccepted("w", "prompt"),
    WorkStarted("w"),
    MessageAdded("w", UserMessage((Text("Fix the bug."), ImagePart("image/png", "b", 12)))),
    ReplyStarted("w", "r", "test/model"),
    ReplyDelta("r", "Let me"),
    ReplyFailed("r", "overloaded"),
    ReplyEnded(
        "s",
        AssistantMessage(parts=(Thinking("A thought."), Text("Let me see."), CALL), model="m"),
    ),
    ApprovalRequested("w", "c", "bash", CALL.arguments),
    ApprovalDecided("c", True),
    ToolStarted("w", "c", "bash"),
    ToolEnded(
        "c",
        ToolReturn("c", "bash", "\n".join(f"line {n}" for n in range(40))),
        status="error",
        seconds=2.0,
    ),
    TaskStarted("w", "task-1", agent="reviewer"),
    TaskEnded("task-1", "failed"),
    Compacted("They looked.", 3, tokens_before=12345),
    ResourcesChanged((), "x", UserMessage((Text("You have a new tool."),), signal="resources")),
    WorkStarted("w", attempt=2),
    AbortRequested("w"),
    WorkEnded("w", "failed", error={"message": "It broke."}, usage=Usage(input_tokens=9)),
]


def write(path: str, *sessions: tuple[SessionKey, list[Record]]) -> None:
    async def work() -> None:
        store = SqliteStore(path)
        for key, records in sessions:
            await (await store.open(key)).append(records)
        await store.aclose()

    asyncio.run(work())


@pytest.fixture
def path(tmp_path: Path) -> str:
    path = str(tmp_path / "agents.db")
    write(path, (KEY, SESSION), (SessionKey("helper", "two", "default"), SESSION[:2]))
    return path


def sessions_output(run: Run, *arguments: str) -> str:
    done = run("sessions", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_sessions_are_listed(run: Run, path: str) -> None:
    rows = [line.split() for line in sessions_output(run, "ls", "--store", path).splitlines()]
    assert rows[0][:3] == ["SESSION", "RECORDS", "UNFINISHED"]
    assert [row[:3] for row in rows[1:]] == [
        ["helper/two/default", "2", "1"],
        ["helper/one/default", str(len(SESSION)), "-"],
    ]


def test_sessions_are_listed_as_json(run: Run, path: str) -> None:
    [one] = json.loads(sessions_output(run, "ls", "--json", "--id", "one", "--store", path))
    assert one["key"] == {"agent": "helper", "id": "one", "session": "default"}
    assert (one["head"], one["unfinished"], one["parent"]) == (len(SESSION), 0, None)


def test_default_store_is_in_the_state_directory(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMOKEBOX_HOME", str(tmp_path / "home"))
    assert sessions_output(run, "ls").split()[0] == "SESSION"
    write(str(tmp_path / "home" / "agents.db"), (KEY, SESSION))
    assert "helper/one/default" in sessions_output(run, "ls")


def test_conversation_is_shown_as_text(run: Run, path: str) -> None:
    shown = sessions_output(run, "show", "helper/one", "--store", path)
    for words in (
        "> Fix the bug.",
        "> [image/png, 12 bytes]",
        "Let me see.",
        "● bash make test",
        "no reply: overloaded",
        "? bash make test needs approval",
        "  allowed",
        "  bash: error",
        "  line 5\n  ... 34 more lines",
        "▶ reviewer: session task-1",
        "  task-1: failed",
        "summarized 12,345 tokens",
        "  They looked.",
        "[resources]",
        "(attempt 2)",
        "abort requested",
        "failed, 9 tokens",
        "  It broke.",
    ):
        assert words in shown
    assert "thought" not in shown


def test_conversation_is_shown_in_full(run: Run, path: str) -> None:
    shown = sessions_output(run, "show", "one", "--full", "--store", path)
    assert "A thought." in shown
    assert "line 39" in shown
    assert "You are a helper." in shown


@pytest.mark.parametrize("words", [["show", "--json"], ["export"]])
def test_records_are_exported_as_lines_of_json(run: Run, path: str, words: list[str]) -> None:
    lines = sessions_output(run, *words, "one", "--store", path).splitlines()
    records = [json.loads(line) for line in lines]
    assert [one["offset"] for one in records] == list(range(1, len(SESSION) + 1))
    assert records[0]["record"]["type"] == "session_created"


def test_session_is_followed_until_it_is_removed(run: Run, path: str) -> None:
    words = [SMOKEBOX, "sessions", "tail", "helper/one", "-n", "1", "--store", path]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as tail:
        assert tail.stdout is not None
        assert tail.stdout.readline().startswith("failed, 9 tokens")
        write(path, (KEY, [MessageAdded("w", UserMessage((Text("Once more."),)))]))
        assert tail.stdout.readline().strip() == "It broke."
        assert tail.stdout.readline() == "> Once more.\n"
        sessions_output(run, "rm", str(KEY), "--store", path)
        assert tail.wait(TIMEOUT) == 0


def test_sessions_are_removed(run: Run, path: str) -> None:
    assert sessions_output(run, "rm", "helper/one/default", "two", "--store", path) == ""
    assert len(sessions_output(run, "ls", "--store", path).splitlines()) == 1


def test_session_in_use_is_removed_by_force_only(run: Run, path: str) -> None:
    async def work() -> None:
        store = SqliteStore(path)
        await store.open(KEY)
        done = await asyncio.to_thread(run, "sessions", "rm", str(KEY), "--store", path)
        assert done.returncode == 1
        assert f"in use by process {os.getpid()}" in done.stderr and "--force" in done.stderr
        done = await asyncio.to_thread(run, "sessions", "rm", "--force", str(KEY), "--store", path)
        assert done.returncode == 0
        await store.aclose()

    asyncio.run(work())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "none"], "there is no session 'none'"),
        (["show", "helper"], "'helper' matches 2 sessions: helper/two/default, helper/one"),
        (["rm", "none"], "`smokebox sessions ls` lists them"),
    ],
)
def test_unknown_or_ambiguous_session_is_refused(
    run: Run, path: str, words: list[str], message: str
) -> None:
    done = run("sessions", *words, "--store", path)
    assert done.returncode == 1
    assert message in done.stderr


def test_missing_store_is_not_created(run: Run, tmp_path: Path) -> None:
    done = run("sessions", "ls", "--store", str(tmp_path / "none.db"))
    assert done.returncode == 1
    assert "there is no session store" in done.stderr
    assert list(tmp_path.iterdir()) == []
