"""Names of hosts in a policy: one by its name or address, or many by a glob."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field

from smokebox.errors import InvalidOption

_LABEL = re.compile(r"[a-z0-9_*]([a-z0-9_*-]*[a-z0-9_*])?")
_LONGEST_NAME, _LONGEST_LABEL = 253, 63
_MOST_PORT = 65535


def normal_host(host: str) -> str:
    """A host as names are compared: in lower case, ASCII, without a final dot or brackets."""
    text = host.strip().rstrip(".").lower().removeprefix("[").removesuffix("]")
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        pass
    else:
        # ::ffff:192.0.2.1 is the host 192.0.2.1, and must not get past what names that.
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
    """`example.com` is that name alone, `*.example.com` every name below it and not itself."""

    text: str
    _glob: re.Pattern[str] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def parse(cls, option: str, given: object) -> HostPattern:
        """The pattern that was written. Raises `InvalidOption` where no host could match."""
        hint = "Write a name, an address or a glob: 'api.github.com', '*.example.com'."
        if not isinstance(given, str) or not given.strip():
            raise InvalidOption(
                f"{option}: {given!r} is no host.", hint=hint, option=option, value=given
            )
        text = normal_host(given)
        if problem := _problem(text):
            raise InvalidOption(
                f"{option}: {given!r} {problem}.", hint=hint, option=option, value=given
            )
        if "*" not in text:
            return cls(text)
        glob = ".*".join(re.escape(piece) for piece in text.split("*"))
        return cls(text, re.compile(glob, re.DOTALL))

    @property
    def exact(self) -> bool:
        """Whether it names one host."""
        return self._glob is None

    @property
    def precision(self) -> int:
        """How much of a name it fixes; of two globs the more precise speaks."""
        return len(self.text) - self.text.count("*")

    def matches(self, host: str) -> bool:
        """Whether it means that host, which is `normal_host` already."""
        return self._glob.fullmatch(host) is not None if self._glob else host == self.text


@dataclass(frozen=True, slots=True)
class HostPort:
    """A host and one port of it: `db.example.com:5432`, `[::1]:8080`."""

    host: HostPattern
    port: int

    @classmethod
    def parse(cls, option: str, given: object) -> HostPort:
        """What was written. Raises `InvalidOption`."""
        text = given if isinstance(given, str) else ""
        host, colon, port = text.rpartition(":")
        if not colon or not port.isascii() or not port.isdigit() or int(port) not in _PORTS:
            raise InvalidOption(
                f"{option}: {given!r} is not a host and a port from 1 to {_MOST_PORT}.",
                hint="Write 'db.example.com:5432'.",
                option=option,
                value=given,
            )
        return cls(HostPattern.parse(option, host), int(port))

    @property
    def text(self) -> str:
        """As it is written."""
        name = self.host.text
        return f"[{name}]:{self.port}" if ":" in name else f"{name}:{self.port}"

    def matches(self, host: str, port: int) -> bool:
        """Whether it means that port of that host."""
        return port == self.port and self.host.matches(host)


_PORTS = range(1, _MOST_PORT + 1)


def _problem(text: str) -> str:
    try:
        ipaddress.ip_address(text)
        return ""
    except ValueError:
        pass
    if "://" in text or "/" in text:
        return "is a URL, and a host is wanted"
    if len(text) > _LONGEST_NAME:
        return f"is longer than the {_LONGEST_NAME} characters of a name"
    for label in text.split("."):
        if len(label) > _LONGEST_LABEL:
            return f"has a part longer than {_LONGEST_LABEL} characters"
        if not _LABEL.fullmatch(label):
            return "is not the name of a host"
    return ""


_V4_IN_V6 = ipaddress.IPv6Network("64:ff9b::/96")
# All that is assigned so far.
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
    return address.is_global and not any(address in network for network in _INSIDE)
