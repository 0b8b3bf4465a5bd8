"""The reverse proxy of previews: one client connection, and its requests in turn."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.errors import (
    DeadlineExceeded,
    InvalidOption,
    LimitReached,
    SandboxGone,
    ServiceUnavailable,
    SmokeboxError,
)
from smokebox.foundation.http1.body import BodyReader, BodyWriter, relay_body
from smokebox.foundation.http1.client import ClientRequest, ClientResponse, RequestBodyFailed, send
from smokebox.foundation.http1.connection import (
    Connection,
    ConnectionLost,
    relay_both,
    relay_bytes,
)
from smokebox.foundation.http1.head import (
    MalformedMessage,
    RequestHead,
    parse_request,
    response_framing,
    write_fields,
    write_response,
)
from smokebox.foundation.loop_shares import run_in
from smokebox.server.previews.access import Route, not_found
from smokebox.server.previews.credentials import (
    PreviewCredentials,
    is_navigation,
    redirect,
    tokens_in,
    without_tokens,
)
from smokebox.server.previews.error_page import Refusal, render
from smokebox.server.previews.headers import ForwardedFor, request_fields, response_fields

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.engine import Sandbox
    from smokebox.errors import Unauthorized
    from smokebox.server.previews.previews import Previews
    from smokebox.wire.preview import PreviewTarget

    HandOver = Callable[[asyncio.Transport, bytes], None]

_log = logging.getLogger("smokebox.server")
# Sent over an idle connection, which the app may be closing: they can be sent again.
_SAFE = frozenset(("GET", "HEAD", "OPTIONS"))
_REQUEST_LINE = re.compile(rb"(GET|HEAD) (/[!-~]*) HTTP/1\.1\r\n")
_MAX_REMEMBERED = 8
# A client reads a response that comes early only after it has sent the body.
_DISCARD_SECONDS = 30.0
# From the first byte of a response's head to its last.
_HEAD_SECONDS = 30.0
_FORWARDED = "x-forwarded-for"


@dataclass(slots=True)
class _Request:
    """A request, the preview it names, and the bytes of its headers for the app.

    `head` may be that of an earlier request, whose method and target differed.
    """

    method: str
    path: str
    head: RequestHead
    target: PreviewTarget | None
    forwarded: ForwardedFor
    fields: bytes
    credentials: PreviewCredentials
    token_in_url: bool = False


class PreviewProxy:
    """Serves the requests of one client connection until it ends.

    Args:
        hand_over: Takes the connection, with the bytes read, if a request is not for a preview:
            reverse proxies send requests for different hosts over one connection.
    """

    def __init__(
        self, previews: Previews, connection: Connection, hand_over: HandOver | None = None
    ) -> None:
        self.idle_since: float | None = None
        self.has_responded = False
        self._previews = previews
        self._connection = connection
        self._hand_over = hand_over
        self._loop = asyncio.get_running_loop()
        # Requests of one client differ mostly in their first line: the rest is parsed once.
        self._remembered: dict[bytes, _Request] = {}
        self._sandbox: tuple[PreviewTarget, Sandbox] | None = None
        self._relaying_websocket = False
        self._head_sent = False
        sock = connection.transport.get_extra_info("socket")
        self._is_local = sock is not None and sock.family == socket.AF_UNIX
        peer = connection.transport.get_extra_info("peername")
        self._client = peer[0] if isinstance(peer, tuple) else "127.0.0.1"
        self._by_proxy = not self._is_local and previews.connections.is_trusted(self._client)
        previews.proxies.add(self)
        self.task = self._loop.create_task(self._run())

    @property
    def is_responding(self) -> bool:
        """True while a response that will end is on its way."""
        return self.idle_since is None and not self._relaying_websocket

    def cut(self, error: Unauthorized | None = None) -> None:
        """Reset the connection: the port or its key is gone, or the server stops."""
        self._connection.abort()
        self.task.cancel()

    def close(self) -> None:
        """Close an idle connection."""
        self._connection.close()

    async def _run(self) -> None:
        connection = self._connection
        try:
            while await self._serve_next():
                pass
        except asyncio.CancelledError:
            # The client left, or `cut` was called.
            connection.abort()
        except ConnectionLost:
            connection.abort()
        except Exception:
            _log.exception("a preview failed")
            connection.abort()
        finally:
            self._previews.remove(self)

    async def _serve_next(self) -> bool:
        """Serve the next request; return whether there can be another."""
        connection, previews = self._connection, self._previews
        self.idle_since = self._loop.time()
        try:
            raw = await connection.read_head(seconds=previews.head_seconds)
            if raw is None:
                connection.close()
                return False
            request = self._remembered_request(raw)
            if request is None:
                if self._hand_over is not None and previews.names.request_kind(raw) == "other":
                    self._hand_over(connection.transport, raw + connection.take())
                    return False
                request = self._parse(raw)
        except TimeoutError:
            connection.close()
            return False
        except MalformedMessage as error:
            self._refuse(_malformed(error))
            connection.close()
            return False
        self.idle_since, self._head_sent = None, False
        self.has_responded = True
        head = request.head
        body = None
        if head.framing:
            body = BodyReader(connection, head.framing, expects_continue=head.expects_continue)
        connection.on_lost = self.task.cancel
        keep_alive = await self._serve_counted(request, body)
        connection.on_lost = None
        if keep_alive and (body is None or body.done) and not previews.draining:
            return True
        if body is not None:
            await body.discard(seconds=_DISCARD_SECONDS)
        connection.close()
        return False

    async def _serve_counted(self, request: _Request, body: BodyReader | None) -> bool:
        """Count the request of a client behind a trusted proxy while it is served."""
        if not self._by_proxy:
            return await self._serve(request, body)
        try:
            with self._previews.connections.request(request.forwarded.client):
                return await self._serve(request, body)
        except LimitReached as error:
            self._refuse(Refusal(429, error), request)
            return False

    async def _serve(self, request: _Request, body: BodyReader | None) -> bool:
        """Send one request to the app, and its response to the client."""
        previews, target, head = self._previews, request.target, request.head
        try:
            if previews.draining:
                raise Refusal(503, previews.drain.refusal())
            if target is None:
                raise not_found()
            if self._sandbox is None or self._sandbox[0] != target:
                self._sandbox = (target, previews.access.sandbox(target))
            sandbox = self._sandbox[1]
            route = await previews.access.route(sandbox, target, request.credentials, request.path)
            token = self._take_token(route, request)
            if token is not None and is_navigation(head):
                keep_alive = head.keep_alive and (body is None or body.done)
                previews.count(303)
                self._connection.write(
                    redirect(
                        request.path,
                        token,
                        head,
                        https=request.forwarded.proto == "https",
                        keep_alive=keep_alive,
                    )
                )
                return keep_alive
            route.ports.add_stream(route.port, self)
            if route.key is not None:
                previews.running.add(route.key, self)
            try:
                return await run_in(sandbox.share, self._forward(route, request, body))
            finally:
                route.ports.remove_stream(route.port, self)
                if route.key is not None:
                    previews.running.remove(route.key, self)
        except Refusal as refusal:
            keep_alive = head.keep_alive and (body is None or body.done)
            self._refuse(refusal, request, keep_alive=keep_alive)
            return keep_alive

    def _take_token(self, route: Route, request: _Request) -> str | None:
        """Remove the tokens of a port from the path, and return one that grants access to it."""
        if request.forwarded.prefix or not (tokens := tokens_in(request.path)):
            return None
        access, row = self._previews.access, route.row
        path = without_tokens(request.path, lambda token: access.knows(row, token))
        request.token_in_url, request.path = path != request.path, path
        return next((token for token in tokens if access.opens(row, token)), None)

    async def _forward(self, route: Route, request: _Request, body: BodyReader | None) -> bool:
        head, run = request.head, route.run
        prefix, timeout = request.forwarded.prefix, self._previews.timeout
        path = request.path[len(prefix) - 1 :] if prefix else request.path
        outgoing = ClientRequest(
            method=request.method,
            head=f"{request.method} {path} HTTP/1.1\r\n".encode("latin-1") + request.fields,
            body=body or b"",
            framing=head.framing,
            upgrade=bool(head.upgrade),
            head_seconds=min(_HEAD_SECONDS, timeout),
        )
        response = None
        try:
            response = await send(
                self._previews.pool,
                (run.id, run.generation, route.port),
                lambda: _connect(route, timeout),
                outgoing,
                reuse=request.method in _SAFE and body is None and not head.upgrade,
            )
            if response.ambiguous:
                raise MalformedMessage("the response has two lengths", 502)
            if response.status == 101:
                await self._relay_websocket(response, request)
                return False
            return await self._respond(response, request)
        except RequestBodyFailed as error:
            if isinstance(error.error, MalformedMessage) and not self._head_sent:
                raise _malformed(error.error) from None
            raise ConnectionLost(str(error)) from error
        except ServiceUnavailable as error:
            raise Refusal(502, error) from None
        except SandboxGone as error:
            raise Refusal(410, error) from None
        except (OSError, MalformedMessage) as error:
            if self._head_sent:
                raise ConnectionLost(str(error)) from error
            if isinstance(error, TimeoutError):
                raise _timed_out(route.port, timeout) from error
            raise _no_response(route.port, error) from error
        finally:
            if response is not None:
                await response.aclose()

    async def _respond(self, response: ClientResponse, request: _Request) -> bool:
        head = request.head
        self._previews.count(response.status)
        framing = response_framing(
            request.method,
            response.status,
            response.length,
            keep_alive=head.keep_alive,
            http11=head.http11,
        )
        fields = response_fields(
            response.fields, request.forwarded, token_in_url=request.token_in_url
        )
        raw = write_response(response.status, response.reason, fields + framing.fields)
        self._head_sent = True
        writer = BodyWriter(self._connection, raw, chunked=framing.chunked)
        await relay_body(response, writer)
        return framing.keep_alive

    async def _relay_websocket(self, response: ClientResponse, request: _Request) -> None:
        """Relay bytes both ways until either side closes."""
        client, app = self._connection, response.connection
        self._previews.count(response.status)
        fields = response_fields(response.fields, request.forwarded)
        fields += [("connection", "upgrade"), ("upgrade", "websocket")]
        self._head_sent = self._relaying_websocket = True
        client.write(write_response(101, response.reason, fields))
        client.enable_keepalive()
        # The frames of a WebSocket may be hours apart.
        app.timeout = None
        await relay_both(relay_bytes(client, app), relay_bytes(app, client))

    def _remembered_request(self, raw: bytes) -> _Request | None:
        """Return a request whose headers are those of an earlier one."""
        line = _REQUEST_LINE.match(raw)
        if line is None or (known := self._remembered.get(raw[line.end() :])) is None:
            return None
        method, path = line[1].decode(), line[2].decode()
        return _Request(
            method,
            path,
            known.head,
            known.target,
            known.forwarded,
            known.fields,
            known.credentials,
        )

    def _parse(self, raw: bytes) -> _Request:
        """Parse a request. Raises `MalformedMessage`."""
        names = self._previews.names
        head = parse_request(raw)
        if not head.target.startswith(("/", "*")):
            raise MalformedMessage("its target is not a path")
        if head.upgrade and head.framing != 0:
            raise MalformedMessage("it has both a body and an upgrade")
        if head.upgrade != "websocket":
            head.upgrade = ""
        target = names.parse(head.host, head.target)
        prefix = "" if target is None or names.is_preview(head.host) else target.path
        is_forwarded = bool(head.get("x-forwarded-host"))
        forwarded = self._forwarded_for(head, prefix, is_forwarded)
        fields = write_fields(request_fields(head, forwarded))
        credentials = PreviewCredentials.of(head)
        request = _Request(head.method, head.target, head, target, forwarded, fields, credentials)
        line = _REQUEST_LINE.match(raw)
        plain = head.keep_alive and not (head.framing or head.upgrade or head.expects_continue)
        usual = plain and not (prefix or is_forwarded)
        if line and usual and len(self._remembered) < _MAX_REMEMBERED:
            self._remembered[raw[line.end() :]] = request
        return request

    def _forwarded_for(self, head: RequestHead, prefix: str, is_forwarded: bool) -> ForwardedFor:
        """Describe the client; a trusted reverse proxy in front may describe it instead."""
        client, host = self._client, head.host
        proto = self._previews.names.proto_of(host)
        if self._by_proxy:
            # Not X-Forwarded-Host: proxies pass on a client's own.
            forwarded = ",".join(value for name, value in head.fields if name.lower() == _FORWARDED)
            client = self._previews.connections.client_of(client, forwarded)
            proto = head.get("x-forwarded-proto") or proto
        elif is_forwarded and self._is_trusted(head):
            host = head.get("x-forwarded-host")
            client = head.get("x-forwarded-for") or client
            proto = head.get("x-forwarded-proto") or proto
        return ForwardedFor(client=client, proto=proto, host=host, prefix=prefix)

    def _is_trusted(self, head: RequestHead) -> bool:
        if self._is_local:
            return True
        keys = head.own.get("proxy-authorization")
        try:
            self._previews.keys.holder(keys[0].encode("latin-1") if keys else None)
        except SmokeboxError:
            return False
        return True

    def _refuse(
        self, refusal: Refusal, request: _Request | None = None, *, keep_alive: bool = False
    ) -> None:
        self._previews.count(refusal.status)
        self._connection.write(
            render(
                refusal,
                for_browser=request is not None and "text/html" in request.head.get("accept"),
                head_only=request is not None and request.method == "HEAD",
                keep_alive=keep_alive,
            )
        )


async def _connect(route: Route, timeout: float) -> Connection:
    sock = await route.ports.dial(route.run, route.port)
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: Connection(timeout=timeout), sock=sock)
    return connection


def _malformed(error: MalformedMessage) -> Refusal:
    return Refusal(
        error.status,
        InvalidOption(
            f"the request is not valid HTTP/1.1: {error.reason}.",
            hint="Send it as RFC 9112 defines it.",
            option="request",
        ),
    )


def _timed_out(port: int, seconds: float) -> Refusal:
    return Refusal(
        504,
        DeadlineExceeded(
            f"the program on port {port} sent no response within {seconds:g} s.",
            hint="Read its log; `smokebox serve --preview-timeout` sets the longest silence.",
            operation="preview",
            timeout=seconds,
        ),
    )


def _no_response(port: int, error: Exception) -> Refusal:
    problem = "closed the connection without a response"
    if isinstance(error, MalformedMessage):
        problem = f"sent no valid response: {error.reason}"
    return Refusal(
        502,
        ServiceUnavailable(
            f"the program on port {port} {problem}.",
            hint="Check that it speaks HTTP, and read its log.",
            service="port",
            port=port,
        ),
    )
