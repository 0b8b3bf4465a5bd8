"""One call of a handler: the request it gets, its deadline, and what it returned."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from multidict import CIMultiDict

from smokebox.egress.handler import HandlerOption, Refused, run_handler
from smokebox.egress.message import MessageBody, Request, Response
from smokebox.egress.scrub import UNREADABLE, Scrubber, added_secrets
from smokebox.engine.egress.http.reply import ProxyReply, reason_phrase
from smokebox.engine.egress.http.target import Destination, Origin, parse_destination
from smokebox.engine.egress.http.upstream import (
    UpstreamFailure,
    UpstreamRequest,
    UpstreamResponse,
)
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
    from collections.abc import AsyncIterator, Awaitable, Mapping

    from smokebox.egress.policy import Verdict
    from smokebox.engine.egress.http.context import ProxyContext
    from smokebox.foundation.http1.body import BodyReader

T = TypeVar("T")

# How long a handler may run. Time in which it waits for a body or a server does not count.
DECIDE_SECONDS = 30.0
_MAX_DIGITS = 19


class HandlerCall:
    """One request in the hands of a handler, and the `HandlerContext` that the handler gets.

    Call `release` after the response was sent: it closes what the handler did not read.
    """

    def __init__(
        self,
        context: ProxyContext,
        request: UpstreamRequest,
        origin: Origin,
        verdict: Verdict,
        body: BodyReader,
    ) -> None:
        self._context = context
        self._request = request
        self._origin = origin
        self._rule = verdict.rule
        self._responses: list[UpstreamResponse] = []
        self._passed: list[tuple[MessageBody, UpstreamResponse]] = []
        self._secrets: set[str] = set()
        self._deadline: asyncio.Timeout | None = None
        self._url = f"{origin.scheme}://{origin.authority}{request.target}"
        self._incoming = body
        self._body = MessageBody(None if body.done else _UntimedBody(self, body))

    @property
    def sandbox_id(self) -> str:
        """The id of the sandbox that sent the request."""
        return self._context.sandbox_id

    @property
    def rule(self) -> str:
        """The entry of the policy that chose the handler."""
        return self._rule

    @property
    def scrubber(self) -> Scrubber | None:
        """Removes from the response the secrets that the handler added to the request."""
        return Scrubber(self._secrets) if self._secrets else None

    @property
    def has_sent(self) -> bool:
        """True once a request was sent to a server."""
        return bool(self._responses)

    async def run(self, option: HandlerOption) -> Request | Response:
        """Run the handler. Raises `UpstreamFailure` if it returns nothing usable."""
        fields = [("Host", self._request.host), *self._request.fields]
        if self._request.upgrade:
            fields += [("connection", "Upgrade"), ("upgrade", "websocket")]
        request = Request(self._request.method, self._url, CIMultiDict(fields))
        request.body = self._body
        deadline = self._deadline = asyncio.timeout(DECIDE_SECONDS)
        try:
            async with deadline:
                handler = await self._context.handlers.resolve(option)
                return await run_handler(handler, request, self._context.env, self)
        except (UpstreamFailure, ConnectionLost):
            raise
        except Refused as error:
            raise UpstreamFailure(str(error) or "the handler refused it", 403) from None
        except Exception as error:
            if deadline.expired():
                why = f"the handler did not decide within {DECIDE_SECONDS:.0f} s"
                raise UpstreamFailure(why, 504) from None
            if self._incoming.malformed:
                raise
            # Its message may hold a secret that it was about to send: show the class only.
            raise UpstreamFailure(f"the handler failed with {type(error).__name__}") from error
        finally:
            self._deadline = None

    async def forward(self, request: Request, *, to: str | None = None) -> Response:
        """Send a request for the handler, and return the response as it arrives."""
        response = await self.untimed(self.send(request, to=to))
        made = Response(_UntimedBody(self, response), response.status, CIMultiDict(response.fields))
        self._passed.append((made.body, response))
        return made

    async def send(self, request: Request, *, to: str | None = None) -> UpstreamResponse:
        """Send the handler's request. Raises `UpstreamFailure`."""
        response = await self._context.pool.send(self._edited(request, to))
        self._responses.append(response)
        if self._secrets:
            response.decompress()
        return response

    def response_in(self, made: Response) -> UpstreamResponse | None:
        """Return the server's response that a handler passes on with its body untouched."""
        for body, response in self._passed:
            if body is made.body and body.untouched:
                return response
        return None

    def reply(self, made: Response) -> ProxyReply:
        """Return the handler's response as it is sent. Raises `UpstreamFailure`."""
        if type(made.status) is not int or not 200 <= made.status <= 999:
            raise UpstreamFailure(f"the status {made.status!r:.20} cannot be sent")
        fields = _fields(made.headers)
        length = made.headers.get("content-length", "")
        if self._request.method == "HEAD" and length.isascii() and length.isdigit():
            fields.append(("content-length", length))
        body = made.body if isinstance(made.body, MessageBody) else MessageBody(made.body)
        known, response = body.known, self.response_in(made)
        content = response if response is not None else _checked(body) if known is None else known
        return ProxyReply(
            status=made.status,
            reason=reason_phrase(made.status),
            fields=fields,
            body=content,
            length=response.length if response is not None else None,
            scrubber=self.scrubber,
        )

    def release(self) -> None:
        """Release every response that the handler requested."""
        for response in self._responses:
            response.release()

    async def untimed(self, wait: Awaitable[T]) -> T:
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

    def _edited(self, request: Request, to: str | None) -> UpstreamRequest:
        """Return a handler's request as it is sent."""
        if not is_token(request.method):
            raise UpstreamFailure(f"the method {request.method!r:.40} cannot be sent")
        fields = _fields(request.headers)
        endpoint, authority, target = self._route(request, to)
        if self._context.policy.scrub:
            self._secrets |= added_secrets(
                fields, request.url, sent_fields=self._request.fields, sent_url=self._url
            )
        if self._secrets:
            fields = [field for field in fields if field[0].lower() not in UNREADABLE]
            fields.append(("accept-encoding", "identity"))
        named = request.headers.get("host", self._request.host)
        edited = replace(
            self._request,
            method=request.method,
            endpoint=endpoint,
            target=target,
            host=named if named != self._request.host else authority,
            fields=fields,
        )
        self._set_body(edited, request)
        return edited

    def _route(self, request: Request, to: str | None) -> tuple[Endpoint, str, str]:
        """Return the server of a request, the Host to name there, and the target."""
        original = self._request
        endpoint, authority, target = original.endpoint, original.host, original.target
        if request.url != self._url:
            destination = _parse_destination(request.url)
            target, origin = destination.target, destination.origin
            if origin != self._origin:
                address = self._context.policy.decide(origin.host, origin.port).address
                private = address is not None
                endpoint = Endpoint(origin.host, origin.port, origin.tls, address, private)
                authority = origin.authority
        if to is not None:
            base = _parse_destination(to)
            origin, target = base.origin, base.target.rstrip("/") + target
            endpoint = Endpoint(origin.host, origin.port, origin.tls, private=True)
            authority = origin.authority
        return endpoint, authority, target

    def _set_body(self, edited: UpstreamRequest, request: Request) -> None:
        """Give a request the body that the handler's has."""
        body = request.body if isinstance(request.body, MessageBody) else MessageBody(request.body)
        if (known := body.known) is not None:
            edited.body, edited.framing = known, len(known)
        elif body is not self._body:
            length = request.headers.get("content-length", "")
            exact = length.isascii() and length.isdigit() and len(length) < _MAX_DIGITS
            edited.body, edited.framing = _checked(body), int(length) if exact else "chunked"
        elif body.untouched:
            edited.body, edited.framing = self._incoming, self._incoming.framing
        else:
            raise UpstreamFailure(
                "the handler read some of the request's body, and did not keep it"
            )


