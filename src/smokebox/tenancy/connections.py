"""Limits of open connections, and the addresses of clients behind a trusted proxy.

Connections of the unix socket are not limited: only its user can open them.
"""

from __future__ import annotations

import contextlib
import ipaddress
import resource
from collections import Counter
from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec

from smokebox.errors import InvalidOption, LimitReached
from smokebox.foundation.http1.connection import Connection
from smokebox.foundation.http1.head import write_response
from smokebox.wire.failure import FailureResponse, failure_of, status_of

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Iterator

    IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network


PER_ADDRESS = 256
"""Open connections of each address by default."""

HEAD_SECONDS = 10.0
"""Seconds that the head of a request may take by default."""


def _serve_option(name: str) -> str:
    option = {"trusted_proxies": "trusted-proxy"}.get(name, name.replace("_", "-"))
    return f"`smokebox serve --{option}`"


class ConnectionLimits:
    """The open TCP connections of a server by address, and the requests that a proxy forwards.

    A trusted proxy has many clients, so its connections are not limited. The limit applies to the
    concurrent requests of each client instead, whose address the proxy tells.

    Args:
        per_address: Open connections of each address.
        total: Open connections in all; by default half of the files that this process may open.
        trusted_proxies: Addresses and networks of reverse proxies.
        setting: Returns the place of a setting by its name, for errors.
    """

    def __init__(
        self,
        *,
        per_address: int = PER_ADDRESS,
        total: int | None = None,
        trusted_proxies: Iterable[str] = (),
        setting: Callable[[str], str] = _serve_option,
    ) -> None:
        self._per_address = per_address
        # Half of the files that this process may open: other work needs the others.
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._total = total or files // 2
        self._proxies = [_network(text) for text in trusted_proxies]
        self._setting = setting
        self._open: dict[asyncio.BaseTransport, str] = {}
        self._counts: Counter[str] = Counter()

    def add(self, transport: asyncio.BaseTransport) -> LimitReached | None:
        """Count a connection until `remove`, or return why it is refused. Safe to repeat."""
        peer = transport.get_extra_info("peername")
        if transport in self._open or not isinstance(peer, tuple):
            return None
        if len(self._open) >= self._total:
            return LimitReached(
                f"this server already has {self._total} open connections, which is its limit.",
                hint=f"Retry in a moment; {self._setting('max_connections')} sets the limit.",
                limit=self._total,
                retry_after=1.0,
            )
        address = str(peer[0])
        if not self.is_trusted(address):
            try:
                self._count(address)
            except LimitReached as error:
                return error
            self._open[transport] = address
        else:
            self._open[transport] = ""
        return None

    def remove(self, transport: asyncio.BaseTransport) -> None:
        """Forget a connection that was closed. Safe to repeat."""
        self._release(self._open.pop(transport, ""))

    def is_trusted(self, address: str) -> bool:
        """Tell whether an address is that of a trusted proxy."""
        if not self._proxies:
            return False
        try:
            ip = ipaddress.ip_address(address)
        except ValueError:
            return False
        return any(ip in network for network in self._proxies)

    def client_of(self, peer: str, forwarded: str) -> str:
        """Return the address of the client behind a trusted proxy.

        Args:
            peer: Address of the proxy.
            forwarded: X-Forwarded-For. Clients can send one too, so the last address in it that
                is not a trusted proxy's counts.
        """
        for part in reversed(forwarded.split(",")):
            address = _address(part.strip())
            if address is None:
                break
            if not self.is_trusted(address):
                return address
        return peer

    @contextlib.contextmanager
    def request(self, address: str) -> Iterator[None]:
        """Count a request of a client behind a trusted proxy. Raises `LimitReached`."""
        self._count(address)
        try:
            yield
        finally:
            self._release(address)

    def _count(self, address: str) -> None:
        if self._counts[address] >= self._per_address:
            raise LimitReached(
                f"the address {address} already has {self._per_address} open connections, which "
                "is its limit.",
                hint="Use connections again for further requests. The operator sets the limit with "
                f"{self._setting('address_connections')}, and names a proxy in front of the server "
                f"with {self._setting('trusted_proxies')}.",
                limit=self._per_address,
                retry_after=1.0,
            )
        self._counts[address] += 1

    def _release(self, address: str) -> None:
        if address:
            self._counts[address] -= 1
            if not self._counts[address]:
                del self._counts[address]


class CountedConnection(Connection):
    """A connection of a client that counts towards the limits until it is closed."""

    def __init__(self, limits: ConnectionLimits) -> None:
        super().__init__(timeout=None)
        self._limits = limits

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._limits.remove(self.transport)


def refusal(error: LimitReached) -> bytes:
    """Return the response to a connection that is refused before its request was read."""
    status = status_of(type(error))
    body = msgspec.json.encode(FailureResponse(failure_of(error)))
    fields = [
        ("content-type", "application/json"),
        ("content-length", str(len(body))),
        ("retry-after", "1"),
        ("connection", "close"),
    ]
    return write_response(status, HTTPStatus(status).phrase, fields) + body


def _address(text: str) -> str | None:
    """Return the address in an item of X-Forwarded-For, which may have a port."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None


def _network(text: str) -> IpNetwork:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise InvalidOption(
            f"{text!r} is not the address of a proxy.",
            hint="Pass an IP address or a network, such as 10.0.0.7 or 10.0.0.0/24.",
            option="trusted_proxies",
            value=text,
        ) from None
