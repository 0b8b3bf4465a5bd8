"""Requests that wait for something when the app ends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from smokebox.app.call import refusal
from smokebox.errors import ServiceUnavailable
from smokebox.wire.failure import failure_of, status_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Closing:
    """Ends them in good order: a stream is at its end, and who waits for a result is told so."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._open: set[asyncio.Task[object]] = set()
        self._closed = False

    def close(self) -> None:
        """End all that go on."""
        self._closed = True
        for task in self._open:
            task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one."""
        task = asyncio.current_task()
        if scope["type"] != "http" or task is None:
            await self._app(scope, receive, send)
            return
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        self._open.add(task)
        try:
            await self._app(scope, receive, watched)
        except asyncio.CancelledError:
            if not self._closed:
                raise
            task.uncancel()
            if begun:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            else:
                error = ServiceUnavailable(
                    "the app is about to end.", hint="Ask again: accepted work goes on."
                )
                await refusal(failure_of(error), status_of(type(error)))(scope, receive, send)
        finally:
            self._open.discard(task)
