"""Attacks over the network of a sandbox without egress."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from attack.sandbox_code import run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smokebox.engine.sandbox import Sandbox


@pytest.fixture
def service() -> Iterator[int]:
    """Run a server on every address of the host, and yield its port."""
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


async def test_host_services_cannot_be_reached(sandbox: Sandbox, service: int) -> None:
    with socket.socket() as probe:
        probe.connect(("127.0.0.1", service))
    host_addresses = {
        str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
    }
    results = await run(
        sandbox,
        r"""
def connect(address, kind=socket.SOCK_STREAM, port=int(sys.argv[1])):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, kind) as sock:
        sock.settimeout(2)
        try:
            sock.connect((address, port))
            sock.send(b"x")
            sock.recv(1)
        except TimeoutError:
            return "timeout"
        except OSError as error:
            return errno.errorcode[error.errno]
        return "connected"

addresses = ["127.0.0.1", "127.1.2.3", "0.0.0.0", "::1", "169.254.169.254", "10.0.0.1",
             "172.17.0.1", "192.168.0.1", "8.8.8.8", "2001:4860:4860::8888", *sys.argv[2:]]
results = {address: connect(address) for address in addresses}
results["quic"] = connect("8.8.8.8", socket.SOCK_DGRAM, 443)
results["broadcast"] = connect("255.255.255.255", socket.SOCK_DGRAM, 67)
output(results)
""",
        str(service),
        *host_addresses,
    )
    refused = {"ECONNREFUSED", "ENETUNREACH", "EHOSTUNREACH", "EACCES", "EADDRNOTAVAIL"}
    assert {target: result for target, result in results.items() if result not in refused} == {}


async def test_names_are_not_resolved_by_the_host(sandbox: Sandbox) -> None:
    for name in ("example.com", "metadata.google.internal", socket.gethostname()):
        result = await sandbox.exec(["getent", "hosts", name], timeout=10)
        assert result.exit_code != 0


async def test_abstract_sockets_of_the_host_are_invisible(
    sandbox: Sandbox, neighbour: Sandbox
) -> None:
    name = "\0smokebox-attack-canary"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        results = await run(
            sandbox,
            r"""
listed = read("/proc/net/unix") if os.path.exists("/proc/net/unix") else ""
results = []
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
    for name in ("\0smokebox-attack-canary", "\0smokebox-ids-50000000"):
        results.append(attempt(socket.socket(socket.AF_UNIX, kind).connect, name))
own = socket.socket(socket.AF_UNIX)
own.bind("\0smokebox-attack-canary")
output([results, "canary" in listed or "init.sock" in listed])
""",
        )
    assert set(results[0]) <= {"ECONNREFUSED", "EPROTOTYPE"}
    assert results[1] is False


async def test_unusual_socket_families_are_refused(sandbox: Sandbox) -> None:
    results = await run(
        sandbox,
        r"""
families = dict(PACKET=17, VSOCK=40, ALG=38, XDP=44, BLUETOOTH=31, TIPC=30, CAN=29, RDS=21, KEY=15,
                PPPOX=24, NFC=39, KCM=41, QIPCRTR=42, SMC=43, RXRPC=33, X25=9, AX25=3,
                IPX=4, LLC=26)
results = {}
for name, family in families.items():
    for kind in (1, 2, 3, 5, 10):
        results[f"{name} {kind}"] = syscall("socket", family, kind, 0)
for protocol in (0, 1, 6, 17, 255):
    results[f"raw {protocol}"] = syscall("socket", 2, 3, protocol)
    results[f"raw6 {protocol}"] = syscall("socket", 10, 3, protocol)
for protocol in (33, 132, 136, 115, 262):
    results[f"protocol {protocol}"] = syscall("socket", 2, 1, protocol)
for protocol in (6, 12, 16, 9, 10):
    results[f"netlink {protocol}"] = syscall("socket", 16, 3, protocol)
output(results)
""",
    )
    assert {call: result for call, result in results.items() if not isinstance(result, str)} == {}


async def test_network_interfaces_and_routes_cannot_be_changed(sandbox: Sandbox) -> None:
    results = await run(
        sandbox,
        r"""
def netlink(kind, body, flags=0x605):
    try:
        sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
        sock.settimeout(2)
        sock.bind((0, 0))
        sock.send(struct.pack("=IHHII", 16 + len(body), kind, flags, 1, 0) + body)
        response = sock.recv(4096)
        code = struct.unpack_from("=i", response, 16)[0]
        return errno.errorcode.get(-code, "done")
    except OSError as error:
        return errno.errorcode.get(error.errno, "timeout")

kind = struct.pack("=HH", 4 + 12, 18) + struct.pack("=HH", 10, 1) + b"dummy\0\0\0"
results = {
    "link": netlink(16, struct.pack("=BxHiII", 0, 0, 0, 0, 0) + kind),
    "address": netlink(20, struct.pack("=BBBBIHH4B", 2, 24, 0, 0, 1, 8, 2, 10, 0, 0, 2)),
    "route": netlink(24, struct.pack("=8BIHHI", 2, 0, 0, 0, 254, 3, 0, 1, 0, 8, 4, 1)),
    "down": netlink(16, struct.pack("=BxHiII", 0, 0, 1, 0, 1), 5),
}
import fcntl
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
# SIOCSIFADDR, SIOCSIFFLAGS, SIOCADDRT and SIOCBRADDBR.
for number in (0x8916, 0x8914, 0x890B, 0x89A0):
    results[hex(number)] = attempt(fcntl.ioctl, sock, number, b"lo".ljust(16, b"\0") + bytes(112))
output([results, [name for _, name in socket.if_nameindex()]])
""",
    )
    refused = {"EPERM", "EACCES", "ENOTTY", "EOPNOTSUPP", "EINVAL", "ENOPKG", "ENODEV"}
    assert {call: result for call, result in results[0].items() if result not in refused} == {}
    assert results[1] == ["lo"]
