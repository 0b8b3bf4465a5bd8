"""Which IP addresses belong to the public internet, and which lead inside."""

from __future__ import annotations

import ipaddress

_V4_IN_V6 = ipaddress.IPv6Network("64:ff9b::/96")
# All that is handed out so far.
_PUBLIC_V6 = ipaddress.IPv6Network("2000::/3")
_INSIDE = [
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",  # shared by carriers; Alibaba's metadata service
        "127.0.0.0/8",
        "168.63.129.16/32",  # Azure's host agent, on a public number
        "169.254.0.0/16",  # link-local; most metadata services
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/3",
        "2001::/23",
        "2001:db8::/32",
        "2002::/16",  # 6to4 hides an IPv4 address
        "3fff::/20",
    )
]


def is_public(text: str) -> bool:
    """Whether an address is outside every private, local, shared and special range."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(str(address.ipv4_mapped))
        if address in _V4_IN_V6:
            return is_public(str(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)))
        if address not in _PUBLIC_V6:
            return False
    return address.is_global and not any(address in network for network in _INSIDE)
