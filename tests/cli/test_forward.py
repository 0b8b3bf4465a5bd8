"""Commands on ports: expose, list and forward them."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from typing import TYPE_CHECKING

import pytest

from cli.served import until
from cli.terminal import PATIENCE

if TYPE_CHECKING:
    import subprocess

    from cli.served import Served

ECHO = """
import socket, threading
def serve(client):
    said = b""
    while data := client.recv(1 << 16):
        said += data
    client.sendall(said.upper())
    client.close()
server = socket.create_server(("127.0.0.1", 3000))
print("listening", flush=True)
while True:
    threading.Thread(target=serve, args=server.accept()[:1]).start()
"""


def listen(served: Served, box: str) -> None:
    served.says("start", box, "--name", "echo", "--", "python3", "-c", ECHO)
    until(lambda: "listening" in served.says("logs", box, "echo"))


def port_of(process: subprocess.Popen[str], there: int = 3000) -> int:
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.fullmatch(rf"Forwarding 127\.0\.0\.1:(\d+) to port {there} of [\w-]+\n", line)
    assert found, line
    return int(found[1])


def talk(port: int, said: bytes) -> bytes:
    """Send all data, shut down that side, and read the response to its end."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as sock:
        sock.sendall(said)
        sock.shutdown(socket.SHUT_WR)
        heard = b""
        # Closing a connection with unread data resets it.
        with contextlib.suppress(ConnectionResetError):
            while data := sock.recv(1 << 16):
                heard += data
        return heard


def test_forward_serves_many_connections(served: Served, box: str) -> None:
    listen(served, box)
    with served.started("forward", box, "0:3000", "0:3001") as process:
        port = port_of(process)
        port_of(process, 3001)
        with socket.create_connection(("127.0.0.1", port), PATIENCE):
            # That connection stays open beside the others.
            for said in (b"hello", b"x" * 3_000_000, b""):
                assert talk(port, said) == said.upper()
        process.send_signal(2)
        assert process.wait(PATIENCE) == 130


def test_forward_reports_a_port_without_listener_and_continues(served: Served, box: str) -> None:
    with served.started("forward", box, "0:3000", stderr=-1) as process:
        port = port_of(process)
        assert talk(port, b"hello") == b""
        assert process.stderr is not None
        assert f"nothing listens on port 3000 of sandbox {box}" in process.stderr.readline()
        listen(served, box)
        assert talk(port, b"hello") == b"HELLO"


def test_local_port_in_use_is_an_error(served: Served, box: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = served.run("forward", box, f"{port}:3000")
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in done.stderr
    assert "0 for any" in done.stderr


@pytest.mark.parametrize(
    "text", ["", "x", "1:", ":1", "1:x", "70000", "1:70000", "8080:0", "1:2:3"]
)
def test_invalid_pair_of_ports_is_refused(served: Served, box: str, text: str) -> None:
    done = served.run("forward", box, text)
    assert (done.returncode, done.stdout) == (2, "")
    assert repr(text) in done.stderr


def test_unknown_sandbox_is_an_error_for_port_commands(served: Served) -> None:
    for verb in (("forward", "nobody", "1"), ("expose", "nobody", "3000"), ("ports", "nobody")):
        done = served.run(*verb)
        assert (done.returncode, "no sandbox 'nobody'" in done.stderr) == (1, True)


def test_expose_prints_a_url_and_ports_lists_it(served: Served, box: str) -> None:
    url = served.says("expose", box, "3000", "--name", "site", "--token", "tok").strip()
    assert re.fullmatch(rf"http://3000-{box}-tok\.localhost:\d+/", url)
    assert served.says("expose", box, "3000").strip() == url
    [listed] = json.loads(served.says("ports", box, "--json"))
    assert (listed["port"], listed["url"], listed["name"]) == (3000, url, "site")
    assert served.says("ports", box).split()[4:] == ["3000", "active", "site", url]
    served.says("sleep", box)
    assert "stale" in served.says("ports", box)
    expiring = served.says("expose", box, "3000", "--private", "--expires", "1h").strip()
    assert expiring != url
    assert "active, private" in served.says("ports", box)
    assert served.says("unexpose", box, "3000") == ""
    assert len(served.says("ports", box).splitlines()) == 1


def test_invalid_options_of_expose_are_refused(served: Served, box: str) -> None:
    for options in (("3000", "--token", "NO"), ("0",), ("3000", "--expires", "never")):
        assert served.run("expose", box, *options).returncode == 2
