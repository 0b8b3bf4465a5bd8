"""Requests that wait for something when the app ends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from smokebox.app.call import refusal
from smokebox.errors import ServiceUnavailable
from smokebox.wire.failure import failure_of, status_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_SECONDS = 0.5


class Closing:
    """Ends them in good order: a stream is at its end, and who waits for a result is told so."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        # Which of those that go on have begun to be answered.
        self._open: dict[asyncio.Task[object], bool] = {}
        self._closed = False

    async def close(self) -> None:
        """End all that go on, when they had a moment to say what has come in the end."""
        self._closed = True
        if self._open:
            await asyncio.wait(list(self._open), timeout=_SECONDS)
        for task in list(self._open):
            task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one."""
        task = asyncio.current_task()
        if scope["type"] != "http" or task is None:
            await self._app(scope, receive, send)
            return

        async def watched(message: Message) -> None:
            self._open[task] = True
            await send(message)

        self._open[task] = False
        try:
            await self._app(scope, receive, watched)
        except asyncio.CancelledError:
            if not self._closed:
                raise
            task.uncancel()
            if self._open[task]:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            else:
                error = ServiceUnavailable(
                    "the app is about to end.", hint="Ask again: accepted work goes on."
                )
                await refusal(failure_of(error), status_of(type(error)))(scope, receive, send)
        finally:
            del self._open[task]
