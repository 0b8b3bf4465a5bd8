"""Routes of workflows and their runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from smokebox.app.events import last_offset
from smokebox.app.request import json_response
from smokebox.app.routes.submissions import (
    abort_open,
    accept_request,
    accepted_response,
    describe,
    submission_response,
)
from smokebox.app.streams import submission_event
from smokebox.wire import submissions

if TYPE_CHECKING:
    from starlette.responses import Response

    from smokebox.app.inbox import StoredSubmission
    from smokebox.app.request import AppRequest

_MAX_RUNS = 100


async def post(request: AppRequest) -> Response:
    """Start a run. `?wait=result` waits for its outcome."""
    return await accepted_response(request, await accept_request(request, "workflow"))


async def runs(request: AppRequest) -> Response:
    """List the latest runs of a workflow."""
    name = request.app.project.find("workflow", request.path_param("name")).name
    prefix = request.principal.prefix
    found = await request.app.inbox.runs(name, limit=_MAX_RUNS, prefix=prefix)
    return json_response(submissions.WorkList([describe(one) for one in found]))


async def get(request: AppRequest) -> Response:
    """Return a run, or its events if the client accepts them."""
    return await submission_response(request, await _find(request))


async def events(request: AppRequest) -> Response:
    """Return the events of a run after an offset."""
    submission, after = await _find(request), last_offset(request.http)
    events = await request.app.inbox.events(submission.id, after=after)
    raw = [msgspec.Raw(submission_event(one).data) for one in events]
    return json_response(submissions.Events(raw, events[-1].offset if events else after))


async def abort(request: AppRequest) -> Response:
    """Abort a run."""
    return await abort_open(request, (await _find(request)).target, None)


async def _find(request: AppRequest) -> StoredSubmission:
    return await request.app.inbox.run(request.id)
