"""The door: every request passes it on the way in, and every answer on the way out.

It gives requests their id, refuses those from elsewhere, says who asks, and answers what
nobody answered: errors.
"""

from __future__ import annotations

import re
import secrets
import time
from typing import TYPE_CHECKING

import msgspec
import structlog
from starlette.responses import Response

from smokebox.errors import SmokeboxError
from smokebox.server.principal import LOCAL, Principal
from smokebox.wire import REQUEST_ID
from smokebox.wire.failure import Failure, FailureAnswer, failure_of, status_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from smokebox.server.state import State

_REQUEST_ID = re.compile(rb"[\w.-]{1,128}")
_log = structlog.get_logger("smokebox.server")


class Door:
    """An ASGI app around another."""

    def __init__(self, app: ASGIApp, state: State) -> None:
        self.app = app
        self.state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        told = headers.get(REQUEST_ID.encode(), b"")
        request_id = told.decode() if _REQUEST_ID.fullmatch(told) else secrets.token_hex(8)
        scope["smokebox.request_id"] = request_id
        scope["smokebox.state"] = self.state
        answer = _Answer(send, request_id)
        started = time.monotonic()
        try:
            scope["smokebox.principal"] = self._who(scope, headers)
            await self.app(scope, receive, answer)
        except SmokeboxError as error:
            await answer.fail(scope, receive, failure_of(error, request_id), status_of(type(error)))
        except Exception:
            _log.exception("defect", request_id=request_id, path=scope["path"])
            await answer.fail(scope, receive, _defect(request_id), 500)
        finally:
            _log.info(
                "request",
                request_id=request_id,
                method=scope.get("method", "WS"),
                path=scope["path"],
                status=answer.status,
                ms=round((time.monotonic() - started) * 1000, 1),
            )

    def _who(self, scope: Scope, headers: dict[bytes, bytes]) -> Principal:
        if scope["server"] is None or scope["server"][1] is None:
            return LOCAL
        self.state.hosts.check(headers)
        return self.state.keys.principal(scope, headers)


class _Answer:
    """Sends an answer on, and knows whether it has begun."""

    def __init__(self, send: Send, request_id: str) -> None:
        self.status = 0
        self._send = send
        self._request_id = request_id.encode()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", []), (b"x-request-id", self._request_id)]
        await self._send(message)

    async def fail(self, scope: Scope, receive: Receive, failure: Failure, status: int) -> None:
        """Answer with an error; one that comes too late ends the connection."""
        if self.status:
            raise ConnectionAbortedError(failure.message)
        if scope["type"] == "websocket":
            await self._send({"type": "websocket.close", "code": 1008, "reason": failure.message})
            return
        body = msgspec.json.encode(FailureAnswer(failure))
        await Response(body, status, media_type="application/json")(scope, receive, self)


def _defect(request_id: str) -> Failure:
    return Failure(
        code="internal",
        message="the server failed to answer: this is a defect in Smokebox.",
        hint=f"Its log says more under request id {request_id}.",
        request_id=request_id,
    )
