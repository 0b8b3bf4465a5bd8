"""`smokebox serve`: a server in the foreground."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from typing import IO, TYPE_CHECKING

import pytest

from cli.command_line import CommandLine
from cli.terminal import SMOKEBOX, TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def run_server(home: Path, *options: str, errors: bool = False) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "smokebox", "serve", "--home", str(home), "--pool", "0"]
    process = subprocess.Popen(
        [*command, *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if errors else None,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def first_line(process: subprocess.Popen[str]) -> str:
    output: IO[str] | None = process.stdout
    assert output is not None
    return output.readline()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_it_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    with run_server(tmp_path, "--no-tcp") as process:
        assert first_line(process).endswith(f" serves unix:{tmp_path}/server.sock\n")
        process.send_signal(number)
        assert process.wait(TIMEOUT) == 0


def test_port_0_chooses_and_prints_a_free_port(tmp_path: Path) -> None:
    with run_server(tmp_path, "--port", "0") as process:
        match = re.search(r"http://127\.0\.0\.1:\d+", first_line(process))
        assert match is not None
        with urllib.request.urlopen(f"{match[0]}/api/sandboxes", timeout=TIMEOUT) as response:
            assert response.read() == b'{"sandboxes":[]}'


def test_keys_are_required_over_tcp(tmp_path: Path) -> None:
    cli = CommandLine(tmp_path)
    with run_server(tmp_path, "--port", "0", "--keys") as process:
        match = re.search(r"http://\S+", first_line(process))
        assert match is not None
        key = cli.output("keys", "create", "--name", "test").strip()
        cli.env["SMOKEBOX_URL"] = match[0]
        done = cli.run("ls")
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("smokebox: this server requires an API key.\n  ")
        cli.env["SMOKEBOX_API_KEY"] = key
        assert cli.output("ls", "--json") == "[]\n"


def test_configuration_is_read_from_the_state_directory_or_a_named_file(tmp_path: Path) -> None:
    cli = CommandLine(tmp_path)
    (tmp_path / "server.toml").write_text("[profiles.small]\nsandboxes = 1\n")
    with run_server(tmp_path, "--no-tcp") as process:
        first_line(process)
        key = cli.output("keys", "create", "--name", "a", "--profile", "small", "--json")
        shown = cli.output("keys", "show", json.loads(key)["id"])
        assert ["sandboxes", "0", "1"] in [line.split() for line in shown.splitlines()]
    other = tmp_path / "other.toml"
    other.write_text("[profile.small]\n")
    with run_server(tmp_path, "--no-tcp", "--config", str(other), errors=True) as process:
        _, error = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 2
        assert f"{other} has no option 'profile'" in error
        assert "Did you mean 'profiles'?" in error


def test_show_demonstrates_and_prints_what_to_try(tmp_path: Path) -> None:
    with run_server(tmp_path, "--no-tcp", "--show") as process:
        assert process.stdout is not None
        seen = ""
        while "Ctrl-C stops" not in seen:
            line = process.stdout.readline()
            assert line, seen
            seen += line
        assert "in a new sandbox printed 42" in seen
        assert "Lisbon spends most: 350." in seen
        assert "smokebox exec mine" in seen
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT) == 0


def test_second_server_on_a_directory_names_the_first(tmp_path: Path) -> None:
    with run_server(tmp_path, "--no-tcp") as process:
        first_line(process)
        env = {**os.environ, "SMOKEBOX_HOME": str(tmp_path)}
        second = subprocess.run(
            [sys.executable, "-m", "smokebox", "serve", "--no-tcp"],
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT,
        )
        assert (second.returncode, second.stdout) == (1, "")
        assert f"process {process.pid} uses the state directory" in second.stderr
        assert "`smokebox status`" in second.stderr
        assert "Traceback" not in second.stderr


def test_port_in_use_is_an_error(tmp_path: Path) -> None:
    with run_server(tmp_path / "a", "--port", "0") as first:
        match = re.search(r":(\d+) ", first_line(first))
        assert match is not None
        second = subprocess.run(
            [SMOKEBOX, "serve", "--home", str(tmp_path / "b"), "--port", match[1]],
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT,
        )
        assert second.returncode == 1
        assert f"cannot listen on 127.0.0.1:{match[1]}" in second.stderr
