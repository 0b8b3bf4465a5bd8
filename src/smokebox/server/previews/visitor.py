"""Connections of those who look at previews."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, cast

import httptools

from smokebox.errors import InvalidOption, SmokeboxError
from smokebox.server.previews.exchange import Exchange
from smokebox.server.previews.heads import Asked, Way, request_fields
from smokebox.server.previews.pages import Refusal, render
from smokebox.server.previews.sites import LONGEST_HEAD
from smokebox.server.previews.upstream import HIGH_WATER

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.engine import Sandbox
    from smokebox.server.previews.previews import Previews
    from smokebox.wire.preview import Target

    HandOver = Callable[[asyncio.Transport, bytes], None]

_log = logging.getLogger("smokebox.server")
_LINE = re.compile(rb"(GET|HEAD) (/[!-~]*) HTTP/1\.1\r\n")
_MOST_REMEMBERED = 8
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 20), (socket.TCP_KEEPCNT, 3))


class Before(NamedTuple):
    """What was made of a request: good for all whose bytes differ in their first line only."""

    asked: Asked
    target: Target
    way: Way
    fields: bytes


class Visitor(asyncio.Protocol):
    """One connection, with one request at a time; others wait.

    What begins as something else than a request for a preview is handed over, connection and
    all: proxies send requests for all kinds of names over one.
    """

    def __init__(self, previews: Previews, hand_over: HandOver | None = None) -> None:
        self.previews = previews
        self.gone = False
        # Whether it has more to send than who asks takes.
        self.full = False
        self.used_at = 0.0
        self._hand_over = hand_over
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._partial = b""
        self._asked = Asked()
        self._size = 0
        self._in_head = self._parsing = self._paused = False
        self._incoming: Exchange | None = None
        self._exchange: Exchange | None = None
        self._queue: deque[Exchange] = deque()
        self._prefix = self._fields = b""
        # What was asked for last, as it is asked for again and again.
        self._target: Target | None = None
        self._sandbox: Sandbox | None = None
        self._before: dict[bytes, Before] = {}

    @property
    def idle(self) -> bool:
        """Whether it waits for a request."""
        return self._exchange is None

    @property
    def answering(self) -> bool:
        """Whether an answer with an end is on its way."""
        return self._exchange is not None and not self._exchange.spliced

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Of asyncio: it begins."""
        # Those of uvloop do not say that they are transports.
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(HIGH_WATER)
        sock = transport.get_extra_info("socket")
        self._local = sock is not None and sock.family == socket.AF_UNIX
        peer = transport.get_extra_info("peername")
        self._client = peer[0].encode() if isinstance(peer, tuple) else b"127.0.0.1"
        self.used_at = self._loop.time()
        self.previews.visitors.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        """Of asyncio: it has ended."""
        self.gone = True
        self.previews.visitors.discard(self)
        self._queue.clear()
        if self._exchange is not None:
            self._exchange.end()
        self.previews.ended()

    def data_received(self, data: bytes) -> None:
        """Of asyncio: a piece of a request, or of what follows an upgrade."""
        exchange = self._exchange
        if exchange is not None and exchange.upgrade:
            exchange.body(data)
            return
        if exchange is None and not self._parsing:
            if self._partial:
                data, self._partial = self._partial + data, b""
            line = _LINE.match(data)
            if line is not None:
                fields = data[line.end() :]
                before = self._before.get(fields)
                if before is not None:
                    self._repeat(line[1], line[2], before)
                    return
                if data.find(b"\r\n\r\n") == len(data) - 4:
                    self._fields = fields
            if self._hand_over is not None:
                kind = self.previews.sites.kind_of(data)
                if kind == "partial":
                    self._partial = data
                    return
                if kind == "other":
                    self._give_away(data)
                    return
        self._feed(data)
        self._fields = b""
        if self._in_head:
            self._size += len(data)
            if self._size > LONGEST_HEAD:
                self._reject(httptools.HttpParserError("its head is too long"))

    def pause_writing(self) -> None:
        """Of asyncio: who asks does not read as fast as the sandbox sends."""
        self.full = True
        if self._exchange is not None:
            self._exchange.hold()

    def resume_writing(self) -> None:
        """Of asyncio: it has caught up."""
        self.full = False
        if self._exchange is not None:
            self._exchange.go_on()

    def on_message_begin(self) -> None:
        """Of httptools: a request begins."""
        self._asked = Asked()
        self._size = 0
        self._in_head = self._parsing = True

    def on_url(self, url: bytes) -> None:
        """Of httptools: what is asked for."""
        self._asked.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Of httptools: a header, or one that follows the body, which nobody waits for."""
        if self._in_head:
            name = name.lower()
            self._asked.headers.append((name, value))
            self._asked.known[name] = value

    def on_headers_complete(self) -> None:
        """Of httptools: the head is there."""
        self._in_head = False
        asked, parser = self._asked, self._parser
        asked.method = parser.get_method()
        asked.old = parser.get_http_version() == "1.0"
        asked.keep_alive = parser.should_keep_alive()
        if parser.should_upgrade():
            asked.upgrade = asked.known.get(b"upgrade", b"").lower() == b"websocket"
            if asked.method == b"CONNECT" or (not asked.upgrade and asked.has_body):
                raise httptools.HttpParserError("an upgrade to what is not known here")
        exchange = self._incoming = Exchange(self, asked)
        if self._exchange is None:
            self._exchange = exchange
            exchange.start()
        else:
            self._queue.append(exchange)
        if exchange.blocked or self._queue:
            self.update_reading()

    def on_body(self, data: bytes) -> None:
        """Of httptools: a piece of the body."""
        if self._incoming is not None:
            self._incoming.body(data)

    def on_message_complete(self) -> None:
        """Of httptools: the request is whole."""
        self._parsing = False
        exchange, self._incoming = self._incoming, None
        if exchange is not None:
            exchange.complete()

    def target_of(self, asked: Asked) -> Target:
        """What a request asks for. Raises `Refusal`."""
        host = asked.known.get(b"host", b"")
        if sum(name == b"host" for name, _ in asked.headers) != 1 or not asked.target.startswith(
            (b"/", b"*")
        ):
            raise _malformed("it has no name, or several")
        sites = self.previews.sites
        target = sites.target_of(host, asked.target)
        if target is None:
            raise self.previews.unknown()
        prefix = b"" if sites.is_preview(host) else target.path.encode()
        self._prefix = prefix
        if target != self._target:
            self._target, self._sandbox = target, None
        return target

    def sandbox_of(self, target: Target) -> Sandbox:
        """The sandbox of a target. Raises `Refusal`."""
        if self._sandbox is None or self._target is not target:
            self._target, self._sandbox = target, self.previews.gate.find(target)
        return self._sandbox

    def look(self, asked: Asked, target: Target) -> Before:
        """What is to be made of a request, which is remembered for the next of that kind."""
        known = asked.known
        host = known[b"host"].strip()
        forwarded = b"x-forwarded-host" in known
        client, proto = self._client, self.previews.sites.proto_of(host)
        if forwarded and self._is_trusted(known.get(b"proxy-authorization")):
            host = known[b"x-forwarded-host"]
            client = known.get(b"x-forwarded-for", client)
            proto = known.get(b"x-forwarded-proto", proto)
        way = Way(client=client, proto=proto, host=host, prefix=self._prefix)
        before = Before(asked, target, way, request_fields(asked, way))
        plain = asked.keep_alive and not (asked.has_body or asked.upgrade or way.prefix)
        if self._fields and plain and not forwarded and len(self._before) < _MOST_REMEMBERED:
            self._before[self._fields] = before
        return before

    def write(self, data: bytes) -> None:
        """Send a piece of an answer."""
        self._transport.write(data)

    def done(self, exchange: Exchange) -> None:
        """Of `Exchange`: it is over."""
        self._exchange = None
        self.used_at = self._loop.time()
        if not exchange.keep_alive or self.previews.draining:
            self._queue.clear()
            self._transport.close()
            self.previews.ended()
        elif self._queue:
            self._loop.call_soon(self._next)
        elif self._paused:
            self.update_reading()

    def update_reading(self) -> None:
        """Read what comes, unless nobody takes it."""
        exchange = self._exchange
        wanted = bool(self._queue) or (exchange is not None and exchange.blocked)
        if wanted == self._paused or self.gone or self._transport.is_closing():
            return
        self._paused = wanted
        if wanted:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def keep_alive(self) -> None:
        """Notice when nobody is there any more, though nothing is said for hours."""
        sock = self._transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def close(self) -> None:
        """End the connection once all was sent."""
        self._transport.close()

    def abort(self) -> None:
        """End the connection so that who asks notices."""
        self._transport.abort()

    def shutdown(self) -> None:
        """Of uvicorn: the server ends."""
        if self.idle:
            self._transport.close()

    def _next(self) -> None:
        if self._exchange is None and self._queue and not self.gone:
            self._exchange = self._queue.popleft()
            self._exchange.start()
            self.update_reading()

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[upgrade.args[0] :]
            exchange = self._exchange
            if exchange is not None and exchange.upgrade and rest:
                exchange.body(rest)
            elif rest:
                self._feed(rest)
        except httptools.HttpParserError as error:
            self._reject(error)

    def _reject(self, error: httptools.HttpParserError) -> None:
        cause = error.__context__ or error
        if not isinstance(cause, httptools.HttpParserError):
            _log.error("a preview failed", exc_info=cause)
        if self._exchange is not None and self._exchange is not self._incoming:
            # An answer is on its way: nothing can be said in between.
            self.abort()
            return
        refusal = cause if isinstance(cause, Refusal) else _malformed(str(cause))
        page = render(refusal, for_browser=False, head_only=False, keep_alive=False)
        if self._exchange is None or not self._exchange.begun:
            self.previews.count(refusal.status)
            self._transport.write(page)
            self._transport.close()
        else:
            self.abort()

    def _repeat(self, method: bytes, target: bytes, before: Before) -> None:
        """A request like one before, but for its first line."""
        former = before.asked
        asked = Asked(method, target, former.headers, former.known)
        exchange = self._exchange = Exchange(self, asked)
        exchange.received = True
        exchange.start(before)

    def _give_away(self, data: bytes) -> None:
        assert self._hand_over is not None
        self.previews.visitors.discard(self)
        self._hand_over(self._transport, data)

    def _is_trusted(self, told: bytes | None) -> bool:
        if self._local:
            return True
        try:
            self.previews.keys.holder(told)
        except SmokeboxError:
            return False
        return True


def _malformed(problem: str) -> Refusal:
    return Refusal(
        400,
        InvalidOption(
            f"this request is not one of HTTP: {problem}.", hint="Send another.", option="request"
        ),
    )
