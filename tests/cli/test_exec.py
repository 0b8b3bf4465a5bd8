"""`smokebox exec` and `smokebox once`: commands in a sandbox."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest

from cli.served import until
from cli.terminal import PATIENCE

if TYPE_CHECKING:
    from cli.served import Served


def test_output_and_exit_code_pass_through(served: Served, box: str) -> None:
    done = served.apart("exec", box, "--", "echo out; echo err >&2; exit 3")
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")


def test_one_word_is_run_by_bash_and_several_are_a_program(served: Served, box: str) -> None:
    assert served.says("exec", box, "echo $((6 * 7))") == "42\n"
    assert served.says("exec", box, "echo", "$((6 * 7))") == "$((6 * 7))\n"


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
    served: Served, box: str, arguments: list[str]
) -> None:
    words = [box if word == "ID" else word for word in arguments]
    assert served.says("exec", *words) == "/tmp\nx y\n"


def test_stdin_is_passed_only_with_the_option(served: Served, box: str) -> None:
    assert served.says("exec", box, "-i", "wc", "-c", stdin="12345").strip() == "5"
    assert served.says("exec", box, "wc -c", stdin="12345").strip() == "0"


def test_command_runs_as_the_given_user(served: Served, box: str) -> None:
    assert served.says("exec", box, "-u", "nobody", "id", "-un") == "nobody\n"


def test_timeout_exits_with_124_and_keeps_output(served: Served, box: str) -> None:
    done = served.run("exec", box, "-t", "0.5", "echo early; sleep 1000")
    assert (done.returncode, done.stdout) == (124, "early\n")


def test_output_is_shown_while_the_command_runs(served: Served, box: str) -> None:
    command = "echo early; until [ -e /tmp/go ]; do sleep 0.02; done"
    with served.started("exec", box, command) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "early\n"
        served.says("exec", box, "touch /tmp/go")
        assert process.wait(PATIENCE) == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_kills_the_remote_command(
    served: Served, box: str, number: signal.Signals, code: int
) -> None:
    with served.started("exec", box, "echo begun; sleep 4321") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(number)
        assert process.wait(PATIENCE) == code
    until(lambda: served.run("exec", box, "pgrep -f 'sleep 432[1]'").returncode == 1)


def test_closed_output_stream_ends_the_command_quietly(served: Served, box: str) -> None:
    with served.started("exec", box, "yes", stderr=-1) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(PATIENCE) != 0
        assert process.stderr.read() == ""
        process.stdout = None


def test_create_option_creates_the_sandbox(served: Served) -> None:
    assert served.says("exec", "--create", "made-by-exec", "pwd") == "/workspace\n"


def test_once_creates_and_destroys_a_sandbox(served: Served) -> None:
    done = served.apart("once", "--", "python3", "-c", "print(6 * 7); raise SystemExit(5)")
    assert (done.returncode, done.stdout, done.stderr) == (5, "42\n", "")
    assert json.loads(served.says("ls", "--json", "--prefix", "run-")) == []


def test_once_destroys_its_sandbox_when_interrupted(served: Served) -> None:
    with served.started("once", "echo begun; sleep 1000") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
    assert json.loads(served.says("ls", "--json", "--prefix", "run-")) == []


def test_once_accepts_the_settings_of_create(served: Served) -> None:
    words = ["-e", "A=1", "-w", "/tmp", "-i", "--limits", "lite", "echo $A; pwd; cat"]
    assert served.says("once", *words, stdin="in\n") == "1\n/tmp\nin\n"
