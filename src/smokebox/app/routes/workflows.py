"""Workflows, and the runs of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from smokebox.app.admission import admit
from smokebox.app.call import answer
from smokebox.app.routes.submissions import aborting, accepted, described
from smokebox.app.sse import event, events_response, last_offset, wants_events
from smokebox.errors import NotFound
from smokebox.wire import work

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.responses import Response

    from smokebox.app.call import Call
    from smokebox.app.inbox import Note
    from smokebox.app.submission import Submission

_MOST_RUNS = 100


async def post(call: Call) -> Response:
    """Begin a run. `?wait=result` waits for what comes of it."""
    submission = await admit(call, "workflow")
    if wants_events(call.request):
        return events_response(_events(call, submission, 0))
    return await accepted(call, submission, 0)


async def runs(call: Call) -> Response:
    """The last runs of a workflow."""
    name = call.app.project.find("workflow", call.part("name")).name
    found = await call.app.inbox.latest("workflow", name, limit=_MOST_RUNS)
    return answer(work.WorkList([described(one) for one in found]))


async def get(call: Call) -> Response:
    """A run; as events, what happened in it and what happens."""
    submission = await _find(call)
    if wants_events(call.request):
        return events_response(_events(call, submission, last_offset(call.request)))
    return answer(described(await call.app.inbox.wait(submission.id, call.seconds("wait") or 0.0)))


async def events(call: Call) -> Response:
    """What happened in a run, behind an offset."""
    submission, after = await _find(call), last_offset(call.request)
    notes = await call.app.inbox.notes(submission.id, after=after)
    return answer(
        work.Events(
            [msgspec.Raw(_plain(one)) for one in notes], notes[-1].place if notes else after
        )
    )


async def abort(call: Call) -> Response:
    """Call a run off."""
    return await aborting(call, (await _find(call)).target, None)


async def _find(call: Call) -> Submission:
    id = call.id
    found = await call.app.inbox.latest("workflow", None, id, limit=1)
    if found:
        return found[0]
    raise NotFound(
        f"there is no run {id!r}.", hint="POST /workflows/{name} begins one.", kind="run", name=id
    )


async def _events(call: Call, submission: Submission, after: int) -> AsyncGenerator[bytes, None]:
    async for note in call.app.inbox.follow(submission.id, after=after):
        kind = msgspec.json.decode(note.data)["event"]
        yield event(kind, _plain(note), note.place)
    done = await call.app.inbox.get(submission.id)
    yield event("outcome", msgspec.json.encode(described(done)))


def _plain(note: Note) -> bytes:
    told = msgspec.json.decode(note.data)
    kind = told.pop("event")
    return msgspec.json.encode({"offset": note.place, "at": note.at, "type": kind, **told})
