"""The check of every address that a server connects to on behalf of a sandbox.

Egress, git and bucket mounts use it after each name lookup. Public addresses pass, except those of
this host: they would lead to services that listen on all of its interfaces. All others need a
grant of the operator.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeAlias

from smokebox.egress.pattern import is_public
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from smokebox.foundation.http1.dial import Endpoint

PrivateAccess: TypeAlias = bool | Sequence[str]
"""Private addresses that may be used: all, none, or networks and addresses such as `10.0.0.0/8`,
`10.0.0.7:5432`."""

_PROBE_PORT = 9


@dataclass(frozen=True, slots=True)
class AddressGrant:
    """A network, or one port of it, that an operator allows connections to."""

    network: ipaddress.IPv4Network | ipaddress.IPv6Network
    port: int | None = None

    @classmethod
    def parse(cls, option: str, text: str) -> Self:
        """Parse a network or address, with or without a port. Raises `InvalidOption`."""
        host, port = text, None
        if "/" not in text and ("]:" in text or text.count(":") == 1):
            host, _, digits = text.rpartition(":")
            port = int(digits) if digits.isascii() and digits.isdigit() else -1
        try:
            network = ipaddress.ip_network(host.removeprefix("[").removesuffix("]"))
        except ValueError:
            network = None
        if network is None or not (port is None or 0 < port < 1 << 16):
            raise InvalidOption(
                f"{option}: {text!r} is not a network or an address.",
                hint="Write '10.0.0.0/8', '10.0.0.7' or '10.0.0.7:5432'.",
                option=option,
                value=text,
            )
        return cls(network, port)

    def covers(self, address: str, port: int | None) -> bool:
        """Return whether it covers a port of an address, or for None any port of it."""
        return (port is None or self.port in (None, port)) and _parse(address) in self.network


@dataclass(frozen=True, slots=True)
class AddressGuard:
    """Allows public addresses of other hosts, and granted ones.

    `trusts_policy` also allows every address that the policy itself names, in `hosts` or with
    `forward(to=)`: the operator set it.
    """

    grants: tuple[AddressGrant, ...] = ()
    trusts_policy: bool = False

    @classmethod
    def of(cls, private: PrivateAccess, *, option: str = "private") -> Self:
        """Return the guard that allows these private addresses. Raises `InvalidOption`."""
        if isinstance(private, bool):
            private = ("0.0.0.0/0", "::/0") if private else ()
        return cls(tuple(AddressGrant.parse(option, one) for one in private))

    def allows(self, endpoint: Endpoint, address: str, port: int) -> bool:
        """Return whether a connection to an endpoint may use this address of it."""
        if self.trusts_policy and endpoint.named:
            return True
        return self.allows_address(address, port)

    def allows_address(self, address: str, port: int | None) -> bool:
        """Return whether a connection may go to a port of an address, or for None to any."""
        if any(grant.covers(address, port) for grant in self.grants):
            return True
        return is_public(address) and not is_own(address)


def is_own(address: str) -> bool:
    """Return whether an address is one of this host, by its routes."""
    parsed = _parse(address)
    family = socket.AF_INET if parsed.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing. A host reaches its own addresses from the same one, or by loopback.
            probe.connect((str(parsed), _PROBE_PORT))
        except OSError:
            return False
        source = _parse(probe.getsockname()[0])
        return source == parsed or source.is_loopback


def _parse(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parse an address; one of IPv4 within IPv6 becomes that of IPv4."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return mapped or parsed
