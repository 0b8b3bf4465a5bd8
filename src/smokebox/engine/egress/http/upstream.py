"""Requests of the egress proxy to servers: addresses checked first, failures explained."""

from __future__ import annotations

import contextlib
import ssl
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.egress.pattern import is_public
from smokebox.foundation.http1.body import BodyReader
from smokebox.foundation.http1.client import (
    ClientRequest,
    ClientResponse,
    RequestBody,
    RequestBodyFailed,
    StaleConnection,
    send,
)
from smokebox.foundation.http1.connection import Connection, ConnectionLost
from smokebox.foundation.http1.dial import (
    AddressRefused,
    Dialer,
    Endpoint,
    Resolver,
    UnknownHost,
)
from smokebox.foundation.http1.head import Fields, Framing, MalformedMessage, write_request
from smokebox.foundation.http1.pool import ConnectionPool

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

# How long a server may take to start its response, or pause in it.
_SILENCE_SECONDS = 900.0
# A small piece can hold a thousand times as much; what is passed on at once stays bounded.
_MAX_DECOMPRESSED = 16 * 1024 * 1024
_GZIP_OR_ZLIB = zlib.MAX_WBITS | 32


class UpstreamFailure(Exception):
    """A request without a response from a server: the reason, and the status to send for it."""

    def __init__(self, reason: str, status: int = 502, *, rule: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status
        self.rule = rule


@dataclass(slots=True, kw_only=True)
class UpstreamRequest:
    """A request to a server. `fields` has neither the Host nor the framing."""

    method: str
    endpoint: Endpoint
    target: str
    host: str
    fields: Fields
    body: RequestBody = b""
    framing: Framing = 0
    upgrade: bool = False

    def encode(self) -> ClientRequest:
        """Return the request as it is sent."""
        expects = isinstance(self.body, BodyReader) and self.body.expects_continue
        fields = [("Host", self.host), *self.fields]
        if self.upgrade:
            fields += [("connection", "Upgrade"), ("upgrade", "websocket")]
        if self.framing == "chunked":
            fields.append(("transfer-encoding", "chunked"))
        elif self.framing or self.method in ("POST", "PUT", "PATCH"):
            fields.append(("content-length", str(self.framing)))
        if expects:
            fields.append(("expect", "100-continue"))
        return ClientRequest(
            method=self.method,
            head=write_request(self.method, self.target, fields),
            body=self.body,
            framing=self.framing,
            upgrade=self.upgrade,
            expects_continue=expects,
        )


class UpstreamPool:
    """The connections of one sandbox's proxy to servers."""

    def __init__(self, *, resolver: Resolver | None = None) -> None:
        self._pool = ConnectionPool()
        self._dialer = Dialer(is_allowed=is_public, timeout=_SILENCE_SECONDS, resolver=resolver)

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        """Send a request, and read the head of the response.

        Raises:
            UpstreamFailure: There is no response.
            Exception: Raised by the source of the request's body.
        """
        endpoint = request.endpoint
        with _explained(endpoint.host):
            response = await send(
                self._pool, endpoint, lambda: self._connect(endpoint), request.encode()
            )
        return UpstreamResponse(response, endpoint.host)

    async def dial(self, endpoint: Endpoint) -> socket.socket:
        """Open a bare socket for a tunnel. Raises `UpstreamFailure` and OSError."""
        with _addresses_explained(endpoint):
            return await self._dialer.dial(endpoint)

    def close(self) -> None:
        """Close idle connections, and keep none from here on."""
        self._pool.close()

    async def _connect(self, endpoint: Endpoint) -> Connection:
        host = endpoint.host
        try:
            with _addresses_explained(endpoint):
                return await self._dialer.connect(endpoint)
        except TimeoutError:
            raise UpstreamFailure(f"{host} did not accept the connection in time", 504) from None
        except ssl.SSLCertVerificationError as error:
            why = f"the certificate of {host} is not trusted: {error.verify_message}"
            raise UpstreamFailure(why) from None
        except ssl.SSLError as error:
            why = (error.reason or "failed").replace("_", " ").lower()
            raise UpstreamFailure(f"TLS with {host}: {why}") from None
        except OSError as error:
            why = error.strerror or "the connection failed"
            raise UpstreamFailure(f"{host} port {endpoint.port}: {why}") from None


class UpstreamResponse:
    """A response of a server as it arrives. Call `release`, whatever happens.

    `length` is the size of the body, or None if it is not known in advance.
    """

    def __init__(self, response: ClientResponse, host: str) -> None:
        self.status = response.status
        self.reason = response.reason
        self.fields = response.fields
        self.length = response.length
        self.connection = response.connection
        self._response = response
        self._host = host
        self._decompressor: _Decompressor | None = None

    @property
    def done(self) -> bool:
        """True once the whole body was read."""
        return self._response.done

    @property
    def ready(self) -> bool:
        """True if reading the next piece does not wait."""
        return self._response.ready

    def decompress(self) -> None:
        """Read the body decompressed. Raises `UpstreamFailure` for an unknown coding."""
        codings = [value for name, value in self.fields if name.lower() == "content-encoding"]
        coding = ",".join(codings).strip().lower()
        if coding in ("", "identity") or self.done:
            return
        self._decompressor = _Decompressor(coding)
        self.length = None
        dropped = ("content-encoding", "content-length")
        self.fields = [field for field in self.fields if field[0].lower() not in dropped]

    async def read(self) -> bytes:
        """Read the next piece of the body, which may be empty. Raises `UpstreamFailure`."""
        try:
            piece = await self._response.read()
        except RequestBodyFailed as failure:
            raise failure.error from None
        except (ConnectionLost, MalformedMessage) as error:
            why = f"the response of {self._host} is cut off or broken: {error}"
            raise UpstreamFailure(why) from None
        except TimeoutError:
            raise UpstreamFailure(f"{self._host} went silent", 504) from None
        return self._decompressor.feed(piece) if self._decompressor is not None else piece

    def release(self) -> None:
        """Return the connection to its pool, or close it."""
        self._response.release()


class _Decompressor:
    """Decompresses gzip and zlib, piece by piece."""

    def __init__(self, coding: str) -> None:
        if coding not in ("gzip", "x-gzip", "deflate"):
            raise UpstreamFailure(
                f"the response is compressed with {coding!r:.40}, which cannot be searched for "
                "secrets; scrub=False would let it through"
            )
        self._inner = zlib.decompressobj(_GZIP_OR_ZLIB)

    def feed(self, piece: bytes) -> bytes:
        """Return what a piece of the body holds. Raises `UpstreamFailure`."""
        parts: list[bytes] = []
        remaining = _MAX_DECOMPRESSED
        try:
            while piece:
                parts.append(self._inner.decompress(piece, remaining))
                remaining -= len(parts[-1])
                if remaining <= 0:
                    raise UpstreamFailure("the response decompresses to more than is allowed")
                piece = self._inner.unused_data
                if self._inner.eof and piece:
                    self._inner = zlib.decompressobj(_GZIP_OR_ZLIB)
        except zlib.error:
            raise UpstreamFailure("the response is not compressed as it says") from None
        return b"".join(parts)


@contextlib.contextmanager
def _explained(host: str) -> Iterator[None]:
    """Turn a missing or broken response into an `UpstreamFailure`."""
    try:
        yield
    except RequestBodyFailed as failure:
        raise failure.error from None
    except StaleConnection as error:
        raise UpstreamFailure(f"{host} closed the connection without a response") from error
    except ConnectionLost as error:
        raise UpstreamFailure(f"the response of {host} is cut off: {error}") from error
    except MalformedMessage as error:
        raise UpstreamFailure(f"{host}: {error.reason}") from None
    except TimeoutError:
        raise UpstreamFailure(f"{host} did not respond in time", 504) from None


@contextlib.contextmanager
def _addresses_explained(endpoint: Endpoint) -> Iterator[None]:
    try:
        yield
    except UnknownHost as error:
        raise UpstreamFailure(error.strerror or "there is no such host") from None
    except AddressRefused as error:
        raise UpstreamFailure(
            f"{error.host} is at {error.address}, an address inside; hosts={{{endpoint.host!r}: "
            f"{error.address!r}}} would open it",
            403,
            rule="private",
        ) from None
