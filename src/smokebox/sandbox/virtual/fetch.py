"""Requests of the virtual sandbox's curl and wget, under the egress policy of the sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import zlib
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import TYPE_CHECKING

from multidict import CIMultiDict

from smokebox.egress import message
from smokebox.egress.handler import Refused, find_handler, run_handler
from smokebox.egress.meter import Meter
from smokebox.egress.pattern import HostPort
from smokebox.egress.scrub import UNREADABLE, Scrubber, added_secrets
from smokebox.egress.urls import Url, join_url, parse_url
from smokebox.errors import InvalidOption
from smokebox.foundation.ids import new_id
from smokebox.project import Secrets
from smokebox.sandbox.virtual.connection import FetchConnection, FetchFailed, Head, blocking

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterable,
        AsyncIterator,
        Iterator,
        Mapping,
        Sequence,
    )

    from smokebox.egress.policy import Egress, Verdict
    from smokebox.sandbox.virtual.connection import Resolver

HANDLER_SECONDS = 30.0

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
_FRAMING = frozenset({"connection", "content-length", "host", "transfer-encoding"})
# curl's exit codes.
_BAD_URL, _NOT_CONNECTED, _TOO_LARGE = 3, 7, 63

_log = logging.getLogger("smokebox.egress")


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
        self.policy = policy
        self.limits = limits or FetchLimits()
        self.resolver = resolver
        self.meter = Meter(lambda: policy)
        self.env = Secrets()
        self.sandbox_id = new_id("virtual")

    @contextlib.asynccontextmanager
    async def fetch(self, request: FetchRequest) -> AsyncIterator[FetchResponse]:
        """Send a request and follow its redirects; the policy is applied to every hop.

        Leaving the block, also by cancellation, closes the connection at once.

        Raises:
            FetchFailed: The request was refused or got no response.
        """
        limits = self.limits
        self._check(request)
        timeout = min(request.timeout or limits.timeout, limits.timeout)
        hops: list[Hop] = []
        attempt: _Attempt | None = None
        try:
            async with asyncio.timeout(timeout):
                while True:
                    attempt = _Attempt(self, request)
                    hop, response = await attempt.send()
                    hops.append(_scrubbed(hop, attempt.scrubber))
                    following = _redirected(request, hop)
                    if following is None:
                        break
                    if len(hops) > min(request.redirects or 0, limits.max_redirects):
                        raise FetchFailed(47, f"Maximum ({len(hops) - 1}) redirects followed")
                    request = following
                    attempt.abort()
                decode = request.decode or attempt.secret
                chunks = _decoded(self._counted(response.body), response.head, decode)
                body = self._shown(chunks, attempt.scrubber)
                async with contextlib.aclosing(body):
                    yield FetchResponse(hops=hops, body=body)
        except FetchFailed as error:
            text = str(error) if attempt is None else attempt.scrubber.text(str(error))
            raise FetchFailed(error.exit_code, text) from None
        except TimeoutError:
            raise FetchFailed(28, f"Operation timed out after {timeout:g} seconds") from None
        finally:
            if attempt is not None:
                attempt.abort()

    def count(self, size: int) -> None:
        """Count bytes against the policy. Raises `FetchFailed` if they exceed it."""
        if reason := self.meter.count(size):
            raise FetchFailed(_TOO_LARGE, reason)

    def _check(self, request: FetchRequest) -> None:
        size, limit = len(request.body or b""), self.limits.max_request_bytes
        if size > limit:
            raise FetchFailed(55, f"the request body has {size} bytes; the limit is {limit}")
        for name, _ in request.headers:
            if name.lower() in _REFUSED_HEADERS:
                raise FetchFailed(43, f"the header {name} cannot be set in this sandbox")

    async def _counted(self, body: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        async for chunk in body:
            self.count(len(chunk))
            yield chunk

    async def _shown(
        self, chunks: AsyncIterable[bytes], scrubber: Scrubber
    ) -> AsyncGenerator[bytes, None]:
        """Return a body as the script may see it."""
        size, limit = 0, self.limits.max_response_bytes
        async for chunk in chunks:
            size += len(chunk)
            if size > limit:
                text = f"the response exceeds the limit of {limit} bytes"
                raise FetchFailed(_TOO_LARGE, text)
            if shown := scrubber.feed(chunk):
                yield shown
        if rest := scrubber.finish():
            yield rest


@dataclass(frozen=True, slots=True)
class _Answer:
    head: Head
    body: AsyncIterable[bytes]


class _Attempt:
    """One hop; also the `HandlerContext` of its handler."""

    def __init__(self, client: EgressClient, request: FetchRequest) -> None:
        self.sandbox_id = client.sandbox_id
        self.rule = ""
        self._client = client
        self._request = request
        self._url = _parse(request.url)
        self._secrets: set[str] = set()
        self._connections: list[FetchConnection] = []

    @property
    def secret(self) -> bool:
        """Return whether a handler added something that the script must not see."""
        return bool(self._secrets)

    @property
    def scrubber(self) -> Scrubber:
        """Return a scrubber that removes from the response what the handler added."""
        return Scrubber(self._secrets)

    async def send(self) -> tuple[Hop, _Answer]:
        """Check the request, pass it to its handler, send it, and read the response's head."""
        request, url = self._request, self._url
        verdict = self._judge()
        visible = [("Host", url.authority), *request.headers]
        if request.body is not None:
            visible.append(("Content-Length", str(len(request.body))))
        outgoing = message.Request(
            request.method, str(url), CIMultiDict(request.headers), request.body or b""
        )
        if verdict.handler is None:
            answer = await self._forward(outgoing, None)
        else:
            answer = await self._handle(verdict, outgoing)
        return Hop(method=request.method, url=url, headers=visible, head=answer.head), answer

    async def forward(self, request: message.Request, *, to: str | None = None) -> message.Response:
        """Send the request and return the response with a streaming body
        (`HandlerContext.forward`).
        """
        answer = await self._forward(request, to)
        headers = CIMultiDict(answer.head.headers)
        return message.Response(message.MessageBody(answer.body), answer.head.status, headers)

    def abort(self) -> None:
        """Close every connection."""
        for connection in self._connections:
            connection.abort()

    def _judge(self) -> Verdict:
        policy, url = self._client.policy, self._url
        verdict = policy.decide(url.host, url.port, sni=url.scheme == "https")
        if verdict.action == "refuse":
            raise FetchFailed(_NOT_CONNECTED, verdict.reason)
        if reason := self._client.meter.admit():
            raise FetchFailed(_NOT_CONNECTED, reason)
        self.rule = verdict.rule
        return verdict

    async def _handle(self, verdict: Verdict, request: message.Request) -> _Answer:
        assert verdict.handler is not None
        try:
            async with asyncio.timeout(HANDLER_SECONDS):
                handler = find_handler(verdict.handler)
                result = await run_handler(handler, request, self._client.env, self)
            if isinstance(result, message.Request):
                return await self._forward(result, None)
            return _Answer(_head(result.status, result.headers), result.body)
        except FetchFailed:
            raise
        except Refused as error:
            return _refusal(403, str(error) or "the handler refused")
        except TimeoutError:
            return _refusal(504, f"the handler did not decide within {HANDLER_SECONDS:.0f} s")
        except Exception as error:
            # Its message may contain the data it was about to send: show only its type.
            _log.warning("a handler failed", exc_info=error)
            return _refusal(502, f"the handler failed with {type(error).__name__}")

    async def _forward(self, request: message.Request, to: str | None) -> _Answer:
        url = _parse(request.url)
        place, private = self._place(url)
        if to is not None:
            base = _parse(to)
            path = base.path.rstrip("/") + url.path
            url = Url(base.scheme, base.host, base.port, path, url.query)
            place, private = None, True
        body = await request.read()
        headers = self._headers(request)
        if body or self._request.body is not None:
            headers.append(("Content-Length", str(len(body))))
        self._client.count(len(body))
        connection = FetchConnection(
            url, private=private, place=place, resolver=self._client.resolver
        )
        self._connections.append(connection)
        limit = self._client.limits.connect_timeout
        timeout = min(self._request.connect_timeout or limit, limit)
        fields = [("Host", url.authority), *headers, ("FetchConnection", "close")]
        try:
            head = await blocking(
                lambda: connection.send(request.method, fields, body or None, timeout)
            )
        except ValueError:
            raise FetchFailed(43, "a header holds characters that cannot be sent") from None
        return _Answer(head, _chunks(connection))

    def _place(self, url: Url) -> tuple[tuple[str, int] | None, bool]:
        """Return the address that the policy maps a host to, and whether it may be private."""
        address = self._client.policy.decide(url.host, url.port).address
        if address is None:
            return None, False
        if address.count(":") == 1 or "]:" in address:
            entry = HostPort.parse("hosts", address)
            return (entry.host.text, entry.port), True
        return (address.strip("[]"), url.port), True

    def _headers(self, request: message.Request) -> list[tuple[str, str]]:
        pairs = [(str(k), v) for k, v in request.headers.items() if k.lower() not in _FRAMING]
        if self._client.policy.scrub:
            self._secrets |= added_secrets(
                pairs, request.url, sent_fields=self._request.headers, sent_url=str(self._url)
            )
        if self._secrets:
            pairs = [pair for pair in pairs if pair[0].lower() not in UNREADABLE]
        return pairs


