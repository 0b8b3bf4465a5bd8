"""The door of a sandbox: what gets through, what does not, and what is written down of it."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from engine.egress.outside import ask, noted, shouting
from smokebox.egress.message import Response
from smokebox.egress.policy import Egress
from smokebox.engine.egress import proxy as module
from smokebox.engine.egress import tunnel
from smokebox.engine.host import Host
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from smokebox.egress.handler import HandlerContext
    from smokebox.egress.message import Request


@pytest.fixture(params=["namespaces", pytest.param("gvisor", marks=pytest.mark.gvisor)])
def tier(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture
async def port() -> AsyncIterator[int]:
    async with shouting() as port:
        yield port


def to(port: int, **options: object) -> Egress:
    """A policy by which db.test:5432 is a server of this machine."""
    given = {"tcp": ["db.test:5432"], "hosts": {"db.test": f"127.0.0.1:{port}"}, **options}
    return Egress(**given)  # type: ignore[arg-type]


async def greet(request: Request, env: object, context: HandlerContext) -> Response:
    return Response(f"hello from {request.url}")


async def test_bytes_pass_to_a_port_that_is_named_and_to_no_other(
    tmp_path: Path, layers: Path, tier: str, port: int
) -> None:
    async with await Host.open(tmp_path / "home", pool=0, images=layers) as host:
        sandbox = await host.create("box", tier=tier, egress=to(port))  # type: ignore[arg-type]
        assert await ask(sandbox, "db.test", 5432, "question") == "QUESTION"
        assert await ask(sandbox, "db.test", 5433, "question") == "ECONNRESET"
        assert await ask(sandbox, "other.test", 5432, "question") == "no such name"
        passed, port_refused, name_refused = await noted(sandbox, 3)
    assert (passed.verdict, passed.host, passed.port) == ("tunnelled", "db.test", 5432)
    assert (passed.sent, passed.received, passed.reason) == (8, 8, "")
    assert passed.rule == "tcp['db.test:5432']"
    assert (port_refused.verdict, port_refused.rule) == ("refused", "tcp")
    assert "tcp=['db.test:5433']" in port_refused.reason
    assert (name_refused.protocol, name_refused.host) == ("dns", "other.test")


async def test_a_sandbox_that_asks_for_nothing_has_no_network(host: Host) -> None:
    sandbox = await host.create("box")
    assert await ask(sandbox, "example.com", 443) == "no such name"
    assert await ask(sandbox, "1.2.3.4", 443) == "ECONNREFUSED"
    assert (await sandbox.capabilities()).network == "off"
    assert [event.host for event in await noted(sandbox)] == ["example.com"]
    assert (await sandbox.exec("env; ls /usr/local/share/ca-certificates")).stdout.count(
        "CERT"
    ) == 0


async def test_a_handler_of_this_process_answers_for_its_host(host: Host) -> None:
    sandbox = await host.create("box", egress={"outbound_by_host": {"api.test": greet}})
    for url in ("http://api.test/a", "https://api.test/b"):
        result = await sandbox.exec(["curl", "-sS", url])
        assert result.stdout == f"hello from {url}", result.stderr
    assert (await sandbox.capabilities()).network == "guarded"
    events = await noted(sandbox, 2)
    assert [(event.verdict, event.protocol, event.path) for event in events] == [
        ("answered", "http", "/a"),
        ("answered", "https", "/b"),
    ]


async def test_sessions_processes_and_terminals_trust_it_too(host: Host) -> None:
    sandbox = await host.create("box", egress={"outbound_by_host": {"api.test": greet}})
    command = "curl -sS https://api.test/"
    session = await sandbox.create_session()
    assert (await session.exec(command)).stdout == "hello from https://api.test/"
    process = await sandbox.start_process(command)
    await process.wait_for_exit(timeout=15)
    assert "hello from" in (await process.logs()).stdout
    terminal = await sandbox.terminals.create(command=["sh", "-c", "env"])
    assert terminal is not None


async def test_a_change_holds_for_the_next_connection_of_what_runs(host: Host, port: int) -> None:
    sandbox = await host.create("box")
    shell = await sandbox.create_session()
    line = "python3 - <<'E'\nimport socket\ntry: print(socket.gethostbyname('db.test'))\n"
    line += "except OSError: print('unknown')\nE"
    assert (await shell.exec(line)).stdout == "unknown\n"
    await sandbox.network.configure(to(port))
    assert (await shell.exec(line)).stdout.startswith("198.18.")
    assert await ask(sandbox, "db.test", 5432, "question") == "QUESTION"
    await sandbox.network.deny_host("db.test")
    assert await ask(sandbox, "db.test", 5432, "question") == "no such name"
    await sandbox.network.remove_denied_host("db.test")
    assert await ask(sandbox, "db.test", 5432, "question") == "QUESTION"


async def test_what_was_opened_at_run_time_is_trusted_by_the_next_command(host: Host) -> None:
    sandbox = await host.create("box")
    assert (await sandbox.exec("echo ${SSL_CERT_FILE-none}")).stdout == "none\n"
    await sandbox.network.set_outbound_by_host("api.test", greet)
    result = await sandbox.exec(["curl", "-sS", "https://api.test/"])
    assert result.stdout == "hello from https://api.test/", result.stderr


async def test_settings_and_changes_outlive_the_engine_and_functions_do_not(
    tmp_path: Path, layers: Path, port: int
) -> None:
    async with await Host.open(tmp_path / "home", pool=0, images=layers) as host:
        sandbox = await host.create(
            "box", egress=to(port, outbound_by_host={"api.test": greet}, internet=True)
        )
        await sandbox.network.deny_host("denied.test")
        await sandbox.network.allow_host("opened.test")
    async with await Host.open(tmp_path / "home", pool=0, images=layers) as host:
        sandbox = host.sandbox("box")
        assert await ask(sandbox, "db.test", 5432, "question") == "QUESTION"
        assert await ask(sandbox, "denied.test", 443) == "no such name"
        assert "denied.test" in sandbox.network.policy.denied_hosts
        assert list(sandbox.network.policy.opened_hosts) == ["opened.test"]
        refused = await sandbox.exec(["curl", "-sS", "-w", "%{http_code}", "http://api.test/"])
        assert "runs in the process of a client" in refused.stdout
        assert refused.stdout.endswith("403")
        host.sandbox("box", egress={"outbound_by_host": {"api.test": greet}})
        assert "hello" in (await sandbox.exec(["curl", "-sS", "http://api.test/"])).stdout


async def test_handlers_outlive_the_handle_that_set_them(host: Host) -> None:
    await host.create("box", egress={"outbound_by_host": {"api.test": greet}})
    await host.sandbox("box").sleep()
    result = await host.sandbox("box").exec(["curl", "-sS", "http://api.test/"])
    assert result.stdout == "hello from http://api.test/"


async def test_tls_that_is_passed_by_its_name_is_not_opened(host: Host) -> None:
    seen: asyncio.Queue[bytes] = asyncio.Queue()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.put_nowait(await reader.read(3))
        writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    async with server:
        place = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        sandbox = await host.create(
            "box", egress=Egress(pass_through=["pinned.test"], hosts={"pinned.test": place})
        )
        await sandbox.exec(["curl", "-sSm10", "https://pinned.test/"])
        assert await asyncio.wait_for(seen.get(), 10) == b"\x16\x03\x01"
        event = (await noted(sandbox))[0]
    assert (event.verdict, event.rule) == ("tunnelled", "pass_through['pinned.test']")


async def test_a_server_that_is_not_there_is_said_to_be_so(host: Host) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    sandbox = await host.create("box", egress=to(port))
    assert await ask(sandbox, "db.test", 5432) == "ECONNRESET"
    event = (await noted(sandbox))[0]
    assert (event.verdict, "refused" in event.reason.lower()) == ("failed", True)


async def test_bytes_and_connections_are_bounded_by_the_policy(host: Host, port: int) -> None:
    sandbox = await host.create("box", egress=to(port, max_bytes=100))
    assert await ask(sandbox, "db.test", 5432, "x" * 40) == "X" * 40
    assert await ask(sandbox, "db.test", 5432, "x" * 40) == "ECONNRESET"
    assert "max_bytes=100" in (await noted(sandbox))[0].reason
    await sandbox.network.configure(to(port, max_requests=1))
    assert await ask(sandbox, "db.test", 5432, "x") == "ECONNRESET"
    assert "max_requests=1" in (await noted(sandbox))[0].reason


async def test_no_more_connections_than_a_few_hundred_are_held_at_once(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnel, "HALF_CLOSED_SECONDS", 0.1)
    # Nobody takes them from the queue of this one.
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as server:
        sandbox = await host.create("box", egress=to(server.getsockname()[1]))
        flood = """
