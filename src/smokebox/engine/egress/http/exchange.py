"""One request to a server, and its answer as it comes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from smokebox.engine.egress.http.body import Incoming, Outgoing
from smokebox.engine.egress.http.head import (
    Fields,
    Framing,
    Malformed,
    ResponseHead,
    parse_response,
    write_request,
)
from smokebox.engine.egress.http.pool import Place, Pool, Unanswered
from smokebox.engine.egress.http.unpacking import Unpacker
from smokebox.engine.egress.http.wire import Cut, Wire

if TYPE_CHECKING:
    from collections.abc import Callable

# As curl does: a server that does not know the word would wait for the body, as we for it.
_CONTINUE_SECONDS = 1.0
_REPEATABLE = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"})

Source: TypeAlias = bytes | Incoming | AsyncIterable[bytes]


@dataclass(slots=True, kw_only=True)
class Errand:
    """A request as it is sent. `fields` have neither the Host nor framing."""

    method: str
    place: Place
    target: str
    host: str
    fields: Fields
    body: Source = b""
    framing: Framing = 0
    upgrade: bool = False

    def head(self, *, expect: bool) -> bytes:
        """Its first bytes."""
        fields = [("Host", self.host), *self.fields]
        if self.upgrade:
            fields += [("connection", "Upgrade"), ("upgrade", "websocket")]
        if self.framing == "chunked":
            fields.append(("transfer-encoding", "chunked"))
        elif self.framing or self.method in ("POST", "PUT", "PATCH"):
            fields.append(("content-length", str(self.framing)))
        if expect:
            fields.append(("expect", "100-continue"))
        return write_request(self.method, self.target, fields)


class Answer:
    """What a server answers. `release` it, whatever happens.

    `length` is that of the body, where it is known before.
    """

    def __init__(self, exchange: _Exchange, head: ResponseHead) -> None:
        self.status = head.status
        self.reason = head.reason
        self.fields = head.fields
        self.length = head.framing if isinstance(head.framing, int) else None
        self.wire = exchange.wire
        self._body = Incoming(exchange.wire, head.framing)
        self._unpacker: Unpacker | None = None
        self._exchange = exchange
        self._keep = head.keep

    @property
    def done(self) -> bool:
        """Whether all of it was read."""
        return self._body.done

    @property
    def ready(self) -> bool:
        """Whether the next piece is here already."""
        return self._body.ready

    def unpack(self) -> None:
        """Have the body as it was before it was compressed. Raises `Unanswered`."""
        codings = [value for name, value in self.fields if name.lower() == "content-encoding"]
        coding = ",".join(codings).strip().lower()
        if coding in ("", "identity") or self._body.done:
            return
        self._unpacker = Unpacker(coding)
        self.length = None
        gone = ("content-encoding", "content-length")
        self.fields = [field for field in self.fields if field[0].lower() not in gone]

    async def read(self) -> bytes:
        """The next piece of the body, or nothing; at the end `done`. Raises `Unanswered`."""
        try:
            piece = await self._body.read()
        except (Cut, Malformed) as error:
            raise self._exchange.failure or Unanswered(
                f"the answer of {self._exchange.place.host} is cut off or broken: {error}"
            ) from None
        except TimeoutError:
            raise Unanswered(f"{self._exchange.place.host} went silent", 504) from None
        return self._unpacker.feed(piece) if self._unpacker is not None else piece

    def release(self) -> None:
        """Keep the connection for another request, or close it where it cannot have one."""
        self._exchange.release(keep=self._keep and self._body.done and self.status != 101)


async def send(pool: Pool, errand: Errand) -> Answer:
    """Ask a server. Raises `Unanswered`, or what reading the body of the request raised."""
    if isinstance(errand.body, Incoming) and errand.body.whole:
        errand.body = await errand.body.read()
    while (wire := pool.idle(errand.place)) is not None:
        try:
            return await _Exchange(pool, errand, wire).ask()
        except _Stale as error:
            if errand.method not in _REPEATABLE or not isinstance(errand.body, bytes):
                raise Unanswered(f"{errand.place.host} closed the connection") from error
    exchange = _Exchange(pool, errand, await pool.connect(errand.place))
    try:
        return await exchange.ask()
    except _Stale as error:
        why = f"{errand.place.host} closed the connection without an answer"
        raise Unanswered(why) from error


class _Stale(Exception):
    """The server closed the connection before it said anything."""


class _Exchange:
    def __init__(self, pool: Pool, errand: Errand, wire: Wire) -> None:
        self.wire = wire
        self.place = errand.place
        self.failure: BaseException | None = None
        self._pool = pool
        self._errand = errand
        self._sender: asyncio.Task[None] | None = None

    async def ask(self) -> Answer:
        """Send the request, and read the head of the answer."""
        try:
            head = await self._asked()
        except BaseException:
            self.release(keep=False)
            raise
        return Answer(self, head)

    def release(self, *, keep: bool) -> None:
        """Part with the connection."""
        sender = self._sender
        if sender is not None and not sender.done():
            sender.cancel()
            keep = False
        if keep and self.failure is None:
            self._pool.keep(self.place, self.wire)
        else:
            self.wire.abort()

    async def _asked(self) -> ResponseHead:
        errand, body = self._errand, self._errand.body
        if isinstance(body, bytes):
            with contextlib.suppress(Cut):
                self.wire.write(errand.head(expect=False) + body)
            return await self._head(None)
        expect = isinstance(body, Incoming) and body.expected
        outgoing = Outgoing(
            self.wire, errand.head(expect=expect), chunked=errand.framing == "chunked"
        )
        if not expect:
            self._start(body, outgoing)
            return await self._head(None)
        outgoing.flush()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CONTINUE_SECONDS):
                return await self._head(lambda: self._start(body, outgoing))
        self._start(body, outgoing)
        return await self._head(None)

    def _start(self, body: Source, outgoing: Outgoing) -> None:
        assert not isinstance(body, bytes)
        if self._sender is None:
            self._sender = asyncio.create_task(self._send_all(body, outgoing))

    async def _send_all(self, body: Incoming | AsyncIterable[bytes], outgoing: Outgoing) -> None:
        framing = self._errand.framing
        left = framing if isinstance(framing, int) else None
        try:
            async for piece in body:
                if left is not None and (left := left - len(piece)) < 0:
                    raise Malformed("the body of the request is longer than it said", 502)
                await outgoing.write(piece)
            if left:
                raise Malformed("the body of the request is shorter than it said", 502)
            await outgoing.finish()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            # A server that closed its ear may have answered before: that is read first.
            if not isinstance(error, Cut) or not self.wire.ended:
                self.failure = error
                self.wire.abort()

    async def _head(self, welcome: Callable[[], None] | None) -> ResponseHead:
        host = self.place.host
        while True:
            try:
                raw = await self.wire.head()
                if raw is None:
                    raise self.failure or _Stale
                head = parse_response(raw, self._errand.method)
            except Malformed as error:
                why = f"{host}: {error.reason}"
                raise self.failure or Unanswered(why) from None
            except TimeoutError:
                raise Unanswered(f"{host} did not answer in time", 504) from None
            if head.status >= 200 or (head.status == 101 and self._errand.upgrade):
                return head
            if head.status == 101:
                raise Unanswered(f"{host} changed the protocol unasked")
            if head.status == 100 and welcome is not None:
                welcome()
                welcome = None
