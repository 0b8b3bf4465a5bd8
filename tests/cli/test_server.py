"""Background server: start, status and stop."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from cli.served import Served
from cli.terminal import SMOKEBOX, Terminal
from smokebox import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Each starts a server or two.
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Served]:
    """Yield a state directory whose server the test starts itself."""
    alone = Served(tmp_path / "home")
    yield alone
    alone.run("down")


def test_up_prints_the_socket_and_is_idempotent(alone: Served) -> None:
    socket = f"{alone.home}/server.sock\n"
    assert alone.says("up") == socket
    pid = json.loads(alone.says("status", "--json"))["pid"]
    assert alone.says("up") == socket
    assert json.loads(alone.says("status", "--json"))["pid"] == pid


def test_status_exits_with_3_without_a_server(alone: Served) -> None:
    done = alone.run("status")
    assert (done.returncode, done.stdout) == (3, "")
    assert "`smokebox up`" in done.stderr
    done = alone.run("status", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (3, {"running": False})


def test_status_shows_the_running_server(alone: Served) -> None:
    alone.says("up")
    alone.says("create", "one")
    told = json.loads(alone.says("status", "--json"))
    assert told["running"] is True
    assert (told["version"], told["sandboxes"], told["active"]) == (__version__, 1, 1)
    assert told["socket"] == f"{alone.home}/server.sock"
    assert os.path.exists(f"/proc/{told['pid']}")
    assert 0 <= told["uptime"] < 600
    assert f"pid        {told['pid']}\n" in alone.says("status")


def test_down_stops_it_and_sandboxes_sleep(alone: Served) -> None:
    alone.says("up")
    alone.says("create", "one")
    alone.says("exec", "one", "echo kept > note")
    assert alone.says("down") == ""
    assert alone.run("status").returncode == 3
    assert json.loads(alone.says("ls", "--json"))[0]["status"] == "idle"
    assert alone.says("exec", "one", "cat note") == "kept\n"


def test_down_keep_leaves_sandboxes_running_for_the_next_server(alone: Served) -> None:
    alone.says("exec", "--create", "one", "true")
    process = alone.says("start", "one", "sleep 1000").strip()
    before = json.loads(alone.says("ps", "one", "--json"))
    assert alone.says("down", "--keep") == ""
    assert alone.run("status").returncode == 3
    after = json.loads(alone.says("ps", "one", "--json"))
    assert [(one["id"], one["status"]) for one in after] == [(process, "running")]
    assert after[0]["pid"] == before[0]["pid"]


def test_down_without_a_server_succeeds(alone: Served) -> None:
    done = alone.run("down")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "No server is running.\n")


def test_command_announces_the_start_of_a_server(alone: Served, tmp_path: Path) -> None:
    terminal = Terminal([SMOKEBOX, "ls"], tmp_path, alone.env)
    try:
        terminal.expect("Starting a server in the background")
        terminal.expect("ID  STATUS")
        assert terminal.wait() == 0
    finally:
        terminal.close()


def test_command_starts_a_server(alone: Served) -> None:
    assert json.loads(alone.says("ls", "--json")) == []
    assert json.loads(alone.says("status", "--json"))["running"] is True


def test_logs_without_arguments_prints_the_server_log(alone: Served) -> None:
    done = alone.run("logs")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no log of a background server" in done.stderr
    alone.says("up")
    assert f"serves unix:{alone.home}/server.sock\n" in alone.says("logs")


def test_logs_follow_prints_new_lines(alone: Served) -> None:
    alone.says("up")
    with alone.started("logs", "-f") as process:
        assert process.stdout is not None
        alone.says("create", "followed")
        while "followed" not in (line := process.stdout.readline()):
            assert line
        process.send_signal(2)
        assert process.wait(15) == 130


def test_other_server_by_url(alone: Served, tmp_path: Path) -> None:
    alone.says("up")
    url = f"unix:{alone.home}/server.sock"
    other = Served(tmp_path / "nothing")
    other.env["SMOKEBOX_URL"] = url
    assert other.says("create", "there") == "there\n"
    told = json.loads(other.says("status", "--json"))
    assert (told["url"], told["sandboxes"]) == (url, 1)


def test_unreachable_url_is_one_line_and_a_hint(alone: Served) -> None:
    alone.env["SMOKEBOX_URL"] = "http://127.0.0.1:1"
    done = alone.run("ls")
    assert (done.returncode, done.stdout) == (1, "")
    message, hint = done.stderr.splitlines()
    assert message.startswith("smokebox: no server answers at http://127.0.0.1:1")
    assert "smokebox up" in hint