def _redirected(request: FetchRequest, hop: Hop) -> FetchRequest | None:
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


async def _chunks(connection: FetchConnection) -> AsyncIterator[bytes]:
    while data := await blocking(connection.read):
        yield data


async def _decoded(chunks: AsyncIterable[bytes], head: Head, decode: bool) -> AsyncIterator[bytes]:
    encoding = (head.get("content-encoding") or "identity").lower()
    if not decode or encoding == "identity":
        async for chunk in chunks:
            yield chunk
        return
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise FetchFailed(61, f"Unrecognized content encoding type: {encoding}")
    inflate = zlib.decompressobj(zlib.MAX_WBITS | 32)
    async for chunk in chunks:
        for piece in _inflated(inflate, chunk):
            yield piece


def _inflated(inflate: zlib._Decompress, data: bytes) -> Iterator[bytes]:
    try:
        while data:
            # In steps, so that a small response cannot expand to a large one all at once.
            yield inflate.decompress(data, 1024 * 1024)
            data = inflate.unconsumed_tail
    except zlib.error:
        raise FetchFailed(61, "the content encoding of the response is broken") from None


def _scrubbed(hop: Hop, scrubber: Scrubber) -> Hop:
    """Return a hop as the script may see it."""
    head = hop.head
    headers = [(name, scrubber.text(value)) for name, value in head.headers]
    clean = replace(head, reason=scrubber.text(head.reason), headers=headers)
    url = replace(hop.url, path=scrubber.text(hop.url.path), query=scrubber.text(hop.url.query))
    return replace(hop, head=clean, url=url)


def _parse(url: str) -> Url:
    try:
        return parse_url(url)
    except InvalidOption as error:
        raise FetchFailed(_BAD_URL, f"{error.message} ({url!r})") from None


def _head(status: int, headers: Mapping[str, str] | CIMultiDict[str]) -> Head:
    try:
        reason = HTTPStatus(status).phrase
    except ValueError:
        reason = ""
    pairs = [(str(name), value) for name, value in headers.items()]
    return Head(version="1.1", status=status, reason=reason, headers=pairs)


def _refusal(status: int, reason: str) -> _Answer:
    text = f"smokebox: {reason}\n"
    return _Answer(_head(status, {"content-type": "text/plain"}), message.MessageBody(text))
