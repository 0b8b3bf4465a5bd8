"""Requests under a policy: every hop judged, secrets added and taken out again."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from smokebox.egress.scrub import Scrubber, secrets_in
from smokebox.sandbox.network import Network
from smokebox.sandbox.urls import Url, join_url
from smokebox.sandbox.virtual.connection import Connection, FetchFailed, Head, blocking

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterator, Sequence

    from smokebox.sandbox.network import Decision
    from smokebox.sandbox.virtual.guarded import Guarded

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
# They frame the message or name the server, which is decided here; or change the method
# behind the back of the policy.
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
        "x-http-method",
        "x-http-method-override",
        "x-method-override",
    )
)
_CREDENTIALS = frozenset({"authorization", "cookie"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a script asks for."""

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
class Sent:
    """One hop: what was asked, without what was added, and the head of the answer."""

    method: str
    url: Url
    headers: Sequence[tuple[str, str]]
    head: Head


@dataclass(slots=True, kw_only=True)
class Response:
    """The last answer, and the hops that led to it."""

    hops: list[Sent] = field(default_factory=list)
    body: AsyncIterator[bytes]

    @property
    def last(self) -> Sent:
        """The hop whose body this is."""
        return self.hops[-1]


def fetch(
    network: Network | Guarded, request: Request
) -> contextlib.AbstractAsyncContextManager[Response]:
    """Make a request and follow where it leads, as far as the policy goes.

    Leaving, also by cancellation, closes the connection at once. Raises `FetchFailed`.
    """
    if isinstance(network, Network):
        return _fetch(network, request)
    from smokebox.sandbox.virtual.guarded import fetch_guarded

    return fetch_guarded(network, request)


@contextlib.asynccontextmanager
async def _fetch(network: Network, request: Request) -> AsyncIterator[Response]:
    check_request(network, request)
    limit = min(request.timeout or network.timeout, network.timeout)
    secrets = [secrets_in(entry.headers) for entry in network.entries] if network.scrub else []
    scrubber = Scrubber(set().union(*secrets))
    connection: Connection | None = None
    try:
        async with asyncio.timeout(limit):
            hops: list[Sent] = []
            while True:
                decision = _judge(network, request)
                assert decision.url is not None
                connection = Connection(network, decision.url, private=decision.private)
                sent = await _send(network, request, decision, connection)
                hops.append(scrubbed(sent, scrubber))
                after = following(request, sent)
                if after is None:
                    break
                if len(hops) > min(request.redirects or 0, network.max_redirects):
                    raise FetchFailed(47, f"Maximum ({len(hops) - 1}) redirects followed")
                request = after
                connection.abort()
            decode = request.decode or bool(set().union(*secrets))
            body = read_body(network, pieces_of(connection), sent.head, scrubber, decode)
            async with contextlib.aclosing(body):
                yield Response(hops=hops, body=body)
    except FetchFailed as error:
        raise FetchFailed(error.exit_code, scrubber.text(str(error))) from None
    except TimeoutError:
        raise FetchFailed(28, f"Operation timed out after {limit:g} seconds") from None
    finally:
        if connection is not None:
            connection.abort()


def check_request(network: Network, request: Request) -> None:
    """Refuse what no policy lets a script send."""
    size = len(request.body or b"")
    if size > network.max_request_bytes:
        raise FetchFailed(
            55, f"the request body has {size} bytes and {network.max_request_bytes} may be sent"
        )
    for name, _ in request.headers:
        if name.lower() in _REFUSED_HEADERS:
            raise FetchFailed(43, f"the header {name} cannot be set in this sandbox")


def _judge(network: Network, request: Request) -> Decision:
    decision = network.decide(request.method, request.url)
    if not decision.allowed:
        raise FetchFailed(3 if decision.url is None else 7, decision.reason)
    # Two halves of an echoed secret, asked for one after the other, would pass unseen.
    if decision.headers and network.scrub and _has(request.headers, "range"):
        raise FetchFailed(33, "ranges are refused where the network adds a credential")
    return decision


