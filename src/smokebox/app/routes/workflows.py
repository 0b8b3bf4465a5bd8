"""Workflows, and the runs of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from smokebox.app.admission import admit
from smokebox.app.call import answer
from smokebox.app.routes.submissions import aborting, accepted, described, submission_answer
from smokebox.app.sse import last_offset
from smokebox.app.streams import noted
from smokebox.wire import work

if TYPE_CHECKING:
    from starlette.responses import Response

    from smokebox.app.call import Call
    from smokebox.app.submission import Submission

_MOST_RUNS = 100


async def post(call: Call) -> Response:
    """Begin a run. `?wait=result` waits for what comes of it."""
    return await accepted(call, await admit(call, "workflow"))


async def runs(call: Call) -> Response:
    """The last runs of a workflow."""
    name = call.app.project.find("workflow", call.part("name")).name
    found = await call.app.inbox.runs(name, limit=_MOST_RUNS)
    return answer(work.WorkList([described(one) for one in found]))


async def get(call: Call) -> Response:
    """A run; as events, what happened in it and what happens."""
    return await submission_answer(call, await _find(call))


async def events(call: Call) -> Response:
    """What happened in a run, behind an offset."""
    submission, after = await _find(call), last_offset(call.request)
    notes = await call.app.inbox.notes(submission.id, after=after)
    return answer(
        work.Events(
            [msgspec.Raw(noted(one).data) for one in notes], notes[-1].place if notes else after
        )
    )


async def abort(call: Call) -> Response:
    """Call a run off."""
    return await aborting(call, (await _find(call)).target, None)


async def _find(call: Call) -> Submission:
    return await call.app.inbox.run(call.id)
