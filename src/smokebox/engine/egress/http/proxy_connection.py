"""The requests of one connection from a sandbox: checked, handled, sent and answered in turn."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.egress.handler import handler_name
from smokebox.egress.message import Request
from smokebox.engine.egress.http.handler_call import HandlerCall
from smokebox.engine.egress.http.reply import ProxyReply, explain, relay_websocket
from smokebox.engine.egress.http.target import Origin, check_target
from smokebox.engine.egress.http.upstream import (
    UpstreamFailure,
    UpstreamRequest,
    UpstreamResponse,
)
from smokebox.foundation.http1.body import BodyReader
from smokebox.foundation.http1.connection import Connection, ConnectionLost
from smokebox.foundation.http1.dial import Endpoint
from smokebox.foundation.http1.head import (
    MalformedMessage,
    RequestHead,
    parse_request,
    write_response,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.egress.policy import Egress, Verdict
    from smokebox.egress.scrub import Scrubber
    from smokebox.engine.egress.http.context import ProxyContext
    from smokebox.types import NetworkVerdict

# A program that sends a large body reads why it was refused only after it has sent some.
_MAX_DISCARDED = 1024 * 1024
_DISCARD_SECONDS = 2.0
_MAX_PATH = 2048


@dataclass(slots=True)
class _AuditEntry:
    """The parts of an audit event that become known while a request is served."""

    verdict: NetworkVerdict = "forwarded"
    rule: str = ""
    method: str | None = None
    path: str | None = None
    status: int | None = None
    handler: str | None = None
    reason: str = ""
    sent: int = 0
    received: int = 0


class ProxyConnection:
    """Serves one connection of a program with one server, as far as the policy allows.

    `on_lost` is called when the program leaves in the middle of a request.
    """

    def __init__(
        self,
        context: ProxyContext,
        connection: Connection,
        origin: Origin,
        on_lost: Callable[[], object],
    ) -> None:
        self._context = context
        self._connection = connection
        self._origin = origin
        self._on_lost = on_lost
        self._decision: tuple[Egress, Verdict] | None = None

    async def run(self) -> None:
        """Serve until the program leaves, or the connection cannot have another request."""
        while (raw := await self._next_head()) is not None:
            entry = _AuditEntry()
            body = None
            started = time.perf_counter()
            self._connection.on_lost = self._on_lost
            try:
                if isinstance(raw, MalformedMessage):
                    raise raw
                head = parse_request(raw)
                entry.method, entry.path = head.method, head.target[:_MAX_PATH]
                target = check_target(head, self._origin)
                body = BodyReader(
                    self._connection,
                    head.framing,
                    expects_continue=head.expects_continue,
                    count=self._count,
                )
                keep_alive = await self._serve(head, target, body, entry)
            except MalformedMessage as error:
                keep_alive = await self._refuse_malformed(error, entry)
            except BaseException as error:
                entry.verdict = "failed"
                left = isinstance(error, (ConnectionLost, TimeoutError, asyncio.CancelledError))
                entry.reason = (
                    "the program left" if left else f"{type(error).__name__} in the proxy"
                )
                raise
            finally:
                self._connection.on_lost = None
                self._log(entry, body, started)
            if not keep_alive:
                if body is not None:
                    await self._discard(body)
                return

    async def _next_head(self) -> bytes | MalformedMessage | None:
        try:
            head = await self._connection.read_head()
            return None if self._connection.ended else head
        except MalformedMessage as error:
            return error
        except TimeoutError:
            return None

    async def _serve(
        self, head: RequestHead, target: str, body: BodyReader, entry: _AuditEntry
    ) -> bool:
        """Serve one request; return whether there can be another."""
        verdict = self._decide()
        entry.rule, entry.handler = verdict.rule, handler_name(verdict.handler)
        if verdict.action == "refuse":
            return await self._explain(head, body, entry, UpstreamFailure(verdict.reason, 403))
        if over := self._context.meter.admit():
            failure = UpstreamFailure(over, 429, rule="limits")
            return await self._explain(head, body, entry, failure)
        origin, address = self._origin, verdict.address
        request = UpstreamRequest(
            method=head.method,
            endpoint=Endpoint(origin.host, origin.port, origin.tls, address, address is not None),
            target=target,
            host=head.host,
            fields=head.fields,
            body=body,
            framing=head.framing,
            # Other protocols are not offered to the server, which then stays with HTTP/1.1.
            upgrade=head.upgrade == "websocket",
        )
        try:
            if verdict.handler is not None:
                return await self._handle(verdict, request, head, body, entry)
            response = await self._context.pool.send(request)
            try:
                return await self._forward(response, head, body, entry, None)
            finally:
                response.release()
        except UpstreamFailure as error:
            if entry.status is not None:
                entry.rule = error.rule or entry.rule
                return self._break_off(entry, error.reason)
            return await self._explain(head, body, entry, error)

    async def _handle(
        self,
        verdict: Verdict,
        request: UpstreamRequest,
        head: RequestHead,
        body: BodyReader,
        entry: _AuditEntry,
    ) -> bool:
        assert verdict.handler is not None
        call = HandlerCall(self._context, request, self._origin, verdict, body)
        try:
            result = await call.run(verdict.handler)
            if isinstance(result, Request):
                response = await call.send(result)
                return await self._forward(response, head, body, entry, call.scrubber)
            passed = call.response_in(result)
            if passed is not None and passed.status == 101:
                return await self._switch(passed, entry, call.scrubber)
            entry.verdict = "forwarded" if call.has_sent else "answered"
            return await self._reply(call.reply(result), head, body, entry)
        finally:
            call.release()

    async def _forward(
        self,
        response: UpstreamResponse,
        head: RequestHead,
        body: BodyReader,
        entry: _AuditEntry,
        scrubber: Scrubber | None,
    ) -> bool:
        if response.status == 101:
            return await self._switch(response, entry, scrubber)
        reply = ProxyReply(
            status=response.status,
            reason=response.reason,
            fields=response.fields,
            body=response,
            length=response.length,
            scrubber=scrubber,
        )
        return await self._reply(reply, head, body, entry)

    async def _reply(
        self, reply: ProxyReply, head: RequestHead, body: BodyReader, entry: _AuditEntry
    ) -> bool:
        entry.status = reply.status
        keep_alive = await reply.write(
            self._connection,
            head.method,
            keep_alive=head.keep_alive and (body.done or body.whole),
            http11=head.http11,
            count=lambda size: self._count_received(size, entry),
        )
        if keep_alive and not body.done:
            await body.read()
        return keep_alive

    async def _switch(
        self, response: UpstreamResponse, entry: _AuditEntry, scrubber: Scrubber | None
    ) -> bool:
        """Pass a WebSocket on until it ends."""
        entry.status = 101
        reply = ProxyReply(status=101, reason="", fields=response.fields, scrubber=scrubber)
        fields = [*reply.scrubbed_fields(), ("connection", "Upgrade"), ("upgrade", "websocket")]
        self._connection.write(write_response(101, "Switching Protocols", fields))

        def count_sent(size: int) -> None:
            entry.sent += size
            self._count(size)

        await relay_websocket(
            self._connection,
            response.connection,
            scrubber,
            sent=count_sent,
            received=lambda size: self._count_received(size, entry),
        )
        return False

    async def _explain(
        self, head: RequestHead, body: BodyReader, entry: _AuditEntry, error: UpstreamFailure
    ) -> bool:
        """Send the proxy's own response to a request that got no other."""
        refused = error.status in (403, 429)
        entry.verdict = "refused" if refused else "failed"
        entry.reason, entry.rule = error.reason, error.rule or entry.rule
        reply = explain(
            error.status,
            error.reason,
            rule=entry.rule if refused else "",
            accept=head.get("accept"),
        )
        entry.status = reply.status
        await self._discard(body)
        # These bytes are not the sandbox's traffic: they are not counted, and no limit stops them.
        return await reply.write(
            self._connection,
            head.method,
            keep_alive=head.keep_alive and body.done,
            http11=head.http11,
            count=_count_nothing,
        )

    async def _refuse_malformed(self, error: MalformedMessage, entry: _AuditEntry) -> bool:
        entry.verdict, entry.rule, entry.reason = "refused", "http", error.reason
        if entry.status is not None:
            self._connection.abort()
            return False
        entry.status = error.status
        reply = explain(error.status, error.reason, rule="http")
        return await reply.write(
            self._connection, "", keep_alive=False, http11=True, count=_count_nothing
        )

    def _break_off(self, entry: _AuditEntry, reason: str) -> bool:
        """End the connection so that the program can tell that the response is not whole."""
        entry.verdict, entry.reason = "failed", reason
        self._connection.abort()
        return False

    async def _discard(self, body: BodyReader) -> None:
        """Read the rest of a small body, so that the response to it is not lost."""
        try:
            await body.discard(limit=_MAX_DISCARDED, seconds=_DISCARD_SECONDS)
        except UpstreamFailure:
            return

    def _decide(self) -> Verdict:
        policy = self._context.policy
        if self._decision is None or self._decision[0] is not policy:
            self._decision = (policy, policy.decide(self._origin.host, self._origin.port))
        return self._decision[1]

    def _count(self, size: int) -> None:
        if size and (over := self._context.meter.count(size)):
            raise UpstreamFailure(over, 429, rule="limits")

    def _count_received(self, size: int, entry: _AuditEntry) -> None:
        entry.received += size
        self._count(size)

    def _log(self, entry: _AuditEntry, body: BodyReader | None, started: float) -> None:
        self._context.audit_log.note(
            verdict=entry.verdict,
            host=self._origin.host,
            port=self._origin.port,
            rule=entry.rule,
            protocol="https" if self._origin.tls else "http",
            method=entry.method,
            path=entry.path,
            status=entry.status,
            sent=entry.sent + (body.size if body is not None else 0),
            received=entry.received,
            seconds=time.perf_counter() - started,
            handler=entry.handler,
            reason=entry.reason,
        )


def _count_nothing(size: int) -> None:
    """Count nothing."""
