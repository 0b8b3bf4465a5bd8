"""Endpoints of an app: authentication, limits of the sender, and responses to errors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from smokebox.app.request import AppRequest, error_response, nested_too_deeply
from smokebox.errors import InvalidOption, SmokeboxError
from smokebox.foundation import sse
from smokebox.foundation.ids import new_global_id
from smokebox.tenancy.peer import PEER
from smokebox.tenancy.running_requests import RunningRequest
from smokebox.wire.failure import Failure, failure_of, status_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.types import Message, Receive, Scope, Send

    from smokebox.app.app import App
    from smokebox.tenancy.peer import Peer

_log = logging.getLogger("smokebox.app")


@dataclass(frozen=True, slots=True, kw_only=True)
class AppEndpoint:
    """One method of one path.

    Attributes:
        scopes: Scopes of which the sender's key needs one; none for a path that is public.
        signed: The path also serves webhooks, which need a signature instead of a key, so `serve`
            authenticates the sender.
        id_kind: A word for the things that the `{id}` in the path names.
    """

    method: str
    path: str
    serve: Callable[[AppRequest], Awaitable[Response]]
    scopes: tuple[str, ...] = ()
    signed: bool = False
    id_kind: str = ""

    def route(self, app: App) -> Route:
        """Return the route of this endpoint in an app."""
        return Route(self.path, _ServedEndpoint(app, self), methods=[self.method])


class _ServedEndpoint:
    """An ASGI app that serves one endpoint."""

    def __init__(self, app: App, endpoint: AppEndpoint) -> None:
        self._app = app
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Errors become responses."""
        task = asyncio.current_task()
        assert task is not None
        running, sent = RunningRequest(task), _SentResponse(send)
        try:
            with contextlib.ExitStack() as held:
                response = await self._respond(scope, receive, running, held)
                await response(scope, receive, sent)
        except asyncio.CancelledError:
            if running.ended_by is None:
                raise
            task.uncancel()
            await sent.end(running.ended_by, scope, receive)

    async def _respond(
        self, scope: Scope, receive: Receive, running: RunningRequest, held: contextlib.ExitStack
    ) -> Response:
        try:
            _count(self._app, scope, held)
            request = AppRequest(self._app, Request(scope, receive), self._endpoint, running, held)
            if self._endpoint.scopes and not self._endpoint.signed:
                request.authenticate()
            await self._app.start()
            return await self._endpoint.serve(request)
        except SmokeboxError as error:
            return error_response(failure_of(error), status_of(type(error)))
        except RecursionError:
            # JSON of a depth that can be decoded, but not handled.
            return error_response(failure_of(nested_too_deeply()), status_of(InvalidOption))
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception:
            id = new_global_id()
            _log.exception("unexpected error in request %s", id)
            failure = Failure(code="error", message="internal error.", request_id=id)
            return error_response(failure, 500)


def _count(app: App, scope: Scope, held: contextlib.ExitStack) -> None:
    """Count the request of a client behind a trusted proxy. Raises `LimitReached`."""
    peer: Peer | None = scope.get(PEER)
    address = None if peer is None else peer.address
    if address is not None and app.connections.is_trusted(address):
        forwarded = [value for name, value in scope["headers"] if name == b"x-forwarded-for"]
        client = app.connections.client_of(address, b",".join(forwarded).decode("latin-1"))
        held.enter_context(app.connections.request(client))


class _SentResponse:
    """Sends a response, and ends it early when the key of its request does."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._media: bytes | None = None
        self._complete = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._media = dict(message["headers"]).get(b"content-type", b"").partition(b";")[0]
        elif not message.get("more_body", False):
            self._complete = True
        await self._send(message)

    async def end(self, error: SmokeboxError, scope: Scope, receive: Receive) -> None:
        """Respond with an error, which is the last event of an event stream."""
        failure = failure_of(error)
        if self._media is None:
            await error_response(failure, status_of(type(error)))(scope, receive, self)
        elif self._media == sse.MEDIA.encode() and not self._complete:
            data = sse.encode("error", msgspec.json.encode(failure))
            await self({"type": "http.response.body", "body": data, "more_body": False})