class _UntimedBody:
    """A body whose incoming does not count towards the handler's deadline."""

    def __init__(self, call: HandlerCall, source: BodyReader | UpstreamResponse) -> None:
        self._call = call
        self._source = source

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while not self._source.done:
            if piece := await self._call.untimed(self._source.read()):
                yield piece


async def _checked(body: MessageBody) -> AsyncIterator[bytes]:
    """Yield the pieces of a body that a handler made, with its errors explained."""
    try:
        async for piece in body:
            if not isinstance(piece, bytes):
                raise TypeError("a piece of a body is bytes")
            yield piece
    except (UpstreamFailure, MalformedMessage, ConnectionLost):
        raise
    except Exception as error:
        why = f"the body that the handler made failed with {type(error).__name__}"
        raise UpstreamFailure(why) from error


def _fields(headers: Mapping[str, str]) -> Fields:
    fields = [field for field in headers.items() if field[0].lower() not in HOP_BY_HOP]
    if problem := find_invalid_field([*fields, ("host", headers.get("host", ""))]):
        raise UpstreamFailure(f"of what the handler made, {problem}")
    return fields


def _parse_destination(url: str) -> Destination:
    try:
        return parse_destination(url)
    except MalformedMessage as error:
        raise UpstreamFailure(f"of what the handler made, {error.reason}") from None
