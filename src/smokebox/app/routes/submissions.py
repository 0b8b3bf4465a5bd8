"""Routes of submissions: their state, their events and aborting them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any
from uuid import NAMESPACE_URL, uuid5

import msgspec

from smokebox.agents.session_context import DEFAULT
from smokebox.app.attachments import check_attachments
from smokebox.app.definitions import ServedAgent
from smokebox.app.events import events_response, last_offset, submission_events, wants_events
from smokebox.app.inbox import SubmissionResult, WorkTarget
from smokebox.app.request import answer, decoded
from smokebox.errors import Aborted, Forbidden, InvalidOption, NotFound, ServiceUnavailable
from smokebox.foundation.ids import new_global_id
from smokebox.foundation.sse import encode
from smokebox.wire import submissions
from smokebox.wire.failure import failure_of
from smokebox.wire.submissions import MessageBody

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from starlette.responses import Response

    from smokebox.app.app import App
    from smokebox.app.inbox import Submission, TargetKind
    from smokebox.app.project import Served
    from smokebox.app.request import AppCall


async def get(call: AppCall) -> Response:
    """Return a submission; `?wait=20` waits up to 20 seconds for its outcome."""
    return await submission_answer(call, await call.app.inbox.get(call.part("submission")))


async def submission_answer(call: AppCall, submission: Submission) -> Response:
    """Respond with the state of a submission, or with its events if the client accepts them."""
    if wants_events(call.request):
        return events_response(_events(call, submission, last_offset(call.request)))
    return answer(described(await call.app.inbox.wait(submission.id, call.seconds("wait") or 0.0)))


async def accepted(call: AppCall, submission: Submission) -> Response:
    """Respond to accepted work with its URL, with its result for `?wait=result`, or with its
    events.
    """
    if wants_events(call.request):
        return events_response(_events(call, submission, 0))
    wait = call.request.query_params.get("wait")
    if wait == "result":
        done = await call.app.inbox.wait(submission.id)
        if done.ending is None:
            raise ServiceUnavailable(
                "the app is shutting down; the work continues after a restart.",
                hint=f"Then GET /submissions/{submission.id}.",
            )
        return answer(described(done), 200 if done.ending.outcome == "completed" else 500)
    if wait is not None:
        raise InvalidOption(
            f"wait must be 'result', not {wait!r:.80}.",
            hint="Leave it out to get the URL of the work.",
            option="wait",
            value=wait,
        )
    target = submission.target
    path = f"/agents/{target.name}/{target.id}" if target.kind == "agent" else f"/runs/{target.id}"
    url = call.url(f"/submissions/{submission.id}")
    told = submissions.Accepted(submission.id, target.id, url, call.url(path), submission.head)
    return answer(told, 202, {"location": url})


async def aborting(call: AppCall, target: WorkTarget, id: str | None) -> Response:
    """Abort one submission of a target, or all unfinished ones."""
    inbox = call.app.inbox
    open = await inbox.open_of(target)
    if id is not None and id not in open and (await inbox.get(id)).target != target:
        raise NotFound(
            f"{target} has no submission {id!r:.100}.",
            hint="Send the submission_id from the response that accepted it.",
            kind="submission",
            name=id,
        )
    error = Aborted("the work was aborted before it started.", reason="abort")
    ending = SubmissionResult("aborted", error=failure_of(error))
    wanted = [one for one in open if id in (None, one)]
    # Last first: otherwise a waiting one would start when the running one ends.
    gone = [one for one in reversed(wanted) if await inbox.abort(one, ending)]
    return answer(submissions.Aborted(gone[::-1]))


def described(submission: Submission) -> submissions.Work:
    """Return a submission in its wire form."""
    target, ending = submission.target, submission.ending
    return submissions.Work(
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


async def _events(call: AppCall, submission: Submission, after: int) -> AsyncGenerator[bytes, None]:
    yield encode("submission", msgspec.json.encode(described(submission)))
    async with contextlib.aclosing(submission_events(call.app, submission, after)) as events:
        async for data in events:
            yield data
    done = await call.app.inbox.wait(submission.id)
    yield encode("outcome", msgspec.json.encode(described(done)))


# Credentials are not stored.
_HIDDEN = frozenset(("authorization", "cookie", "proxy-authorization"))


async def accept_request(call: AppCall, kind: TargetKind) -> Submission:
    """Accept the work of a request."""
    served = _let_in(call, kind)
    data = await call.body()
    delivery = call.verify(served.trigger, data)
    if not served.trigger.open:
        raise Forbidden(
            f"{served.name} does not accept requests.",
            hint='Set triggers = {"webhook": True} in its file.',
        )
    # The id of a signed delivery wins: a replay cannot pass under another key.
    key = delivery or call.idempotency_key
    id = call.id if kind == "agent" else run_id(served.name, key)
    return await call.app.inbox.accept(
        WorkTarget(kind=kind, name=served.name, id=id),
        _message(data) if isinstance(served, ServedAgent) else _payload(data),
        key=key,
        request=_request(call),
        head=await _head(call.app, served.name, id) if isinstance(served, ServedAgent) else 0,
    )


def run_id(workflow: str, key: str | None) -> str:
    """Return the id of a run. The same key gives the same id."""
    return uuid5(NAMESPACE_URL, f"smokebox:key:{workflow}:{key}").hex if key else new_global_id()


def _let_in(call: AppCall, kind: TargetKind) -> Served:
    """Return the target of a request.

    Without a key, only names whose trigger is signed are revealed.
    """
    project, name = call.app.project, call.part("name")
    known: Mapping[str, Served] = project.agents if kind == "agent" else project.workflows
    if name not in known or known[name].trigger.signature is None:
        call.let_in()
    return project.find(kind, name)


async def _head(app: App, name: str, id: str) -> int:
    """Return the current last offset of a conversation."""
    found = await app.store.sessions(agent=name, id=id)
    return next((one.head for one in found if one.key.session == DEFAULT), 0)


def _message(data: bytes) -> dict[str, Any]:
    body = decoded(MessageBody, data)
    if not body.message.strip():
        raise InvalidOption("message is empty.", hint='Send {"message": "..."}.', option="message")
    plain: dict[str, Any] = msgspec.to_builtins(body)
    check_attachments(plain.get("attachments", ()))
    return plain


def _payload(data: bytes) -> object:
    return decoded(object, data) if data else None


def _request(call: AppCall) -> dict[str, Any]:
    request = call.request
    headers = {name: value for name, value in request.headers.items() if name not in _HIDDEN}
    return {
        "method": request.method,
        "path": request.url.path,
        "query": dict(request.query_params),
        "headers": headers,
    }
