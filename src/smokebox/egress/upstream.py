"""Requests to servers on behalf of a sandbox: addresses checked first, failures explained."""

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
    CONNECT_SECONDS,
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

    from smokebox.egress.address_guard import AddressGuard

# Maximum time until a server starts its response, and of a pause in it.
_SILENCE_SECONDS = 900.0
# Limit for one piece of a body: a small piece can decompress to a thousand times its size.
_MAX_DECOMPRESSED = 16 * 1024 * 1024
CODINGS = ("gzip", "x-gzip", "deflate")
_GZIP_OR_ZLIB = zlib.MAX_WBITS | 32


class EgressFailure(Exception):
    """A request that was refused or failed: the reason, and the status of the response.

    `rule` is the part of the policy that refused it, if any.
    """

    def __init__(self, reason: str, status: int = 502, *, rule: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status
        self.rule = rule


class UpstreamFailure(EgressFailure):
    """No response from a server, or a broken one. `__cause__` is the error behind it."""


@dataclass(slots=True, kw_only=True)
class UpstreamRequest:
    """A request to a server. `fields` has neither the Host nor the framing.

    `close` asks the server to close the connection after its response.
    """

    method: str
    endpoint: Endpoint
    target: str
    host: str
    fields: Fields
    body: RequestBody = b""
    framing: Framing = 0
    upgrade: bool = False
    close: bool = False

    def encode(self) -> ClientRequest:
        """Return the request as it is sent."""
        expects = isinstance(self.body, BodyReader) and self.body.expects_continue
        fields = [("Host", self.host), *self.fields]
        if self.upgrade:
            fields += [("connection", "Upgrade"), ("upgrade", "websocket")]
        elif self.close:
            fields.append(("connection", "close"))
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
    """The connections of one sandbox to servers, on one event loop.

    `guard` decides about every address, after its name was looked up.
    """

    def __init__(
        self,
        guard: AddressGuard,
        *,
        resolver: Resolver | None = None,
        connect_timeout: float = CONNECT_SECONDS,
    ) -> None:
        self._guard = guard
        self._pool = ConnectionPool()
        self._dialer = Dialer(
            is_allowed=guard.allows,
            timeout=_SILENCE_SECONDS,
            connect_timeout=connect_timeout,
            resolver=resolver,
        )

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
        with self._addresses_explained(endpoint):
            return await self._dialer.dial(endpoint)

    def close(self) -> None:
        """Close idle connections, and keep none from here on."""
        self._pool.close()

    async def _connect(self, endpoint: Endpoint) -> Connection:
        host = endpoint.host
        try:
            with self._addresses_explained(endpoint):
                return await self._dialer.connect(endpoint)
        except TimeoutError as error:
            reason = f"{host} did not accept the connection in time"
            raise UpstreamFailure(reason, 504) from error
        except ssl.SSLCertVerificationError as error:
            reason = f"the certificate of {host} is not trusted: {error.verify_message}"
            raise UpstreamFailure(reason) from error
        except ssl.SSLError as error:
            reason = (error.reason or "failed").replace("_", " ").lower()
            raise UpstreamFailure(f"TLS with {host}: {reason}") from error
        except OSError as error:
            reason = error.strerror or "the connection failed"
            raise UpstreamFailure(f"{host} port {endpoint.port}: {reason}") from error

    @contextlib.contextmanager
    def _addresses_explained(self, endpoint: Endpoint) -> Iterator[None]:
        try:
            yield
        except UnknownHost as error:
            raise UpstreamFailure(error.strerror or "there is no such host") from error
        except AddressRefused as error:
            kind = "an address of this host" if is_public(error.address) else "a private address"
            fix = (
                f"hosts={{{endpoint.host!r}: {error.address!r}}} would open it"
                if self._guard.trusts_policy
                else "the operator of the server can grant it: private in [network], or in the "
                "profile of the key, in server.toml"
            )
            reason = f"{error.host} resolves to {error.address}, {kind}; {fix}"
            raise UpstreamFailure(reason, 403, rule="private") from error


class UpstreamResponse:
    """A response of a server as it arrives. Call `release`, whatever happens.

    `length` is the size of the body, or None if it is not known in advance. `raw_head` has the
    bytes of the head as they arrived.
    """

    def __init__(self, response: ClientResponse, host: str) -> None:
        self.status = response.status
        self.reason = response.reason
        self.fields = response.fields
        self.length = response.length
        self.raw_head = response.raw_head
        self.connection = response.connection
        self._response = response
        self._host = host
        self._decompressor: Decompressor | None = None

    @property
    def done(self) -> bool:
        """True once the whole body was read."""
        return self._response.done

    @property
    def ready(self) -> bool:
        """True if reading the next piece does not wait."""
        return self._response.ready

    def decompress(self) -> bool:
        """Decompress the body as it is read; False if its coding is unknown."""
        coding = content_coding(self.fields)
        if not coding or self.done:
            return True
        if coding not in CODINGS:
            return False
        self._decompressor = Decompressor()
        self.length = None
        dropped = ("content-encoding", "content-length")
        self.fields = [field for field in self.fields if field[0].lower() not in dropped]
        return True

    async def read(self) -> bytes:
        """Read the next piece of the body, which may be empty. Raises `UpstreamFailure`."""
        try:
            piece = await self._response.read()
        except RequestBodyFailed as failure:
            raise failure.error from None
        except (ConnectionLost, MalformedMessage) as error:
            reason = f"the response of {self._host} is cut off or broken: {error}"
            raise UpstreamFailure(reason) from error
        except TimeoutError as error:
            raise UpstreamFailure(f"{self._host} stopped responding", 504) from error
        return self._decompressor.feed(piece) if self._decompressor is not None else piece

    def release(self) -> None:
        """Return the connection to its pool, or close it."""
        self._response.release()


def content_coding(fields: Fields) -> str:
    """Return the Content-Encoding in lower case; empty for none and for `identity`."""
    codings = [value for name, value in fields if name.lower() == "content-encoding"]
    coding = ",".join(codings).strip().lower()
    return "" if coding == "identity" else coding


class Decompressor:
    """Decompresses gzip and zlib, piece by piece."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(_GZIP_OR_ZLIB)

    def feed(self, piece: bytes) -> bytes:
        """Return what a piece of the body decompresses to. Raises `UpstreamFailure`."""
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
        except zlib.error as error:
            raise UpstreamFailure("the response does not match its Content-Encoding") from error
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
        raise UpstreamFailure(f"{host}: {error.reason}") from error
    except TimeoutError as error:
        raise UpstreamFailure(f"{host} did not respond in time", 504) from error
