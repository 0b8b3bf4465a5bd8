"""Requests of the virtual sandbox's curl and wget, under the egress policy of the sandbox.

Redirects are followed here; `smokebox.egress.outbound` applies the policy to every hop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import zlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from smokebox.egress.address_guard import AddressGuard
from smokebox.egress.meter import Meter
from smokebox.egress.outbound import (
    OutboundCall,
    OutboundResponse,
    admit,
    count_bytes,
    explain,
    make_endpoint,
)
from smokebox.egress.upstream import (
    CODINGS,
    Decompressor,
    EgressFailure,
    UpstreamFailure,
    UpstreamPool,
    UpstreamRequest,
    UpstreamResponse,
    content_coding,
)
from smokebox.egress.urls import Url, join_url, parse_url
from smokebox.errors import InvalidOption
from smokebox.foundation.http1.client import StaleConnection
from smokebox.foundation.http1.connection import ConnectionLost
from smokebox.foundation.http1.dial import AddressRefused, UnknownHost
from smokebox.foundation.http1.head import MalformedMessage, find_invalid_field, is_token
from smokebox.foundation.ids import new_id
from smokebox.project import Secrets
from smokebox.sandbox.virtual import threads

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence

    from smokebox.egress.policy import Egress
    from smokebox.foundation.http1.dial import Resolver
    from smokebox.foundation.http1.head import Fields

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
# Headers that frame the message or name the server, which this client sets itself.
_REFUSED_HEADERS = frozenset(
    (
        "host",
        "connection",
        "content-length",
        "transfer-encoding",
        "te",
        "trailer",
        "upgrade",
        "expect",
        "keep-alive",
        "proxy-authorization",
        "proxy-connection",
    )
)
_CREDENTIALS = frozenset({"authorization", "cookie"})
# curl's exit codes.
_BAD_URL, _NO_HOST, _NOT_CONNECTED, _WEIRD_REPLY, _PARTIAL, _TIMEOUT = 3, 6, 7, 8, 18, 28
_TLS_FAILED, _BAD_HEADER, _TOO_MANY_REDIRECTS, _EMPTY_REPLY = 35, 43, 47, 52
_SEND_FAILED, _RECEIVE_FAILED, _UNTRUSTED, _BAD_CODING, _TOO_LARGE = 55, 56, 60, 61, 63


class FetchFailed(Exception):
    """Request without a response, with curl's exit code. Never leaves the command."""

    def __init__(self, exit_code: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLimits:
    """Bounds of one request with its redirects, in seconds and bytes."""

    timeout: float = 30.0
    connect_timeout: float = 10.0
    max_redirects: int = 20
    max_request_bytes: int = 10 * 1024 * 1024
    max_response_bytes: int = 10 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRequest:
    """A request of a script. `redirects` is the maximum to follow; None follows none."""

    method: str
    url: str
    headers: Sequence[tuple[str, str]] = ()
    body: bytes | None = None
    keep_method: bool = False
    redirects: int | None = None
    timeout: float | None = None
    connect_timeout: float | None = None
    decode: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Status line and headers of a response, without secrets."""

    version: str
    status: int
    reason: str
    headers: Sequence[tuple[str, str]]

    def get(self, name: str) -> str | None:
        """Return the first header of that name, ignoring case."""
        return next((value for key, value in self.headers if key.lower() == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """A request as the script sent it, without what handlers added, and the response's head."""

    method: str
    url: Url
    headers: Sequence[tuple[str, str]]
    head: Head


@dataclass(slots=True, kw_only=True)
class FetchResponse:
    """The last response, and the hops that led to it."""

    hops: list[Hop] = field(default_factory=list)
    body: AsyncIterator[bytes]

    @property
    def last(self) -> Hop:
        """Return the hop of this response."""
        return self.hops[-1]


@dataclass(frozen=True, slots=True)
class _FetchContext:
    """The `EgressContext` of one `fetch`: a script's event loop ends with it, and so its pool."""

    sandbox_id: str
    policy: Egress
    meter: Meter
    env: Any
    pool: UpstreamPool


class EgressClient:
    """HTTP client of one virtual sandbox, which counts what its policy limits.

    `resolver` replaces the system's name lookup.
    """

    def __init__(
        self,
        policy: Egress,
        *,
        limits: FetchLimits | None = None,
        resolver: Resolver | None = None,
    ) -> None:
        self._policy = policy
        self._limits = limits or FetchLimits()
        self._resolver = resolver or _resolve
        self._meter = Meter(lambda: policy)
        self._env = Secrets()
        self._sandbox_id = new_id("virtual")

    @contextlib.asynccontextmanager
    async def fetch(self, request: FetchRequest) -> AsyncIterator[FetchResponse]:
        """Send a request and follow its redirects; the policy is applied to every hop.

        Leaving the block, also by cancellation, closes the connection at once.

        Raises:
            FetchFailed: The request was refused or got no response.
        """
        limits = self._limits
        self._check(request)
        timeout = min(request.timeout or limits.timeout, limits.timeout)
        connect_timeout = min(
            request.connect_timeout or limits.connect_timeout, limits.connect_timeout
        )
        # The user of this process set the policy.
        guard = AddressGuard(trusts_policy=True)
        pool = UpstreamPool(guard, resolver=self._resolver, connect_timeout=connect_timeout)
        context = _FetchContext(self._sandbox_id, self._policy, self._meter, self._env, pool)
        hops: list[Hop] = []
        call: OutboundCall | None = None
        try:
            async with asyncio.timeout(timeout):
                while True:
                    url = _parse_url(request.url)
                    call = self._admit(context, request, url)
                    response = await _send(call, request, url)
                    hops.append(_make_hop(request, url, response))
                    following = _redirect(request, hops[-1])
                    if following is None:
                        break
                    if len(hops) > min(request.redirects or 0, limits.max_redirects):
                        text = f"Maximum ({len(hops) - 1}) redirects followed"
                        raise FetchFailed(_TOO_MANY_REDIRECTS, text)
                    call.release()
                    request, call = following, None
                body = self._read(response, url, decode=request.decode)
                async with contextlib.aclosing(body):
                    yield FetchResponse(hops=hops, body=body)
        except TimeoutError:
            text = f"Operation timed out after {timeout:g} seconds"
            raise FetchFailed(_TIMEOUT, text) from None
        finally:
            if call is not None:
                call.release()
            pool.close()

    def _check(self, request: FetchRequest) -> None:
        size, limit = len(request.body or b""), self._limits.max_request_bytes
        if size > limit:
            text = f"the request body has {size} bytes; the limit is {limit}"
            raise FetchFailed(_SEND_FAILED, text)
        for name, _ in request.headers:
            if name.lower() in _REFUSED_HEADERS:
                raise FetchFailed(_BAD_HEADER, f"the header {name} cannot be set in this sandbox")
        if problem := find_invalid_field(request.headers):
            raise FetchFailed(_BAD_HEADER, problem)
        if not is_token(request.method):
            raise FetchFailed(_BAD_HEADER, f"the method {request.method!r:.40} cannot be sent")

    def _admit(self, context: _FetchContext, request: FetchRequest, url: Url) -> OutboundCall:
        """Check a request against the policy."""
        verdict = self._policy.decide(url.host, url.port, sni=url.scheme == "https")
        body = request.body or b""
        try:
            admit(verdict, self._meter)
        except EgressFailure as error:
            raise FetchFailed(_NOT_CONNECTED, error.reason) from None
        self._count(len(body))
        outgoing = UpstreamRequest(
            method=request.method,
            endpoint=make_endpoint(url.server, verdict.address),
            target=url.target,
            host=url.authority,
            fields=list(request.headers),
            body=body,
            framing=len(body),
            close=True,
        )
        return OutboundCall(context, outgoing, url.server, verdict)

    async def _read(
        self, response: OutboundResponse, url: Url, *, decode: bool
    ) -> AsyncGenerator[bytes, None]:
        """Yield the body as the script may see it."""
        size, limit = 0, self._limits.max_response_bytes
        decompressor = _decompressor(response.fields) if decode else None
        try:
            async with contextlib.aclosing(_pieces(response)) as pieces:
                async for piece, last in pieces:
                    self._count(len(piece))
                    data = decompressor.feed(piece) if decompressor is not None else piece
                    size += len(data)
                    if size > limit:
                        text = f"the response exceeds the limit of {limit} bytes"
                        raise FetchFailed(_TOO_LARGE, text)
                    if clean := response.scrub(data, last):
                        yield clean
        except EgressFailure as error:
            raise _curl_failure(error, url, in_body=True) from None

    def _count(self, size: int) -> None:
        try:
            count_bytes(size, self._meter)
        except EgressFailure as error:
            raise FetchFailed(_TOO_LARGE, error.reason) from None


def remote_name(url: str) -> str:
    """Return the last segment of a URL's path as a file name; empty if it cannot be one."""
    path = url.partition("://")[2].partition("?")[0].partition("#")[0]
    name = unquote(path.rpartition("/")[2]) if "/" in path else ""
    return "" if "/" in name or name in (".", "..") else name


async def _resolve(host: str, port: int) -> list[str]:
    # Not on a thread of the event loop, which would wait for a hanging lookup when it ends.
    found = await threads.run(lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    return [str(address[0]) for *_, address in found]


async def _send(call: OutboundCall, request: FetchRequest, url: Url) -> OutboundResponse:
    try:
        return await call.send()
    except UpstreamFailure as error:
        raise _curl_failure(error, url, in_body=False) from None
    except EgressFailure as error:
        accept = next((value for name, value in request.headers if name.lower() == "accept"), "")
        return explain(error, call.rule, accept=accept)


def _make_hop(request: FetchRequest, url: Url, response: OutboundResponse) -> Hop:
    headers = [("Host", url.authority), *request.headers]
    if request.body is not None:
        headers.append(("Content-Length", str(len(request.body))))
    version, fields, reason = "1.1", response.scrub_fields(), response.reason
    if response.upstream is not None:
        # Show the head as the server sent it.
        first, *lines = response.upstream.raw_head.decode("latin-1").strip("\r\n").split("\r\n")
        version = first[5:8]
        if response.scrubber is None:
            parted = (line.partition(":") for line in lines)
            fields = [(name, value.strip(" \t")) for name, _, value in parted]
    if response.scrubber is not None:
        reason = response.scrubber.text(reason)
    head = Head(version=version, status=response.status, reason=reason, headers=fields)
    return Hop(method=request.method, url=url, headers=headers, head=head)


def _redirect(request: FetchRequest, hop: Hop) -> FetchRequest | None:
    """Return the request that a redirect leads to, if redirects are followed."""
    location = hop.head.get("location")
    if request.redirects is None or hop.head.status not in _REDIRECTS or location is None:
        return None
    url = join_url(hop.url, location)
    headers = [pair for pair in request.headers if pair[0].lower() != "referer"]
    if not url.startswith(f"{hop.url.origin}/"):
        headers = [pair for pair in headers if pair[0].lower() not in _CREDENTIALS]
    following = replace(request, url=url, headers=headers)
    status = hop.head.status
    to_get = status == 303 or (status in (301, 302) and request.method == "POST")
    if not to_get or request.keep_method or request.method == "HEAD":
        return following
    bodiless = [pair for pair in headers if not pair[0].lower().startswith("content-")]
    return replace(following, method="GET", body=None, headers=bodiless)


async def _pieces(response: OutboundResponse) -> AsyncGenerator[tuple[bytes, bool], None]:
    """Yield the pieces of a body, and whether each is the last."""
    body = response.body
    if isinstance(body, bytes):
        yield body, True
    elif isinstance(body, UpstreamResponse):
        while not body.done:
            piece = await body.read()
            yield piece, body.done
    else:
        async for piece in body:
            yield piece, False
        yield b"", True


def _decompressor(fields: Fields) -> Decompressor | None:
    coding = content_coding(fields)
    if coding and coding not in CODINGS:
        raise FetchFailed(_BAD_CODING, f"Unrecognized content encoding type: {coding}")
    return Decompressor() if coding else None


def _parse_url(url: str) -> Url:
    try:
        return parse_url(url)
    except InvalidOption as error:
        raise FetchFailed(_BAD_URL, f"{error.message} ({url!r})") from None


def _curl_failure(error: EgressFailure, url: Url, *, in_body: bool) -> FetchFailed:
    """Return curl's exit code and message for a failure."""
    place = f"{url.host} port {url.port}"
    match error.__cause__:
        case UnknownHost():
            return FetchFailed(_NO_HOST, f"Could not resolve host: {url.host}")
        case AddressRefused():
            return FetchFailed(_NOT_CONNECTED, error.reason)
        case ssl.SSLCertVerificationError() as cause:
            return FetchFailed(_UNTRUSTED, f"SSL certificate problem: {cause.verify_message}")
        case ssl.SSLError() as cause:
            return FetchFailed(_TLS_FAILED, f"TLS connect error with {place}: {cause.reason}")
        case TimeoutError():
            return FetchFailed(_TIMEOUT, f"Failed to connect to {place}: timed out")
        case StaleConnection():
            return FetchFailed(_EMPTY_REPLY, "Empty reply from server")
        case ConnectionLost() if in_body:
            text = "transfer closed with outstanding read data remaining"
            return FetchFailed(_PARTIAL, text)
        case MalformedMessage() if not in_body:
            return FetchFailed(_WEIRD_REPLY, "Weird server reply")
        case zlib.error():
            return FetchFailed(_BAD_CODING, error.reason)
        case ConnectionLost() | MalformedMessage():
            return FetchFailed(_RECEIVE_FAILED, f"Failure with {place}: {error.__cause__}")
        case OSError() as cause:
            reason = (cause.strerror or "no connection").lower()
            return FetchFailed(_NOT_CONNECTED, f"Failed to connect to {place}: {reason}")
    return FetchFailed(_RECEIVE_FAILED, error.reason)
