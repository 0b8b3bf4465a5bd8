"""Exposed ports: dialing, tokens, activation per run, streams and invalid options."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from smokebox.engine.host import Host
from smokebox.errors import Conflict, InvalidOption, ServiceUnavailable

if TYPE_CHECKING:
    from pathlib import Path

    from smokebox.engine import Sandbox
    from smokebox.engine.ports import PortGrant

ECHO = """
import socket, sys
version, address = sys.argv[1:]
family = socket.AF_INET6 if version == "6" else socket.AF_INET
server = socket.create_server((address, 3000), family=family)
print("listening", flush=True)
while True:
    client, _ = server.accept()
    client.sendall(client.recv(100).upper())
    client.close()
"""


class CutStream:
    """A stream that records whether it was cut."""

    def __init__(self) -> None:
        self.was_cut = False

    def cut(self) -> None:
        self.was_cut = True


@pytest.fixture
def sandbox(host: Host) -> Sandbox:
    return host.sandbox("box")


async def listen(sandbox: Sandbox, version: int = 4, address: str = "127.0.0.1") -> None:
    server = await sandbox.start_process(["python3", "-c", ECHO, str(version), address])
    await server.wait_for_log("listening", 10)


async def send_hello(sandbox: Sandbox) -> bytes:
    run = sandbox.lifecycle.run
    assert run is not None
    loop = asyncio.get_running_loop()
    with await sandbox.ports.dial(run, 3000) as sock:
        await loop.sock_sendall(sock, b"hello")
        return await loop.sock_recv(sock, 100)


@pytest.mark.parametrize(("version", "address"), [(4, "127.0.0.1"), (6, "::1"), (4, "0.0.0.0")])
async def test_port_is_reached_on_any_local_address(
    sandbox: Sandbox, version: int, address: str
) -> None:
    await listen(sandbox, version, address)
    assert [await send_hello(sandbox) for _ in range(8)] == [b"HELLO"] * 8


@pytest.mark.gvisor
async def test_port_of_a_gvisor_sandbox_is_reached(host: Host) -> None:
    sandbox = await host.create("box", tier="gvisor")
    await listen(sandbox)
    assert await send_hello(sandbox) == b"HELLO"


async def test_port_without_a_server_is_unavailable(sandbox: Sandbox) -> None:
    await sandbox.wake()
    with pytest.raises(ServiceUnavailable, match="nothing listens on port 3000 of sandbox box"):
        await send_hello(sandbox)


async def test_ports_of_a_sandbox_are_not_open_on_the_host(sandbox: Sandbox) -> None:
    await listen(sandbox)
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", 3000)


async def test_exposed_port_keeps_its_random_token(sandbox: Sandbox) -> None:
    first = await sandbox.ports.expose(3000, name="site")
    assert (first.port, first.name, first.private, first.active) == (3000, "site", False, True)
    assert (len(first.token), len(first.slug)) == (16, 8)
    assert await sandbox.ports.expose(3000) == first
    assert await sandbox.ports.list() == [first]
    assert (await sandbox.ports.expose(3001)).token != first.token


async def test_port_is_active_in_the_run_that_exposed_it(sandbox: Sandbox) -> None:
    token = (await sandbox.ports.expose(3000, token="mine")).token

    async def active() -> list[bool]:
        return [port.active for port in await sandbox.ports.list()]

    assert await active() == [True]
    await sandbox.sleep()
    assert await active() == [False]
    await sandbox.wake()
    assert await active() == [False]
    assert await sandbox.ports.validate_token(3000, token)
    assert (await sandbox.ports.expose(3000)).token == token
    assert await active() == [True]


async def test_exposed_ports_survive_a_new_engine(tmp_path: Path, layers: Path) -> None:
    first = await Host.open(tmp_path / "home", pool=0, images=layers)
    exposed = await first.sandbox("box").ports.expose(3000, token="t", private=True)
    await first.aclose(detach=True)
    async with await Host.open(tmp_path / "home", pool=0, images=layers) as second:
        assert await second.sandbox("box").ports.list() == [exposed]


async def test_destroy_revokes_exposed_ports(sandbox: Sandbox) -> None:
    await sandbox.ports.expose(3000, token="t")
    await sandbox.destroy()
    assert await sandbox.ports.list() == []
    await sandbox.wake()
    assert not await sandbox.ports.validate_token(3000, "t")


async def test_unexpose_may_be_repeated_and_cuts_streams(sandbox: Sandbox) -> None:
    await sandbox.ports.expose(3000)
    stream, other = CutStream(), CutStream()
    sandbox.ports.add_stream(3000, stream)
    sandbox.ports.add_stream(3001, other)
    await sandbox.ports.unexpose(3000)
    await sandbox.ports.unexpose(3000)
    assert await sandbox.ports.list() == []
    assert (stream.was_cut, other.was_cut) == (True, False)
    await sandbox.sleep()
    assert other.was_cut


async def test_open_stream_keeps_the_sandbox_awake_and_listing_does_not_wake_it(
    host: Host,
) -> None:
    sandbox = host.sandbox("box", sleep_after=0.1)
    await sandbox.ports.expose(3000)
    stream = CutStream()
    sandbox.ports.add_stream(3000, stream)
    await asyncio.sleep(0.5)
    assert sandbox.lifecycle.run is not None
    sandbox.ports.remove_stream(3000, stream)
    async with asyncio.timeout(10):
        while sandbox.lifecycle.run is not None:
            await asyncio.sleep(0.02)
    assert not (await sandbox.ports.list())[0].active
    assert sandbox.lifecycle.run is None


async def test_only_the_exact_token_is_valid(sandbox: Sandbox) -> None:
    await sandbox.ports.expose(3000, token="token")
    valid = sandbox.ports.validate_token
    assert [await valid(3000, token) for token in ("token", "toke", "", "Token", "\udc80")] == [
        True,
        *[False] * 4,
    ]
    assert not await valid(3001, "token")


@pytest.mark.parametrize("port", [0, -1, 65536, True, "80", 3000.0, None, 1])
async def test_invalid_ports_are_refused(sandbox: Sandbox, port: int) -> None:
    with pytest.raises(InvalidOption, match="port"):
        await sandbox.ports.expose(port)
    assert await sandbox.info() is None


@pytest.mark.parametrize("token", ["", "a" * 17, "A", "a-b", "a.b", "é", 3])
async def test_invalid_tokens_are_refused(sandbox: Sandbox, token: str) -> None:
    with pytest.raises(InvalidOption, match="token"):
        await sandbox.ports.expose(3000, token=token)


@pytest.mark.parametrize("name", ["", "a" * 64, "a\nb", 3])
async def test_invalid_names_are_refused(sandbox: Sandbox, name: str) -> None:
    with pytest.raises(InvalidOption, match="name"):
        await sandbox.ports.expose(3000, name=name)


async def test_preview_name_too_long_for_dns_is_refused_before_waking(host: Host) -> None:
    sandbox = host.sandbox("a" * 60)
    with pytest.raises(InvalidOption, match="DNS allows 63"):
        await sandbox.ports.expose(3000)
    assert await sandbox.info() is None
    fits = host.sandbox("a" * 49)
    assert (await fits.ports.expose(3000)).active
    with pytest.raises(InvalidOption, match="DNS"):
        await fits.ports.expose(10000)


async def test_conflicting_names_and_tokens_are_refused(sandbox: Sandbox) -> None:
    async def conflict(port: int, **options: Any) -> PortGrant | str:
        try:
            return await sandbox.ports.expose(port, **options)
        except Conflict as error:
            return error.message

    await sandbox.ports.expose(3000, name="site", token="one")
    assert await conflict(3000, name="api") == "port 3000 is exposed with another name."
    assert await conflict(3000, token="two") == "port 3000 is exposed with another token."
    assert await conflict(3001, name="site") == "port 3000 already has that name."
    assert await conflict(3001, token="one") == "port 3000 already has that token."
    assert (await sandbox.ports.expose(3000, name="site", token="one")).active
    assert len(await sandbox.ports.list()) == 1
