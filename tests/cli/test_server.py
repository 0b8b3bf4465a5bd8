"""Background server: start, status and stop."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from cli.command_line import CommandLine
from cli.terminal import SMOKEBOX, Terminal
from smokebox import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Each starts a server or two.
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[CommandLine]:
    """Yield a state directory whose server the test starts itself."""
    fresh = CommandLine(tmp_path / "home")
    yield fresh
    fresh.run("down")


def test_up_prints_the_socket_and_is_idempotent(fresh: CommandLine) -> None:
    socket = f"{fresh.home}/server.sock\n"
    assert fresh.output("up") == socket
    pid = json.loads(fresh.output("status", "--json"))["pid"]
    assert fresh.output("up") == socket
    assert json.loads(fresh.output("status", "--json"))["pid"] == pid


def test_status_exits_with_3_without_a_server(fresh: CommandLine) -> None:
    done = fresh.run("status")
    assert (done.returncode, done.stdout) == (3, "")
    assert "`smokebox up`" in done.stderr
    done = fresh.run("status", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (3, {"running": False})


def test_status_shows_the_running_server(fresh: CommandLine) -> None:
    fresh.output("up")
    fresh.output("create", "one")
    output = json.loads(fresh.output("status", "--json"))
    assert output["running"] is True
    assert (output["version"], output["sandboxes"], output["active"]) == (__version__, 1, 1)
    assert output["socket"] == f"{fresh.home}/server.sock"
    assert os.path.exists(f"/proc/{output['pid']}")
    assert 0 <= output["uptime"] < 600
    assert f"pid        {output['pid']}\n" in fresh.output("status")


def test_down_stops_it_and_sandboxes_sleep(fresh: CommandLine) -> None:
    fresh.output("up")
    fresh.output("create", "one")
    fresh.output("exec", "one", "echo kept > note")
    assert fresh.output("down") == ""
    assert fresh.run("status").returncode == 3
    assert json.loads(fresh.output("ls", "--json"))[0]["status"] == "idle"
    assert fresh.output("exec", "one", "cat note") == "kept\n"


def test_down_keep_leaves_sandboxes_running_for_the_next_server(fresh: CommandLine) -> None:
    fresh.output("exec", "--create", "one", "true")
    process = fresh.output("start", "one", "sleep 1000").strip()
    before = json.loads(fresh.output("ps", "one", "--json"))
    assert fresh.output("down", "--keep") == ""
    assert fresh.run("status").returncode == 3
    after = json.loads(fresh.output("ps", "one", "--json"))
    assert [(one["id"], one["status"]) for one in after] == [(process, "running")]
    assert after[0]["pid"] == before[0]["pid"]


def test_down_without_a_server_succeeds(fresh: CommandLine) -> None:
    done = fresh.run("down")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "No server is running.\n")


def test_command_announces_the_start_of_a_server(fresh: CommandLine, tmp_path: Path) -> None:
    terminal = Terminal([SMOKEBOX, "ls"], tmp_path, fresh.env)
    try:
        terminal.expect("Starting a server in the background")
        terminal.expect("ID  STATUS")
        assert terminal.wait() == 0
    finally:
        terminal.close()


def test_command_starts_a_server(fresh: CommandLine) -> None:
    assert json.loads(fresh.output("ls", "--json")) == []
    assert json.loads(fresh.output("status", "--json"))["running"] is True


def test_logs_without_arguments_prints_the_server_log(fresh: CommandLine) -> None:
    done = fresh.run("logs")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no log of a background server" in done.stderr
    fresh.output("up")
    assert f"serves unix:{fresh.home}/server.sock\n" in fresh.output("logs")


def test_logs_follow_prints_new_lines(fresh: CommandLine) -> None:
    fresh.output("up")
    with fresh.start("logs", "-f") as process:
        assert process.stdout is not None
        fresh.output("create", "followed")
        while "followed" not in (line := process.stdout.readline()):
            assert line
        process.send_signal(2)
        assert process.wait(15) == 130


def test_other_server_by_url(fresh: CommandLine, tmp_path: Path) -> None:
    fresh.output("up")
    url = f"unix:{fresh.home}/server.sock"
    other = CommandLine(tmp_path / "nothing")
    other.env["SMOKEBOX_URL"] = url
    assert other.output("create", "there") == "there\n"
    output = json.loads(other.output("status", "--json"))
    assert (output["url"], output["sandboxes"]) == (url, 1)


def test_unreachable_url_is_one_line_and_a_hint(fresh: CommandLine) -> None:
    fresh.env["SMOKEBOX_URL"] = "http://127.0.0.1:1"
    done = fresh.run("ls")
    assert (done.returncode, done.stdout) == (1, "")
    message, hint = done.stderr.splitlines()
    assert message.startswith("smokebox: no server responds at http://127.0.0.1:1")
    assert "smokebox up" in hint
