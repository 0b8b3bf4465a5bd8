"""Commands on background processes: start, ps, logs, kill."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from cli.command_line import wait_until
from cli.terminal import TIMEOUT

if TYPE_CHECKING:
    from cli.command_line import CommandLine


def processes(cli: CommandLine, sandbox: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(cli.output("ps", sandbox, "--json"))
    return found


def test_start_prints_the_id_and_ps_lists_it(cli: CommandLine, sandbox: str) -> None:
    id = cli.output("start", sandbox, "--", "sleep", "1000").strip()
    assert cli.output("start", sandbox, "--name", "web", "sleep 1000") == "web\n"
    assert [one["id"] for one in processes(cli, sandbox)] == [id, "web"]
    lines = cli.output("ps", sandbox).splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [[id, "running"], ["web", "running"]]
    assert lines[2].endswith("sleep 1000")


def test_start_sets_directory_and_variables(cli: CommandLine, sandbox: str) -> None:
    cli.output("start", sandbox, "--name", "p", "-w", "/tmp", "-e", "A=1", "pwd; echo $A")
    assert cli.output("logs", sandbox, "p", "-f") == "/tmp\n1\n"


def test_logs_keep_streams_apart(cli: CommandLine, sandbox: str) -> None:
    cli.output("start", sandbox, "--name", "p", "echo out; echo err >&2")
    done = cli.run("logs", sandbox, "p", "--follow")
    assert (done.returncode, done.stdout, done.stderr) == (0, "out\n", "err\n")
    done = cli.run("logs", sandbox, "p")
    assert (done.returncode, done.stdout, done.stderr) == (0, "out\n", "err\n")


def test_follow_prints_output_until_the_process_ends(cli: CommandLine, sandbox: str) -> None:
    command = "echo first; until [ -e /tmp/go ]; do sleep 0.02; done; echo last"
    cli.output("start", sandbox, "--name", "p", command)
    with cli.start("logs", sandbox, "p", "-f") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "first\n"
        cli.output("exec", sandbox, "touch /tmp/go")
        assert process.stdout.readline() == "last\n"
        assert process.wait(TIMEOUT) == 0


def test_interrupted_follow_leaves_the_process_running(cli: CommandLine, sandbox: str) -> None:
    cli.output("start", sandbox, "--name", "p", "echo first; sleep 1000")
    with cli.start("logs", sandbox, "p", "-f") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "first\n"
        process.send_signal(2)
        assert process.wait(TIMEOUT) == 130
    assert [one["status"] for one in processes(cli, sandbox)] == ["running"]


def test_kill_kills_one_or_all(cli: CommandLine, sandbox: str) -> None:
    for name in ("a", "b", "c"):
        cli.output("start", sandbox, "--name", name, "sleep 1000")
    assert cli.output("kill", sandbox, "a") == ""
    assert [one["status"] for one in processes(cli, sandbox)] == ["killed", "running", "running"]
    assert cli.output("kill", sandbox, "--all") == ""
    assert {one["status"] for one in processes(cli, sandbox)} == {"killed"}


def test_kill_sends_the_given_signal(cli: CommandLine, sandbox: str) -> None:
    # Python fresh: bash would report the signal that its children got.
    script = (
        "import signal, time; signal.signal(1, lambda *_: print('caught', flush=True));"
        "print('ready', flush=True)\nwhile True: time.sleep(1)"
    )
    cli.output("start", sandbox, "--name", "p", "python3", "-c", script)
    wait_until(lambda: cli.output("logs", sandbox, "p") == "ready\n")
    assert cli.output("kill", sandbox, "p", "-s", "HUP") == ""
    wait_until(lambda: cli.output("logs", sandbox, "p") == "ready\ncaught\n")
    assert cli.output("kill", sandbox, "p", "-s", "1") == ""
    wait_until(lambda: cli.output("logs", sandbox, "p") == "ready\ncaught\ncaught\n")
    assert [one["status"] for one in processes(cli, sandbox)] == ["running"]