import socket, sys, time
address = socket.gethostbyname("db.test")
socks = [socket.socket() for _ in range(600)]
for sock in socks:
    sock.setblocking(False)
    sock.connect_ex((address, 5432))
print("begun", flush=True)
sys.stdin.read()
"""
        process = await sandbox.start_process(["python3", "-c", flood], stdin=True)
        await process.wait_for_log("begun", timeout=15)
        async with asyncio.timeout(15):
            while sandbox.egress_proxy.connections < 256:
                await asyncio.sleep(0.01)
        assert sandbox.egress_proxy.connections == 256
        await process.kill()
        async with asyncio.timeout(15):
            while sandbox.egress_proxy.connections:
                await asyncio.sleep(0.01)
        assert await ask(sandbox, "other.test", 1) == "no such name"


async def test_who_says_nothing_is_not_waited_for_without_end(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HELLO_SECONDS", 0.2)
    sandbox = await host.create("box", egress={"outbound_by_host": {"api.test": greet}})
    silent = "import socket; s = socket.create_connection(('api.test', 443)); print(s.recv(1))"
    result = await sandbox.exec(["python3", "-c", silent], timeout=15)
    assert "ConnectionResetError" in result.stderr
    slow = "import socket, time; s = socket.create_connection(('api.test', 443)); "
    slow += "s.send(bytes([22, 3, 1, 2, 0])); print(s.recv(1))"
    result = await sandbox.exec(["python3", "-c", slow], timeout=15)
    assert "ConnectionResetError" in result.stderr


async def test_names_are_told_by_tcp_as_well(host: Host) -> None:
    sandbox = await host.create("box", egress={"outbound_by_host": {"api.test": greet}})
    code = """
