"""HTTP to registries and their token servers: addresses checked, redirects followed safely.

Every failure is a `SmokeboxError`. HTTP without TLS is used only where the operator configured it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import TYPE_CHECKING

from smokebox.egress.address_guard import AddressGuard
from smokebox.egress.urls import Url, join_url, parse_url
from smokebox.errors import Forbidden, InvalidOption, RegistryError
from smokebox.foundation.http1.client import (
    ClientRequest,
    ClientResponse,
    RequestBody,
    RequestBodyFailed,
    send,
)
from smokebox.foundation.http1.connection import ConnectionLost
from smokebox.foundation.http1.dial import AddressRefused, Dialer, Endpoint, UnknownHost
from smokebox.foundation.http1.head import Fields, MalformedMessage, write_request
from smokebox.foundation.http1.pool import ConnectionPool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from smokebox.engine.images.registry.access import RegistryAccess, RegistrySettings
    from smokebox.foundation.http1.dial import Resolver

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MAX_REDIRECTS = 5
_CONNECT_SECONDS = 20.0
# A registry may fetch from its own store before it sends the first byte.
SILENCE_SECONDS = 60.0
_HEAD_SECONDS = 30.0
DOCUMENT_SECONDS = 60.0
"""Time limit for a document such as a manifest or a token, from the request to its last byte."""


class RegistryTransport:
    """Connections for one pull or push. `close` it.

    Args:
        silence: Seconds that a server may stay silent.
    """

    def __init__(
        self,
        settings: RegistrySettings,
        access: RegistryAccess,
        *,
        resolver: Resolver | None = None,
        silence: float = SILENCE_SECONDS,
    ) -> None:
        self._settings = settings
        self._check_host = access.check_host
        self._pool = ConnectionPool()
        self._dialer = Dialer(
            is_allowed=AddressGuard.of(access.private).allows,
            timeout=silence,
            connect_timeout=_CONNECT_SECONDS,
            resolver=resolver,
        )

    def close(self) -> None:
        """Close the connections."""
        self._pool.close()

    def is_plain(self, registry: str) -> bool:
        """Return whether the operator configured HTTP without TLS for a registry."""
        return self._settings.is_plain(registry)

    def url(self, authority: str, path: str, *, plain: bool) -> Url:
        """Return the URL of a path at a registry."""
        return parse_url(f"{'http' if plain else 'https'}://{authority}{path}")

    @contextlib.asynccontextmanager
    async def request(
        self,
        method: str,
        url: Url,
        fields: Fields,
        *,
        body: RequestBody = b"",
        length: int | None = None,
    ) -> AsyncIterator[RegistryResponse]:
        """Send a request, and yield the response to it, or to the last of its redirects.

        Only GET and HEAD follow redirects. Another origin gets no Authorization header.

        Args:
            length: Size of a body that is not `bytes`.

        Raises:
            RegistryError: There is no response.
            Forbidden: The caller may not reach the host or its address.
        """
        origin = url.origin
        for _ in range(_MAX_REDIRECTS + 1):
            self._check(url)
            sent = [one for one in fields if url.origin == origin or one[0] != "Authorization"]
            with explained(url):
                response = await self._send(method, url, sent, body, length)
            try:
                found = RegistryResponse(response, url)
                if response.status not in _REDIRECTS or method not in ("GET", "HEAD"):
                    yield found
                    return
                url = found.location()
            finally:
                await response.aclose()
        raise RegistryError(
            f"{origin} redirects more than {_MAX_REDIRECTS} times.",
            hint="Report it to the operator of the registry.",
            reason="failed",
            registry=url.authority,
        )

    def _check(self, url: Url) -> None:
        names = (url.authority, f"{url.host}:{url.port}")
        if url.scheme == "http" and not any(self._settings.is_plain(name) for name in names):
            raise RegistryError(
                f"{url.origin} would be reached without TLS.",
                hint=f"Use https, or let the operator write `plain_http = true` in "
                f'[registries."{url.authority}"] of server.toml.',
                reason="failed",
                registry=url.authority,
            )
        if self._check_host is not None:
            self._check_host(url.host)

    async def _send(
        self, method: str, url: Url, fields: Fields, body: RequestBody, length: int | None
    ) -> ClientResponse:
        head: Fields = [("Host", url.authority), ("User-Agent", "smokebox"), *fields]
        size = len(body) if isinstance(body, bytes) else length
        if size or method in ("POST", "PUT", "PATCH"):
            head.append(("Content-Length", str(size or 0)))
        request = ClientRequest(
            method=method,
            head=write_request(method, url.target, head),
            body=body,
            framing=size or 0,
            head_seconds=_HEAD_SECONDS,
        )
        endpoint = Endpoint(url.host, url.port, url.scheme == "https")
        return await send(self._pool, endpoint, lambda: self._dialer.connect(endpoint), request)


class RegistryResponse:
    """A response as it arrives. `url` is where it comes from, after redirects."""

    def __init__(self, response: ClientResponse, url: Url) -> None:
        self.url = url
        self.status = response.status
        self.length = response.length
        self._response = response

    @property
    def done(self) -> bool:
        """True once the whole body was read."""
        return self._response.done

    def header(self, name: str) -> str:
        """Return the first header of that name, in lower case; empty if there is none."""
        return next((value for key, value in self._response.fields if key.lower() == name), "")

    def headers(self, name: str) -> list[str]:
        """Return all headers of that name, in lower case."""
        return [value for key, value in self._response.fields if key.lower() == name]

    def location(self) -> Url:
        """Return the URL in the Location header. Raises `RegistryError`."""
        try:
            return parse_url(join_url(self.url, self.header("location")))
        except InvalidOption as error:
            raise RegistryError(
                f"{self.url.origin} redirects to an address that is not an http or https URL.",
                hint="Report it to the operator of the registry.",
                reason="failed",
                registry=self.url.authority,
            ) from error

    async def read(self) -> bytes:
        """Read the next piece of the body, which may be empty. Raises `RegistryError`."""
        with explained(self.url):
            return await self._response.read()

    async def document(self, limit: int) -> bytes:
        """Read a whole body of at most `limit` bytes. Raises `RegistryError`."""
        pieces: list[bytes] = []
        size = 0
        if self.length is not None and self.length > limit:
            raise _too_long(self.url, limit)
        while not self.done:
            piece = await self.read()
            size += len(piece)
            if size > limit:
                raise _too_long(self.url, limit)
            pieces.append(piece)
        return b"".join(pieces)


@contextlib.asynccontextmanager
async def document_deadline(authority: str) -> AsyncIterator[None]:
    """Raise `RegistryError` if the block takes longer than a document may."""
    try:
        async with asyncio.timeout(DOCUMENT_SECONDS) as scope:
            yield
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise _network(f"{authority} takes more than {DOCUMENT_SECONDS:g} s", authority) from error


@contextlib.contextmanager
def explained(url: Url) -> Iterator[None]:
    """Turn errors of DNS, sockets, TLS and HTTP into a `SmokeboxError`."""
    name = url.authority
    try:
        yield
    except RequestBodyFailed as failure:
        raise failure.error from None
    except AddressRefused as error:
        raise Forbidden(
            f"{url.origin} does not lead to a public address of another host, so it was not "
            "contacted.",
            hint="The operator of the server can grant it: private in the table [network] of "
            "server.toml, or in the profile of the key.",
            reason="private",
        ) from error
    except UnknownHost as error:
        raise _network(f"the name {url.host} is not known", name, connected=False) from error
    except ssl.SSLCertVerificationError as error:
        reason = (error.verify_message or "it is not trusted").rstrip(".")
        raise RegistryError(
            f"the certificate of {name} cannot be verified: {reason}.",
            hint="If its authority is private, the operator sets SSL_CERT_FILE of the server to a "
            "file with the certificates to trust.",
            reason="failed",
            registry=name,
        ) from error
    except ssl.SSLError as error:
        raise RegistryError(
            f"TLS with {name} failed.",
            hint="If it speaks HTTP only, the operator writes `plain_http = true` in "
            f'[registries."{name}"] of server.toml.',
            reason="network",
            registry=name,
        ) from error
    except TimeoutError as error:
        raise _network(f"{name} does not respond", name) from error
    except (ConnectionLost, MalformedMessage) as error:
        raise _network(f"the connection to {name} broke off", name) from error
    except ConnectionRefusedError as error:
        raise _network(f"{name} refuses connections", name, connected=False) from error
    except OSError as error:
        reason = (error.strerror or "no connection").lower()
        raise _network(f"{name} cannot be reached: {reason}", name) from error


def _network(message: str, registry: str, *, connected: bool = True) -> RegistryError:
    return RegistryError(
        f"{message}.",
        hint="Try again, or check the registry and the network of this machine.",
        reason="network",
        registry=registry,
        connected=connected,
    )


def _too_long(url: Url, limit: int) -> RegistryError:
    return RegistryError(
        f"a document of {url.authority} is longer than {limit} bytes.",
        hint="No image of other tools has one: check the reference and the registry.",
        reason="failed",
        registry=url.authority,
    )
