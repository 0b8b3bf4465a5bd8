"""Commands on ports: expose, list and forward them."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from typing import TYPE_CHECKING

import pytest

from cli.command_line import wait_until
from cli.terminal import TIMEOUT

if TYPE_CHECKING:
    import subprocess

    from cli.command_line import CommandLine

ECHO = """
import socket, threading
def serve(client):
    received = b""
    while data := client.recv(1 << 16):
        received += data
    client.sendall(received.upper())
    client.close()
server = socket.create_server(("127.0.0.1", 3000))
print("listening", flush=True)
while True:
    threading.Thread(target=serve, args=server.accept()[:1]).start()
"""


def listen(cli: CommandLine, sandbox: str) -> None:
    cli.output("start", sandbox, "--name", "echo", "--", "python3", "-c", ECHO)
    wait_until(lambda: "listening" in cli.output("logs", sandbox, "echo"))


def port_of(process: subprocess.Popen[str], remote: int = 3000) -> int:
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.fullmatch(rf"Forwarding 127\.0\.0\.1:(\d+) to port {remote} of [\w-]+\n", line)
    assert found, line
    return int(found[1])


def exchange(port: int, data: bytes) -> bytes:
    """Send all data, shut down that side, and read the response to its end."""
    with socket.create_connection(("127.0.0.1", port), TIMEOUT) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        received = b""
        # Closing a connection with unread data resets it.
        with contextlib.suppress(ConnectionResetError):
            while chunk := sock.recv(1 << 16):
                received += chunk
        return received


def test_forward_serves_many_connections(cli: CommandLine, sandbox: str) -> None:
    listen(cli, sandbox)
    with cli.start("forward", sandbox, "0:3000", "0:3001") as process:
        port = port_of(process)
        port_of(process, 3001)
        with socket.create_connection(("127.0.0.1", port), TIMEOUT):
            # That connection stays open beside the others.
            for data in (b"hello", b"x" * 3_000_000, b""):
                assert exchange(port, data) == data.upper()
        process.send_signal(2)
        assert process.wait(TIMEOUT) == 130


def test_forward_reports_a_port_without_listener_and_continues(
    cli: CommandLine, sandbox: str
) -> None:
    with cli.start("forward", sandbox, "0:3000", stderr=-1) as process:
        port = port_of(process)
        assert exchange(port, b"hello") == b""
        assert process.stderr is not None
        assert f"nothing listens on port 3000 of sandbox {sandbox}" in process.stderr.readline()
        listen(cli, sandbox)
        assert exchange(port, b"hello") == b"HELLO"


def test_local_port_in_use_is_an_error(cli: CommandLine, sandbox: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = cli.run("forward", sandbox, f"{port}:3000")
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in done.stderr
    assert "0 for any" in done.stderr


@pytest.mark.parametrize(
    "text", ["", "x", "1:", ":1", "1:x", "70000", "1:70000", "8080:0", "1:2:3"]
)
def test_invalid_pair_of_ports_is_refused(cli: CommandLine, sandbox: str, text: str) -> None:
    done = cli.run("forward", sandbox, text)
    assert (done.returncode, done.stdout) == (2, "")
    assert repr(text) in done.stderr


def test_unknown_sandbox_is_an_error_for_port_commands(cli: CommandLine) -> None:
    for verb in (("forward", "missing", "1"), ("expose", "missing", "3000"), ("ports", "missing")):
        done = cli.run(*verb)
        assert (done.returncode, "no sandbox 'missing'" in done.stderr) == (1, True)


def test_expose_prints_a_url_and_ports_lists_it(cli: CommandLine, sandbox: str) -> None:
    url = cli.output("expose", sandbox, "3000", "--name", "site", "--token", "tok").strip()
    assert re.fullmatch(rf"http://3000-{sandbox}-\w{{8}}\.localhost:\d+/\?token=tok", url)
    assert cli.output("expose", sandbox, "3000").strip() == url
    [listed] = json.loads(cli.output("ports", sandbox, "--json"))
    assert (listed["port"], listed["url"], listed["name"]) == (3000, url, "site")
    assert cli.output("ports", sandbox).split()[4:] == ["3000", "active", "site", url]
    cli.output("sleep", sandbox)
    assert "stale" in cli.output("ports", sandbox)
    expiring = cli.output("expose", sandbox, "3000", "--private", "--expires", "1h").strip()
    assert expiring != url
    assert "active, private" in cli.output("ports", sandbox)
    assert cli.output("unexpose", sandbox, "3000") == ""
    assert len(cli.output("ports", sandbox).splitlines()) == 1


def test_invalid_options_of_expose_are_refused(cli: CommandLine, sandbox: str) -> None:
    for options in (("3000", "--token", "NO"), ("0",), ("3000", "--expires", "never")):
        assert cli.run("expose", sandbox, *options).returncode == 2
