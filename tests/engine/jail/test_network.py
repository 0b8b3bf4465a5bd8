"""The network of a jail: redirection of its traffic to sockets of the engine."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

import smokebox
from smokebox.engine.host import Host
from smokebox.engine.jail import guest_requests, network
from unprivileged import rerun_as_nobody

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from smokebox.engine.jail.network import EgressSockets
    from smokebox.engine.sandbox import Sandbox

CONNECT = """
import errno, socket, sys
where, port = sys.argv[1], int(sys.argv[2])
family = socket.AF_INET6 if ":" in where else socket.AF_INET
kind = socket.SOCK_DGRAM if sys.argv[3:] == ["udp"] else socket.SOCK_STREAM
with socket.socket(family, kind) as sock:
    sock.settimeout(10)
    try:
        sock.connect((where, port))
        if kind == socket.SOCK_DGRAM:
            sock.send(b"query")
        print(sock.recv(100).decode())
    except OSError as error:
        print(errno.errorcode.get(error.errno, error))
"""


@pytest_asyncio.fixture(params=["namespaces", pytest.param("gvisor", marks=pytest.mark.gvisor)])
async def sandbox(
    request: pytest.FixtureRequest, tmp_path: Path, layers: Path
) -> AsyncIterator[Sandbox]:
    async with await Host.open(
        tmp_path / "home", tier=request.param, pool=0, images=layers
    ) as host:
        yield await host.create("box")


async def take_egress_sockets(sandbox: Sandbox) -> EgressSockets:
    """Stop the egress proxy of a sandbox, and return its sockets."""
    assert sandbox.lifecycle.run is not None
    await sandbox.egress_proxy.aclose()
    return await guest_requests.egress_sockets(sandbox.lifecycle.run.jail)


async def connect(sandbox: Sandbox, *args: object) -> str:
    result = await sandbox.exec(["python3", "-c", CONNECT, *map(str, args)], timeout=15)
    return result.stdout.strip() or result.stderr


async def test_connections_are_refused_without_egress(sandbox: Sandbox) -> None:
    for where in ("1.2.3.4", "2606:4700::1", "169.254.169.254"):
        assert await connect(sandbox, where, 80) == "ECONNREFUSED"


async def test_tcp_connection_is_redirected_with_its_destination(
    sandbox: Sandbox,
) -> None:
    sockets = await take_egress_sockets(sandbox)
    listener = sockets.tcp
    assert listener is not None
    listener.listen()
    loop = asyncio.get_running_loop()
    for where, port in (("1.2.3.4", 443), ("2606:4700::1", 80), ("169.254.169.254", 8080)):
        connecting = asyncio.create_task(connect(sandbox, where, port))
        connection, _ = await asyncio.wait_for(loop.sock_accept(listener), 15)
        with connection:
            assert network.destination(connection) == (where, port)
            await loop.sock_sendall(connection, b"welcome")
        assert await connecting == "welcome"
    sockets.close()


async def test_dns_query_is_redirected(sandbox: Sandbox) -> None:
    loop = asyncio.get_running_loop()
    sockets = await take_egress_sockets(sandbox)
    for where, sock in zip(("9.9.9.9", "2606:4700::1111"), sockets.dns, strict=True):
        connecting = asyncio.create_task(connect(sandbox, where, 53, "udp"))
        query, address = await asyncio.wait_for(loop.sock_recvfrom(sock, 100), 15)
        assert query == b"query"
        await loop.sock_sendto(sock, b"response", address)
        assert await connecting == "response"
    sockets.close()


async def test_other_datagrams_are_refused(sandbox: Sandbox) -> None:
    assert await connect(sandbox, "1.2.3.4", 443, "udp") == "ECONNREFUSED"
    assert await connect(sandbox, "2606:4700::1", 443, "udp") == "ECONNREFUSED"


async def test_server_inside_is_reached_at_local_addresses(sandbox: Sandbox) -> None:
    serve = """
import socket, threading
with socket.create_server(("::", 80), family=socket.AF_INET6, dualstack_ipv6=True) as server:
    def fetch(where):
        with socket.create_connection((where, 80), 10) as sock:
            print(sock.recv(100).decode())
    for where in ("127.0.0.1", "127.9.9.9", "::1", "10.11.0.2", "localhost", "box"):
        client = threading.Thread(target=fetch, args=[where])
        client.start()
        with server.accept()[0] as connection:
            connection.send(where.encode())
        client.join()
"""
    result = await sandbox.exec(["python3", "-c", serve], timeout=15)
    assert result.stdout.split() == [
        "127.0.0.1",
        "127.9.9.9",
        "::1",
        "10.11.0.2",
        "localhost",
        "box",
    ]


async def test_guest_init_returns_the_same_egress_sockets(sandbox: Sandbox) -> None:
    assert sandbox.lifecycle.run is not None
    found = [await guest_requests.egress_sockets(sandbox.lifecycle.run.jail) for _ in range(2)]
    first, second = ([os.fstat(sock.fileno()).st_ino for sock in one.sockets] for one in found)
    assert first == second
    assert len(first) >= 2
    for sockets in found:
        sockets.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="this is an unprivileged user")
@pytest.mark.timeout(120)
def test_redirection_as_unprivileged_user() -> None:
    rerun_as_nobody(__file__, "tcp_connection or dns_query")


def run(code: str) -> list[object]:
    """Run code in a new network namespace, and return what it passes to `output`."""
    script = """
import json, os, socket
from smokebox.engine.jail import linux
def output(value): print(json.dumps(value))
uid, gid = os.geteuid(), os.getegid()
linux.unshare(linux.NEWUSER | linux.NEWNET)
open('/proc/self/setgroups', 'w').write('deny')
open('/proc/self/uid_map', 'w').write(f'0 {uid} 1')
open('/proc/self/gid_map', 'w').write(f'0 {gid} 1')
"""
    source = str(Path(smokebox.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", script + textwrap.dedent(code)],
        capture_output=True,
        env={"PYTHONPATH": source},
        timeout=15,
    )
    assert done.returncode == 0, done.stderr.decode()
    results: list[object] = json.loads(done.stdout)
    return results


def test_missing_nf_tables_leave_loopback_and_reason() -> None:
    code = """
        from smokebox.engine.jail import network
        def refuse(**_): raise OSError(95, "Operation not supported")
        network.redirect = refuse
        sockets = network.set_up()
        with socket.create_server(("127.0.0.1", 8080)) as server:
            socket.create_connection(server.getsockname()).close()
        try:
            socket.create_connection(("1.2.3.4", 80), 5)
        except OSError as error:
            output([sockets.reason, len(sockets.sockets), error.errno])
    """
    reason, count, number = run(code)
    assert "nf_tables" in str(reason)
    assert (count, number) == (0, errno.ENETUNREACH)


def test_destination_is_parsed_for_both_families() -> None:
    v4 = struct.pack("=H", socket.AF_INET) + struct.pack("!H4s8x", 443, socket.inet_aton("1.2.3.4"))
    assert network.parse_destination(v4) == ("1.2.3.4", 443)
    address = socket.inet_pton(socket.AF_INET6, "2606::1")
    v6 = struct.pack("=H", socket.AF_INET6) + struct.pack("!HI16sI", 80, 0, address, 0)
    assert network.parse_destination(v6) == ("2606::1", 80)