import socket, struct
message = b"\\0\\1\\1\\0\\0\\1\\0\\0\\0\\0\\0\\0\\3api\\4test\\0\\0\\1\\0\\1"
with socket.create_connection(("9.9.9.9", 53), 10) as sock:
    for _ in range(2):
        sock.sendall(struct.pack("!H", len(message)) + message)
        size, = struct.unpack("!H", sock.recv(2, socket.MSG_WAITALL))
        print(socket.inet_ntoa(sock.recv(size, socket.MSG_WAITALL)[-4:]))
"""
    result = await sandbox.exec(["python3", "-c", code], timeout=15)
    assert result.stdout == "198.18.0.1\n" * 2, result.stderr


async def test_what_is_no_policy_is_refused_before_anything_starts(host: Host) -> None:
    with pytest.raises(InvalidOption, match="egress is an Egress"):
        host.sandbox("box", egress="open")  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="internet"):
        host.sandbox("box", egress={"internet": "yes"})
    with pytest.raises(InvalidOption):
        host.sandbox("box", egress={"internett": True})
    assert await host.list() == []


async def test_the_keys_of_the_authority_are_nowhere_inside(host: Host) -> None:
    sandbox = await host.create("box", egress={"outbound_by_host": {"api.test": greet}})
    found = await sandbox.exec(
        "grep -rIl 'PRIVATE KEY' /etc /usr/local /run /workspace /root /tmp 2>/dev/null", timeout=15
    )
    assert found.stdout == ""
