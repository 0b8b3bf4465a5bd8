"""HTTP connections of a sandbox: TLS is ended in the server's name, requests served in turn."""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from smokebox.egress.handler import handler_name
from smokebox.egress.outbound import (
    EgressContext,
    OutboundCall,
    OutboundResponse,
    admit,
    count_bytes,
    explain,
    make_endpoint,
)
from smokebox.egress.pattern import normal_host
from smokebox.egress.upstream import EgressFailure, UpstreamRequest
from smokebox.egress.urls import DEFAULT_PORTS, Origin
from smokebox.engine.egress.http_reply import relay_websocket, write_reply
from smokebox.foundation.http1.body import BodyReader
from smokebox.foundation.http1.connection import Connection, ConnectionLost
from smokebox.foundation.http1.head import (
    MalformedMessage,
    RequestHead,
    parse_request,
    write_response,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.egress.policy import Egress, Verdict
    from smokebox.engine.egress.audit_log import AuditLog
    from smokebox.engine.egress.authority import Authority
    from smokebox.engine.egress.listener import IncomingConnection
    from smokebox.types import NetworkVerdict

_HANDSHAKE_SECONDS = 10.0
# Maximum time that a program may keep a silent connection open.
_SILENCE_SECONDS = 300.0
# A program that sends a large body reads why it was refused only after it has sent some.
_MAX_DISCARDED = 1024 * 1024
_DISCARD_SECONDS = 2.0
_MAX_PATH = 2048

_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
_ABSOLUTE = re.compile(r"(https?)://([^/?#]*)(.*)", re.IGNORECASE)


class ProxyContext(EgressContext, Protocol):
    """The egress proxy of a sandbox, as its HTTP connections use it."""

    @property
    def authority(self) -> Authority: ...
    @property
    def audit_log(self) -> AuditLog: ...


async def serve(proxy: ProxyContext, incoming: IncomingConnection) -> None:
    """Serve one connection until it ends, and close it."""
    host = incoming.host or incoming.sni or incoming.address
    origin = Origin("https" if incoming.hello else "http", normal_host(host), incoming.port)
    if reason := _find_tls_problem(incoming):
        _log_refusal(proxy, origin, reason)
        incoming.sock.close()
        return
    task = asyncio.current_task()
    assert task is not None
    connection = Connection(timeout=_SILENCE_SECONDS)
    try:
        if not await _accept(proxy, incoming, origin, connection):
            return
        # Cancel the request of a program that has left.
        await ProxyConnection(proxy, connection, origin, task.cancel).run()
        if isinstance(connection.error, ssl.SSLError):
            _log_refusal(proxy, origin, _tls_reason(connection.error))
    except (ConnectionLost, TimeoutError):
        connection.abort()
    except asyncio.CancelledError:
        connection.abort()
        if not connection.lost or task.uncancel() > 0:
            raise
    except BaseException:
        connection.abort()
        raise
    else:
        connection.close()


def _find_tls_problem(incoming: IncomingConnection) -> str:
    """Return the reason to refuse a connection by its first bytes, or nothing."""
    if not incoming.hello:
        return "" if incoming.port != 443 else "the connection to port 443 is not TLS"
    if incoming.sni is None:
        return "TLS without a server name (SNI) cannot be checked against the policy"
    if incoming.host is not None and normal_host(incoming.sni) != normal_host(incoming.host):
        return f"TLS names {incoming.sni!r:.100}, and the connection goes to {incoming.host}"
    return ""


async def _accept(
    proxy: ProxyContext, incoming: IncomingConnection, origin: Origin, connection: Connection
) -> bool:
    loop = asyncio.get_running_loop()
    context = proxy.authority.context_for(origin.host) if origin.tls else None
    try:
        await loop.connect_accepted_socket(
            lambda: connection,
            incoming.sock,
            ssl=context,
            ssl_handshake_timeout=_HANDSHAKE_SECONDS if context else None,
        )
    except (OSError, TimeoutError) as error:
        incoming.sock.close()
        _log_refusal(proxy, origin, _tls_reason(error))
        return False
    return True


def _tls_reason(error: Exception) -> str:
    # In TLS 1.3 the alert of the program arrives after the handshake has ended here.
    if isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or ""):
        return "the program does not trust the proxy's certificate; pass_through= would pass it"
    return "the program broke off TLS with the proxy; it may not trust its certificate"


