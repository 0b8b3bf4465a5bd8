"""Commands on sandboxes: create, list, inspect, sleep, wake and remove."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from cli.terminal import SMOKEBOX, Terminal

if TYPE_CHECKING:
    from pathlib import Path

    from cli.served import Served


def test_create_prints_the_id_and_ls_lists_it(served: Served) -> None:
    assert served.says("create", "mine", "--label", "team=search") == "mine\n"
    lines = served.says("ls", "--label", "team=search").splitlines()
    assert [line.split()[0] for line in lines] == ["ID", "mine"]
    assert lines[1].endswith("team=search")


def test_create_without_an_id_chooses_one(served: Served) -> None:
    id = served.says("create").strip()
    assert json.loads(served.says("info", id, "--json"))["id"] == id


def test_create_sends_every_setting(served: Served) -> None:
    served.says(
        *("create", "full", "--limits", "memory=512MiB,cpu=0.5,pids=none", "--env", "A=1"),
        *("--sleep-after", "2h", "--ephemeral", "--keep-alive", "--cwd", "/tmp"),
    )
    info = json.loads(served.says("info", "full", "--json"))
    assert (info["limits"]["memory"], info["limits"]["cpu"]) == (512 << 20, 0.5)
    assert info["limits"]["pids"] is None
    assert (info["sleep_after"], info["cwd"]) == (7200, "/tmp")
    assert (info["ephemeral"], info["keep_alive"]) == (True, True)
    assert served.says("exec", "full", "echo $A") == "1\n"


def test_create_takes_the_name_of_an_instance_type(served: Served) -> None:
    served.says("create", "small", "--limits", "lite")
    info = json.loads(served.says("info", "small", "--json"))
    assert info["limits"]["memory"] == 256 << 20


def test_ls_filters_and_prints_json(served: Served, box: str) -> None:
    served.says("sleep", box)
    found = json.loads(served.says("ls", "--json", "--prefix", box, "--status", "idle"))
    assert [(one["id"], one["status"]) for one in found] == [(box, "idle")]
    assert json.loads(served.says("ls", "--json", "--prefix", box, "--status", "active")) == []


def test_info_is_readable(served: Served, box: str) -> None:
    fields = dict(line.split(maxsplit=1) for line in served.says("info", box).splitlines())
    assert (fields["id"], fields["status"], fields["cwd"]) == (box, "active", "/workspace")
    assert "memory=4.0 GiB" in fields["limits"]


def test_stats_are_by_id(served: Served, box: str) -> None:
    assert json.loads(served.says("stats", box, "--json"))[box]["disk"] is not None
    header, line = served.says("stats", box).splitlines()
    assert header.startswith("ID") and line.startswith(box)


def test_stats_watch_refreshes_until_ctrl_c(served: Served, box: str) -> None:
    with served.started("stats", box, "--watch") as process:
        assert process.stdout is not None
        seen = [process.stdout.readline() for _ in range(4)]
        assert [line.split()[0] for line in seen] == ["ID", box, "ID", box]
        process.send_signal(2)
        assert process.wait(15) == 130


def test_sleep_ends_processes_and_wake_starts_again(served: Served, box: str) -> None:
    assert served.says("exec", box, "echo kept > note; sleep 1000 &") == ""
    assert served.says("sleep", box) == ""
    assert json.loads(served.says("info", box, "--json"))["status"] == "idle"
    assert served.says("wake", box) == ""
    assert served.says("exec", box, "cat note; pgrep -c sleep; true") == "kept\n0\n"


def test_rm_destroys_several_and_says_which(served: Served) -> None:
    for id in ("gone-a", "gone-b"):
        served.says("create", id)
    assert served.says("rm", "gone-a", "gone-b") == "gone-a\ngone-b\n"
    assert json.loads(served.says("ls", "--json", "--prefix", "gone-")) == []


def test_rm_of_a_missing_sandbox_removes_nothing(served: Served, box: str) -> None:
    done = served.run("rm", box, "missing")
    assert (done.returncode, done.stdout) == (1, "")
    assert json.loads(served.says("info", box, "--json"))["id"] == box
    assert served.says("rm", "--force", "missing") == "missing\n"


def test_rm_asks_in_a_terminal(served: Served, box: str, tmp_path: Path) -> None:
    for keys, code in (("n\r", 1), (None, 130), ("y\r", 0)):
        terminal = Terminal([SMOKEBOX, "rm", box], tmp_path, served.env)
        try:
            terminal.expect(rf"Remove {box} and all files\? \[y/N\]: ")
            if keys is None:
                terminal.interrupt()
            else:
                terminal.press(keys)
            assert terminal.wait() == code
        finally:
            terminal.close()
        left = [one["id"] for one in json.loads(served.says("ls", "--json"))]
        assert (box in left) is bool(code)


def test_unknown_id_hints_at_create(served: Served) -> None:
    for verb in (["exec", "nobody", "true"], ["info", "nobody"], ["stats", "nobody"]):
        done = served.run(*verb)
        assert (done.returncode, done.stdout) == (1, "")
        message, hint = done.stderr.splitlines()
        assert message == "smokebox: there is no sandbox 'nobody'."
        assert "`smokebox create nobody`" in hint
    assert json.loads(served.says("ls", "--json", "--prefix", "nobody")) == []
