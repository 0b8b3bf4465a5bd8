"""The egress proxy of a sandbox: DNS, tunnels, handlers, limits and audit log events."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from engine.egress.tcp_traffic import send_text, uppercase_server, wait_for_events
from smokebox.egress.message import Response
from smokebox.egress.policy import Egress
from smokebox.engine.egress import proxy as proxy_module
from smokebox.engine.egress import tunnel as tunnel_module
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
    """Run a server on this machine, and return its port."""
    async with uppercase_server() as port:
        yield port


def tunnel_to(port: int, **options: object) -> Egress:
    """Return a policy that tunnels db.test:5432 to a port of this machine."""
    fields = {"tcp": ["db.test:5432"], "hosts": {"db.test": f"127.0.0.1:{port}"}, **options}
    return Egress(**fields)  # type: ignore[arg-type]


async def greet(request: Request, env: object, context: HandlerContext) -> Response:
    return Response(f"hello from {request.url}")


async def test_only_listed_tcp_ports_are_tunnelled(
    tmp_path: Path, layers: Path, tier: str, port: int
) -> None:
    async with await Host.open(tmp_path / "home", pool=0, images=layers) as host:
        sandbox = await host.create("box", tier=tier, egress=tunnel_to(port))  # type: ignore[arg-type]
        assert await send_text(sandbox, "db.test", 5432, "question") == "QUESTION"
        assert await send_text(sandbox, "db.test", 5433, "question") == "ECONNRESET"
        assert await send_text(sandbox, "other.test", 5432, "question") == "no such name"
        tunnelled, port_refused, name_refused = await wait_for_events(sandbox, 3)
    assert (tunnelled.verdict, tunnelled.host, tunnelled.port) == ("tunnelled", "db.test", 5432)
    assert (tunnelled.sent, tunnelled.received, tunnelled.reason) == (8, 8, "")
    assert tunnelled.rule == "tcp['db.test:5432']"
    assert (port_refused.verdict, port_refused.rule) == ("refused", "tcp")
    assert "tcp=['db.test:5433']" in port_refused.reason
    assert (name_refused.protocol, name_refused.host) == ("dns", "other.test")


async def test_sandbox_without_egress_has_no_network(host: Host) -> None:
    sandbox = await host.create("box")
    assert await send_text(sandbox, "example.com", 443) == "no such name"
    assert await send_text(sandbox, "1.2.3.4", 443) == "ECONNREFUSED"
    assert (await sandbox.capabilities()).network == "off"
    assert [event.host for event in await wait_for_events(sandbox)] == ["example.com"]
    assert (await sandbox.exec("env; ls /usr/local/share/ca-certificates")).stdout.count(
        "CERT"
    ) == 0


async def test_handler_in_this_process_responds_for_its_host(host: Host) -> None:
    sandbox = await host.create("box", egress={"outbound_by_host": {"api.test": greet}})
    for url in ("http://api.test/a", "https://api.test/b"):
        result = await sandbox.exec(["curl", "-sS", url])
        assert result.stdout == f"hello from {url}", result.stderr
    assert (await sandbox.capabilities()).network == "guarded"
    events = await wait_for_events(sandbox, 2)
    assert [(event.verdict, event.protocol, event.path) for event in events] == [
        ("answered", "http", "/a"),
        ("answered", "https", "/b"),
    ]


async def test_sessions_processes_and_terminals_trust_the_proxy(host: Host) -> None:
    sandbox = await host.create("box", egress={"outbound_by_host": {"api.test": greet}})
    command = "curl -sS https://api.test/"
    session = await sandbox.create_session()
    assert (await session.exec(command)).stdout == "hello from https://api.test/"
    process = await sandbox.start_process(command)
    await process.wait_for_exit(timeout=15)
    assert "hello from" in (await process.logs()).stdout
    terminal = await sandbox.terminals.create(command=["sh", "-c", "env"])
    assert terminal is not None


async def test_policy_change_applies_to_the_next_connection(host: Host, port: int) -> None:
    sandbox = await host.create("box")
    shell = await sandbox.create_session()
    command = "python3 - <<'E'\nimport socket\ntry: print(socket.gethostbyname('db.test'))\n"
    command += "except OSError: print('unknown')\nE"
    assert (await shell.exec(command)).stdout == "unknown\n"
    await sandbox.network.configure(tunnel_to(port))
    assert (await shell.exec(command)).stdout.startswith("198.18.")
    assert await send_text(sandbox, "db.test", 5432, "question") == "QUESTION"
    await sandbox.network.deny_host("db.test")
    assert await send_text(sandbox, "db.test", 5432, "question") == "no such name"
    await sandbox.network.remove_denied_host("db.test")
    assert await send_text(sandbox, "db.test", 5432, "question") == "QUESTION"


async def test_next_command_trusts_a_handler_set_at_run_time(host: Host) -> None:
    sandbox = await host.create("box")
    assert (await sandbox.exec("echo ${SSL_CERT_FILE-none}")).stdout == "none\n"
    await sandbox.network.set_outbound_by_host("api.test", greet)
    result = await sandbox.exec(["curl", "-sS", "https://api.test/"])
    assert result.stdout == "hello from https://api.test/", result.stderr


async def test_next_engine_keeps_the_policy_without_functions(
    tmp_path: Path, layers: Path, port: int
) -> None:
    async with await Host.open(tmp_path / "home", pool=0, images=layers) as host:
        sandbox = await host.create(
            "box", egress=tunnel_to(port, outbound_by_host={"api.test": greet}, internet=True)
        )
        await sandbox.network.deny_host("denied.test")
        await sandbox.network.allow_host("allowed.test")
    async with await Host.open(tmp_path / "home", pool=0, images=layers) as host:
        sandbox = host.sandbox("box")
        assert await send_text(sandbox, "db.test", 5432, "question") == "QUESTION"
        assert await send_text(sandbox, "denied.test", 443) == "no such name"
        assert "denied.test" in sandbox.network.policy.denied_hosts
        assert list(sandbox.network.policy.opened_hosts) == ["allowed.test"]
        result = await sandbox.exec(["curl", "-sS", "-w", "%{http_code}", "http://api.test/"])
        assert "runs in the process of a client" in result.stdout
        assert result.stdout.endswith("403")
        host.sandbox("box", egress={"outbound_by_host": {"api.test": greet}})
        assert "hello" in (await sandbox.exec(["curl", "-sS", "http://api.test/"])).stdout


async def test_handlers_apply_to_later_handles_of_the_sandbox(host: Host) -> None:
    await host.create("box", egress={"outbound_by_host": {"api.test": greet}})
    await host.sandbox("box").sleep()
    result = await host.sandbox("box").exec(["curl", "-sS", "http://api.test/"])
    assert result.stdout == "hello from http://api.test/"


async def test_pass_through_does_not_terminate_tls(host: Host) -> None:
    seen: asyncio.Queue[bytes] = asyncio.Queue()

    async def record(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.put_nowait(await reader.read(3))
        writer.close()

    server = await asyncio.start_server(record, "127.0.0.1", 0)
    async with server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        sandbox = await host.create(
            "box", egress=Egress(pass_through=["pinned.test"], hosts={"pinned.test": address})
        )
        await sandbox.exec(["curl", "-sSm10", "https://pinned.test/"])
        assert await asyncio.wait_for(seen.get(), 10) == b"\x16\x03\x01"
        event = (await wait_for_events(sandbox))[0]
    assert (event.verdict, event.rule) == ("tunnelled", "pass_through['pinned.test']")


async def test_refused_connection_is_logged_as_failed(host: Host) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    sandbox = await host.create("box", egress=tunnel_to(port))
    assert await send_text(sandbox, "db.test", 5432) == "ECONNRESET"
    event = (await wait_for_events(sandbox))[0]
    assert (event.verdict, "refused" in event.reason.lower()) == ("failed", True)


async def test_policy_limits_bytes_and_connections(host: Host, port: int) -> None:
    sandbox = await host.create("box", egress=tunnel_to(port, max_bytes=100))
    assert await send_text(sandbox, "db.test", 5432, "x" * 40) == "X" * 40
    assert await send_text(sandbox, "db.test", 5432, "x" * 40) == "ECONNRESET"
    assert "max_bytes=100" in (await wait_for_events(sandbox))[0].reason
    await sandbox.network.configure(tunnel_to(port, max_requests=1))
    assert await send_text(sandbox, "db.test", 5432, "x") == "ECONNRESET"
    assert "max_requests=1" in (await wait_for_events(sandbox))[0].reason


async def test_number_of_open_connections_is_limited(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnel_module, "HALF_CLOSED_SECONDS", 0.1)
    # This server never accepts, so that the connections stay in its backlog.
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as server:
        sandbox = await host.create("box", egress=tunnel_to(server.getsockname()[1]))
        flood = """
