"""A handler at work on a request: what it gets, how long it may take, and what it made."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from multidict import CIMultiDict

from smokebox.egress.handler import HandlerOption, Refused, run_handler
from smokebox.egress.message import Body, Request, Response
from smokebox.egress.scrub import Scrubber, secrets_in, secrets_in_query
from smokebox.engine.egress.http.exchange import Answer, Errand, send
from smokebox.engine.egress.http.head import (
    HOP_BY_HOP,
    Fields,
    Malformed,
    is_token,
    wrong_field,
)
from smokebox.engine.egress.http.pool import Place, Unanswered
from smokebox.engine.egress.http.reply import Reply, phrase
from smokebox.engine.egress.http.target import Destination, Origin, destination
from smokebox.engine.egress.http.wire import Cut

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Mapping

    from smokebox.egress.policy import Verdict
    from smokebox.engine.egress.http.body import Incoming
    from smokebox.engine.egress.http.doorway import Doorway

T = TypeVar("T")

# How long a handler may think. What it waits for others does not count.
DECIDE_SECONDS = 30.0
# With secrets to look for, the answer must be readable, and whole.
_UNREADABLE = frozenset({"accept-encoding", "if-range", "range", "sec-websocket-extensions"})
_MOST_DIGITS = 19


class Handling:
    """One request in the hands of a handler; the `Context` that it gets.

    `release` it when the answer was sent: what the handler did not read is closed then.
    """

    def __init__(
        self, door: Doorway, errand: Errand, origin: Origin, verdict: Verdict, body: Incoming
    ) -> None:
        self._door = door
        self._errand = errand
        self._origin = origin
        self._rule = verdict.rule
        self._answers: list[Answer] = []
        self._given: list[tuple[Body, Answer]] = []
        self._secrets: set[str] = set()
        self._deadline: asyncio.Timeout | None = None
        self._url = f"{origin.scheme}://{origin.authority}{errand.target}"
        self._incoming = body
        self._body = Body(None if body.done else _Patient(self, body))

    @property
    def sandbox_id(self) -> str:
        """Which sandbox asks."""
        return self._door.sandbox_id

    @property
    def rule(self) -> str:
        """The entry of the policy that led here."""
        return self._rule

    @property
    def scrubber(self) -> Scrubber | None:
        """What takes out of the answer what the handler put into the request."""
        return Scrubber(self._secrets) if self._secrets else None

    @property
    def asked(self) -> bool:
        """Whether a server was asked."""
        return bool(self._answers)

    async def decide(self, option: HandlerOption) -> Request | Response:
        """What the handler makes of it. Raises `Unanswered` where that is nothing."""
        fields = [("Host", self._errand.host), *self._errand.fields]
        if self._errand.upgrade:
            fields += [("connection", "Upgrade"), ("upgrade", "websocket")]
        request = Request(self._errand.method, self._url, CIMultiDict(fields))
        request.body = self._body
        deadline = self._deadline = asyncio.timeout(DECIDE_SECONDS)
        try:
            async with deadline:
                handler = await self._door.handlers.resolve(option)
                return await run_handler(handler, request, self._door.env, self)
        except (Unanswered, Cut):
            raise
        except Refused as error:
            raise Unanswered(str(error) or "the handler refused it", 403) from None
        except Exception as error:
            if deadline.expired():
                why = f"the handler did not decide within {DECIDE_SECONDS:.0f} s"
                raise Unanswered(why, 504) from None
            if self._incoming.broken:
                raise
            # Its words may hold what it was about to send: only its kind is told.
            raise Unanswered(f"the handler failed with {type(error).__name__}") from error
        finally:
            self._deadline = None

    async def forward(self, request: Request, *, to: str | None = None) -> Response:
        """Of `Context`: send the request, and give the answer as it comes."""
        answer = await self.patiently(self.send(request, to=to))
        response = Response(_Patient(self, answer), answer.status, CIMultiDict(answer.fields))
        self._given.append((response.body, answer))
        return response

    async def send(self, request: Request, *, to: str | None = None) -> Answer:
        """Send what the handler made of the request, or of another. Raises `Unanswered`."""
        answer = await send(self._door.pool, self._edited(request, to))
        self._answers.append(answer)
        if self._secrets:
            answer.unpack()
        return answer

    def answer_in(self, made: Response) -> Answer | None:
        """The answer of a server that a handler passes on, body and all."""
        for body, answer in self._given:
            if body is made.body and body.untouched:
                return answer
        return None

    def reply(self, made: Response) -> Reply:
        """What a handler's answer is on the wire. Raises `Unanswered`."""
        if type(made.status) is not int or not 200 <= made.status <= 999:
            raise Unanswered(f"the status {made.status!r:.20} cannot be sent")
        fields = _fields(made.headers)
        length = made.headers.get("content-length", "")
        if self._errand.method == "HEAD" and length.isascii() and length.isdigit():
            fields.append(("content-length", length))
        body = made.body if isinstance(made.body, Body) else Body(made.body)
        known, answer = body.known, self.answer_in(made)
        content = answer if answer is not None else _made(body) if known is None else known
        return Reply(
            status=made.status,
            reason=phrase(made.status),
            fields=fields,
            body=content,
            length=answer.length if answer is not None else None,
            scrubber=self.scrubber,
        )

    def release(self) -> None:
        """Part with every answer that the handler asked for."""
        for answer in self._answers:
            answer.release()

    async def patiently(self, wait: Awaitable[T]) -> T:
        """Wait for somebody else on the time of nobody."""
        deadline = self._deadline
        at = deadline.when() if deadline is not None else None
        if deadline is None or at is None:
            return await wait
        loop = asyncio.get_running_loop()
        left = at - loop.time()
        deadline.reschedule(None)
        try:
            return await wait
        finally:
            if not deadline.expired():
                deadline.reschedule(loop.time() + left)

    def _edited(self, request: Request, to: str | None) -> Errand:
        """The errand that a handler's request is."""
        if not is_token(request.method):
            raise Unanswered(f"the method {request.method!r:.40} cannot be sent")
        fields = _fields(request.headers)
        place, authority, target = self._place(request, to)
        if self._door.policy.scrub:
            added = [field for field in fields if field not in self._errand.fields]
            self._secrets |= secrets_in(added)
            if request.url != self._url:
                self._secrets |= secrets_in_query(request.url) - secrets_in_query(self._url)
        if self._secrets:
            fields = [field for field in fields if field[0].lower() not in _UNREADABLE]
            fields.append(("accept-encoding", "identity"))
        named = request.headers.get("host", self._errand.host)
        errand = replace(
            self._errand,
            method=request.method,
            place=place,
            target=target,
            host=named if named != self._errand.host else authority,
            fields=fields,
        )
        self._fill(errand, request)
        return errand

    def _place(self, request: Request, to: str | None) -> tuple[Place, str, str]:
        """Where a request goes, the Host to name there, and what to ask for."""
        errand = self._errand
        place, authority, target = errand.place, errand.host, errand.target
        if request.url != self._url:
            wanted = _destination(request.url)
            target, origin = wanted.target, wanted.origin
            if origin != self._origin:
                address = self._door.policy.decide(origin.host, origin.port).address
                private = address is not None
                place = Place(origin.host, origin.port, origin.tls, address, private)
                authority = origin.authority
        if to is not None:
            base = _destination(to)
            origin, target = base.origin, base.target.rstrip("/") + target
            place = Place(origin.host, origin.port, origin.tls, private=True)
            authority = origin.authority
        return place, authority, target

    def _fill(self, errand: Errand, request: Request) -> None:
        """Give an errand the body that the handler's request has."""
        body = request.body if isinstance(request.body, Body) else Body(request.body)
        if (known := body.known) is not None:
            errand.body, errand.framing = known, len(known)
        elif body is not self._body:
            length = request.headers.get("content-length", "")
            exact = length.isascii() and length.isdigit() and len(length) < _MOST_DIGITS
            errand.body, errand.framing = _made(body), int(length) if exact else "chunked"
        elif body.untouched:
            errand.body, errand.framing = self._incoming, self._incoming.framing
        else:
            raise Unanswered("the handler read some of the request's body, and did not keep it")


class _Patient:
    """A body that may take its time: what a handler waits for it does not count."""

    def __init__(self, handling: Handling, source: Incoming | Answer) -> None:
        self._handling = handling
        self._source = source

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while not self._source.done:
            if piece := await self._handling.patiently(self._source.read()):
                yield piece


async def _made(body: Body) -> AsyncIterator[bytes]:
    """A body that a handler makes, piece by piece."""
    try:
        async for piece in body:
            if not isinstance(piece, bytes):
                raise TypeError("a piece of a body is bytes")
            yield piece
    except (Unanswered, Malformed, Cut):
        raise
    except Exception as error:
        why = f"the body that the handler made failed with {type(error).__name__}"
        raise Unanswered(why) from error


def _fields(headers: Mapping[str, str]) -> Fields:
    fields = [field for field in headers.items() if field[0].lower() not in HOP_BY_HOP]
    if wrong := wrong_field([*fields, ("host", headers.get("host", ""))]):
        raise Unanswered(f"of what the handler made, {wrong}")
    return fields


def _destination(url: str) -> Destination:
    try:
        return destination(url)
    except Malformed as error:
        raise Unanswered(f"of what the handler made, {error.reason}") from None
