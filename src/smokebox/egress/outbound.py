"""One request that leaves a sandbox: checked, passed to its handler, sent, and scrubbed.

The egress proxy of Linux sandboxes and the HTTP client of virtual sandboxes both enforce their
policy here.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import logging
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from multidict import CIMultiDict

from smokebox.egress.handler import (
    HandlerFailed,
    Refused,
    handler_name,
    load_handler,
    run_handler,
)
from smokebox.egress.message import MessageBody, Request, Response
from smokebox.egress.scrub import UNREADABLE, Scrubber, added_secrets
from smokebox.egress.upstream import (
    EgressFailure,
    UpstreamPool,
    UpstreamRequest,
    UpstreamResponse,
    content_coding,
)
from smokebox.egress.urls import Origin, Url, split_url
from smokebox.errors import InvalidOption
from smokebox.foundation.http1.connection import ConnectionLost
from smokebox.foundation.http1.dial import Endpoint
from smokebox.foundation.http1.head import (
    HOP_BY_HOP,
    Fields,
    MalformedMessage,
    find_invalid_field,
    is_token,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Mapping

    from smokebox.egress.handler import HandlerOption
    from smokebox.egress.meter import Meter
    from smokebox.egress.policy import Egress, Verdict
    from smokebox.foundation.http1.body import BodyReader

T = TypeVar("T")

# Maximum run time of a handler. Waiting for a body or a server does not count.
HANDLER_SECONDS = 30.0
_MAX_DIGITS = 19
_MAX_REASON = 500

_log = logging.getLogger("smokebox.egress")


class EgressContext(Protocol):
    """The egress of one sandbox. `policy` is read for each request."""

    @property
    def sandbox_id(self) -> str: ...
    @property
    def policy(self) -> Egress: ...
    @property
    def meter(self) -> Meter: ...
    @property
    def env(self) -> Any: ...
    @property
    def pool(self) -> UpstreamPool: ...


def admit(verdict: Verdict, meter: Meter) -> None:
    """Count a request. Raises `EgressFailure` if the policy refuses it."""
    if verdict.action == "refuse":
        raise EgressFailure(verdict.reason, 403, rule=verdict.rule)
    if reason := meter.admit():
        raise EgressFailure(reason, 429, rule="limits")


def count_bytes(size: int, meter: Meter) -> None:
    """Count bytes of a request or response. Raises `EgressFailure` above the limit."""
    if size and (reason := meter.count(size)):
        raise EgressFailure(reason, 429, rule="limits")


def make_endpoint(origin: Origin, address: str | None) -> Endpoint:
    """Return the endpoint of a server; `address` is where the policy's `hosts` places it."""
    return Endpoint(origin.host, origin.port, origin.tls, address, named=address is not None)


@dataclass(slots=True, kw_only=True)
class OutboundResponse:
    """A response for the sandbox, from a server or a handler.

    `length` is the size of a body that has not arrived, if known. `upstream` is the server's
    response if it is passed on as it is.
    """

    status: int
    reason: str
    fields: Fields
    body: bytes | UpstreamResponse | AsyncIterable[bytes] = b""
    length: int | None = None
    scrubber: Scrubber | None = field(default=None, repr=False)
    upstream: UpstreamResponse | None = None

    def scrub_fields(self) -> Fields:
        """Return the headers without secrets."""
        scrubber = self.scrubber
        if scrubber is None or not scrubber.finds_in(itertools.chain.from_iterable(self.fields)):
            return list(self.fields)
        # The replacement of a secret is not valid in a name.
        clean = [field for field in self.fields if scrubber.text(field[0]) == field[0]]
        return [(name, scrubber.text(value)) for name, value in clean]

    def scrub(self, piece: bytes, last: bool) -> bytes:
        """Return the next piece of the body without secrets."""
        scrubber = self.scrubber
        if scrubber is None:
            return piece
        clean = scrubber.feed(piece)
        return clean + scrubber.finish() if last else clean


