"""`smokebox exec` and `smokebox once`: commands in a sandbox."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest

from cli.command_line import wait_until
from cli.terminal import TIMEOUT

if TYPE_CHECKING:
    from cli.command_line import CommandLine


def test_output_and_exit_code_pass_through(cli: CommandLine, sandbox: str) -> None:
    done = cli.run_process("exec", sandbox, "--", "echo out; echo err >&2; exit 3")
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")


def test_one_word_is_run_by_bash_and_several_are_a_program(cli: CommandLine, sandbox: str) -> None:
    assert cli.output("exec", sandbox, "echo $((6 * 7))") == "42\n"
    assert cli.output("exec", sandbox, "echo", "$((6 * 7))") == "$((6 * 7))\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["ID", "-w", "/tmp", "-e", "A=x y", "--", "bash", "-c", "pwd; echo $A"],
        ["ID", "-w", "/tmp", "-e", "A=x y", "bash", "-c", "pwd; echo $A"],
        ["-w", "/tmp", "-e", "A=x y", "ID", "bash", "-c", "pwd; echo $A"],
        ["--cwd=/tmp", "ID", "-eA=x y", "bash", "-c", "pwd; echo $A"],
    ],
)
def test_options_stop_where_the_command_begins(
    cli: CommandLine, sandbox: str, arguments: list[str]
) -> None:
    words = [sandbox if word == "ID" else word for word in arguments]
    assert cli.output("exec", *words) == "/tmp\nx y\n"


def test_stdin_is_passed_only_with_the_option(cli: CommandLine, sandbox: str) -> None:
    assert cli.output("exec", sandbox, "-i", "wc", "-c", stdin="12345").strip() == "5"
    assert cli.output("exec", sandbox, "wc -c", stdin="12345").strip() == "0"


def test_command_runs_as_the_given_user(cli: CommandLine, sandbox: str) -> None:
    assert cli.output("exec", sandbox, "-u", "nobody", "id", "-un") == "nobody\n"


def test_timeout_exits_with_124_and_keeps_output(cli: CommandLine, sandbox: str) -> None:
    done = cli.run("exec", sandbox, "-t", "0.5", "echo early; sleep 1000")
    assert (done.returncode, done.stdout) == (124, "early\n")


def test_output_is_shown_while_the_command_runs(cli: CommandLine, sandbox: str) -> None:
    command = "echo early; until [ -e /tmp/go ]; do sleep 0.02; done"
    with cli.start("exec", sandbox, command) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "early\n"
        cli.output("exec", sandbox, "touch /tmp/go")
        assert process.wait(TIMEOUT) == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_kills_the_remote_command(
    cli: CommandLine, sandbox: str, number: signal.Signals, code: int
) -> None:
    with cli.start("exec", sandbox, "echo started; sleep 4321") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(number)
        assert process.wait(TIMEOUT) == code
    wait_until(lambda: cli.run("exec", sandbox, "pgrep -f 'sleep 432[1]'").returncode == 1)


def test_closed_output_stream_ends_the_command_quietly(cli: CommandLine, sandbox: str) -> None:
    with cli.start("exec", sandbox, "yes", stderr=-1) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(TIMEOUT) != 0
        assert process.stderr.read() == ""
        process.stdout = None


def test_create_option_creates_the_sandbox(cli: CommandLine) -> None:
    assert cli.output("exec", "--create", "made-by-exec", "pwd") == "/workspace\n"


def test_once_creates_and_destroys_a_sandbox(cli: CommandLine) -> None:
    done = cli.run_process("once", "--", "python3", "-c", "print(6 * 7); raise SystemExit(5)")
    assert (done.returncode, done.stdout, done.stderr) == (5, "42\n", "")
    assert json.loads(cli.output("ls", "--json", "--prefix", "run-")) == []


def test_once_destroys_its_sandbox_when_interrupted(cli: CommandLine) -> None:
    with cli.start("once", "echo started; sleep 1000") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT) == 130
    assert json.loads(cli.output("ls", "--json", "--prefix", "run-")) == []


def test_once_accepts_the_settings_of_create(cli: CommandLine) -> None:
    words = ["-e", "A=1", "-w", "/tmp", "-i", "--limits", "lite", "echo $A; pwd; cat"]
    assert cli.output("once", *words, stdin="in\n") == "1\n/tmp\nin\n"
