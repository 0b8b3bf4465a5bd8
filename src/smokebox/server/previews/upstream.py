"""Connections to the servers in sandboxes: one request at a time, kept for the next."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol, cast

import httptools

if TYPE_CHECKING:
    from smokebox.server.previews.heads import Headers

    Key = tuple[str, int, int]

# Many a server closes what is idle for five seconds.
_IDLE_SECONDS = 4.0
_MOST_IDLE = 64
HIGH_WATER = 1 << 18
_NO_BODY = (204, 304)
_SWITCHING = 101


class Asker(Protocol):
    """Who waits for an answer. What the first three give is sent in their order."""

    bodiless: bool
    upgrade: bool

    def head(
        self, status: int, reason: bytes, headers: Headers, known: dict[bytes, bytes]
    ) -> bytes: ...
    def piece(self, data: bytes) -> bytes: ...
    def tail(self) -> bytes: ...
    def send(self, data: bytes) -> None: ...
    def answered(self) -> None: ...
    def switched(self) -> None: ...
    def failed(self, *, begun: bool, retry: bool) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...


class Pool:
    """Connections that are idle, by sandbox, run and port."""

    def __init__(self) -> None:
        self._idle: dict[Key, list[Upstream]] = {}

    def take(self, key: Key) -> Upstream | None:
        """The one that was used last, unless it may be closed by now."""
        idle = self._idle.get(key)
        if not idle:
            return None
        upstream = idle.pop()
        if upstream.idle_for() < _IDLE_SECONDS:
            return upstream
        for one in (upstream, *idle):
            one.close()
        del self._idle[key]
        return None

    def put(self, upstream: Upstream) -> None:
        """Keep one for later."""
        idle = self._idle.setdefault(upstream.key, [])
        if len(idle) < _MOST_IDLE:
            idle.append(upstream)
        else:
            upstream.close()

    def remove(self, upstream: Upstream) -> None:
        """Forget one that has ended."""
        idle = self._idle.get(upstream.key, [])
        if upstream in idle:
            idle.remove(upstream)
        if not idle:
            self._idle.pop(upstream.key, None)

    def sweep(self) -> None:
        """Close those that nobody has wanted for a while."""
        for idle in list(self._idle.values()):
            for upstream in list(idle):
                if upstream.idle_for() >= _IDLE_SECONDS:
                    self.remove(upstream)
                    upstream.close()

    def close(self) -> None:
        """Close all."""
        for idle in list(self._idle.values()):
            for upstream in list(idle):
                upstream.close()
        self._idle.clear()


class Upstream(asyncio.Protocol):
    """One connection to a port of a sandbox."""

    def __init__(self, pool: Pool, key: Key) -> None:
        self.key = key
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._asker: Asker | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._out: list[bytes] = []
        self._headers: Headers = []
        self._used_at = 0.0
        self._fresh = True
        self._heard = self._begun = self._complete = self._spliced = self._endless = False

    def ask(self, asker: Asker, request: bytes) -> None:
        """Send a request, whose answer goes to `asker`."""
        self._asker = asker
        self._heard = self._begun = self._complete = self._endless = False
        # Whoever asked before may have held it back with the last piece of its answer.
        self.resume()
        self._transport.write(request)

    def write(self, data: bytes) -> None:
        """Send more of it."""
        self._transport.write(data)

    def idle_for(self) -> float:
        """Seconds since the last answer."""
        return self._loop.time() - self._used_at

    def pause(self) -> None:
        """Read nothing for a while."""
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def close(self) -> None:
        """End the connection, for whoever is at its other end to see."""
        self._asker = None
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Of asyncio: it begins."""
        # Those of uvloop do not say that they are transports.
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(HIGH_WATER)

    def data_received(self, data: bytes) -> None:
        """Of asyncio: a piece of an answer."""
        asker = self._asker
        if asker is None:
            self.close()
            return
        if self._spliced:
            asker.send(data)
            return
        self._heard = True
        rest = b""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[upgrade.args[0] :]
        except httptools.HttpParserError:
            self._fail()
            return
        if self._out:
            asker.send(b"".join(self._out))
            self._out.clear()
        if self._spliced:
            asker.switched()
            if rest:
                asker.send(rest)
        elif self._complete:
            self._end(asker)

    def connection_lost(self, error: Exception | None) -> None:
        """Of asyncio: it has ended."""
        asker, self._asker = self._asker, None
        if asker is None:
            self._pool.remove(self)
        elif self._endless and error is None:
            if last := asker.tail():
                asker.send(last)
            asker.answered()
        else:
            asker.failed(begun=self._begun, retry=not self._fresh and not self._heard)

    def pause_writing(self) -> None:
        """Of asyncio: the sandbox does not read as fast as who asks sends."""
        if self._asker is not None:
            self._asker.pause()

    def resume_writing(self) -> None:
        """Of asyncio: it has caught up."""
        if self._asker is not None:
            self._asker.resume()

    def on_message_begin(self) -> None:
        """Of httptools: an answer begins."""
        self._headers = []
        self._reason = b""
        self._in_head = True

    def on_status(self, reason: bytes) -> None:
        """Of httptools: what the status is called."""
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        """Of httptools: a header, or one that follows the body, which nobody waits for."""
        if self._in_head:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Of httptools: the head is there."""
        self._in_head = False
        status, asker = self._parser.get_status_code(), self._asker
        self._interim = status < 200 and status != _SWITCHING
        if asker is None or self._interim:
            return
        if status == _SWITCHING:
            if not asker.upgrade:
                raise httptools.HttpParserError("an upgrade that nobody asked for")
            self._spliced = True
        self._begun = True
        known = dict(self._headers)
        self._out.append(asker.head(status, self._reason, self._headers, known))
        self._endless = not (
            b"content-length" in known
            or b"transfer-encoding" in known
            or asker.bodiless
            or self._spliced
            or status in _NO_BODY
        )
        if asker.bodiless:
            self._keep = self._parser.should_keep_alive()
            self._complete = True
            # This one would wait for a body.
            self._parser = httptools.HttpResponseParser(self)

    def on_body(self, data: bytes) -> None:
        """Of httptools: a piece of the body."""
        if self._asker is not None and not self._complete:
            self._out.append(self._asker.piece(data))
        else:
            self._keep = False

    def on_message_complete(self) -> None:
        """Of httptools: that was all."""
        if self._interim or self._spliced or self._complete or self._asker is None:
            return
        self._keep = self._parser.should_keep_alive()
        self._complete = True
        if last := self._asker.tail():
            self._out.append(last)

    def _end(self, asker: Asker) -> None:
        self._asker = None
        self._fresh = False
        if self._keep and not asker.upgrade and not self._transport.is_closing():
            self._used_at = self._loop.time()
            self._pool.put(self)
        else:
            self.close()
        asker.answered()

    def _fail(self) -> None:
        asker, self._asker = self._asker, None
        self._transport.abort()
        if asker is not None:
            asker.failed(begun=self._begun, retry=False)
