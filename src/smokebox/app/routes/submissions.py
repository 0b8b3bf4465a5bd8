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
from smokebox.app.inbox import SubmissionOutcome, WorkTarget, no_submission
from smokebox.app.request import decode, json_response
from smokebox.errors import Aborted, Forbidden, InvalidOption, ServiceUnavailable
from smokebox.foundation.ids import new_global_id
from smokebox.foundation.sse import encode
from smokebox.wire import submissions
from smokebox.wire.failure import failure_of
from smokebox.wire.submissions import SubmitMessage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from starlette.requests import Request
    from starlette.responses import Response

    from smokebox.app.app import App
    from smokebox.app.inbox import StoredSubmission, TargetKind
    from smokebox.app.project import Served
    from smokebox.app.request import AppRequest


async def get(request: AppRequest) -> Response:
    """Return a submission; `?wait=20` waits up to 20 seconds for its outcome."""
    submission = await request.app.inbox.get(request.path_param("submission"))
    target, principal = submission.target, request.principal
    if not target.id.startswith(principal.prefix):
        # The same as for one that does not exist.
        raise no_submission(submission.id)
    principal.check_scope("agents:read" if target.kind == "agent" else "runs:read")
    return await submission_response(request, submission)


async def submission_response(request: AppRequest, submission: StoredSubmission) -> Response:
    """Respond with the state of a submission, or with its events if the client accepts those."""
    if wants_events(request.http):
        return events_response(_events(request, submission, last_offset(request.http)))
    found = await request.app.inbox.wait(submission.id, request.seconds("wait") or 0.0)
    return json_response(describe(found))


async def accepted_response(request: AppRequest, submission: StoredSubmission) -> Response:
    """Respond with the URL of accepted work, its result (`?wait=result`), or its events."""
    if wants_events(request.http):
        return events_response(_events(request, submission, 0))
    wait = request.http.query_params.get("wait")
    if wait == "result":
        done = await request.app.inbox.wait(submission.id)
        if done.outcome is None:
            raise ServiceUnavailable(
                "the app is shutting down; the work continues after a restart.",
                hint=f"Then GET /submissions/{submission.id}.",
            )
        return json_response(describe(done), 200 if done.outcome.status == "completed" else 500)
    if wait is not None:
        raise InvalidOption(
            f"wait must be 'result', not {wait!r:.80}.",
            hint="Leave it out to get the URL of the work.",
            option="wait",
            value=wait,
        )
    target = submission.target
    path = f"/agents/{target.name}/{target.id}" if target.kind == "agent" else f"/runs/{target.id}"
    url = request.url(f"/submissions/{submission.id}")
    body = submissions.Accepted(submission.id, target.id, url, request.url(path), submission.head)
    return json_response(body, 202, {"location": url})


async def abort_open(request: AppRequest, target: WorkTarget, id: str | None) -> Response:
    """Abort one submission of a target, or all unfinished ones."""
    inbox = request.app.inbox
    open = await inbox.open_ids(target)
    if id is not None and id not in open and (await inbox.get(id)).target != target:
        # The same as for one that does not exist.
        raise no_submission(id)
    error = Aborted("the work was aborted before it started.", reason="abort")
    outcome = SubmissionOutcome("aborted", error=failure_of(error))
    chosen = [one for one in open if id in (None, one)]
    # Last first: otherwise a waiting one would start when the running one ends.
    aborted = [one for one in reversed(chosen) if await inbox.abort(one, outcome)]
    return json_response(submissions.AbortedSubmissions(aborted[::-1]))


def describe(submission: StoredSubmission) -> submissions.Work:
    """Return a submission in its wire form."""
    target, outcome = submission.target, submission.outcome
    return submissions.Work(
        submission_id=submission.id,
        kind=target.kind,
        name=target.name,
        id=target.id,
        state=submission.state,
        accepted_at=submission.accepted_at,
        attempts=submission.attempts,
        ended_at=submission.ended_at,
        outcome=None if outcome is None else outcome.status,
        result=None if outcome is None else outcome.result,
        failure=None if outcome is None else outcome.error,
    )


async def _events(
    request: AppRequest, submission: StoredSubmission, after: int
) -> AsyncGenerator[bytes, None]:
    yield encode("submission", msgspec.json.encode(describe(submission)))
    async with contextlib.aclosing(submission_events(request.app, submission, after)) as events:
        async for data in events:
            yield data
    done = await request.app.inbox.wait(submission.id)
    yield encode("outcome", msgspec.json.encode(describe(done)))


# Credentials are not stored.
_SECRET_HEADERS = frozenset(("authorization", "cookie", "proxy-authorization"))


async def accept_request(request: AppRequest, kind: TargetKind) -> StoredSubmission:
    """Accept the work of a request."""
    served = _find_target(request, kind)
    data = await request.body()
    delivery = request.verify(served.trigger, data)
    if not served.trigger.open:
        raise Forbidden(
            f"{served.name} does not accept requests.",
            hint='Set triggers = {"webhook": True} in its file.',
        )
    key = request.idempotency_key
    if delivery is not None and not delivery.repeats:
        # It wins: a replay cannot pass under another key.
        key = delivery.key
    prefix = "" if delivery is not None else request.principal.prefix
    id = request.id if kind == "agent" else prefix + run_id(served.name, key)
    # Each run has an id of its own, so a repeated delivery is bound to none.
    bound = delivery is not None and not (delivery.repeats and kind == "workflow")
    return await request.app.inbox.accept(
        WorkTarget(kind=kind, name=served.name, id=id),
        _message(data) if isinstance(served, ServedAgent) else _payload(data),
        key=key,
        delivery=delivery.key if delivery is not None and bound else None,
        request=_describe_request(request.http),
        head=await _head(request.app, served.name, id) if isinstance(served, ServedAgent) else 0,
    )


def run_id(workflow: str, key: str | None) -> str:
    """Return the id of a run. The same key gives the same id."""
    return uuid5(NAMESPACE_URL, f"smokebox:key:{workflow}:{key}").hex if key else new_global_id()


def _find_target(request: AppRequest, kind: TargetKind) -> Served:
    """Return the agent or workflow of a request.

    Without a key, only those with a signed trigger are found.
    """
    project, name = request.app.project, request.path_param("name")
    known: Mapping[str, Served] = project.agents if kind == "agent" else project.workflows
    if name not in known or known[name].trigger.signature is None:
        request.authenticate()
    return project.find(kind, name)


async def _head(app: App, name: str, id: str) -> int:
    """Return the current last offset of a conversation."""
    found = await app.store.sessions(agent=name, id=id)
    return next((one.head for one in found if one.key.session == DEFAULT), 0)


def _message(data: bytes) -> dict[str, Any]:
    body = decode(SubmitMessage, data)
    if not body.message.strip():
        raise InvalidOption("message is empty.", hint='Send {"message": "..."}.', option="message")
    plain: dict[str, Any] = msgspec.to_builtins(body)
    check_attachments(plain.get("attachments", ()))
    return plain


def _payload(data: bytes) -> object:
    return decode(object, data) if data else None


def _describe_request(request: Request) -> dict[str, Any]:
    headers = {
        name: value for name, value in request.headers.items() if name not in _SECRET_HEADERS
    }
    return {
        "method": request.method,
        "path": request.url.path,
        "query": dict(request.query_params),
        "headers": headers,
    }