def _log_refusal(proxy: ProxyContext, origin: Origin, reason: str) -> None:
    proxy.audit_log.add(
        verdict="refused",
        host=origin.host,
        port=origin.port,
        rule="tls",
        protocol="https" if origin.tls else "http",
        reason=reason,
    )


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
    """Serves the requests of one connection to one server, as far as the policy allows.

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
        try:
            admit(verdict, self._context.meter)
            return await self._forward(head, target, body, entry, verdict)
        except EgressFailure as error:
            if entry.status is None:
                return await self._explain(head, body, entry, error)
            # Reset the connection, so that the program can tell that the response is not whole.
            entry.verdict, entry.reason = "failed", error.reason
            entry.rule = error.rule or entry.rule
            self._connection.abort()
            return False

    async def _forward(
        self,
        head: RequestHead,
        target: str,
        body: BodyReader,
        entry: _AuditEntry,
        verdict: Verdict,
    ) -> bool:
        request = UpstreamRequest(
            method=head.method,
            endpoint=make_endpoint(self._origin, verdict.address),
            target=target,
            host=head.host,
            fields=head.fields,
            body=body,
            framing=head.framing,
            # Other protocols are not offered to the server, which then stays with HTTP/1.1.
            upgrade=head.upgrade == "websocket",
        )
        call = OutboundCall(self._context, request, self._origin, verdict, body)
        try:
            response = await call.send()
            if response.status == 101:
                return await self._switch(response, entry)
            entry.verdict = "forwarded" if call.has_sent else "answered"
            entry.status = response.status
            keep_alive = await write_reply(
                self._connection,
                response,
                head.method,
                keep_alive=head.keep_alive and (body.done or body.whole),
                http11=head.http11,
                count=lambda size: self._count_received(size, entry),
            )
            if keep_alive and not body.done:
                await body.read()
            return keep_alive
        finally:
            call.release()

    async def _switch(self, response: OutboundResponse, entry: _AuditEntry) -> bool:
        """Relay a WebSocket until it ends."""
        assert response.upstream is not None
        entry.status = 101
        fields = [*response.scrub_fields(), ("connection", "Upgrade"), ("upgrade", "websocket")]
        self._connection.write(write_response(101, "Switching Protocols", fields))

        def count_sent(size: int) -> None:
            entry.sent += size
            self._count(size)

        await relay_websocket(
            self._connection,
            response.upstream.connection,
            response.scrubber,
            sent=count_sent,
            received=lambda size: self._count_received(size, entry),
        )
        return False

    async def _explain(
        self, head: RequestHead, body: BodyReader, entry: _AuditEntry, error: EgressFailure
    ) -> bool:
        """Send the proxy's own response to a request that got no other."""
        entry.verdict = "refused" if error.status in (403, 429) else "failed"
        entry.reason, entry.rule = error.reason, error.rule or entry.rule
        response = explain(error, entry.rule, accept=head.get("accept"))
        entry.status = response.status
        await self._discard(body)
        # These bytes are not the sandbox's traffic: they are not counted, and no limit stops them.
        return await write_reply(
            self._connection,
            response,
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
        response = explain(EgressFailure(error.reason, error.status, rule="http"), "http")
        return await write_reply(
            self._connection, response, "", keep_alive=False, http11=True, count=_count_nothing
        )

    async def _discard(self, body: BodyReader) -> None:
        """Read the rest of a small body, so that the response to it is not lost."""
        try:
            await body.discard(limit=_MAX_DISCARDED, seconds=_DISCARD_SECONDS)
        except EgressFailure:
            return

    def _decide(self) -> Verdict:
        policy = self._context.policy
        if self._decision is None or self._decision[0] is not policy:
            self._decision = (policy, policy.decide(self._origin.host, self._origin.port))
        return self._decision[1]

    def _count(self, size: int) -> None:
        count_bytes(size, self._context.meter)

    def _count_received(self, size: int, entry: _AuditEntry) -> None:
        entry.received += size
        self._count(size)

    def _log(self, entry: _AuditEntry, body: BodyReader | None, started: float) -> None:
        self._context.audit_log.add(
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


def check_target(head: RequestHead, origin: Origin) -> str:
    """Return the path and query to request from the server.

    Every name in the request must be that of the server that the policy was checked for.

    Raises:
        MalformedMessage: The request names another server, or is not one to a server.
    """
    target = head.target
    if head.method == "CONNECT":
        raise MalformedMessage("CONNECT is not supported: connect to the host itself", 405)
    if not _names(head.host, origin):
        raise MalformedMessage(
            f"Host {head.host!r:.100} is not {origin.authority}, where the connection goes", 421
        )
    if not target.startswith("/"):
        target = _path_of_absolute(head, origin)
    if "#" in target:
        raise MalformedMessage("the target of the request has a fragment")
    return target


def _path_of_absolute(head: RequestHead, origin: Origin) -> str:
    if head.target == "*" and head.method == "OPTIONS":
        return "*"
    match = _ABSOLUTE.fullmatch(head.target)
    if match is None:
        raise MalformedMessage("the target of the request is neither a path nor a URL")
    scheme, authority, rest = match.groups()
    if scheme.lower() != origin.scheme or not _names(authority, origin):
        raise MalformedMessage(f"the URL of the request is not of {origin}")
    return rest if rest.startswith("/") else f"/{rest}"


def _names(authority: str, origin: Origin) -> bool:
    """Return whether a Host header names this server."""
    if authority == origin.authority:
        return True
    match = _AUTHORITY.fullmatch(authority)
    if match is None:
        raise MalformedMessage(f"Host {authority!r:.100} is not a host")
    port = int(match[2]) if match[2] else DEFAULT_PORTS[origin.scheme]
    return normal_host(match[1]) == origin.host and port == origin.port


def _count_nothing(size: int) -> None:
    """Count nothing."""
