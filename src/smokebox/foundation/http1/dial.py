"""Sockets to servers: names are resolved once, and every address is checked before it is used."""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from smokebox.foundation.http1.connection import Connection

CONNECT_SECONDS = 10.0

Resolver: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]


class UnknownHost(OSError):
    """A name without an address."""


class AddressRefused(OSError):
    """A name that leads to an address which the caller does not allow."""

    def __init__(self, host: str, address: str) -> None:
        super().__init__(None, f"{host} is at {address}, which is not allowed")
        self.host = host
        self.address = address


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server: `host` is its name, `address` where to find it instead (`127.0.0.1:8080`).

    `named` means that a policy names the address, or that a handler does.
    """

    host: str
    port: int
    tls: bool
    address: str | None = None
    named: bool = False


class Dialer:
    """Opens connections to endpoints.

    Args:
        is_allowed: Tells whether an address and port may be used for an endpoint.
        timeout: Seconds that a server may stay silent; see `Connection`.
        connect_timeout: Seconds for the name, the connection and TLS together.
    """

    def __init__(
        self,
        *,
        is_allowed: Callable[[Endpoint, str, int], bool],
        timeout: float,
        connect_timeout: float = CONNECT_SECONDS,
        resolver: Resolver | None = None,
    ) -> None:
        self._is_allowed = is_allowed
        self._timeout = timeout
        self._connect_timeout = connect_timeout
        self._resolver = resolver or _resolve

    async def connect(self, endpoint: Endpoint) -> Connection:
        """Open a connection, with TLS if the endpoint has it.

        Raises:
            AddressRefused: The name leads to an address that is not allowed.
            UnknownHost: The name has no address.
            TimeoutError: It took too long.
            OSError: No connection, or no TLS (`ssl.SSLError`).
        """
        async with asyncio.timeout(self._connect_timeout):
            sock = await self.dial(endpoint)
            try:
                _, connection = await asyncio.get_running_loop().create_connection(
                    functools.partial(Connection, timeout=self._timeout),
                    sock=sock,
                    ssl=_tls(os.environ.get("SSL_CERT_FILE")) if endpoint.tls else None,
                    server_hostname=endpoint.host if endpoint.tls else None,
                )
            except BaseException:
                sock.close()
                raise
            return connection

    async def dial(self, endpoint: Endpoint) -> socket.socket:
        """Open a bare socket, without TLS and without a deadline. Raises as `connect`."""
        failure: OSError = ConnectionRefusedError(None, "no address")
        for address, port in await self._addresses(endpoint):
            sock = await _dial(address, port)
            if not isinstance(sock, OSError):
                return sock
            failure = sock
        raise failure

    async def _addresses(self, endpoint: Endpoint) -> list[tuple[str, int]]:
        # The address that was checked is the one to connect to: a name that resolves
        # differently the second time is never resolved a second time.
        host, port = endpoint.host, endpoint.port
        if endpoint.address is not None:
            host, named_port = split_address(endpoint.address)
            port = port if named_port is None else named_port
        addresses: Sequence[str] = [host]
        if not is_address(host):
            try:
                addresses = await self._resolver(host, port)
            except (OSError, UnicodeError):
                addresses = []
        if not addresses:
            raise UnknownHost(None, f"there is no host {host}")
        for address in addresses:
            if not self._is_allowed(endpoint, address, port):
                raise AddressRefused(host, address)
        return [(address, port) for address in dict.fromkeys(addresses)]


async def _dial(address: str, port: int) -> socket.socket | OSError:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.get_running_loop().sock_connect(sock, (address, port))
    except OSError as error:
        sock.close()
        return error
    except BaseException:
        sock.close()
        raise
    return sock


async def _resolve(host: str, port: int) -> list[str]:
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in infos]


def split_address(address: str) -> tuple[str, int | None]:
    """Split `name`, `name:1`, `::1` or `[::1]:1` into host and port."""
    host, colon, digits = address.rpartition(":")
    if colon and digits.isdigit() and (host.endswith("]") or ":" not in host):
        return host.strip("[]"), int(digits)
    return address.strip("[]"), None


def is_address(host: str) -> bool:
    """Tell whether a host is an IP address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


@functools.cache
def _tls(ca_file: str | None) -> ssl.SSLContext:
    """Return the context that verifies servers; OpenSSL itself reads the variable.

    Cached for the whole process: reading the system's authorities takes 20 ms.
    """
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context
