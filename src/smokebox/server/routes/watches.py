"""Watches: changes of files in a sandbox, as they happen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.engine.files.watches import EXCLUDED
from smokebox.errors import LimitReached
from smokebox.foundation import sse
from smokebox.server.endpoint import ApiCall, endpoint
from smokebox.server.responses import EventResponse, cancel_on_disconnect, event
from smokebox.server.routes.files import READ_ERRORS
from smokebox.wire.requests import Watch
from smokebox.wire.responses import Watching

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.types import Receive, Scope, Send

    from smokebox.engine.files.watches import WatchStream


@endpoint("GET", "/sandboxes/{id}/watch", errors=(*READ_ERRORS, LimitReached), returns=sse.MEDIA)
async def watch(call: ApiCall, query: Watch) -> EventResponse:
    """Stream the changes below a path, from this moment or from `cursor` on.

    Events: first `watching`, with a cursor, once the watch is in place; then `change` for each
    change, whose id is the cursor after it; `error` last if the watch fails. The stream ends
    when the watched path is removed or moved. The header Last-Event-ID overrides `cursor`. An
    empty `exclude` excludes nothing.
    """
    files = call.sandbox.files
    exclude = EXCLUDED if query.exclude is None else [name for name in query.exclude if name]
    # Watching a large tree takes time.
    start = files.watch(
        query.path,
        recursive=query.recursive,
        include=query.include,
        exclude=exclude,
        cursor=call.request.headers.get("last-event-id") or query.cursor,
    )
    return _WatchResponse(call, await cancel_on_disconnect(call.request.receive, start))


class _WatchResponse(EventResponse):
    """The events of a watch. Closes the watch even if the client disconnects before the first."""

    def __init__(self, call: ApiCall, stream: WatchStream) -> None:
        super().__init__(call, _events(stream))
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._stream.aclose()


async def _events(stream: WatchStream) -> AsyncGenerator[bytes, None]:
    yield event("watching", Watching(stream.cursor), stream.cursor)
    async for change in stream:
        yield event("change", change, change.cursor)


ENDPOINTS = [watch]
