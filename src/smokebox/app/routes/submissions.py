"""Accepted work: how it stands, and calling it off."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.app.call import answer
from smokebox.app.submission import Ending
from smokebox.errors import Aborted, InvalidOption, NotFound
from smokebox.wire import work
from smokebox.wire.failure import failure_of

if TYPE_CHECKING:
    from starlette.responses import Response

    from smokebox.app.call import Call
    from smokebox.app.submission import Submission, Target


async def get(call: Call) -> Response:
    """One submission; `?wait=20` waits so long for its outcome."""
    wait = call.seconds("wait") or 0.0
    submission = await call.app.inbox.wait(call.part("submission"), wait)
    return answer(described(submission))


async def accepted(call: Call, submission: Submission, offset: int) -> Response:
    """What whoever gave work is told: where it is, or with `?wait=result` what it came to."""
    wait = call.request.query_params.get("wait")
    if wait == "result":
        done = await call.app.inbox.wait(submission.id)
        outcome = None if done.ending is None else done.ending.outcome
        return answer(described(done), 200 if outcome == "completed" else 500)
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
    told = work.Accepted(submission.id, target.id, url, call.url(path), offset)
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
    return answer(work.Aborted([one for one in wanted if await inbox.abort(one, ending)]))


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
        error=None if ending is None else ending.error,
    )