async def _send(
    network: Network, request: Request, decision: Decision, connection: Connection
) -> Sent:
    assert decision.url is not None
    visible = [("Host", decision.url.authority), *request.headers]
    if request.body is not None:
        visible.append(("Content-Length", str(len(request.body))))
    added = {name.lower() for name in decision.headers}
    wire = [pair for pair in visible if pair[0].lower() not in added]
    wire += [*decision.headers.items(), ("Connection", "close")]
    wait = min(request.connect_timeout or network.connect_timeout, network.connect_timeout)
    work = lambda: connection.send(request.method, wire, request.body, wait)  # noqa: E731
    try:
        head = await blocking(work)
    except ValueError:
        raise FetchFailed(43, "a header holds characters that cannot be sent") from None
    return Sent(method=request.method, url=decision.url, headers=visible, head=head)


def following(request: Request, sent: Sent) -> Request | None:
    """The request that an answer leads to, where redirects are followed."""
    location = sent.head.get("location")
    if request.redirects is None or sent.head.status not in _REDIRECTS or location is None:
        return None
    url = join_url(sent.url, location)
    headers = [pair for pair in request.headers if pair[0].lower() != "referer"]
    if not url.startswith(f"{sent.url.origin}/"):
        headers = [pair for pair in headers if pair[0].lower() not in _CREDENTIALS]
    after = replace(request, url=url, headers=headers)
    status = sent.head.status
    to_get = status == 303 or (status in (301, 302) and request.method == "POST")
    if not to_get or request.keep_method or request.method == "HEAD":
        return after
    bodiless = [pair for pair in headers if not pair[0].lower().startswith("content-")]
    return replace(after, method="GET", body=None, headers=bodiless)


async def pieces_of(connection: Connection) -> AsyncIterator[bytes]:
    """The body of an answer as it comes."""
    while data := await blocking(connection.read):
        yield data


async def read_body(
    network: Network, pieces: AsyncIterable[bytes], head: Head, scrubber: Scrubber, decode: bool
) -> AsyncGenerator[bytes, None]:
    """A body as the script may see it, up to what the network allows."""
    encoding = (head.get("content-encoding") or "identity").lower()
    inflate = None
    if decode and encoding != "identity":
        if encoding not in ("gzip", "x-gzip", "deflate"):
            raise FetchFailed(61, f"Unrecognized content encoding type: {encoding}")
        inflate = zlib.decompressobj(zlib.MAX_WBITS | 32)
    size = 0
    async for data in pieces:
        for piece in _inflated(inflate, data) if inflate else (data,):
            size += len(piece)
            if size > network.max_response_bytes:
                limit = network.max_response_bytes
                raise FetchFailed(63, f"the response is longer than the {limit} bytes allowed")
            if shown := scrubber.feed(piece):
                yield shown
    if rest := scrubber.finish():
        yield rest


def _inflated(inflate: zlib._Decompress, data: bytes) -> Iterator[bytes]:
    try:
        while data:
            # In steps, so that a small answer cannot become a large one all at once.
            yield inflate.decompress(data, 1024 * 1024)
            data = inflate.unconsumed_tail
    except zlib.error:
        raise FetchFailed(61, "the content encoding of the response is broken") from None


def scrubbed(sent: Sent, scrubber: Scrubber) -> Sent:
    """A hop as the script may see it."""
    head = sent.head
    headers = [(name, scrubber.text(value)) for name, value in head.headers]
    clean = replace(head, reason=scrubber.text(head.reason), headers=headers)
    url = replace(sent.url, path=scrubber.text(sent.url.path), query=scrubber.text(sent.url.query))
    return replace(sent, head=clean, url=url)


def _has(headers: Sequence[tuple[str, str]], name: str) -> bool:
    return any(key.lower() == name for key, _ in headers)