def explain(error: EgressFailure, rule: str, *, accept: str = "") -> OutboundResponse:
    """Return the response to a request that was refused or failed.

    Args:
        rule: Entry of the policy that decided about the request.
        accept: Accept header of the request. If it names JSON, the response is JSON.
    """
    reason = error.reason[:_MAX_REASON]
    rule = error.rule or (rule if error.status in (403, 429) else "")
    if "application/json" in accept.lower():
        kind = "application/json"
        text = json.dumps({"error": {"message": reason, "rule": rule}})
    else:
        kind, text = "text/plain; charset=utf-8", f"smokebox: {reason}\n"
    fields: Fields = [("content-type", kind)]
    if rule:
        fields.append(("x-smokebox-refused", rule.encode("ascii", "backslashreplace").decode()))
    return OutboundResponse(
        status=error.status, reason=reason_phrase(error.status), fields=fields, body=text.encode()
    )


def reason_phrase(status: int) -> str:
    """Return the standard phrase of a status."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""


class OutboundCall:
    """One admitted request, and the `HandlerContext` of its handler.

    Call `release` after the response was sent, whatever happens: it closes what was not read.

    Args:
        request: The request as the sandbox sent it, to the address that the policy chose.
        body: The body of the request, if it has not arrived yet.
    """

    def __init__(
        self,
        context: EgressContext,
        request: UpstreamRequest,
        origin: Origin,
        verdict: Verdict,
        body: BodyReader | None = None,
    ) -> None:
        self.sandbox_id = context.sandbox_id
        self.rule = verdict.rule
        self._context = context
        self._request = request
        self._origin = origin
        self._handler = verdict.handler
        self._incoming = body
        self._responses: list[UpstreamResponse] = []
        self._secrets: set[str] = set()
        # Set when the handler runs.
        self._url = ""
        self._body: MessageBody | None = None
        self._forwarded: list[tuple[MessageBody, UpstreamResponse]] = []
        self._deadline: asyncio.Timeout | None = None

    @property
    def scrubber(self) -> Scrubber | None:
        """Removes from the response the secrets that the handler added to the request."""
        return Scrubber(self._secrets) if self._secrets else None

    @property
    def has_sent(self) -> bool:
        """True once a request was sent to a server."""
        return bool(self._responses)

    async def send(self) -> OutboundResponse:
        """Run the handler, if there is one, and send the request. Raises `EgressFailure`."""
        if self._handler is None:
            response = await self._context.pool.send(self._request)
            self._responses.append(response)
            return self._pass(response)
        result = await self._run(self._handler)
        if isinstance(result, Request):
            return self._pass(await self._send(result, None))
        return self._reply(result)

    async def forward(
        self,
        request: Request,
        *,
        to: str | None = None,
        trusted: bool = True,
        proxy: str = "",
    ) -> Response:
        """Send a request for the handler, and return the response as it arrives.

        Unless `trusted`, the server that `to` names needs a public or granted address. `proxy` is
        the URL of an HTTP proxy that the request goes through, with its login.
        """
        sending = self._send(request, to, trusted=trusted, proxy=proxy)
        response = await self._untimed(sending)
        made = Response(_UntimedBody(self, response), response.status, CIMultiDict(response.fields))
        self._forwarded.append((made.body, response))
        return made

    def release(self) -> None:
        """Release every response."""
        for response in self._responses:
            response.release()

    async def _run(self, option: HandlerOption) -> Request | Response:
        """Run the handler. Raises `EgressFailure` if it returns nothing usable."""
        request, incoming = self._request, self._incoming
        self._url = f"{self._origin}{request.target}"
        if incoming is None:
            assert isinstance(request.body, bytes)
            self._body = MessageBody(request.body)
        else:
            self._body = MessageBody(None if incoming.done else _UntimedBody(self, incoming))
        fields = [("Host", request.host), *request.fields]
        if request.upgrade:
            fields += [("connection", "Upgrade"), ("upgrade", "websocket")]
        message = Request(request.method, self._url, CIMultiDict(fields), self._body)
        deadline = self._deadline = asyncio.timeout(HANDLER_SECONDS)
        try:
            async with deadline:
                handler = option
                if isinstance(handler, str):
                    # Importing a user's module may take long.
                    handler = await asyncio.to_thread(load_handler, handler)
                return await run_handler(handler, message, self._context.env, self)
        except (EgressFailure, ConnectionLost):
            raise
        except Refused as error:
            raise EgressFailure(str(error) or "the handler refused it", 403) from None
        except Exception as error:
            if deadline.expired():
                reason = f"the handler did not decide within {HANDLER_SECONDS:.0f} s"
                raise EgressFailure(reason, 504) from None
            if incoming is not None and incoming.malformed:
                raise
            # Its message may contain a secret: show the class only.
            if isinstance(error, HandlerFailed):
                raise EgressFailure(str(error)) from error
            _log.warning("the handler %s failed", handler_name(option), exc_info=error)
            raise EgressFailure(f"the handler failed with {type(error).__name__}") from error
        finally:
            self._deadline = None

    async def _send(
        self, request: Request, to: str | None, *, trusted: bool = True, proxy: str = ""
    ) -> UpstreamResponse:
        """Send the handler's request."""
        edited = self._edit(request, to, trusted=trusted)
        if proxy:
            _pass_through_proxy(edited, proxy, trusted=trusted)
        response = await self._context.pool.send(edited)
        self._responses.append(response)
        if self._secrets and not response.decompress():
            raise EgressFailure(
                f"the response is compressed with {content_coding(response.fields)!r:.40}, which "
                "cannot be searched for secrets; scrub=False would let it through"
            )
        return response

    def _pass(self, response: UpstreamResponse) -> OutboundResponse:
        return OutboundResponse(
            status=response.status,
            reason=response.reason,
            fields=response.fields,
            body=response,
            length=response.length,
            scrubber=self.scrubber,
            upstream=response,
        )

    def _reply(self, result: Response) -> OutboundResponse:
        """Return the handler's response as it is sent."""
        forwarded = (one for body, one in self._forwarded if body is result.body and body.unread)
        response = next(forwarded, None)
        if response is not None and response.status == 101:
            return self._pass(response)
        if type(result.status) is not int or not 200 <= result.status <= 999:
            raise EgressFailure(f"the status {result.status!r:.20} cannot be sent")
        fields = _end_to_end(result.headers)
        length = result.headers.get("content-length", "")
        if self._request.method == "HEAD" and length.isascii() and length.isdigit():
            fields.append(("content-length", length))
        body = _as_body(result.body)
        content = response or (body.data if body.data is not None else _checked(body))
        return OutboundResponse(
            status=result.status,
            reason=reason_phrase(result.status),
            fields=fields,
            body=content,
            length=response.length if response is not None else None,
            scrubber=self.scrubber,
        )

    def _edit(self, request: Request, to: str | None, *, trusted: bool) -> UpstreamRequest:
        """Return a handler's request as it is sent."""
        original = self._request
        if not is_token(request.method):
            raise EgressFailure(f"the method {request.method!r:.40} cannot be sent")
        fields = _end_to_end(request.headers)
        edited = replace(original, method=request.method)
        self._route(edited, request.url, to, trusted=trusted)
        if self._context.policy.scrub:
            self._secrets |= added_secrets(
                fields, request.url, sent_fields=original.fields, sent_url=self._url
            )
        if self._secrets:
            fields = [field for field in fields if field[0].lower() not in UNREADABLE]
            fields.append(("accept-encoding", "identity"))
        edited.fields = fields
        if (host := request.headers.get("host", original.host)) != original.host:
            edited.host = host
        self._set_body(edited, request)
        return edited

    def _route(self, edited: UpstreamRequest, url: str, to: str | None, *, trusted: bool) -> None:
        """Set the server of a request, the Host to name there, and the target."""
        if url != self._url:
            parsed = _split(url)
            edited.target = parsed.target
            if (origin := parsed.server) != self._origin:
                address = self._context.policy.decide(origin.host, origin.port).address
                edited.endpoint, edited.host = make_endpoint(origin, address), origin.authority
        if to is not None:
            base = _split(to)
            origin = base.server
            edited.target = base.target.rstrip("/") + edited.target
            edited.endpoint = Endpoint(origin.host, origin.port, origin.tls, named=trusted)
            edited.host = origin.authority

    def _set_body(self, edited: UpstreamRequest, request: Request) -> None:
        body = _as_body(request.body)
        if body.data is not None:
            edited.body, edited.framing = body.data, len(body.data)
        elif body is not self._body or self._incoming is None:
            length = request.headers.get("content-length", "")
            exact = length.isascii() and length.isdigit() and len(length) < _MAX_DIGITS
            edited.body, edited.framing = _checked(body), int(length) if exact else "chunked"
        elif body.unread:
            edited.body, edited.framing = self._incoming, self._incoming.framing
        else:
            raise EgressFailure("the handler read some of the request's body, and did not keep it")

    async def _untimed(self, wait: Awaitable[T]) -> T:
        """Await something with the handler's deadline suspended."""
        deadline = self._deadline
        at = deadline.when() if deadline is not None else None
        if deadline is None or at is None:
            return await wait
        loop = asyncio.get_running_loop()
        remaining = at - loop.time()
        deadline.reschedule(None)
        try:
            return await wait
        finally:
            if not deadline.expired():
                deadline.reschedule(loop.time() + remaining)


