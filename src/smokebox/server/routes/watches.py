"""What changes in the files of a sandbox, as it happens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.engine.files.watches import EXCLUDED
from smokebox.errors import LimitReached
from smokebox.server.call import Call
from smokebox.server.endpoint import endpoint
from smokebox.server.events import EventResponse, event
from smokebox.server.routes.files import LOOKING
from smokebox.server.streams import unless_left
from smokebox.wire import sse
from smokebox.wire.answers import Watching
from smokebox.wire.requests import Watch

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.types import Receive, Scope, Send

    from smokebox.engine.files.watches import WatchStream


@endpoint("GET", "/sandboxes/{id}/watch", errors=(*LOOKING, LimitReached), gives=sse.MEDIA)
async def watch(call: Call, query: Watch) -> EventResponse:
    """Give what changes at a path, from here on or since `cursor`.

    Events: first `watching`, with a cursor, when nothing is missed any more; then `change`
    for each, whose id is the cursor after it; `error` last if it fails. It ends when what
    is watched is removed or moved away. The header Last-Event-ID goes before `cursor`. An
    empty `exclude` leaves nothing out.
    """
    files = call.sandbox.files
    exclude = EXCLUDED if query.exclude is None else [name for name in query.exclude if name]
    # A large tree takes a while to be watched.
    start = files.watch(
        query.path,
        recursive=query.recursive,
        include=query.include,
        exclude=exclude,
        cursor=call.request.headers.get("last-event-id") or query.cursor,
    )
    return _WatchResponse(call, await unless_left(call, start))


class _WatchResponse(EventResponse):
    """The events of a watch, which is left even if the client is gone before the first."""

    def __init__(self, call: Call, stream: WatchStream) -> None:
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
