"""The network of a jail: one room, whose doors the engine holds."""

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
from ordinary import passes_for_nobody
from smokebox.engine.host import Host
from smokebox.engine.jail import guest_requests, network

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
            sock.send(b"question")
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


async def doors_of(sandbox: Sandbox) -> EgressSockets:
    """The doors of a sandbox, which its engine does not serve from here on."""
    assert sandbox.life.run is not None
    await sandbox.egress_proxy.leave()
    return await guest_requests.egress_sockets(sandbox.life.run.jail)


async def connect(sandbox: Sandbox, *words: object) -> str:
    result = await sandbox.exec(["python3", "-c", CONNECT, *map(str, words)], timeout=15)
    return result.stdout.strip() or result.stderr


async def test_a_door_that_nobody_opened_refuses_at_once(sandbox: Sandbox) -> None:
    for where in ("1.2.3.4", "2606:4700::1", "169.254.169.254"):
        assert await connect(sandbox, where, 80) == "ECONNREFUSED"


async def test_every_connection_comes_to_the_door_and_says_where_it_wanted_to_go(
    sandbox: Sandbox,
) -> None:
    doors = await doors_of(sandbox)
    door = doors.tcp
    assert door is not None
    door.listen()
    loop = asyncio.get_running_loop()
    for where, port in (("1.2.3.4", 443), ("2606:4700::1", 80), ("169.254.169.254", 8080)):
        asking = asyncio.create_task(connect(sandbox, where, port))
        inside, _ = await asyncio.wait_for(loop.sock_accept(door), 15)
        with inside:
            assert network.destination(inside) == (where, port)
            await loop.sock_sendall(inside, b"welcome")
        assert await asking == "welcome"
    doors.close()


async def test_what_is_asked_by_dns_comes_to_the_door(sandbox: Sandbox) -> None:
    loop = asyncio.get_running_loop()
    doors = await doors_of(sandbox)
    for where, door in zip(("9.9.9.9", "2606:4700::1111"), doors.dns, strict=True):
        asking = asyncio.create_task(connect(sandbox, where, 53, "udp"))
        question, who = await asyncio.wait_for(loop.sock_recvfrom(door, 100), 15)
        assert question == b"question"
        await loop.sock_sendto(door, b"answer", who)
        assert await asking == "answer"
    doors.close()


async def test_other_datagrams_are_refused_at_once(sandbox: Sandbox) -> None:
    assert await connect(sandbox, "1.2.3.4", 443, "udp") == "ECONNREFUSED"
    assert await connect(sandbox, "2606:4700::1", 443, "udp") == "ECONNREFUSED"


async def test_a_server_inside_is_reached_at_its_own_addresses(sandbox: Sandbox) -> None:
    serve = """
import socket, threading
with socket.create_server(("::", 80), family=socket.AF_INET6, dualstack_ipv6=True) as server:
    def ask(where):
        with socket.create_connection((where, 80), 10) as sock:
            print(sock.recv(100).decode())
    for where in ("127.0.0.1", "127.9.9.9", "::1", "10.11.0.2", "localhost", "box"):
        asking = threading.Thread(target=ask, args=[where])
        asking.start()
        with server.accept()[0] as connection:
            connection.send(where.encode())
        asking.join()
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


async def test_another_engine_gets_the_doors_from_the_agent(sandbox: Sandbox) -> None:
    assert sandbox.life.run is not None
    found = [await guest_requests.egress_sockets(sandbox.life.run.jail) for _ in range(2)]
    once, again = ([os.fstat(sock.fileno()).st_ino for sock in one.sockets] for one in found)
    assert once == again
    assert len(once) >= 2
    for doors in found:
        doors.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="this is an ordinary user")
@pytest.mark.timeout(120)
def test_the_same_by_an_ordinary_user() -> None:
    passes_for_nobody(__file__, "every_connection or by_dns")


def told(code: str) -> list[object]:
    """What a process tells that runs `code` in a network of its own."""
    script = """
import json, os, socket
from smokebox.engine.jail import linux
def tell(what): print(json.dumps(what))
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
    answer: list[object] = json.loads(done.stdout)
    return answer


def test_without_nf_tables_there_is_a_loopback_and_a_reason() -> None:
    code = """
        from smokebox.engine.jail import network
        def refuse(**_): raise OSError(95, "Operation not supported")
        network.redirect = refuse
        doors = network.furnish()
        with socket.create_server(("127.0.0.1", 8080)) as server:
            socket.create_connection(server.getsockname()).close()
        try:
            socket.create_connection(("1.2.3.4", 80), 5)
        except OSError as error:
            tell([doors.reason, len(doors.sockets), error.errno])
    """
    reason, doors, number = told(code)
    assert "nf_tables" in str(reason)
    assert (doors, number) == (0, errno.ENETUNREACH)


def test_where_a_connection_wanted_to_go_is_read_for_both_families() -> None:
    v4 = struct.pack("=H", socket.AF_INET) + struct.pack("!H4s8x", 443, socket.inet_aton("1.2.3.4"))
    assert network.read_destination(v4) == ("1.2.3.4", 443)
    address = socket.inet_pton(socket.AF_INET6, "2606::1")
    v6 = struct.pack("=H", socket.AF_INET6) + struct.pack("!HI16sI", 80, 0, address, 0)
    assert network.read_destination(v6) == ("2606::1", 80)
