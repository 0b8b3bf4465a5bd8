"""Accepted work: how it stands, and calling it off."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import msgspec

from smokebox.app.call import answer
from smokebox.app.happenings import happenings
from smokebox.app.sse import events_response, last_offset, wants_events
from smokebox.app.submission import Ending
from smokebox.errors import Aborted, InvalidOption, NotFound, ServiceUnavailable
from smokebox.wire import work
from smokebox.wire.failure import failure_of
from smokebox.wire.sse import encode

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.responses import Response

    from smokebox.app.call import Call
    from smokebox.app.submission import Submission, Target


async def get(call: Call) -> Response:
    """One submission; `?wait=20` waits so long for its outcome."""
    return await submission_answer(call, await call.app.inbox.get(call.part("submission")))


async def submission_answer(call: Call, submission: Submission) -> Response:
    """How a submission stands; as events, what happened to it and what happens."""
    if wants_events(call.request):
        return events_response(_events(call, submission, last_offset(call.request)))
    return answer(described(await call.app.inbox.wait(submission.id, call.seconds("wait") or 0.0)))


async def accepted(call: Call, submission: Submission) -> Response:
    """What whoever gave work is told: where it is, or with `?wait=result` what it came to; or
    all that happens to it, as events."""
    if wants_events(call.request):
        return events_response(_events(call, submission, 0))
    wait = call.request.query_params.get("wait")
    if wait == "result":
        done = await call.app.inbox.wait(submission.id)
        if done.ending is None:
            raise ServiceUnavailable(
                "the app is being stopped; the work goes on when it is started again.",
                hint=f"Ask for /submissions/{submission.id} then.",
            )
        return answer(described(done), 200 if done.ending.outcome == "completed" else 500)
    if wait is not None:
        raise InvalidOption(
            f"wait is 'result' here, not {wait!r:.80}.",
            hint="Leave it out to be told where the work is.",
            option="wait",
            value=wait,
        )
    target = submission.target
    path = f"/agents/{target.name}/{target.id}" if target.kind == "agent" else f"/runs/{target.id}"
    url = call.url(f"/submissions/{submission.id}")
    told = work.Accepted(submission.id, target.id, url, call.url(path), submission.head)
    return answer(told, 202, {"location": url})


async def aborting(call: Call, target: Target, id: str | None) -> Response:
    """Call off one submission of a target, or all of it that has no outcome."""
    inbox = call.app.inbox
    open = await inbox.open_of(target)
    if id is not None and id not in open and (await inbox.get(id)).target != target:
        raise NotFound(
            f"{target} has no submission {id!r:.100}.",
            hint="Send the submission_id that it was accepted with.",
            kind="submission",
            name=id,
        )
    error = Aborted("the work was called off before it was begun.", reason="abort")
    ending = Ending("aborted", error=failure_of(error))
    wanted = [one for one in open if id in (None, one)]
    # The last first, or what waits would begin when what runs has ended.
    gone = [one for one in reversed(wanted) if await inbox.abort(one, ending)]
    return answer(work.Aborted(gone[::-1]))


def described(submission: Submission) -> work.Work:
    """A submission as the wire has it."""
    target, ending = submission.target, submission.ending
    return work.Work(
        submission_id=submission.id,
        kind=target.kind,
        name=target.name,
        id=target.id,
        state=submission.state,
        accepted_at=submission.accepted_at,
        attempts=submission.attempts,
        ended_at=submission.ended_at,
        outcome=None if ending is None else ending.outcome,
        result=None if ending is None else ending.result,
        failure=None if ending is None else ending.error,
    )


async def _events(call: Call, submission: Submission, after: int) -> AsyncGenerator[bytes, None]:
    yield encode("submission", msgspec.json.encode(described(submission)))
    async with contextlib.aclosing(happenings(call.app, submission, after)) as events:
        async for data in events:
            yield data
    done = await call.app.inbox.wait(submission.id)
    yield encode("outcome", msgspec.json.encode(described(done)))
