"""The user of a local TCP connection, and the access of other users to a server without keys."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import subprocess
import time
from typing import TYPE_CHECKING

import aiohttp
import pytest

from http_response import fetch
from smokebox.errors import Unauthorized
from smokebox.server.server import RunningServer, run_server
from smokebox.server.settings import ServerSettings
from smokebox.tenancy.peer import find_uid, peer_uid
from unprivileged import NOBODY, as_nobody

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from smokebox.tenancy.peer import Address

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
WS = "/api/sandboxes/ghost/terminals/t"


@contextlib.contextmanager
def connected(listen: str, connect: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield a client's socket, connected to that address, and the server's."""
    family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    with socket.create_server(
        (listen, 0), family=family, dualstack_ipv6=listen == "::"
    ) as listener:
        address = (connect, listener.getsockname()[1])
        client = socket.socket(socket.AF_INET6 if ":" in connect else socket.AF_INET)
        with client:
            client.connect(address)
            server, _ = listener.accept()
            with server:
                yield client, server


def ends(sock: socket.socket) -> tuple[tuple[Address, int], tuple[Address, int]]:
    """Return the addresses of both ends as seen from the other one."""
    pairs = (sock.getpeername(), sock.getsockname())
    found = []
    for host, port, *_ in pairs:
        address = ipaddress.ip_address(host)
        mapped = getattr(address, "ipv4_mapped", None)
        found.append((mapped or address, port))
    return found[0], found[1]


@pytest.mark.parametrize(
    ("listen", "connect"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", "::ffff:127.0.0.1"),
        ("::1", "::1"),
        ("::", "127.0.0.1"),
        ("::", "::ffff:127.0.0.1"),
        ("0.0.0.0", "127.0.0.9"),
    ],
)
def test_owner_of_a_local_connection_is_found(listen: str, connect: str) -> None:
    with connected(listen, connect) as (_, server):
        assert find_uid(*ends(server)) == os.geteuid()


def test_socket_that_its_program_closed_has_no_owner() -> None:
    with connected("127.0.0.1", "127.0.0.1") as (client, server):
        both = ends(server)
        client.sendall(b"x")
        # The kernel reports uid 0 for what is left of it.
        client.close()
        assert find_uid(*both) is None


def test_half_closed_socket_still_has_its_owner() -> None:
    with connected("127.0.0.1", "127.0.0.1") as (client, server):
        client.shutdown(socket.SHUT_WR)
        assert find_uid(*ends(server)) == os.geteuid()


def test_listener_on_the_port_of_the_peer_is_not_its_owner() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = ipaddress.ip_address("127.0.0.1")
        port = listener.getsockname()[1]
        assert find_uid((here, port), (here, 9)) is None


def test_addresses_of_other_machines_have_no_owner() -> None:
    remote = (ipaddress.ip_address("192.0.2.1"), 40000)
    assert find_uid(remote, (ipaddress.ip_address("192.0.2.2"), 80)) is None


async def test_transport_without_tcp_has_no_owner() -> None:
    first, second = socket.socketpair()
    with first, second:
        transport, _ = await asyncio.get_running_loop().create_connection(
            asyncio.Protocol, sock=first
        )
        assert peer_uid(transport) is None
        transport.close()


@contextlib.asynccontextmanager
async def serve(tmp_path: Path, host: str = "127.0.0.1") -> AsyncIterator[RunningServer]:
    settings = ServerSettings(home=str(tmp_path / "home"), host=host, pool=0)
    async with run_server(settings) as server:
        yield server


async def curl_as_nobody(url: str, *options: str) -> tuple[int, bytes]:
    """Send a request as another user, and return the status and the body."""
    process = await asyncio.create_subprocess_exec(
        *as_nobody(),
        *("curl", "-gsS", "-m", "10", "-w", "\n%{http_code}", *options, url),
        stdout=subprocess.PIPE,
    )
    body, _, status = (await process.communicate())[0].rpartition(b"\n")
    return int(status), body


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_own_user_needs_no_key_on_a_loopback_address(tmp_path: Path, host: str) -> None:
    async with serve(tmp_path, host) as server, aiohttp.ClientSession(server.url) as http:
        assert (await fetch(http.get("/api/sandboxes"))).status == 200
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await http.ws_connect(WS)
        assert caught.value.status == 404