import socket, sys, time
address = socket.gethostbyname("db.test")
socks = [socket.socket() for _ in range(600)]
for sock in socks:
    sock.setblocking(False)
    sock.connect_ex((address, 5432))
print("connecting", flush=True)
sys.stdin.read()
"""
        process = await sandbox.start_process(["python3", "-c", flood], stdin=True)
        await process.wait_for_log("connecting", timeout=15)
        async with asyncio.timeout(15):
            while sandbox.egress_proxy.connections < 256:
                await asyncio.sleep(0.01)
        assert sandbox.egress_proxy.connections == 256
        await process.kill()
        async with asyncio.timeout(15):
            while sandbox.egress_proxy.connections:
                await asyncio.sleep(0.01)
        assert await send_text(sandbox, "other.test", 1) == "no such name"


async def test_incomplete_client_hello_times_out(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy_module, "HELLO_SECONDS", 0.2)
    sandbox = await host.create("box", egress={"outbound_by_host": {"api.test": greet}})
    silent = "import socket; s = socket.create_connection(('api.test', 443)); print(s.recv(1))"
    result = await sandbox.exec(["python3", "-c", silent], timeout=15)
    assert "ConnectionResetError" in result.stderr
    slow = "import socket, time; s = socket.create_connection(('api.test', 443)); "
    slow += "s.send(bytes([22, 3, 1, 2, 0])); print(s.recv(1))"
    result = await sandbox.exec(["python3", "-c", slow], timeout=15)
    assert "ConnectionResetError" in result.stderr


async def test_names_are_resolved_over_tcp(host: Host) -> None:
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


async def test_invalid_policy_is_refused_before_the_sandbox_starts(host: Host) -> None:
    with pytest.raises(InvalidOption, match="egress is an Egress"):
        host.sandbox("box", egress="open")  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="internet"):
        host.sandbox("box", egress={"internet": "yes"})
    with pytest.raises(InvalidOption):
        host.sandbox("box", egress={"internett": True})
    assert await host.list() == []


async def test_private_key_of_the_authority_is_not_in_the_sandbox(host: Host) -> None:
    sandbox = await host.create("box", egress={"outbound_by_host": {"api.test": greet}})
    result = await sandbox.exec(
        "grep -rIl 'PRIVATE KEY' /etc /usr/local /run /workspace /root /tmp 2>/dev/null", timeout=15
    )
    assert result.stdout == ""
