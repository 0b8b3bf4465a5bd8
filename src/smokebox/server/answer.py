"""The answer to one request on its way out: what has been said, and what can still be."""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response

from smokebox.server.events import event
from smokebox.wire import sse
from smokebox.wire.failure import Failure, FailureAnswer

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

_JSON = b"application/json"
_WS_REFUSED, _WS_DEFECT, _WS_RESTART = 1008, 1011, 1012
_LONGEST_WS_REASON = 123
# A caller who reads nothing does not get to hear why it ends.
_LAST_WORDS = 1.0


class Answer:
    """Sends an answer on, with its headers, and knows how far it is.

    `more` are headers for it, `size` the bytes of its body.
    """

    __slots__ = (
        "_begun",
        "_blank",
        "_headers",
        "_scope",
        "_send",
        "complete",
        "more",
        "request_id",
        "size",
        "status",
    )

    def __init__(self, scope: Scope, send: Send, request_id: str) -> None:
        self.request_id = request_id
        self.status = 0
        self.size = 0
        self.complete = False
        self.more: list[tuple[bytes, bytes]] = []
        self._scope = scope
        self._send = send
        self._begun = False
        self._blank = True
        self._headers: list[tuple[bytes, bytes]] = []

    async def __call__(self, message: Message) -> None:
        """Send one message of the answer."""
        kind = message["type"]
        if kind == "http.response.body":
            body = message.get("body", b"")
            self.size += len(body)
            if not message.get("more_body", False):
                self.complete = True
            elif self._blank:
                self._blank = not body.strip()
        elif kind in ("http.response.start", "websocket.http.response.start"):
            self._begun = True
            self.status = message["status"]
            self._headers = message["headers"] = [
                *message.get("headers", ()),
                (b"x-request-id", self.request_id.encode()),
                *self.more,
            ]
        elif kind == "websocket.accept":
            self._begun = True
            self.status = 101
        elif kind == "websocket.send":
            self.size += len(message.get("bytes") or message.get("text") or b"")
        elif kind == "websocket.close":
            self._begun = self.complete = True
            self.status = self.status or 403
        await self._send(message)

    async def fail(self, receive: Receive, failure: Failure, status: int) -> None:
        """Answer with an error.

        Once the answer has begun, a stream of events gets it as its last event, and JSON that
        is blank so far becomes the error; anything else breaks off short of its end, where
        the server closes the connection, so that callers notice.
        """
        if not self._begun:
            await self._refuse(receive, failure, status)
        elif not self.complete:
            with contextlib.suppress(TimeoutError, OSError):
                async with asyncio.timeout(_LAST_WORDS):
                    await self._end(failure, status)

    async def _refuse(self, receive: Receive, failure: Failure, status: int) -> None:
        headers: dict[str, str] = {}
        if status == 401:
            told = failure.fields.get("reason") != "missing"
            headers["www-authenticate"] = 'Bearer error="invalid_token"' if told else "Bearer"
        if status in (429, 503):
            wait = float(failure.fields.get("retry_after") or 1)
            headers["retry-after"] = str(math.ceil(wait))
        if failure.fields.get("reason") == "draining":
            headers["connection"] = "close"
        body = msgspec.json.encode(FailureAnswer(failure))
        response = Response(body, status, headers, media_type="application/json")
        await response(self._scope, receive, self)

    async def _end(self, failure: Failure, status: int) -> None:
        if self._scope["type"] == "websocket":
            code = {503: _WS_RESTART, 500: _WS_DEFECT}.get(status, _WS_REFUSED)
            reason = failure.message.encode()[:_LONGEST_WS_REASON].decode(errors="ignore")
            await self({"type": "websocket.close", "code": code, "reason": reason})
            return
        headers = dict(self._headers)
        media = headers.get(b"content-type", b"").partition(b";")[0]
        if media == sse.MEDIA.encode():
            await self(_last(event("error", failure)))
        elif media == _JSON and self._blank and b"content-length" not in headers:
            await self(_last(msgspec.json.encode(FailureAnswer(failure))))


def _last(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body}