@needs_root
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_other_users_need_a_key_on_a_loopback_address(tmp_path: Path, host: str) -> None:
    async with serve(tmp_path, host) as server:
        for path in ("/api/sandboxes", "/api/keys", "/metrics", "/v1/pool/stats"):
            status, body = await curl_as_nobody(f"{server.url}{path}")
            assert status == 401, path
            assert b"smokebox keys create" in body
        upgrade = ("connection: upgrade", "upgrade: websocket", "sec-websocket-version: 13")
        headers = [f"-H{one}" for one in (*upgrade, "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==")]
        assert (await curl_as_nobody(f"{server.url}{WS}", *headers))[0] == 401
        assert (await curl_as_nobody(f"{server.url}/api/health"))[0] == 200


@needs_root
async def test_key_of_another_user_is_checked_on_a_loopback_address(tmp_path: Path) -> None:
    async with serve(tmp_path) as server, aiohttp.ClientSession(server.url) as http:
        body = {"name": "nobody", "prefix": "nobody"}
        key = (await fetch(http.post("/api/keys", json=body))).body["key"]
        url, header = f"{server.url}/api/sandboxes", f"-Hauthorization: Bearer {key}"
        assert await curl_as_nobody(url, header) == (200, b'{"sandboxes":[]}')
        assert (await curl_as_nobody(f"{url}/other", header))[0] == 403
        assert (await curl_as_nobody(url, f"{header}0"))[0] == 401


async def test_key_of_the_own_user_limits_its_requests_on_a_loopback_address(
    tmp_path: Path,
) -> None:
    async with serve(tmp_path) as server, aiohttp.ClientSession(server.url) as http:
        body = {"name": "tenant", "prefix": "tenant"}
        key = (await fetch(http.post("/api/keys", json=body))).body["key"]
        bearer = {"authorization": f"Bearer {key}"}
        assert (await fetch(http.put("/api/sandboxes/other", headers=bearer))).status == 403
        assert (await fetch(http.get("/api/keys", headers=bearer))).status == 403
        wrong = {"authorization": f"bearer {key[:-1]}x"}
        assert (await fetch(http.get("/api/sandboxes", headers=wrong))).status == 401
        # Other vendors' clients cannot leave their key out.
        for other in ("Bearer dummy", "Basic dTpw"):
            headers = {"authorization": other}
            assert (await fetch(http.get("/api/sandboxes", headers=headers))).status == 200


@needs_root
async def test_connections_of_two_users_are_told_apart(tmp_path: Path) -> None:
    async with serve(tmp_path) as server, aiohttp.ClientSession(server.url) as http:
        url = f"{server.url}/api/sandboxes"
        for _ in range(3):
            assert (await curl_as_nobody(url, "--next", url))[0] == 401
            assert (await fetch(http.get("/api/sandboxes"))).status == 200


@needs_root
def test_server_of_another_user_serves_that_user_and_root(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o777)
    program = (
        "import socket, sys\n"
        "s = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        command = [*as_nobody(), "/usr/bin/python3", "-c", program, port]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            server, _ = listener.accept()
            with server:
                assert find_uid(*ends(server)) == NOBODY


def test_lookup_is_quick() -> None:
    with connected("127.0.0.1", "127.0.0.1") as (_, server):
        both, began = ends(server), time.monotonic()
        for _ in range(100):
            find_uid(*both)
        assert (time.monotonic() - began) / 100 < 0.005


def test_only_loopback_servers_without_keys_look_at_peers() -> None:
    def checks(**options: object) -> bool:
        return ServerSettings(home="h", **options).checks_peers  # type: ignore[arg-type]

    assert checks(host="127.0.0.1")
    assert checks(host="localhost", keys=False)
    assert not checks(host="127.0.0.1", keys=True)
    assert not checks(host="0.0.0.0", keys=False)
    assert not checks()


async def test_peer_that_the_kernel_does_not_know_needs_a_key(tmp_path: Path) -> None:
    async with serve(tmp_path) as server:
        with pytest.raises(Unauthorized, match="SMOKEBOX_API_KEY"):
            server.state.keys.principal(None, None)
