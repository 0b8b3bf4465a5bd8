"""`smokebox sh` without a terminal: one command, or a script."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cli.terminal import SMOKEBOX, TIMEOUT

if TYPE_CHECKING:
    from cli.terminal import Run

SANDBOXES = [
    pytest.param([], id="virtual"),
    pytest.param(["--local"], id="local"),
    pytest.param(["--bucket", "memory:///"], id="bucket"),
]


@pytest.mark.parametrize("options", SANDBOXES)
def test_command_passes_output_and_exit_code_through(run: Run, options: list[str]) -> None:
    done = run("sh", *options, "-c", "echo out; echo err >&2; exit 3")
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")


@pytest.mark.parametrize("options", SANDBOXES)
def test_script_comes_from_standard_input(run: Run, options: list[str]) -> None:
    done = run("sh", *options, stdin="for i in 1 2; do\n  echo $i\ndone\nexit 4\n")
    assert (done.returncode, done.stdout) == (4, "1\n2\n")


@pytest.mark.parametrize("options", SANDBOXES)
def test_stdin_option_passes_standard_input(run: Run, options: list[str]) -> None:
    assert run("sh", *options, "--stdin", "-c", "wc -c", stdin="12345").stdout.strip() == "5"


@pytest.mark.parametrize("options", SANDBOXES)
def test_standard_input_is_empty_otherwise(run: Run, options: list[str]) -> None:
    assert run("sh", *options, "-c", "cat | wc -c", stdin="12345").stdout.strip() == "0"


@pytest.mark.parametrize("options", SANDBOXES)
def test_variable_is_set(run: Run, options: list[str]) -> None:
    done = run("sh", *options, "-e", "A=1 'two'", "--env", "B=", "-c", 'echo "[$A][$B]"')
    assert done.stdout == "[1 'two'][]\n"


@pytest.mark.parametrize("options", SANDBOXES)
def test_timeout_exits_with_124_and_keeps_output(run: Run, options: list[str]) -> None:
    done = run("sh", *options, "--timeout", "1", "-c", "echo early; while :; do :; done")
    assert (done.returncode, done.stdout) == (124, "early\n")


def test_local_starts_in_the_directory_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    assert run("sh", "--local", "a b", "-c", "pwd").stdout == f"{tmp_path}/a b\n"


def test_virtual_does_not_see_the_host(run: Run, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    done = run("sh", "-c", f"cat {tmp_path}/secret")
    assert (done.returncode, done.stdout) == (1, "")


def test_bucket_can_be_a_local_folder_by_url(run: Run, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("needle\n")
    done = run("sh", "--bucket", f"file://{tmp_path}", "-c", "grep -r needle . | wc -l")
    assert (done.returncode, done.stdout.strip()) == (0, "1")


def test_read_only_bucket_refuses_writes(run: Run, tmp_path: Path) -> None:
    done = run("sh", "--bucket", f"file://{tmp_path}", "--read-only", "-c", "echo x > a.txt")
    assert done.returncode != 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--local", "--bucket", "memory:///"], "exclude each other"),
        (["--endpoint", "http://127.0.0.1"], "--endpoint needs --bucket"),
        (["--read-only"], "--read-only needs --bucket"),
        (["--anonymous"], "--anonymous needs --bucket"),
        (["--stdin"], "--stdin needs -c"),
        (["-e", "NAME", "-c", "true"], "--env takes NAME=VALUE"),
        (["-e", "1A=x", "-c", "true"], "not the name of an environment variable"),
        (["--timeout", "-1", "-c", "true"], "positive number of seconds"),
        (["--timeout", "soon", "-c", "true"], "not a valid float"),
    ],
)
def test_misuse_is_exit_code_2(run: Run, arguments: list[str], message: str) -> None:
    done = run("sh", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_script_that_is_not_text_is_refused(tmp_path: Path) -> None:
    done = subprocess.run([SMOKEBOX, "sh"], input=b"\xff\xfe", capture_output=True, check=False)
    assert done.returncode == 1
    assert b"not UTF-8 text (byte 0)" in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_kills_the_command_and_sets_the_exit_code(
    tmp_path: Path, number: int, code: int
) -> None:
    command = "echo $$ > pid; sleep 1000"
    process = subprocess.Popen([SMOKEBOX, "sh", "--local", "-c", command], cwd=tmp_path)
    pid = tmp_path / "pid"
    deadline = time.monotonic() + TIMEOUT
    while not (pid.exists() and pid.read_text().endswith("\n")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(TIMEOUT) == code
    assert not Path(f"/proc/{pid.read_text().strip()}").exists()


def test_sigterm_ends_it_as_a_background_job(tmp_path: Path) -> None:
    """Background jobs of a script have SIGINT ignored."""
    command = "echo $$ > pid; sleep 1000"
    script = 'trap "" INT; exec "$@"'
    arguments = ["sh", "-c", script, "sh", SMOKEBOX, "sh", "--local", "-c", command]
    with subprocess.Popen(arguments, cwd=tmp_path) as process:
        pid = tmp_path / "pid"
        deadline = time.monotonic() + TIMEOUT
        while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(TIMEOUT) == 143
        finally:
            process.kill()
    assert not Path(f"/proc/{pid.read_text().strip()}").exists()


def test_output_is_shown_while_the_command_runs(tmp_path: Path) -> None:
    command = "echo early; until [ -e go ]; do sleep 0.02; done"
    with subprocess.Popen(
        [SMOKEBOX, "sh", "--local", "-c", command], cwd=tmp_path, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"early\n"
        (tmp_path / "go").touch()
        assert process.wait(TIMEOUT) == 0
