"""Commands on sandboxes: create, list, inspect, sleep, wake and remove."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from cli.terminal import SMOKEBOX, Terminal

if TYPE_CHECKING:
    from pathlib import Path

    from cli.command_line import CommandLine


def test_create_prints_the_id_and_ls_lists_it(cli: CommandLine) -> None:
    assert cli.output("create", "mine", "--label", "team=search") == "mine\n"
    lines = cli.output("ls", "--label", "team=search").splitlines()
    assert [line.split()[0] for line in lines] == ["ID", "mine"]
    assert lines[1].endswith("team=search")


def test_create_without_an_id_chooses_one(cli: CommandLine) -> None:
    id = cli.output("create").strip()
    assert json.loads(cli.output("info", id, "--json"))["id"] == id


def test_create_sends_every_setting(cli: CommandLine) -> None:
    cli.output(
        *("create", "full", "--limits", "memory=512MiB,cpu=0.5,pids=none", "--env", "A=1"),
        *("--sleep-after", "2h", "--ephemeral", "--keep-alive", "--cwd", "/tmp"),
        *("--lifetime", "7d"),
    )
    info = json.loads(cli.output("info", "full", "--json"))
    assert (info["limits"]["memory"], info["limits"]["cpu"]) == (512 << 20, 0.5)
    assert info["limits"]["pids"] is None
    assert (info["sleep_after"], info["cwd"]) == (7200, "/tmp")
    assert (info["ephemeral"], info["keep_alive"]) == (True, True)
    assert info["expires_at"] == info["created_at"] + 7 * 86400
    assert "expires_at in 6d" in " ".join(cli.output("info", "full").split())
    assert cli.output("exec", "full", "echo $A") == "1\n"


def test_create_takes_the_name_of_an_instance_type(cli: CommandLine) -> None:
    cli.output("create", "small", "--limits", "lite")
    info = json.loads(cli.output("info", "small", "--json"))
    assert info["limits"]["memory"] == 256 << 20


def test_ls_filters_and_prints_json(cli: CommandLine, sandbox: str) -> None:
    cli.output("sleep", sandbox)
    found = json.loads(cli.output("ls", "--json", "--prefix", sandbox, "--status", "idle"))
    assert [(one["id"], one["status"]) for one in found] == [(sandbox, "idle")]
    assert json.loads(cli.output("ls", "--json", "--prefix", sandbox, "--status", "active")) == []


def test_info_is_readable(cli: CommandLine, sandbox: str) -> None:
    fields = dict(line.split(maxsplit=1) for line in cli.output("info", sandbox).splitlines())
    assert (fields["id"], fields["status"], fields["cwd"]) == (sandbox, "active", "/workspace")
    assert "memory=4.0 GiB" in fields["limits"]


def test_stats_are_by_id(cli: CommandLine, sandbox: str) -> None:
    assert json.loads(cli.output("stats", sandbox, "--json"))[sandbox]["disk"] is not None
    header, line = cli.output("stats", sandbox).splitlines()
    assert header.startswith("ID") and line.startswith(sandbox)


def test_stats_watch_refreshes_until_ctrl_c(cli: CommandLine, sandbox: str) -> None:
    with cli.start("stats", sandbox, "--watch") as process:
        assert process.stdout is not None
        seen = [process.stdout.readline() for _ in range(4)]
        assert [line.split()[0] for line in seen] == ["ID", sandbox, "ID", sandbox]
        process.send_signal(2)
        assert process.wait(15) == 130


def test_sleep_ends_processes_and_wake_starts_again(cli: CommandLine, sandbox: str) -> None:
    assert cli.output("exec", sandbox, "echo kept > note; sleep 1000 &") == ""
    assert cli.output("sleep", sandbox) == ""
    assert json.loads(cli.output("info", sandbox, "--json"))["status"] == "idle"
    assert cli.output("wake", sandbox) == ""
    assert cli.output("exec", sandbox, "cat note; pgrep -c sleep; true") == "kept\n0\n"


def test_rm_destroys_several_and_says_which(cli: CommandLine) -> None:
    for id in ("gone-a", "gone-b"):
        cli.output("create", id)
    assert cli.output("rm", "gone-a", "gone-b") == "gone-a\ngone-b\n"
    assert json.loads(cli.output("ls", "--json", "--prefix", "gone-")) == []


def test_rm_of_a_missing_sandbox_removes_nothing(cli: CommandLine, sandbox: str) -> None:
    done = cli.run("rm", sandbox, "missing")
    assert (done.returncode, done.stdout) == (1, "")
    assert json.loads(cli.output("info", sandbox, "--json"))["id"] == sandbox
    assert cli.output("rm", "--force", "missing") == "missing\n"


def test_rm_asks_in_a_terminal(cli: CommandLine, sandbox: str, tmp_path: Path) -> None:
    for keys, code in (("n\r", 1), (None, 130), ("y\r", 0)):
        terminal = Terminal([SMOKEBOX, "rm", sandbox], tmp_path, cli.env)
        try:
            terminal.expect(rf"Remove {sandbox} and all files\? \[y/N\]: ")
            if keys is None:
                terminal.interrupt()
            else:
                terminal.press(keys)
            assert terminal.wait() == code
        finally:
            terminal.close()
        left = [one["id"] for one in json.loads(cli.output("ls", "--json"))]
        assert (sandbox in left) is bool(code)


def test_unknown_id_hints_at_create(cli: CommandLine) -> None:
    for verb in (["exec", "missing", "true"], ["info", "missing"], ["stats", "missing"]):
        done = cli.run(*verb)
        assert (done.returncode, done.stdout) == (1, "")
        message, hint = done.stderr.splitlines()
        assert message == "smokebox: there is no sandbox 'missing'."
        assert "`smokebox create missing`" in hint
    assert json.loads(cli.output("ls", "--json", "--prefix", "missing")) == []
