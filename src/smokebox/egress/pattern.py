"""Hosts in a policy: names, addresses and globs, and which addresses are public."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field

from smokebox.errors import InvalidOption

_LABEL = re.compile(r"[a-z0-9_*]([a-z0-9_*-]*[a-z0-9_*])?")
_MAX_NAME, _MAX_LABEL = 253, 63
_MAX_PORT = 65535


def normal_host(host: str) -> str:
    """Return a host in the form that is compared: lower case, ASCII, no final dot or brackets."""
    text = host.strip().rstrip(".").lower().removeprefix("[").removesuffix("]")
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        pass
    else:
        # ::ffff:192.0.2.1 is 192.0.2.1, and must not bypass entries for that.
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return str(mapped or address)
    if text.isascii():
        return text
    try:
        return text.encode("idna").decode()
    except UnicodeError:
        return text


@dataclass(frozen=True, slots=True)
class HostPattern:
    """A host or a glob. `*.example.com` matches every name below example.com, and not itself."""

    text: str
    _glob: re.Pattern[str] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def parse(cls, option: str, value: object) -> HostPattern:
        """Parse an entry of an option. Raises `InvalidOption` if no host could match."""
        hint = "Write a name, an address or a glob: 'api.github.com', '*.example.com'."
        if not isinstance(value, str) or not value.strip():
            raise InvalidOption(
                f"{option}: {value!r} is not a host.", hint=hint, option=option, value=value
            )
        text = normal_host(value)
        if problem := _find_problem(text):
            raise InvalidOption(
                f"{option}: {value!r} {problem}.", hint=hint, option=option, value=value
            )
        if "*" not in text:
            return cls(text)
        glob = ".*".join(re.escape(piece) for piece in text.split("*"))
        return cls(text, re.compile(glob, re.DOTALL))

    @property
    def exact(self) -> bool:
        """True if it is a single host, not a glob."""
        return self._glob is None

    @property
    def precision(self) -> int:
        """Number of literal characters; of several globs, the most precise one decides."""
        return len(self.text) - self.text.count("*")

    def matches(self, host: str) -> bool:
        """Return whether it matches a host, which must be a `normal_host`."""
        return self._glob.fullmatch(host) is not None if self._glob else host == self.text


@dataclass(frozen=True, slots=True)
class HostPort:
    """A host and one port of it: `db.example.com:5432`, `[::1]:8080`."""

    host: HostPattern
    port: int

    @classmethod
    def parse(cls, option: str, value: object) -> HostPort:
        """Parse an entry of an option. Raises `InvalidOption`."""
        text = value if isinstance(value, str) else ""
        host, colon, port = text.rpartition(":")
        if not colon or not port.isascii() or not port.isdigit() or int(port) not in _PORTS:
            raise InvalidOption(
                f"{option}: {value!r} is not a host and a port from 1 to {_MAX_PORT}.",
                hint="Write 'db.example.com:5432'.",
                option=option,
                value=value,
            )
        return cls(HostPattern.parse(option, host), int(port))

    @property
    def text(self) -> str:
        """The entry in normal form."""
        name = self.host.text
        return f"[{name}]:{self.port}" if ":" in name else f"{name}:{self.port}"

    def matches(self, host: str, port: int) -> bool:
        """Return whether it matches a host and port."""
        return port == self.port and self.host.matches(host)


_PORTS = range(1, _MAX_PORT + 1)


def _find_problem(text: str) -> str:
    try:
        ipaddress.ip_address(text)
        return ""
    except ValueError:
        pass
    if "://" in text or "/" in text:
        return "is a URL, not a host"
    if len(text) > _MAX_NAME:
        return f"is longer than {_MAX_NAME} characters"
    for label in text.split("."):
        if len(label) > _MAX_LABEL:
            return f"has a label longer than {_MAX_LABEL} characters"
        if not _LABEL.fullmatch(label):
            return "is not a host name"
    return ""


_V4_IN_V6 = ipaddress.IPv6Network("64:ff9b::/96")
# The only range of public unicast addresses so far.
_PUBLIC_V6 = ipaddress.IPv6Network("2000::/3")
_NOT_PUBLIC = [
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",  # carrier-grade NAT; Alibaba's metadata service
        "127.0.0.0/8",
        "168.63.129.16/32",  # Azure's host agent, in a public range
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
        "2002::/16",  # 6to4 embeds an IPv4 address
        "3fff::/20",
    )
]


def is_public(text: str) -> bool:
    """Return True for an address outside every private, local, shared and special range."""
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
    return address.is_global and not any(address in network for network in _NOT_PUBLIC)
