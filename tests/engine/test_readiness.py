"""Readiness of processes: waiting for log lines and ports, including hostile ones."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import pytest

from engine.awake_sandbox import AwakeSandbox, open_sandbox
from smokebox.engine.processes import readiness
from smokebox.engine.processes.readiness import LONGEST_LINE, LineScanner
from smokebox.errors import DeadlineExceeded, InvalidOption, ProcessEnded
from smokebox.types import LogChunk

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from smokebox.types import Stream

SERVER = """
import socket, sys, time
family = socket.AF_INET6 if sys.argv[1] == "6" else socket.AF_INET
server = socket.create_server(("::1" if sys.argv[1] == "6" else "127.0.0.1", 8080), family=family)
print("listening", flush=True)
while True:
    client, _ = server.accept()
    try:
        {response}
    except OSError:
        pass
    client.close()
"""


@pytest.fixture
async def sandbox(tmp_path: Path) -> AsyncIterator[AwakeSandbox]:
    async with open_sandbox(tmp_path) as sandbox:
        yield sandbox


def serve(response: str, version: int = 4) -> list[str]:
    return ["python3", "-c", SERVER.replace("{response}", response), str(version)]


def chunk(data: str, stream: Stream = "stdout", dropped: int = 0) -> LogChunk:
    return LogChunk(stream=stream, data=data, cursor="", dropped=dropped)


async def test_existing_line_is_found(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start(
        "echo before; echo Listening on 80; echo after; sleep 9"
    )
    await process.wait_for_log("after", 5)
    found = await process.wait_for_log("Listening", 5)
    assert (found.stream, found.line, found.text) == ("stdout", "Listening on 80", "Listening")


async def test_later_line_is_found_on_stderr_too(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start("sleep 0.1; echo ready >&2; sleep 9")
    found = await process.wait_for_log("ready", 5)
    assert (found.stream, found.line) == ("stderr", "ready")


async def test_match_has_the_groups_of_the_pattern(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start(
        r"printf 'x\nserving at http://h:8123/ now\r\n'; sleep 9"
    )
    found = await process.wait_for_log(re.compile(r"http://(\w+):(\d+)/(x)? now$"), 5)
    assert found.groups == ("h", "8123", None)
    assert found.line == "serving at http://h:8123/ now"


async def test_incomplete_line_is_found(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start("printf 'Password: '; sleep 9")
    assert (await process.wait_for_log("Password:", 5)).line == "Password: "
    assert (await process.wait_for_log(re.compile(r"^Pass.*: $"), 5)).text == "Password: "


async def test_partial_match_waits_for_more_output(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start("printf 'port 80'; sleep 0.03; echo 80; sleep 9")
    found = await process.wait_for_log(re.compile(r"port (\d+)"), 5)
    assert found.groups == ("8080",)


async def test_incomplete_last_line_of_an_ended_process_is_found(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start("printf 'all done'")
    assert (await process.wait_for_log(re.compile("done"), 5)).line == "all done"
    await process.wait_for_exit(5)
    assert (await process.wait_for_log("all", 5)).line == "all done"


async def test_error_of_an_ended_process_has_its_last_lines(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start(
        "echo starting; printf 'no such \\033[31mmodule\\n' >&2; exit 2", process_id="web"
    )
    with pytest.raises(ProcessEnded, match=r"web.*code 2.*'ready'.*no such .\[31mmodule") as caught:
        await process.wait_for_log("ready", 5)
    assert (caught.value.fields["process"], caught.value.fields["exit_code"]) == ("web", 2)
    assert "\033" not in str(caught.value)
    with pytest.raises(ProcessEnded, match=r"port 8080"):
        await process.wait_for_port(8080)


async def test_wait_for_log_times_out_with_the_pattern(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start("sleep 9", process_id="web")
    with pytest.raises(DeadlineExceeded, match=r"web.*0.05 s.*'ready'"):
        await process.wait_for_log("ready", 0.05)


async def test_invalid_patterns_are_refused(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start("sleep 9")
    bad: list[Any] = ["", b"x", re.compile(b"x"), None, 5]
    for pattern in bad:
        with pytest.raises(InvalidOption, match="pattern"):
            await process.wait_for_log(pattern)
    with pytest.raises(InvalidOption, match="timeout"):
        await process.wait_for_log("x", timeout=-1)


def test_match_spans_chunks_but_not_streams() -> None:
    scanner = LineScanner("hello")
    assert scanner.feed(chunk("he")) is None
    assert scanner.feed(chunk("llo", "stderr")) is None
    found = scanner.feed(chunk("llo w"))
    assert found is not None and found.line == "hello w"


def test_match_does_not_span_gaps_or_lines() -> None:
    scanner = LineScanner(re.compile("ab", re.DOTALL))
    assert scanner.feed(chunk("a")) is None
    assert scanner.feed(chunk("[dropped]", dropped=5)) is None
    assert scanner.feed(chunk("b\na\nb\n")) is None


def test_endless_line_takes_bounded_memory() -> None:
    scanner = LineScanner("needle")
    for _ in range(50):
        assert scanner.feed(chunk("x" * LONGEST_LINE)) is None
    found = scanner.feed(chunk("needle"))
    assert found is not None and len(found.line) <= LONGEST_LINE


async def test_web_server_is_ready_when_it_responds(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start("sleep 0.2; exec python3 -m http.server 8080")
    await process.wait_for_port(8080, timeout=15)
    await process.wait_for_port(8080, mode="tcp", timeout=5)
    await process.wait_for_port(8080, path="/none?x=1", status=404, timeout=5)
    await process.wait_for_port(8080, path="/none", status=range(400, 405), timeout=5)
    with pytest.raises(DeadlineExceeded, match=r"port 8080.*GET /none.*200-399"):
        await process.wait_for_port(8080, path="/none", timeout=0.3)
    assert "Traceback" not in (await process.logs()).stderr


async def test_server_on_the_ipv6_loopback_address_is_found(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start(serve("pass", version=6))
    await process.wait_for_port(8080, mode="tcp", timeout=15)


@pytest.mark.parametrize(
    "response",
    [
        "client.sendall(b'hello')",
        "client.sendall(b'HTTP/1.1 2000 OK\\r\\n')",
        "client.sendall(b'HTTP/1.1 500 No\\r\\n\\r\\n')",
        "time.sleep(60)",
        "client.sendall(b'\\xff' * (1 << 24))",
        "[client.sendall(b'H') or time.sleep(0.01) for _ in range(6000)]",
    ],
)
async def test_server_with_an_unexpected_response_is_not_ready(
    sandbox: AwakeSandbox, response: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "PROBE_SECONDS", 0.1)
    process = await sandbox.processes.start(serve(response))
    await process.wait_for_log("listening", 15)
    with pytest.raises(DeadlineExceeded, match="8080"):
        await process.wait_for_port(8080, timeout=0.25)


async def test_wait_for_port_ends_with_the_process(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start("sleep 0.2; echo crashed >&2; exit 1")
    with pytest.raises(ProcessEnded, match="crashed"):
        await process.wait_for_port(8080, timeout=10)


async def test_ports_of_the_host_are_not_those_of_the_sandbox(sandbox: AwakeSandbox) -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    process = await sandbox.processes.start("sleep 9")
    with pytest.raises(DeadlineExceeded):
        await process.wait_for_port(port, mode="tcp", timeout=0.2)
    server.close()
    await server.wait_closed()


async def test_invalid_port_options_are_refused_by_name(sandbox: AwakeSandbox) -> None:
    process = await sandbox.processes.start("sleep 9")
    cases: list[dict[str, Any]] = [
        {"port": 0},
        {"port": 65536},
        {"port": "80"},
        {"mode": "udp"},
        {"path": "x"},
        {"path": "/a b"},
        {"path": "/\r\nX: y"},
        {"path": "/ä"},
        {"status": 99},
        {"status": (300, 200)},
        {"status": (200, "x")},
        {"status": True},
        {"status": range(200, 300, 2)},
        {"interval": 0},
        {"interval": float("inf")},
        {"timeout": 0},
    ]
    for options in cases:
        [name] = options
        with pytest.raises(InvalidOption, match=name):
            await process.wait_for_port(**{"port": 8080, **options})
