"""Routes of workflows and their runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from smokebox.app.events import last_offset
from smokebox.app.request import answer
from smokebox.app.routes.submissions import (
    aborting,
    accept_request,
    accepted,
    described,
    submission_answer,
)
from smokebox.app.streams import note_event
from smokebox.wire import submissions

if TYPE_CHECKING:
    from starlette.responses import Response

    from smokebox.app.inbox import Submission
    from smokebox.app.request import AppCall

_MOST_RUNS = 100


async def post(call: AppCall) -> Response:
    """Start a run. `?wait=result` waits for its outcome."""
    return await accepted(call, await accept_request(call, "workflow"))


async def runs(call: AppCall) -> Response:
    """List the latest runs of a workflow."""
    name = call.app.project.find("workflow", call.part("name")).name
    found = await call.app.inbox.runs(name, limit=_MOST_RUNS)
    return answer(submissions.WorkList([described(one) for one in found]))


async def get(call: AppCall) -> Response:
    """Return a run, or its events if the client accepts them."""
    return await submission_answer(call, await _find(call))


async def events(call: AppCall) -> Response:
    """Return the events of a run after an offset."""
    submission, after = await _find(call), last_offset(call.request)
    notes = await call.app.inbox.notes(submission.id, after=after)
    return answer(
        submissions.Events(
            [msgspec.Raw(note_event(one).data) for one in notes],
            notes[-1].place if notes else after,
        )
    )


async def abort(call: AppCall) -> Response:
    """Abort a run."""
    return await aborting(call, (await _find(call)).target, None)


async def _find(call: AppCall) -> Submission:
    return await call.app.inbox.run(call.id)
