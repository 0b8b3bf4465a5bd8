"""Events of one submission.

Those of an agent come from the records of its conversation, those of a function from the inbox.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import StreamingResponse

from smokebox.agents.log.store import SessionKey
from smokebox.agents.session_context import DEFAULT
from smokebox.app.definitions import ServedAgent
from smokebox.app.streams import ConversationEvents, SubmissionEvents, record_event
from smokebox.errors import InvalidOption
from smokebox.foundation import sse
from smokebox.wire import HEARTBEAT

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.requests import Request

    from smokebox.app.app import App
    from smokebox.app.inbox import StoredSubmission
    from smokebox.app.streams import StreamEvent


def submission_events(
    app: App, submission: StoredSubmission, after: int
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a submission after an offset, encoded, until it ends."""
    served = app.project.find(submission.target.kind, submission.target.name)
    if isinstance(served, ServedAgent):
        return _agent_events(app, submission, after)
    return app.streams.chunks(SubmissionEvents(app.inbox, submission.id), after)


async def _agent_events(
    app: App, submission: StoredSubmission, after: int
) -> AsyncGenerator[bytes, None]:
    target, records = submission.target, SubmissionFilter(submission.id)
    key, at = SessionKey(target.name, target.id, DEFAULT), submission.head
    ended = asyncio.create_task(app.inbox.wait(submission.id))
    events = app.streams.events(ConversationEvents(app.store, key), at)
    following: asyncio.Task[StreamEvent | None] | None = None
    try:
        while not records.ended:
            following = following or asyncio.ensure_future(anext(events, None))
            await asyncio.wait([following, ended], return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                break
            event, following = following.result(), None
            if event is None:
                return
            at = event.offset
            if records.includes(event) and at > after:
                yield event.encoded
        # The conversation has the outcome before the inbox does, so the rest is in the store. Work
        # that fails before it starts has no records.
        while not records.ended and (page := await app.store.read(key, after=at)):
            for event in map(record_event, page):
                at = event.offset
                if records.includes(event) and at > after:
                    yield event.encoded
    finally:
        ended.cancel()
        if following is not None:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await following
        await events.aclose()


class SubmissionFilter:
    """Selects the records of one submission from its conversation."""

    def __init__(self, key: str) -> None:
        self.ended = False
        self._key = key
        self._work: str | None = None
        self._parts: set[str] = set()

    def includes(self, event: StreamEvent) -> bool:
        """Return whether an event belongs to the submission."""
        record: dict[str, Any] = msgspec.json.decode(event.data)
        if event.kind == "work_accepted" and record.get("key") == self._key:
            self._work = record["work_id"]
            return True
        mine = self._work is not None and record.get("work_id") == self._work
        for part in ("reply_id", "call_id", "session"):
            if part in record:
                if mine:
                    self._parts.add(record[part])
                mine = mine or record[part] in self._parts
        if mine and event.kind == "work_ended":
            self.ended = True
        return mine


_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def wants_events(request: Request) -> bool:
    """Return whether the client accepts an event stream."""
    return sse.MEDIA in request.headers.get("accept", "")


def last_offset(request: Request, default: int = 0) -> int:
    """Return the offset to continue after: that of Last-Event-ID, or of the query."""
    text = request.headers.get("last-event-id") or request.query_params.get("offset")
    if text is None:
        return default
    if text.isascii() and text.isdigit() and len(text) <= 18:
        return int(text)
    raise InvalidOption(
        f"offset must be a non-negative integer, not {text!r:.80}.",
        hint="Send the offset of the last event you received.",
        option="offset",
        value=text,
    )


def events_response(source: AsyncGenerator[bytes, None]) -> StreamingResponse:
    """Stream events until the source ends or the client disconnects."""
    return StreamingResponse(
        sse.with_heartbeat(source, HEARTBEAT), media_type=sse.MEDIA, headers=_HEADERS
    )