class _UntimedBody:
    """A body that does not count towards the handler's deadline while it arrives."""

    def __init__(self, call: OutboundCall, source: BodyReader | UpstreamResponse) -> None:
        self._call = call
        self._source = source

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while not self._source.done:
            if piece := await self._call._untimed(self._source.read()):
                yield piece


async def _checked(body: MessageBody) -> AsyncIterator[bytes]:
    """Yield the pieces of a body that a handler made, with its errors explained."""
    try:
        async for piece in body:
            if not isinstance(piece, bytes):
                raise TypeError("a piece of a body is bytes")
            yield piece
    except (EgressFailure, MalformedMessage, ConnectionLost):
        raise
    except Exception as error:
        reason = f"the body that the handler made failed with {type(error).__name__}"
        raise EgressFailure(reason) from error


def _as_body(body: object) -> MessageBody:
    """Return the body of a message to which a handler may have assigned plain content."""
    return body if isinstance(body, MessageBody) else MessageBody(body)  # type: ignore[arg-type]


def _end_to_end(headers: Mapping[str, str]) -> Fields:
    fields = [field for field in headers.items() if field[0].lower() not in HOP_BY_HOP]
    if problem := find_invalid_field([*fields, ("host", headers.get("host", ""))]):
        raise EgressFailure(f"the handler's message is not valid: {problem}")
    return fields


def _pass_through_proxy(request: UpstreamRequest, proxy: str, *, trusted: bool) -> None:
    """Change a request of plain HTTP to one of a proxy."""
    parts = urlsplit(proxy)
    request.target = f"http://{request.host}{request.target}"
    request.endpoint = Endpoint(parts.hostname or "", parts.port or 80, tls=False, named=trusted)
    if parts.username is not None:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        value = f"Basic {base64.b64encode(login).decode()}"
        request.fields = [*request.fields, ("proxy-authorization", value)]


def _split(url: str) -> Url:
    try:
        return split_url(url)
    except InvalidOption as error:
        raise EgressFailure(f"the handler's message is not valid: {error.message}") from None
