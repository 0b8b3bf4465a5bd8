"""Connections to servers: to addresses that were judged first, and kept for the next request."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import os
import select
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from smokebox.engine.egress.http.wire import Wire
from smokebox.sandbox.addresses import is_public

_CONNECT_SECONDS = 10.0
# Servers close idle connections after five seconds or more (node, uvicorn): one that was
# about to be closed under a request that may not be sent twice would be an error.
_IDLE_SECONDS = 4.0
_MOST_IDLE = 32
# How long a server may take to begin its answer, or pause in it.
_PATIENCE = 900.0

Resolver: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]


class Unanswered(Exception):
    """A request that no server answers; the reason, and the status that says so."""

    def __init__(self, reason: str, status: int = 502, *, rule: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status
        self.rule = rule


@dataclass(frozen=True, slots=True)
class Place:
    """A server: `host` is its name, `address` where to find it instead (`127.0.0.1:8080`).

    Only with `private` may it be an address inside.
    """

    host: str
    port: int
    tls: bool
    address: str | None = None
    private: bool = False


class Pool:
    """The connections of one door."""

    def __init__(self, *, resolver: Resolver | None = None) -> None:
        self._resolver = resolver or _resolve
        self._idle: dict[Place, list[tuple[float, Wire]]] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    def idle(self, place: Place) -> Wire | None:
        """A connection that was used before and still stands."""
        kept = self._idle.get(place)
        while kept:
            since, wire = kept.pop()
            fresh = asyncio.get_running_loop().time() - since < _IDLE_SECONDS
            if fresh and not wire.ended and not wire.waiting and _quiet(wire):
                return wire
            wire.abort()
        return None

    async def connect(self, place: Place) -> Wire:
        """A connection of its own. Raises `Unanswered`."""
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                return await self._connect(place)
        except TimeoutError:
            raise Unanswered(f"{place.host} did not take the connection in time", 504) from None
        except ssl.SSLCertVerificationError as error:
            why = f"the certificate of {place.host} is not trusted: {error.verify_message}"
            raise Unanswered(why) from None
        except ssl.SSLError as error:
            why = (error.reason or "failed").replace("_", " ").lower()
            raise Unanswered(f"TLS with {place.host}: {why}") from None
        except OSError as error:
            why = error.strerror or "the connection failed"
            raise Unanswered(f"{place.host} port {place.port}: {why}") from None

    def keep(self, place: Place, wire: Wire) -> None:
        """Have a connection ready for the next request."""
        if self._closed or wire.ended or wire.waiting:
            wire.abort()
            return
        wire.lost = None
        loop = asyncio.get_running_loop()
        kept = self._idle.setdefault(place, [])
        kept.append((loop.time(), wire))
        if len(kept) > _MOST_IDLE:
            kept.pop(0)[1].close()
        if self._sweep is None:
            self._sweep = loop.call_later(_IDLE_SECONDS, self._close_old)

    def close(self) -> None:
        """Close those that nobody uses, and keep none from here on."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        for kept in self._idle.values():
            for _, wire in kept:
                wire.abort()
        self._idle.clear()

    def _close_old(self) -> None:
        loop = asyncio.get_running_loop()
        oldest = loop.time() - _IDLE_SECONDS
        for place, kept in list(self._idle.items()):
            for since, wire in kept:
                if since <= oldest:
                    wire.close()
            left = [(since, wire) for since, wire in kept if since > oldest]
            if left:
                self._idle[place] = left
            else:
                del self._idle[place]
        more = self._idle and not self._closed
        self._sweep = loop.call_later(_IDLE_SECONDS, self._close_old) if more else None

    async def _connect(self, place: Place) -> Wire:
        loop = asyncio.get_running_loop()
        sock = await self.dial(place)
        try:
            _, wire = await loop.create_connection(
                functools.partial(Wire, patience=_PATIENCE),
                sock=sock,
                ssl=_tls(os.environ.get("SSL_CERT_FILE")) if place.tls else None,
                server_hostname=place.host if place.tls else None,
            )
        except BaseException:
            sock.close()
            raise
        return wire

    async def dial(self, place: Place) -> socket.socket:
        """A bare connection, without TLS. Raises `Unanswered` and OSError."""
        failure: OSError = ConnectionRefusedError(None, "no address")
        for address, port in await self._addresses(place):
            sock = await _dial(address, port)
            if not isinstance(sock, OSError):
                return sock
            failure = sock
        raise failure

    async def _addresses(self, place: Place) -> list[tuple[str, int]]:
        # The address that was judged is the one connected to: a name that answers
        # differently the second time is never asked a second time.
        host, port = place.host, place.port
        if place.address is not None:
            host, port = _split(place.address, port)
        if _is_address(host):
            found: Sequence[str] = [host]
        else:
            try:
                found = await self._resolver(host, port)
            except (OSError, UnicodeError):
                found = []
        if not found:
            raise Unanswered(f"there is no host {host}")
        inside = [address for address in found if not is_public(address)]
        if inside and not place.private:
            raise Unanswered(
                f"{host} is at {inside[0]}, an address inside; hosts={{{place.host!r}: "
                f"{inside[0]!r}}} would open it",
                403,
                rule="private",
            )
        return [(address, port) for address in dict.fromkeys(found)]


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
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def _split(address: str, port: int) -> tuple[str, int]:
    """Host and port of `name`, `name:1`, `::1` or `[::1]:1`."""
    host, colon, digits = address.rpartition(":")
    if colon and digits.isdigit() and (host.endswith("]") or ":" not in host):
        return host.strip("[]"), int(digits)
    return address.strip("[]"), port


def _is_address(host: str) -> bool:
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return False


def _quiet(wire: Wire) -> bool:
    """Whether the server neither closed the connection nor said anything unasked."""
    poll = select.poll()
    poll.register(wire.transport.get_extra_info("socket").fileno(), select.POLLIN)
    return not poll.poll(0)


@functools.cache
def _tls(ca_file: str | None) -> ssl.SSLContext:
    """What servers are verified with; OpenSSL itself looks at the variable.

    Kept for all doors of the process: reading the system's authorities takes 20 ms.
    """
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context
